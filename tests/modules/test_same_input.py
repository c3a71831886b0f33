"""Linears with one input as one operation, and copies of A and B: the numbers, when they are
written, and how many launches of a GPU they save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import init_adapters
from qfsdp.modules.low_rank import copies
from qfsdp.modules.low_rank import linear as same_input
from qfsdp.modules.low_rank import product as adapted_linear
from qfsdp.modules.low_rank.copies import copies_in
from qfsdp.modules.low_rank.linear import low_rank_linears, refresh_dora_norms
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.kernels.custom_op import CUSTOM_OPS
from tests.models import adapted_model, cpu_world, load_model, randomize_adapters
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")
TOKENS = torch.arange(48).view(2, 24) * 7 % 500
GROUPS = 4  # of a layer: q, k and v; o; gate and up; down
Result = tuple[float, dict[str, Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("same_input") / "model")


@pytest.fixture(scope="module")
def with_bias(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("same_input_bias") / "model"
    return write_tiny_model(folder, architectures=["Qwen2ForCausalLM"], model_type="qwen2")


def model_of(folder: Path, method: Any = "lora", dtype: str = "bf16", **config: Any) -> Decoder:
    model = adapted_model(folder, AdapterConfig(method, rank=4, **config), dtype=dtype)
    randomize_adapters(model)
    return model.train()


def step(model: Decoder) -> Result:
    model.zero_grad()
    loss = model(TOKENS, labels=TOKENS)
    loss.backward()
    named = model.named_parameters()
    return loss.item(), {name: p.grad.clone() for name, p in named if p.grad is not None}


@contextmanager
def one_by_one(model: Decoder) -> Iterator[None]:
    """Within it, no linears are one operation and there are no copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(same_input, "_are_one", lambda _: False)
        patch.setattr(same_input, "ready_copies", lambda *_: None)
        yield


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("bias", [False, True])
def test_numbers_are_those_of_linears_one_by_one(
    folder: Path, with_bias: Path, method: str, bias: bool
) -> None:
    model = model_of(with_bias if bias else folder, method, "fp32")
    loss, grads = step(model)
    with one_by_one(model):
        expected, of_each = step(model)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert grads.keys() == of_each.keys()
    assert len(grads) == len(trainable_parameters(model))
    for name, grad in of_each.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-5 * grad.abs().max())


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_in_bf16_forward_has_the_same_bits(folder: Path, method: str) -> None:
    model = model_of(folder, method)
    loss, grads = step(model)
    assert all(linear.copies is not None for _, linear in low_rank_linears(model))
    with one_by_one(model):
        expected, of_each = step(model)
    assert loss == expected
    for name, grad in of_each.items():  # bf16 rounds to 0.4 %; sums of q, k and v round less often
        assert (grads[name] - grad).norm() < 0.02 * grad.norm(), name


def test_dropout_and_hooks_go_linear_by_linear(folder: Path) -> None:
    model = model_of(folder, dropout=0.5)
    torch.manual_seed(3)
    loss, _ = step(model)
    torch.manual_seed(3)
    with one_by_one(model):
        assert step(model)[0] == loss
    model, seen = model_of(folder), []
    hook = model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: seen.append(1))
    step(model)
    hook.remove()
    step(model)
    assert seen == [1]


# ---- when copies are written ---------------------------------------------------------------------


def changes() -> dict[str, Any]:
    """Ways in which adapters change."""

    def update(model: Decoder, kind: Any, **options: Any) -> None:
        step(model)
        optimizer = kind(trainable_parameters(model), lr=0.05, **options)
        optimizer.step()

    def torchao(model: Decoder) -> None:
        from torchao.optim import AdamW8bit

        with torch.compiler.set_stance("force_eager"):
            update(model, AdamW8bit)

    def state(model: Decoder) -> None:
        trained = {n: p * 1.5 for n, p in model.named_parameters() if p.requires_grad}
        model.load_state_dict(trained, strict=False)

    def assigned(model: Decoder) -> None:
        linear = model.model.layers[1].mlp.up_proj
        linear.lora_A = torch.nn.Parameter(linear.lora_A.detach() * 2)

    return {
        "fused": lambda m: update(m, torch.optim.AdamW, fused=True),
        "foreach": lambda m: update(m, torch.optim.AdamW, foreach=True),
        "sgd": lambda m: update(m, torch.optim.SGD),
        "torchao": torchao,
        "state": state,
        "assigned": assigned,
        "started": lambda m: init_adapters(m, seed=9),
    }


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("change", list(changes()))
def test_copies_follow_every_change(folder: Path, method: str, change: str) -> None:
    model = model_of(folder, method)
    before, _ = step(model)
    places = [copy.data_ptr() for copy in copies_in(model)]
    changes()[change](model)
    refresh_dora_norms(model)
    loss, _ = step(model)
    with one_by_one(model):
        assert step(model)[0] == loss != before
    assert [copy.data_ptr() for copy in copies_in(model)] == places


def test_copies_are_written_once_per_update(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, written = model_of(folder), []
    write = copies._write_b
    monkeypatch.setattr(copies, "_write_b", lambda some: (written.extend(some), write(some))[1])
    step(model)
    step(model)
    assert len(written) == len(list(low_rank_linears(model))) == 14
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.lora_B.add_(1.0)
    step(model)
    assert len(written) == 15


def test_sharded_linears_are_one_operation_without_copies(folder: Path) -> None:
    expected = run_ranks(1, sharded_step, folder)[0]
    for found in run_ranks(3, sharded_step, folder):
        assert found["copies"] == 0
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["calls"] == expected["calls"] == 2 * GROUPS


def sharded_step(folder: Path) -> dict[str, Any]:
    model = load_model(folder, adapter=AdapterConfig("dora", rank=4))
    init_adapters(model, seed=0)
    randomize_adapters(model)
    calls = []
    original = adapted_linear.forward_op
    adapted_linear.forward_op = lambda *args: (calls.append(1), original(*args))[1]
    loss = model.train()(TOKENS, labels=TOKENS)
    loss.backward()
    assert cpu_world().size in (1, 3)
    return {"loss": loss.item(), "calls": len(calls), "copies": len(list(copies_in(model)))}


# ---- launches ------------------------------------------------------------------------------------

VIEWS = ("view", "t", "transpose", "split", "detach", "slice", "alias", "empty", "unsqueeze")
VIEWS += ("_unsafe_view", "new_empty", "empty_like", "split_with_sizes", "as_strided", "select")


class Launches(TorchDispatchMode):
    """Counts the operations within our custom ops that a GPU runs as a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()
        self.within = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := f"{func.namespace}::{func._opname}") in CUSTOM_OPS:
            self.within = name.removeprefix("qfsdp::")
            with self:
                made = CUSTOM_OPS[name](*args, **(kwargs or {}))
            self.within = ""
            return made
        if self.within:
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        if self.within and func._opname not in VIEWS:
            self.found[self.within, func._opname] += 1
        return func(*args, **(kwargs or {}))


class Kernels(TorchDispatchMode):
    """Counts the operations that are no views."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("method", "launches"), [("lora", 4), ("dora", 9)])
def test_launches_of_copies(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str, launches: int
) -> None:
    """As many for 30 layers as for one: DoRA took three for each linear. The bits are those of one
    linear at a time."""
    model = model_of(folder, method)
    model.model.layers = nn.ModuleList([deepcopy(model.model.layers[0]) for _ in range(30)])
    monkeypatch.setattr(copies, "NUMBERS_AT_A_TIME", 0)
    copies.prepare(model)
    alone = [tensor.clone() for tensor in copies_in(model)]
    monkeypatch.undo()
    for _, linear in low_rank_linears(model):
        linear.copied = None
    with Kernels() as counted:
        copies.prepare(model)
    assert counted.found == launches
    assert all(map(torch.equal, alone, copies_in(model)))


@pytest.mark.parametrize(("method", "backward"), [("lora", 48), ("dora", 50)])
def test_launches_of_a_layer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str, backward: int
) -> None:
    """Of the operations of its 7 linears, where one kernel dequantizes a weight. Forward takes 21
    launches, 3 a linear; the products with A come before it. Backward takes 48, 6.9 a linear."""
    model = model_of(folder, method)
    step(model)  # writes the copies
    original = adapted_linear.frozen_weight

    def one_kernel(*args: Any) -> Tensor:
        counted.found[counted.within, "dequantize"] += 1
        within, counted.within = counted.within, ""
        made = original(*args)
        counted.within = within
        return made

    monkeypatch.setattr(adapted_linear, "frozen_weight", one_kernel)
    with Launches() as counted:
        step(model)
    found: Counter[str] = Counter()
    for (name, _), number in counted.found.items():
        found[name] += number
    assert found["adapted_linear"] == 2 * 21, counted.found
    # The input of the first layer needs no gradient.
    assert found["adapted_linear_backward"] == 2 * backward - 7, counted.found
