"""Weights trained themselves: as a plain loop of PyTorch trains transformers' model, however the
work is spread; and where some layers are trained, nothing else changes by a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ranks import run_ranks
from tests.tiny import load_recipe, write_tiny_model
from tests.toy_data import Samples

RECIPE = "full_finetune_distributed"
STEPS = 4
ADAMW = {"lr": 1e-3, "eps": 1e-6, "fused": True}
# Absolute, on losses and on every number of every weight; an update moves these by 1e-3.
TOLERANCE = 1e-5
FAMILIES: dict[str, dict[str, Any]] = {
    "untied": {},
    "biases": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "tied, biases, q/k norms": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 40,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
}


def loader(world_rank: int, world_size: int, split: tuple[int, int], fill: bool = False) -> Any:
    from qfsdp.data import StepLoader

    return StepLoader(
        Samples(None),
        batch_size=split[0],
        gradient_accumulation_steps=split[1],
        rank=world_rank,
        world_size=world_size,
        seed=3,
        pad_id=0,
        max_seq_len=64,
        fill_rows=fill,
    )


def make_config(recipe: Any, case: dict[str, Any]) -> Any:
    from qfsdp.modules.packed_linear import QuantizationConfig
    from qfsdp.modules.trainable import TrainableConfig
    from qfsdp.modules.transformer import ActivationConfig

    cfg = recipe.Config(
        output_dir="unused",
        model=recipe.ModelConfig(str(case["folder"]), dtype=case.get("compute", "fp32")),
        tokenizer=None,
        dataset=None,
        optimizer=recipe.Component(case.get("optimizer", "torch.optim.AdamW"), ADAMW),
        optimizer_in_backward=case.get("in_backward", False),
        clip_grad_norm=case.get("clip", 1.0),
        trainable=TrainableConfig(**case.get("trainable", {})),
        quantization=QuantizationConfig(case.get("format", "none")),
        sharding=recipe.ShardingConfig(**case.get("sharding", {})),
        activation=ActivationConfig(case.get("checkpointing", "none")),
        compile=case.get("compile", False),
    )
    cfg.check()
    return cfg


def train(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some updates for each case, by the recipe's own functions; runs on every rank."""
    recipe = load_recipe(RECIPE)
    return [train_one(recipe, case) for case in cases]


def train_one(recipe: Any, case: dict[str, Any]) -> dict[str, Any]:
    from qfsdp.memory.usage import bytes_by_kind
    from qfsdp.modules.shards import whole_tensor

    cfg = make_config(recipe, case)
    world = recipe.init_world(cfg.sharding, casts=cfg.trainable.dtype != cfg.model.dtype)
    model = recipe.load_model(cfg, world)
    before = held_bytes(model)
    parameters = recipe.trainable_parameters(model)
    optimizer = recipe.build_optimizer(cfg.optimizer, parameters, cfg.optimizer_in_backward)
    grads: dict[str, Tensor] = {}

    def note_gradients(*_: Any) -> None:
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        if not grads:
            grads.update({n: whole_tensor(grad).clone() for n, grad in found.items()})

    if not cfg.optimizer_in_backward:
        optimizer.register_step_pre_hook(note_gradients)
    alive: list[int] = []
    for param in parameters:
        param.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in parameters))
        )
    data = loader(world.rank, world.size, case["split"], cfg.compile)
    clock = recipe.StepClock(world.device)
    history = [
        recipe.train_step(
            model, optimizer, None, data.step(step), cfg.clip_grad_norm, world, clock
        )
        for step in range(STEPS)
    ]
    after = held_bytes(model)
    return {
        "losses": [h["loss"] for h in history],
        "grad_norms": [h["grad_norm"] for h in history],
        "grads": grads,
        "alive": max(alive),
        "weights": {
            n: whole_tensor(p).clone() for n, p in model.named_parameters() if p.requires_grad
        },
        "changed": {n for n in before if not same_bits(before[n], after[n])},
        "dtypes": {p.dtype for p in parameters},
        "bytes": bytes_by_kind(model, optimizer, world.device),
    }


def held_bytes(model: torch.nn.Module) -> dict[str, list[Tensor]]:
    """Copies of the tensors that this rank's part of every parameter is made of."""
    from qfsdp.memory.usage import plain_tensors

    params = model.named_parameters()
    return {n: [t.detach().clone() for t in plain_tensors(p)] for n, p in params}


def same_bits(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# ---- a reference that no one here wrote ------------------------------------------------------


def plain_loop(folder: Path, compute: torch.dtype = torch.float32) -> dict[str, Any]:
    """The same updates of transformers' model, in one process and one batch: weights in fp32,
    computation in `compute`."""
    from transformers import AutoModelForCausalLM

    master = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    low = AutoModelForCausalLM.from_pretrained(folder, dtype=compute)
    params = dict(master.named_parameters())
    optimizer = torch.optim.AdamW(params.values(), **ADAMW)
    data, found = loader(0, 1, (12, 1)), dict[str, Any](losses=[], grad_norms=[])
    for step in range(STEPS):
        (batch,) = data.step(step)
        with torch.no_grad():
            for name, param in low.named_parameters():
                param.copy_(params[name])
        logits = low(batch.tokens).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        for name, param in low.named_parameters():
            assert param.grad is not None
            params[name].grad, param.grad = param.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        if step == 0:
            found["grads"] = {n: p.grad.clone() for n, p in params.items()}  # type: ignore
        optimizer.step()
        found["losses"].append(loss.item())
        found["grad_norms"].append(norm.item())
    return found | {"weights": {n: p.detach().clone() for n, p in params.items()}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {
        name: write_tiny_model(root / str(at), **changes)
        for at, (name, changes) in enumerate(FAMILIES.items())
    }


@pytest.fixture(scope="module")
def references(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {name: plain_loop(folder) for name, folder in folders.items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    losses = torch.tensor([found["losses"], expected["losses"]])
    assert (losses[0] - losses[1]).abs().max() < TOLERANCE, f"{what}: {losses}"
    assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4), what
    for kind in ("grads", "weights"):
        assert found[kind].keys() == expected[kind].keys(), f"{what}: {kind}"
        for name, value in found[kind].items():
            difference = (value - expected[kind][name]).abs().max()
            bound = TOLERANCE * (expected[kind][name].abs().max() if kind == "grads" else 1)
            assert difference < bound, f"{what}: {kind} {name} differ by {difference:.2e}"


SPLITS = {1: [(12, 1), (3, 4)], 2: [(6, 1), (2, 3)], 3: [(4, 1), (1, 4)]}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_as_transformers_in_a_plain_loop(
    size: int, folders: dict[str, Path], references: dict[str, dict[str, Any]]
) -> None:
    """Losses, gradients of the first step, and weights after the last; embeddings tied and not."""
    cases = [
        {"family": family, "folder": folder, "split": split}
        for family, folder in folders.items()
        for split in SPLITS[size]
    ]
    cases[-1] |= {"checkpointing": "full", "sharding": {"wrap": "linear"}}
    by_rank = run_ranks(size, train, cases)
    for at, case in enumerate(cases):
        for rank in range(size):
            assert_same(by_rank[rank][at], references[case["family"]], f"{rank}: {case}")
        numbers = sum(w.numel() for w in by_rank[0][at]["weights"].values())
        held = [results[at]["bytes"] for results in by_rank]
        for kind, copies in (("parameters_trained", 1), ("optimizer_state", 2)):
            # Uneven rows: at most one row more than a share; a step count for each tensor.
            mine = [of_rank[kind] for of_rank in held]
            assert 4 * copies * numbers <= sum(mine) < 1.02 * 4 * copies * numbers + 4096, held
            assert max(mine) <= 1.05 * sum(mine) / size, held
        assert "parameters_plain" not in held[0]


# ---- strategies, precision, chosen layers ----------------------------------------------------


def assert_close(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    """bf16 arithmetic: batches of another shape are rounded otherwise."""
    assert found["losses"] == pytest.approx(expected["losses"], abs=0.02), what
    assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=0.02), what
    for name, grad in found["grads"].items():
        difference = (grad - expected["grads"][name]).norm()
        assert difference < 0.05 * expected["grads"][name].norm(), f"{what}: {name}"


STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "shard_grad_op", "prefetch": 2},
    {"strategy": "ddp"},
    {"strategy": "hybrid_full_shard", "replicate": 2, "shard": 1},
    {"strategy": "hybrid_shard_grad_op", "replicate": 1, "shard": 2},
    {"cpu_offload": True},
]


def test_strategies_on_two_ranks(
    folders: dict[str, Path], references: dict[str, dict[str, Any]]
) -> None:
    families = ["untied", "tied, biases, q/k norms"]
    cases = [
        {"family": family, "folder": folders[family], "split": (3, 2), "sharding": sharding}
        for family in families
        for sharding in STRATEGIES
    ]
    for rank, results in enumerate(run_ranks(2, train, cases)):
        for case, found in zip(cases, results, strict=True):
            assert_same(found, references[case["family"]], f"{rank}: {case}")


@pytest.mark.parametrize("size", [1, 2])
def test_weights_in_fp32_and_computation_in_bf16(size: int, folders: dict[str, Path]) -> None:
    """As transformers' model in bf16 whose gradients go to weights in fp32; on one rank too."""
    families = ["untied", "tied, biases, q/k norms"]
    base = {"compute": "bf16", "split": (12 // size, 1)}
    cases = [base | {"folder": folders[family]} for family in families]
    by_rank = run_ranks(size, train, cases)
    for at, family in enumerate(families):
        expected = plain_loop(folders[family], torch.bfloat16)
        found = by_rank[0][at]
        assert_close(found, expected, family)
        assert found["dtypes"] == {torch.float32}
        numbers = sum(w.numel() for w in found["weights"].values())
        held = sum(results[at]["bytes"]["parameters_trained"] for results in by_rank)
        assert 4 * numbers <= held < 4.1 * numbers, "a bf16 copy is held between steps"
        for name, weight in found["weights"].items():
            # An update is finer than bf16, and what is added up is not lost.
            assert (weight != weight.bfloat16().float()).float().mean() > 0.5, name
            assert (weight - expected["weights"][name]).abs().mean() < 2e-4, name


CHOSEN: list[dict[str, Any]] = [
    {"trainable": {"layers": [1, 3]}, "format": "nf4"},
    {"trainable": {"layers": [0], "embeddings": True}, "format": "nf4"},
    {"trainable": {"layers": "expanded"}, "format": "nf4", "compute": "bf16"},
    {"trainable": {"layers": "expanded"}, "compute": "bf16", "sharding": {"wrap": "linear"}},
    {"trainable": {"layers": [2]}, "format": "nf4", "sharding": {"strategy": "ddp"}},
    {"trainable": {"layers": [2]}, "format": "nf4", "sharding": {"offload_base": "cpu"}},
]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven and more layers make `layers.1` a part of other names."""
    changes = {"num_hidden_layers": 12, "expanded_layers": [1, 10], "hidden_size": 96}
    return write_tiny_model(tmp_path_factory.mktemp("deep"), **changes)


def chosen_names(case: dict[str, Any], names: set[str]) -> set[str]:
    layers = case["trainable"]["layers"]
    layers = [1, 10] if layers == "expanded" else layers
    of_layers = {n for n in names if n.split(".")[1] == "layers" and int(n.split(".")[2]) in layers}
    others = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    return of_layers | (others if case["trainable"].get("embeddings") else set())


def test_chosen_layers_train_and_nothing_else(deep: Path) -> None:
    """Over plain and packed frozen layers: one rank and three do the same."""
    from qfsdp.checkpoint.sources import ModelWeights

    names = set(ModelWeights(deep).plain)
    cases = [case | {"folder": deep} for case in CHOSEN]
    (one,) = run_ranks(1, train, [case | {"split": (12, 1)} for case in cases])
    three = run_ranks(3, train, [case | {"split": (2, 2)} for case in cases])
    for at, case in enumerate(cases):
        expected = chosen_names(case, names)
        assert one[at]["weights"].keys() == expected and one[at]["changed"] == expected, case
        assert one[at]["losses"][-1] < one[at]["losses"][0]
        same = assert_close if case.get("compute") == "bf16" else assert_same
        for results in three:
            assert results[at]["changed"] <= expected  # a rank may have no row of a norm
            same(results[at], one[at], str(case))
        whole, *parts = (packed_bytes(results[at]) for results in (one, *three))
        assert (whole > 0) == ("format" in case)
        if case.get("sharding", {}).get("strategy") == "ddp":
            assert parts == [whole] * 3
        else:  # every rank has the second-level scales of NF4
            assert whole <= sum(parts) <= 1.02 * whole and max(parts) <= 0.35 * whole


def packed_bytes(found: dict[str, Any]) -> int:
    return sum(size for kind, size in found["bytes"].items() if "packed" in kind)
