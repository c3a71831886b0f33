"""When steps are captured, what stays, what is replayed, and why not: with a stand-in for CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.data.batch import ALL_POSITIONS, Batch
from qfsdp.data.loader import collate
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.low_rank.copies import copies_in
from qfsdp.modules.low_rank.linear import low_rank_linears
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.dtensor import local_part
from qfsdp.training import cuda_graphs
from qfsdp.training.cuda_graphs import WARM_UP, Obstacle, StepGraphs, why_not
from qfsdp.training.steps import StepClock
from tests.models import adapted_model, randomize_adapters
from tests.ranks import run_ranks
from tests.tiny import DELTA, load_recipe, recipe_config, write_tiny_model, write_tiny_run
from tests.toy_data import TOY_CONFIG

pytestmark = pytest.mark.usefixtures("eager")
CPU = torch.device("cpu")
STEPS, ROW = 7, 24


class Recorded:
    """A graph of the stand-in: runs the function that was captured, with the inputs of then, and
    checks that no tensor has moved. Graphs of norms have no inputs, and use no gradients."""

    def __init__(self, fn: Callable[..., Any], inputs: Sequence[Tensor], model: Decoder) -> None:
        self._fn, self._inputs, self._model = fn, inputs, model
        self.replays, self.frees, self._places = 0, 0, self._now()
        # A capture runs nothing: what the function has changed is changed back.
        grads = [
            (p.grad, p.grad.clone()) for p in trainable_parameters(model) if p.grad is not None
        ]
        self.result = fn(*inputs)
        for grad, before in grads:
            grad.copy_(before)

    def _now(self) -> list[int | None]:
        """Where the tensors are that a graph uses."""
        trained = trainable_parameters(self._model)
        used = [*self._inputs, *self._model.parameters()]
        used += copies_in(self._model) if self._inputs else []
        grads = [p.grad for p in trained if self._inputs]
        held = map(local_part, used)
        places: list[int | None] = [getattr(t, "qdata", t).data_ptr() for t in held]
        return [*places, *(None if grad is None else grad.data_ptr() for grad in grads)]

    def replay(self) -> None:
        self.replays += 1
        assert self._now() == self._places
        result = self._fn(*self._inputs)
        if result is not None:
            self.result.copy_(result)

    def reset(self) -> None:
        self.frees += 1


class StandIn:
    def __init__(self, model: Decoder, fails: str = "") -> None:
        self.model, self.fails = model, fails
        self.graphs: list[Recorded] = []

    def capture(self, fn: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, Any]:
        if self.fails:
            raise RuntimeError(f"{self.fails}\nCompile with TORCH_USE_CUDA_DSA")
        self.graphs.append(Recorded(fn, inputs, self.model))
        return self.graphs[-1], self.graphs[-1].result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("graphs") / "model")


def batch(step: int, packed: bool, row: int = ROW) -> Batch:
    """Rows with a number of targets, and of documents, that vary."""
    generator = torch.Generator().manual_seed(step)
    rows = []
    for _ in range(2):
        tokens = torch.randint(0, 500, (row,), generator=generator)
        labels = tokens.clone()
        labels[: 3 + step] = -100
        cut = 5 + step
        lengths = {"lengths": [cut, row - cut] if step % 3 else [row]} if packed else {}
        rows.append({"tokens": tokens, "labels": labels, **lengths})
    return collate(rows, pad_id=0, max_seq_len=row)


def train(
    folder: Path, method: Any, dtype: str, packed: bool, graphs_of: Any
) -> tuple[list[dict[str, float]], list[Tensor]]:
    model = adapted_model(folder, AdapterConfig(method, rank=4), dtype=dtype)
    randomize_adapters(model)
    model.train()
    world, recipe = World(CPU), load_recipe("qdora_distributed")
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=1e-3, fused=True)
    graphs, metrics = graphs_of(model, world), []
    for step in range(STEPS):
        batches = [batch(2 * step + part, packed) for part in range(2)]
        if step == 5:
            batches[1] = batch(3, packed, row=ROW + 8)  # of another shape: not replayed
        metrics.append(
            recipe.train_step(model, optimizer, None, batches, 1.0, world, StepClock(CPU), graphs)
        )
    return metrics, [param.detach().clone() for param in trainable_parameters(model)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("method", "dtype"), [("dora", "fp32"), ("lora", "fp32"), ("dora", "bf16")]
)
def test_replayed_steps_are_steps(folder: Path, method: str, dtype: str, packed: bool) -> None:
    expected, weights = train(folder, method, dtype, packed, lambda *_: None)
    made: list[StandIn] = []

    def graphs_of(model: Decoder, world: World) -> StepGraphs:
        made.append(StandIn(model))
        return StepGraphs(model, True, None, world, made[0])  # type: ignore[arg-type]

    found, trained = train(folder, method, dtype, packed, graphs_of)
    close = 1e-5 if dtype == "fp32" else 2e-2
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=close)
    for one, other in zip(trained, weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=close if dtype == "fp32" else 4e-3)
    passes, *norms = made[0].graphs
    assert passes.replays == 2 * STEPS - WARM_UP - 1
    assert [graph.replays for graph in norms] == [STEPS - WARM_UP] * (method == "dora")


def test_a_capture_that_fails_ends_the_run(folder: Path) -> None:
    def graphs_of(model: Decoder, world: World) -> StepGraphs:
        fails = StandIn(model, "operation not permitted when stream is capturing")
        return StepGraphs(model, "auto", None, world, fails)  # type: ignore[arg-type]

    reason = "a micro-batch cannot be captured: operation not permitted when stream is capturing"
    with pytest.raises(UserError) as error:
        train(folder, "dora", "fp32", True, graphs_of)
    assert str(error.value) == f"cuda_graphs: {reason}; expected cuda_graphs=false"


def test_passes_before_a_capture_run_its_code(folder: Path) -> None:
    model = adapted_model(folder, AdapterConfig("lora", rank=4), dtype="fp32")
    stand_in, seen = StandIn(model), []
    graphs = StepGraphs(model, True, None, World(CPU), stand_in)  # type: ignore[arg-type]

    def forward_backward(given: Batch) -> Tensor:
        seen.append(given.targets)
        return torch.zeros(())

    for step in range(WARM_UP + 1):
        assert graphs.micro_batch(forward_backward, batch(step, True), StepClock(CPU)) is not None
    assert set(seen) == {ALL_POSITIONS}
    assert len(stand_in.graphs) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"device": "cpu"}, "the device is cpu; expected cuda"),
        ({"mesh": object()}, "FSDP2 gathers weights into memory that moves"),
        ({"dtype": "fp16"}, "model.dtype=fp16 changes its loss scale"),
        ({"packed": False}, "the sizes of batches vary; expected packed=true or compile=true"),
        ({"packed": False, "compile": True}, None),
        ({"dtype": "fp32"}, "the host reads where packed samples end for fp32 and heads of"),
        ({"dtype": "fp32", "packed": False, "compile": True}, None),
        ({"dropout": 0.1}, "adapter.dropout=0.1 draws numbers; expected 0"),
        ({"offload": True}, "activation.offload=true copies on another stream; expected false"),
        ({"checkpointing": "full"}, "activation.checkpointing=full; expected none, or selective"),
        ({"recurrent": True}, None),
        ({"fla": True}, None),
        ({"recurrent": True, "fla": True}, "flash-linear-attention reads where packed samples"),
        ({"recurrent": True, "fla": True, "compile": True}, None),
        ({"mesh": object(), "base": "cpu"}, "FSDP2 gathers weights into memory that moves"),
        ({"mesh": object(), "method": "lora"}, "FSDP2 gathers weights into memory that moves"),
    ],
)
def test_why_not(
    folder: Path, tmp_path: Path, changes: dict[str, Any], reason: str | None, monkeypatch: Any
) -> None:
    given = {"device": "cuda", "mesh": None, "dtype": "bf16", "packed": True, "compile": False}
    given |= {"dropout": 0.0, "offload": False, "checkpointing": "none"}
    given |= {"base": "none", "method": "dora", "recurrent": False, "fla": False} | changes
    monkeypatch.setattr(cuda_graphs, "is_installed", lambda _: given["fla"])
    if given["recurrent"]:
        folder = write_tiny_model(tmp_path / "model", **DELTA)
    model = adapted_model(folder, AdapterConfig(given["method"], rank=4))
    for layer in model.model.layers:
        layer.checkpointing = given["checkpointing"]
    world = World(torch.device(given["device"]), mesh=given["mesh"])
    cfg = SimpleNamespace(
        model=SimpleNamespace(dtype=given["dtype"]),
        adapter=SimpleNamespace(dropout=given["dropout"]),
        activation=SimpleNamespace(offload=given["offload"], checkpointing=given["checkpointing"]),
        sharding=SimpleNamespace(cpu_offload=False, offload_base=given["base"]),
        packed=given["packed"],
        compile=given["compile"],
    )
    found = why_not(model, world, cfg)
    assert (found is None) == (reason is None)
    if found is not None:
        assert found.reason.startswith(reason or "")
        assert found.norms == (not {"device", "base", "method"} & changes.keys())


def train_sharded(folder: Path, strategy: Any) -> tuple[list[float], list[float], int]:
    """Losses without graphs and with those of norms, and how often these were replayed."""
    recipe, losses, stand_in = load_recipe("qdora_distributed"), [], None
    for graphed in (False, True):
        sharding = ShardingConfig(strategy)
        world = recipe.init_world(sharding)
        cfg = recipe_config(recipe, folder, adapter=AdapterConfig("dora", 4, 8), sharding=sharding)
        model = recipe.load_model(cfg, world)
        optimizer = torch.optim.AdamW(trainable_parameters(model), lr=1e-3)
        graphs = None
        if graphed:
            stand_in = StandIn(model)
            graphs = StepGraphs(model, True, Obstacle("FSDP2", norms=True), world, stand_in)  # type: ignore[arg-type]
        for step in range(STEPS):
            batches, clock = [batch(2 * step + world.rank, packed=True)], StepClock(CPU)
            metrics = recipe.train_step(model, optimizer, None, batches, 1.0, world, clock, graphs)
            losses.append(metrics["loss"])
    assert stand_in is not None and len(stand_in.graphs) == 1  # no micro-batch
    return losses[:STEPS], losses[STEPS:], stand_in.graphs[0].replays


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "ddp"])
def test_norms_of_two_ranks_are_replayed(folder: Path, strategy: str) -> None:
    for plain, replayed, count in run_ranks(2, train_sharded, folder, strategy):
        assert replayed == plain and count == STEPS - WARM_UP


def test_graphs_are_freed_before_the_group_ends(tmp_path: Path) -> None:
    """Also by a run that fails: a graph with a collective would keep its group from ending."""
    words = "output_dir: {folder}/run\nadapter: {{method: dora, rank: 4}}\n"
    write_tiny_run(tmp_path, TOY_CONFIG + words)
    recipe, made, steps = load_recipe(), [], []
    update = recipe.train_step

    def graphs_of(model: Decoder, _: Any, __: Any, world: World) -> StepGraphs:
        made.append(StandIn(model))
        return StepGraphs(model, True, None, world, made[0])  # type: ignore[arg-type]

    def train_step(*args: Any) -> Any:
        steps.append(update(*args))
        if len(steps) == STEPS:
            raise UserError("step 7 fails")
        return steps[-1]

    recipe.StepGraphs, recipe.train_step = graphs_of, train_step
    with pytest.raises(UserError, match="step 7 fails"):
        recipe.main(load_config(recipe.Config, ["--config", f"{tmp_path}/config.yaml"]))
    norms = made[0].graphs[-1]
    assert norms.replays > 0
    assert [graph.frees for graph in made[0].graphs] == [1] * len(made[0].graphs)


def test_off_is_off(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def graphs_of(model: Decoder, world: World) -> StepGraphs:
        assert list(low_rank_linears(model))
        return StepGraphs(model, False, None, world, StandIn(model, "never"))  # type: ignore[arg-type]

    found, _ = train(folder, "lora", "fp32", False, graphs_of)
    assert found == train(folder, "lora", "fp32", False, lambda *_: None)[0]
    for wanted, said in ((True, True), ("auto", False), (False, False)):
        StepGraphs(None, wanted, Obstacle("the device is cpu"), World(CPU))  # type: ignore[arg-type]
        assert bool(capfd.readouterr().err) == said
