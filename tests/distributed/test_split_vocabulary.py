"""Training with a split vocabulary equals training that gathers it, and one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from qfsdp.common.errors import InvalidField, UserError
from qfsdp.distributed.split_vocabulary import _host_group, splits_vocabulary
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World, init_world
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.transformer import Decoder
from tests.ranks import run_ranks
from tests.recipes import test_dpo_distributed as dpo
from tests.recipes import test_full_finetune as full
from tests.recipes import test_sharded_equals_unsharded as adapters
from tests.tiny import TINY_CONFIG, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")
HYBRID = {"strategy": "hybrid_full_shard", "replicate": 2, "shard": 2}
LONG = pytest.mark.long

# The output layer: quantized or plain, frozen or adapted, tied or not; 577 rows.
FROZEN: dict[str, Any] = {"method": "dora", "adapted": ["all-linear"], "steps": 3}
PLAIN = FROZEN | {"quantized": "all-linear"}
ADAPTED: dict[str, Any] = {"method": "dora", "steps": 3}
ADAPTER_CASES: dict[str, dict[str, Any]] = {
    "quantized": FROZEN,
    "quantized, hqq": FROZEN | {"format": "hqq"},
    "plain": PLAIN,
    "tied": PLAIN | {"tied": True},
    "adapted": ADAPTED,
    "adapted, plain": ADAPTED | {"quantized": "all-linear", "method": "lora"},
    "adapted, tied": ADAPTED | {"quantized": "all-linear", "tied": True},
    "adapted by ia3": ADAPTED | {"method": "ia3"},
    # Two rows, of the first and the last rank, so that one of three ranks has none.
    "rows": FROZEN | {"rows": {"embed_tokens": [570, 3], "lm_head": [3, 570]}},
    "rows, tied": PLAIN | {"tied": True, "method": "lora", "rows": [570, 3]},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "of linears": FROZEN | {"wrap": "linear", "sharding": {"strategy": "shard_grad_op"}},
    "offloaded": FROZEN | {"sharding": {"offload_base": "cpu"}},
    "packed rows": PLAIN | {"packs": True, "checkpointing": "full"},
    "every update": FROZEN | {"sharding": {"reduce_gradients": "every_update"}},
    "every micro-batch": FROZEN | {"sharding": {"reduce_gradients": "every_micro_batch"}},
}
TRAINED: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "ddp": {"sharding": {"strategy": "ddp"}},
    "in backward": {"tied": True, "in_backward": True, "clip": None},
    "bf16": {"compute": "bf16"},
    "linears": {"sharding": {"wrap": "linear"}, "activation": {"checkpointing": "full"}},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    root = tmp_path_factory.mktemp("vocabulary")
    return {
        tied: write_tiny_model(root / str(tied), tie_word_embeddings=tied) for tied in (False, True)
    }


def with_vocabulary(case: dict[str, Any], how: str, **more: Any) -> dict[str, Any]:
    return case | more | {"sharding": case.get("sharding", {}) | {"vocabulary": how}}


def of_adapters(size: int, folders: dict[bool, Path], cases: dict[str, Any], how: str) -> Any:
    given = [
        {"wrap": "decoder_layer", "split": adapters.SPLITS[size][-1]}
        | with_vocabulary(case, how, folder=folders[case.get("tied", False)])
        for case in cases.values()
    ]
    return run_ranks(size, adapters.train, folders[False], given)


def assert_as_alone(size: int, folders: dict[bool, Path], cases: dict[str, Any]) -> None:
    """Losses and every number of every adapter are those of one process."""
    plain = {name: case | {"sharding": {}} for name, case in cases.items()}
    alone = of_adapters(1, folders, plain, "gather")[0]
    for rank, results in enumerate(of_adapters(size, folders, cases, "split")):
        for name, result, one in zip(cases, results, alone, strict=True):
            adapters.assert_same(result, one, f"rank {rank} of {size}: {name}")


def test_three_ranks(folders: dict[bool, Path]) -> None:
    """Their rows have different lengths and other numbers of targets, in every micro-batch."""
    cases = {
        name: ADAPTER_CASES[name] for name in ("quantized", "adapted, tied", "rows", "rows, tied")
    }
    assert_as_alone(3, folders, cases)


@LONG
@pytest.mark.parametrize("size", [2, 3, 4])
def test_adapters(size: int, folders: dict[bool, Path]) -> None:
    cases = ADAPTER_CASES if size != 3 else ADAPTER_CASES | VARIANTS
    if size == 4:
        cases = cases | {f"hybrid, {name}": c | {"sharding": HYBRID} for name, c in cases.items()}
    assert_as_alone(size, folders, cases)


@LONG
@pytest.mark.parametrize("size", [2, 4])
def test_gathered(size: int, folders: dict[bool, Path]) -> None:
    """Against gathering on the same ranks, besides one process."""
    both = [of_adapters(size, folders, ADAPTER_CASES, how)[0] for how in ("gather", "split")]
    for name, gathered, split in zip(ADAPTER_CASES, *both, strict=True):
        adapters.assert_same(split, gathered, f"{size} ranks: {name}")


# ---- trained vocabularies --------------------------------------------------------------------


def of_full(size: int, folders: dict[bool, Path], cases: dict[str, Any], how: str) -> Any:
    given = [
        {"split": (12 // size, 1) if case.get("in_backward") else (3, 4 // size)}
        | with_vocabulary(case, how, folder=folders[case.get("tied", False)])
        for case in cases.values()
    ]
    return run_ranks(size, full.train, given)


@pytest.mark.parametrize(
    ("size", "names"),
    [(2, ["tied"]), pytest.param(2, list(TRAINED), marks=LONG), pytest.param(4, [], marks=LONG)],
)
def test_trained(size: int, names: list[str], folders: dict[bool, Path]) -> None:
    """Full finetuning: losses, gradients of the first step, weights after three."""
    cases = {name: TRAINED[name] for name in names or TRAINED}
    if size == 4:
        cases |= {"hybrid": {"sharding": HYBRID}, "tied hybrid": {"tied": True, "sharding": HYBRID}}
    gathered = of_full(size, folders, cases, "gather")
    split = of_full(size, folders, cases, "split")
    for name, one, other in zip(cases, gathered[0], split[0], strict=True):
        if name != "bf16":
            full.assert_same(other, one, f"{size} ranks: {name}")
        else:  # gradients are rounded to bf16 before they are reduced if it is gathered
            assert other["losses"] == pytest.approx(one["losses"], rel=1e-2)
            assert other["weights"]["lm_head.weight"].dtype == torch.float32


# ---- preferences: sums of samples -----------------------------------------------------------


def train_preferences(folder: Path, how: str, cases: list[dict[str, Any]]) -> Any:
    from qfsdp.distributed import strategy

    class Sharding(strategy.ShardingConfig):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given, vocabulary=how)  # type: ignore[arg-type]

    strategy.ShardingConfig = Sharding  # type: ignore[misc]  # in this process only
    return dpo.train(folder, cases)


@LONG
@pytest.mark.parametrize("size", [2, 3])
def test_preferences(size: int, folders: dict[bool, Path]) -> None:
    """Each sample has its own weight, known in backward; also where the output layer is adapted,
    which computes its logits again."""
    cases = [
        {"method": "dora", "micro": 1},
        {"method": "lora", "micro": 1, "targets": ["all-linear", "lm_head"]},
    ]
    alone = run_ranks(1, dpo.train, folders[False], cases)[0]
    for results in run_ranks(size, train_preferences, folders[False], "split", cases):
        for result, expected in zip(results, alone, strict=True):
            dpo.assert_same(result, expected)


# ---- without labels, and what cannot be split -----------------------------------------------


def answers(folder: Path, how: str) -> Any:
    """Logits of a loaded model, where each rank has other tokens, and why they have no gradient."""
    from tests.models import load_model

    model = load_model(folder, sharding={"vocabulary": how}).eval()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    tokens = torch.arange(3 * (5 + rank)).view(3, -1) % 577
    with torch.no_grad():
        logits = model(tokens)
    try:
        model.split.logits(model.lm_head, torch.ones(1, 192, requires_grad=True))
    except RuntimeError as error:
        return logits, str(error)
    except AttributeError:
        return logits, "gathered"
    return logits, ""


@pytest.mark.parametrize("tied", [pytest.param(False, marks=LONG), True])
def test_logits(tied: bool, folders: dict[bool, Path]) -> None:
    gathered = run_ranks(3, answers, folders[tied], "gather")
    split = run_ranks(3, answers, folders[tied], "split")
    for (expected, how), (found, why) in zip(gathered, split, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert how == "gathered" and "sharding.vocabulary is split; expected labels too" in why


def test_auto_compares_tokens_with_rows() -> None:
    """Of all ranks that share the rows, in a micro-batch; where nobody knows them it gathers."""
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dict(TINY_CONFIG))
    auto = ShardingConfig()
    assert splits_vocabulary(model, auto, 2, 288) and not splits_vocabulary(model, auto, 2, 289)
    assert splits_vocabulary(model, auto, 3, 192) and not splits_vocabulary(model, auto, 3, 193)
    assert not splits_vocabulary(model, auto, 2, None) and not splits_vocabulary(model, auto, 1, 1)
    assert splits_vocabulary(model, ShardingConfig(vocabulary="split"), 2, 10_000)
    assert not splits_vocabulary(model, ShardingConfig(vocabulary="gather"), 2, 1)


@pytest.mark.parametrize(
    ("config", "ranks", "why"),
    [
        ({"strategy": "ddp"}, 2, "with sharding.strategy: ddp every rank holds the frozen base"),
        ({}, 400, "some of 400 ranks would have no row of a vocabulary of 577"),
    ],
)
def test_what_cannot_be_split(config: dict[str, Any], ranks: int, why: str) -> None:
    """ "split" is refused in one line; "auto" gathers."""
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dict(TINY_CONFIG)).requires_grad_(False)
    with pytest.raises(UserError, match=f"^sharding.vocabulary: split, but {why}; expected auto"):
        splits_vocabulary(model, ShardingConfig(vocabulary="split", **config), ranks, 1)
    assert not splits_vocabulary(model, ShardingConfig(**config), ranks, 1)


def test_offloaded_parameters_are_not_split() -> None:
    with pytest.raises(InvalidField, match="^vocabulary: 'split' .* gather with cpu_offload"):
        ShardingConfig(vocabulary="split", cpu_offload=True).check()
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dict(TINY_CONFIG))
    assert not splits_vocabulary(model, ShardingConfig(cpu_offload=True), 2, 1)


def group_of_two(mesh_of: tuple[int, ...]) -> list[int] | None:
    """The host group of a rank of the first subgroup, as on a GPU; the others call nothing."""
    world: World = init_world()
    mesh = DeviceMesh("cpu", torch.arange(world.size).view(mesh_of))
    if world.rank >= mesh_of[-1]:
        return None
    on_gpu = replace(world, device=torch.device("cuda", 0))
    return dist.get_process_group_ranks(_host_group(mesh, on_gpu))


def test_a_host_group_is_made_by_its_members_alone() -> None:
    assert run_ranks(4, group_of_two, (2, 2)) == [[0, 1], [0, 1], None, None]
