"""Out-of-memory messages: the place, the largest kinds, and advice."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from qfsdp.common.errors import UserError
from qfsdp.config.component import Component
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import DistributedConfig
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.trainable import TrainableConfig
from qfsdp.planning import oom
from qfsdp.planning.advice import TRANSIENT, less_device_memory, less_host_memory
from qfsdp.planning.oom import Run, explain_out_of_memory, is_out_of_memory
from qfsdp.training.steps import StepClock
from tests.models import adapted_model
from tests.tiny import load_recipe, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")
CPU, GPU = torch.device("cpu"), torch.device("cuda")
ON_CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.65 GiB of "
    "which 1.10 GiB is free."
)


@dataclass
class Config:
    output_dir: str
    batch_size: int = 4
    gradient_accumulation_steps: int = 3
    activation: ActivationConfig = field(default_factory=ActivationConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    optimizer: str = "torch.optim.AdamW"


def on_cuda() -> None:
    raise torch.OutOfMemoryError(ON_CUDA)


def on_cpu() -> None:
    torch.empty(2**50)


def of_python() -> None:
    bytearray(2**60)


def load_model(fail: Callable[[], None]) -> None:
    fail()


def train(cfg: Config, folder: Path, fail: Callable[[], None], at_load: bool = False) -> None:
    """Runs a `main` that loads, and fails in the backward pass of its second step."""

    @explain_out_of_memory
    def main(cfg: Config, run: Run) -> None:
        if at_load:
            load_model(fail)
        run.model = model = adapted_model(folder, AdapterConfig("dora", 5))
        run.optimizer = optimizer = torch.optim.AdamW(trainable_parameters(model))
        run.clock = clock = StepClock(CPU)
        tokens = torch.arange(40).view(2, 20)
        for step in range(1, 4):
            run.step = step
            with clock.phase("forward"):
                loss = model(tokens, labels=tokens)
            with clock.phase("backward"):
                loss.backward()
                if step == 2:
                    fail()
            with clock.phase("optimizer"):
                optimizer.step()

    main(cfg)


def run(cfg: Any, fail: Callable[[], None]) -> None:
    """Runs a `main` that only fails."""
    explain_out_of_memory(lambda cfg, run: fail())(cfg)


@pytest.mark.parametrize(
    ("fail", "requested"), [(on_cuda, "2.50 GiB"), (on_cpu, "4194304.00 GiB"), (of_python, None)]
)
def test_a_step_that_fails(
    fail: Callable[[], None], requested: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All tensors of this process count, also those that earlier tests left.
    count = 3 if fail is of_python else 10_000
    monkeypatch.setattr(oom, "LARGEST_TENSORS", count)
    cfg = Config(str(tmp_path / "run"))
    with pytest.raises(UserError) as caught:
        train(cfg, write_tiny_model(tmp_path / "model"), fail)
    message = str(caught.value)
    print(message)
    assert "\n" not in message and message.startswith("out of memory at step 2, backward")
    assert (f", asked for {requested} more; " in message) == (requested is not None)
    assert (
        "try activation.checkpointing=full; or batch_size=2 gradient_accumulation_steps=6"
        in message
    )
    file = tmp_path / "run" / "oom" / "rank_0.json"
    assert message.endswith(f"; see {file}")

    details = json.loads(file.read_text())
    kinds = details["bytes_by_kind"]
    assert kinds["gradients"] == kinds["parameters_trained"] > 0
    assert kinds["parameters_quantized"] > 0 and kinds["optimizer_state"] > 0
    assert list(kinds.values()) == sorted(kinds.values(), reverse=True)
    tensors = details["largest_tensors"]
    sizes = [tensor["bytes"] for tensor in tensors]
    assert sizes == sorted(sizes, reverse=True) and 3 <= len(sizes) <= count
    names = {tensor["name"] for tensor in tensors}
    assert count == 3 or {"model.embed_tokens.weight", "lm_head.weight"} <= names
    assert f"in {fail.__name__}" in "".join(details["traceback"])


def test_loading_that_fails(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="out of memory in load_model") as caught:
        train(Config(str(tmp_path)), tmp_path, partial(torch.empty, 2**50), at_load=True)
    assert "activation." not in str(caught.value).partition("try")[2]


def test_on_another_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(UserError):
        train(Config(str(tmp_path)), tmp_path, on_cpu, at_load=True)
    assert (tmp_path / "oom" / "rank_3.json").exists()


def test_a_folder_that_cannot_be_written_changes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "oom").touch()
    with pytest.raises(UserError, match="out of memory") as caught:
        train(Config(str(tmp_path)), tmp_path, on_cpu, at_load=True)
    assert "see" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "qdora_distributed",
        "full_finetune_distributed",
        "generate",
        "evaluate",
        "quantize",
        "merge",
        "block_expansion",
    ],
)
def test_every_recipe_that_loads_weights_explains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(name)
    monkeypatch.setattr(recipe, "init_world", lambda *_, **__: on_cuda())
    model = SimpleNamespace(path=str(tmp_path), dtype="fp32")
    parts = {"sharding": ShardingConfig(), "trainable": TrainableConfig()}
    cfg = SimpleNamespace(model=model, distributed=DistributedConfig(), **parts)
    with pytest.raises(UserError, match=r"^out of memory in main, asked for 2.50 GiB more; "):
        recipe.main(cfg)


def test_tensors_without_sizes_are_left_out(tmp_path: Path) -> None:
    """Compiled code leaves such tensors behind."""
    symbols = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.empty(7, 5), symbolic_context=symbols)
    functional = torch._to_functional_tensor(fake)  # of type Tensor
    with pytest.raises(UserError, match="out of memory"):
        run(Config(str(tmp_path)), on_cpu)
    assert isinstance(fake.size(0), torch.SymInt) and isinstance(functional.size(0), torch.SymInt)


def test_wrappers_of_torch_func_are_left_out(tmp_path: Path) -> None:
    def loss(wrapped: torch.Tensor) -> torch.Tensor:
        assert type(wrapped) is torch.Tensor
        with pytest.raises(UserError, match="out of memory"):
            run(Config(str(tmp_path)), on_cpu)
        return wrapped.sum()

    torch.func.grad(loss)(torch.ones(3))
    torch.func.vmap(loss)(torch.ones(2, 3))
    assert (tmp_path / "oom" / "rank_0.json").exists()


def test_a_failing_explanation_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oom, "largest_tensors", lambda model: 1 / 0)
    with pytest.raises(torch.OutOfMemoryError, match="2.50 GiB") as caught:
        train(Config(str(tmp_path)), tmp_path, on_cuda, at_load=True)
    assert "in load_model" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), ValueError("out of memory"), KeyboardInterrupt()]
)
def test_other_exceptions_pass(error: BaseException, tmp_path: Path) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        run(Config(str(tmp_path)), fail)
    assert caught.value is error and not list(tmp_path.iterdir())


def test_pinned_memory_counts() -> None:
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))


def advice(device: torch.device = GPU, training: bool = True, **changes: Any) -> list[str]:
    kinds = {"parameters_quantized": 50, "optimizer_state": 20, TRANSIENT: 30}
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    cfg = Config("", **changes)
    return list(less_device_memory(cfg, kinds, ranks, device.type != "cpu", training))


def test_advice_leaves_out_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = [
        "activation.checkpointing=full",
        "batch_size=2 gradient_accumulation_steps=6",
        "activation.offload=true",
        "optimizer._component_=torchao.optim.AdamW8bit",
        "sharding.offload_base=cpu",
        "sharding.cpu_offload=true",
        "a smaller max_seq_len",
        "more ranks",
    ]
    assert advice() == everything
    assert advice(training=False) == everything[3:6] + everything[7:]
    on_cpu = [way for way in everything if "offload" not in way]
    assert advice(CPU) == on_cpu
    assert "batch_size=1 gradient_accumulation_steps=15" in advice(batch_size=5)
    frugal = {
        "activation": ActivationConfig("full", offload=True),
        "sharding": ShardingConfig(offload_base="disk"),
        "optimizer": "torchao.optim.AdamW8bit",
        "batch_size": 1,
    }
    assert advice(**frugal) == ["a smaller max_seq_len", "more ranks"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "sharding.wrap=linear" in advice(**frugal)
    given = Component("torch.optim.AdamW", {"lr": 1e-3, "fused": True, "eps": 1e-6})
    words = "optimizer._component_=torchao.optim.AdamW8bit ~optimizer.fused"
    assert words in advice(optimizer=given)
    for fewer in ("torchao.optim.AdamW4bit", "torchao.optim.AdamWFp8"):
        assert not any("8bit" in way for way in advice(optimizer=fewer))
    ways = advice(sharding=ShardingConfig("ddp", wrap="linear"))
    assert "sharding.strategy=full_shard" in ways and "sharding.offload_base=cpu" not in ways


def test_advice_for_host_memory() -> None:
    plain = Config("")
    assert list(less_host_memory(plain)) == ["fewer ranks on this machine"]
    busy = Config(
        "", activation=ActivationConfig(offload=True), sharding=ShardingConfig(offload_base="cpu")
    )
    assert list(less_host_memory(busy))[:2] == [
        "activation.offload=false",
        "sharding.offload_base=disk",
    ]
