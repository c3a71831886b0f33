"""The collectives of a training step, all of them: on a fake group of eight, and on two real ranks.

Each is (phase, kind, dtype, bytes of the larger side), in order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qfsdp.config.load import load_config
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.modules.compute_dtype import planned_for
from qfsdp.planning.estimate import estimate
from qfsdp.planning.tracker import MemoryTracker
from tests.memory.test_estimate import load, read_config
from tests.ranks import run_ranks
from tests.tiny import load_recipe, write_tiny_model, write_tiny_run
from tests.toy_data import TOY_CONFIG

HIDDEN, VOCABULARY, LAYERS, RANKS = 192, 2048, 2, 8
TOKENS = 2 * 64  # of a micro-batch of one rank
TABLE = 2 * HIDDEN * VOCABULARY  # the embedding, and the output layer, in bf16
NORM = 2 * HIDDEN
LAYER = 434_432  # 4-bit rows, norms, and adapters in fp32
ADAPTERS = 224_000  # of a layer; "ddp" gathers them with their norms of 6,912 bytes
LINEARS = [45_120, 23_232, 23_232, 45_120, 99_840, 99_840, 97_280]  # q, k, v, o, gate, up, down
OF_LINEARS = [25_344, 16_640, 16_640, 25_344, 47_104, 47_104, 45_824]  # their gradients
FACTORS = 212_992  # every A, for DoRA's norms
NAMES = {
    "_allgather_base_": "gather",
    "allgather_": "gather",
    "_reduce_scatter_base_": "reduce",
    "allreduce_": "all",
    "alltoall_base_": "exchange",
}
BYTES, BF16, FP32, FP64 = torch.uint8, torch.bfloat16, torch.float32, torch.float64

Collective = tuple[str, str, torch.dtype, int]


def gathers(phase: str, *sizes: int, dtype: torch.dtype = BYTES) -> list[Collective]:
    plain = {TABLE, NORM, 2 * NORM}
    return [(phase, "gather", BF16 if size in plain else dtype, size) for size in sizes]


def reduces(*sizes: int, replicas: int = 1, shard: int = RANKS) -> list[Collective]:
    """Gradients; on a hybrid mesh the reduced rows are reduced over the replicas too."""
    found = []
    for size in sizes:
        found.append(("backward", "reduce", FP32, size))
        if replicas > 1:
            found.append(("backward", "all", FP32, size // shard))
    return found


def split(inner: list[Collective], ranks: int = RANKS) -> list[Collective]:
    """Forward with a split vocabulary. Tokens and embeddings; then labels, hidden states, the
    largest logit, sums of exponentials with targets' logits, and the hidden states' gradient."""
    tokens = ranks * TOKENS
    ids = ("forward", "gather", torch.int64, 8 * tokens)
    states = ("gather", BF16, NORM * tokens), ("reduce", BF16, NORM * tokens)
    sums = [("forward", "all", FP32, size * tokens) for size in (4, 8)]
    first = [("forward", "gather", BF16, NORM), ids, ("forward", *states[1])]
    return [*first, *inner, ids, ("forward", *states[0]), *sums, ("forward", *states[1])]


def step(*passes: list[Collective]) -> list[Collective]:
    """Target tokens before the passes; after them the squared norm with the loss, A."""
    return [
        ("", "all", FP64, 8),
        *(one for of_pass in passes for one in of_pass),
        ("optimizer", "all", FP64, 16),
        ("norm_refresh", "gather", FP32, FACTORS),
    ]


LAYER_BY_LAYER = gathers("forward", LAYER, LAYER)
FORWARD = gathers("forward", NORM, TABLE, LAYER, LAYER, TABLE)
AGAIN = gathers("backward", LAYER, LAYER)  # and not the embedding, which is frozen
REDUCED = reduces(ADAPTERS, ADAPTERS)
# A layer is gathered while the one behind it computes; its gradients are reduced after that.
DDP = gathers("forward", *[ADAPTERS + 6_912] * LAYERS, dtype=FP32)
HYBRID = reduces(ADAPTERS, ADAPTERS, replicas=2, shard=4)
CASES: dict[str, list[Collective]] = {
    "full_shard vocabulary=gather": step(FORWARD, AGAIN, REDUCED),
    "full_shard vocabulary=gather prefetch=0": step(
        FORWARD, AGAIN[:1], REDUCED[:1], AGAIN[:1], REDUCED[:1]
    ),
    "full_shard vocabulary=gather prefetch=2": step(FORWARD, AGAIN, REDUCED),
    "full_shard vocabulary=split": step(split(LAYER_BY_LAYER), AGAIN, REDUCED),
    "full_shard": step(split(LAYER_BY_LAYER), AGAIN, REDUCED),  # 1,024 tokens, 2,048 rows
    "shard_grad_op vocabulary=gather": step(FORWARD, REDUCED),
    "shard_grad_op": step(split(LAYER_BY_LAYER), REDUCED),
    "ddp": step(DDP, REDUCED),
    "hybrid_full_shard shard=4 vocabulary=gather": step(FORWARD, AGAIN, HYBRID),
    "hybrid_full_shard shard=4": step(split(LAYER_BY_LAYER, 4), AGAIN, HYBRID),
    "hybrid_shard_grad_op shard=4 vocabulary=gather": step(FORWARD, HYBRID),
    "hybrid_shard_grad_op shard=4": step(split(LAYER_BY_LAYER, 4), HYBRID),
}


class Recorder(TorchDispatchMode):
    """Notes the collectives of a real step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        note(self.seen, "", func, args)
        return func(*args, **kwargs or {})


def note(seen: list[Collective], phase: str, func: Any, args: Any) -> None:
    if (name := NAMES.get(func._opname)) is not None:
        tensors = [leaf for leaf in tree_leaves(args[:2]) if isinstance(leaf, Tensor)]
        whole = max(tensors, key=lambda tensor: tensor.nbytes)
        seen.append((phase, name, whole.dtype, whole.nbytes))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collectives")
    return write_tiny_model(folder / "model", vocab_size=VOCABULARY, intermediate_size=512)


def words_of(case: str, micro_batches: int = 1) -> list[str]:
    strategy, *others = case.split()
    words = ["model.dtype=bf16", f"gradient_accumulation_steps={micro_batches}"]
    return [*words, f"sharding.strategy={strategy}", *(f"sharding.{word}" for word in others)]


def collectives(
    model: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], ranks: int = RANKS
) -> list[Collective]:
    """Those of a dry step."""
    seen: list[Collective] = []
    monkeypatch.setattr(
        MemoryTracker,
        "_count_wire",
        lambda tracker, func, args: note(seen, tracker.phase, func, args),
    )
    estimate(*load(model, *words), ranks)
    return seen


@pytest.mark.parametrize("case", CASES)
def test_a_step(model: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    found = collectives(model, monkeypatch, words_of(case))
    assert found == CASES[case]


@pytest.mark.parametrize(("window", "tokens"), [(None, TOKENS), (9, 2 * 8 * 4)])
def test_ranks_that_share_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int | None, tokens: int
) -> None:
    """Four ranks have 16 tokens of each row. Keys and values of a layer are gathered, or only those
    within the window before a part; all else is as without it. Layers are computed again."""
    family = {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    changes: dict[str, Any] = family if window else {}
    write_tiny_model(tmp_path / "model", vocab_size=VOCABULARY, intermediate_size=512, **changes)
    words = words_of("full_shard vocabulary=gather context_parallel=4")
    found = collectives(tmp_path / "model", monkeypatch, [*words, "activation.checkpointing=full"])
    size = 2 * tokens * 2 * 2 * 32  # in bf16: of keys and values, two heads of 32
    forward, again = ((phase, "gather", BF16, size) for phase in ("forward", "backward"))
    back = ("backward", "reduce", BF16, size)
    layer = gathers("forward", LAYER)
    assert found == step(
        gathers("forward", NORM, TABLE),
        [*layer, forward, *layer, forward, *gathers("forward", TABLE)],
        [*AGAIN, again, again, back, REDUCED[0], again, again, back, REDUCED[1]],
    )


def test_units_of_linears(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = words_of("full_shard vocabulary=gather wrap=linear")
    found = collectives(model, monkeypatch, words)
    forward = gathers("forward", NORM, TABLE, *LAYERS * [2 * NORM, *LINEARS], TABLE)
    assert [one for one in found if one[0] == "forward"] == forward
    backward = [one for one in found if one[:2] == ("backward", "gather")]
    assert backward == gathers("backward", *LAYERS * [2 * NORM, *reversed(LINEARS)])
    reduced = [size for phase, kind, _, size in found if (phase, kind) == ("backward", "reduce")]
    # The input of the first layer needs no gradient, so its q, k and v come in another order.
    assert reduced == [*reversed(OF_LINEARS), *reversed(OF_LINEARS[3:]), *OF_LINEARS[:3]]


def test_gradients_are_reduced_once_per_update(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of adapters are small: at most 1 GiB in fp32."""
    for how in ("auto", "every_update", "every_micro_batch"):
        words = words_of(f"full_shard vocabulary=gather reduce_gradients={how}", 2)
        every = how == "every_micro_batch"
        first = [FORWARD, AGAIN, *([REDUCED] if every else [])]
        found = collectives(model, monkeypatch, words)
        assert found == step(*first, FORWARD, AGAIN, REDUCED), how
    monkeypatch.setattr("qfsdp.distributed.gradients.SMALL_GRADIENTS", 2 * ADAPTERS - 1)
    found = collectives(model, monkeypatch, words_of("full_shard vocabulary=gather", 2))
    assert found == step(FORWARD, AGAIN, REDUCED, FORWARD, AGAIN, REDUCED)


@pytest.mark.long
def test_traffic_of_micro_batches(model: Path) -> None:
    """The estimate runs two micro-batches: the first stands for all but the last."""
    sent = [
        estimate(*load(model, *words_of("full_shard vocabulary=gather", count)), RANKS).wire
        for count in (1, 2, 9)
    ]
    assert sent[0]["reduce_scatter"] == sent[1]["reduce_scatter"] == sent[2]["reduce_scatter"]
    of_norms = FACTORS * (RANKS - 1) // RANKS
    gathered = [of_step["all_gather"] - of_norms for of_step in sent]
    assert gathered == [gathered[0], 2 * gathered[0], 9 * gathered[0]]


def test_what_lies_before_the_first_trained_linear_is_gathered_once(
    model: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Backward ends at the down_proj of the first layer. Its other linears need no gradient. FSDP2
    does not warn of what they return."""
    words = [*words_of("full_shard wrap=linear"), "adapter.targets=[down_proj]"]
    found = collectives(model, monkeypatch, words)
    units = LAYERS * (1 + len(LINEARS)) - (len(LINEARS) - 1)
    assert sum(one[:2] == ("backward", "gather") for one in found) == units
    assert not [one for one in recwarn if "view" in str(one.message)]


# ---- real ranks ------------------------------------------------------------------------------


def real_steps(model: Path, cases: list[list[str]]) -> list[list[Collective]]:
    """The collectives of the second step of every case; runs on every rank."""
    found = []
    for words in cases:
        recipe, cfg = read_config(model, *words)
        world = recipe.init_world(cfg.sharding)
        with planned_for("cuda"):  # in bf16, also on a CPU without bf16 products
            net = recipe.load_model(cfg, world)
        optimizer = recipe.build_optimizer(cfg.optimizer, trainable_parameters(net))
        tokens = torch.zeros(cfg.batch_size, cfg.max_seq_len, dtype=torch.int64)
        batches = [recipe.Batch(tokens, tokens.clone(), tokens.numel())]  # all are targets
        batches *= cfg.gradient_accumulation_steps
        for _ in range(2):
            with Recorder() as recorder:
                clock = recipe.StepClock(world.device)
                recipe.train_step(net, optimizer, None, batches, 1.0, world, clock)
        found.append(recorder.seen)
    return found


@pytest.mark.long
@pytest.mark.parametrize("names", [["full_shard"], pytest.param([*CASES], marks=pytest.mark.long)])
def test_real_ranks_send_what_the_dry_run_says(
    model: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    """And besides it, on the host, how many tokens and targets the ranks have (8 bytes each)."""
    cases = [words_of(case.replace("shard=4", "shard=1"), 2) for case in names]
    agreed = ("", "all", torch.int64, 8)
    for seen in zip(*run_ranks(2, real_steps, model, cases), cases, strict=True):
        *by_rank, words = seen
        dry = [("", *one[1:]) for one in collectives(model, monkeypatch, words, ranks=2)]
        for real in by_rank:
            assert [one for one in real if one != agreed] == dry, words
            splits = any(one[2] == torch.int64 and one[1] == "gather" for one in dry)
            assert real.count(agreed) == (4 if splits else 0)


# ---- numbers of the hosts --------------------------------------------------------------------


def host_numbers(config: Path) -> list[Collective]:
    """What the ranks of a run exchange between two updates; runs on every rank."""
    recipe = load_recipe()
    cfg = load_config(recipe.Config, ["--config", str(config)])
    recorder, starts, update = Recorder(), [], recipe.train_step
    ends = []

    def train_step(*args: Any, **kwargs: Any) -> Any:
        starts.append(len(recorder.seen))
        metrics = update(*args, **kwargs)
        ends.append(len(recorder.seen))
        return metrics

    recipe.train_step = train_step
    with recorder:
        recipe.main(cfg)
    return recorder.seen[ends[-2] : starts[-1]]


@pytest.mark.long
def test_numbers_of_the_hosts_are_exchanged_once_per_update(tmp_path: Path) -> None:
    """Stop signals, failed and late checkpoints, tokens, slots, and three peaks of memory: they
    were four all-reduces on a CPU, and five on GPUs, each of which waited for the device."""
    words = "output_dir: {folder}/run\nadapter: {{rank: 4}}\nmax_steps: 4\n"
    write_tiny_run(tmp_path, TOY_CONFIG + words)
    for seen in run_ranks(2, host_numbers, tmp_path / "config.yaml"):
        assert seen == [("", "gather", FP64, 8 * 8)]
