"""Optimizers over sharded parameters: bits equal to torch's own step, DTensors between steps."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from qfsdp.common.errors import UserError
from qfsdp.config.component import Component
from qfsdp.training.optimizer import ELEMENTWISE, build_optimizer, check_optimizer
from qfsdp.training.steps import clip_grad_norm
from tests.ranks import run_ranks

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fused": ("torch.optim.AdamW", {"lr": 1e-2, "fused": True}),
    "amsgrad": ("torch.optim.AdamW", {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    "momentum": ("torch.optim.SGD", {"lr": 1e-2, "momentum": 0.9}),
    "plain": ("torch.optim.SGD", {"lr": 1e-2}),
}
SHAPES = [(5, 7), (7,), (4, 3)]  # numbers of rows that two ranks share unevenly


def parameters() -> list[nn.Parameter]:
    mesh, generator = init_device_mesh("cpu", (dist.get_world_size(),)), torch.Generator()
    generator.manual_seed(0)
    whole = (torch.randn(shape, generator=generator) for shape in SHAPES)
    return [nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)])) for tensor in whole]


def steps(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], first: int) -> None:
    """Three steps with new gradients; the last parameter has one in every other step."""
    for step in range(first, first + 3):
        generator = torch.Generator().manual_seed(step)
        for index, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator)
            if index < 2 or step % 2:
                param.grad = distribute_tensor(grad, param.device_mesh, [Shard(0)])  # type: ignore
        optimizer.step()
        assert all(isinstance(param, DTensor) for param in optimizer.param_groups[0]["params"])
        assert all(param.to_local().grad is None for param in params)
        optimizer.zero_grad()


def train(name: str) -> dict[str, list[dict[str, Any]]]:
    """Rows and state, ours and torch's, after three steps and three more from loaded state."""
    path, kwargs = OPTIMIZERS[name]
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "torch": []}
    for whose in found:
        params = parameters()
        made = Component(path, kwargs)
        optimizer = build_optimizer(made, params) if whose == "ours" else made.build(params)
        for first in (0, 3):
            steps(optimizer, params, first)
            state = [optimizer.state.get(param, {}) for param in params]
            kinds = [{k: type(v).__name__ for k, v in fields.items()} for fields in state]
            rows = [{k: plain(v) for k, v in fields.items()} for fields in state]
            found[whose].append({"kinds": kinds, "state": rows, "rows": [plain(p) for p in params]})
            optimizer.load_state_dict(optimizer.state_dict())
    return found


def plain(value: Any) -> Any:
    return value.detach().to_local().clone() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_over_rows_is_a_step_over_dtensors(name: str) -> None:
    for found in run_ranks(2, train, name):
        for ours, theirs in zip(found["ours"], found["torch"], strict=True):
            assert ours["kinds"] == theirs["kinds"]
            assert name == "plain" or "DTensor" in ours["kinds"][0].values()
            for mine, other in zip(ours["rows"], theirs["rows"], strict=True):
                assert torch.equal(mine, other)
            for mine, other in zip(ours["state"], theirs["state"], strict=True):
                assert mine.keys() == other.keys()
                for field, value in mine.items():
                    same = value == other[field]
                    assert same.all() if isinstance(same, Tensor) else same, field


def rows_and_whole_steps() -> None:
    for kind in ELEMENTWISE:
        params = parameters()
        whole = [nn.Parameter(param.full_tensor()) for param in params]  # type: ignore[attr-defined]
        steps(build_optimizer(Component(f"torch.optim.{kind.__name__}"), params), params, 0)
        alone = kind(whole)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for index, param in enumerate(whole):
                grad = torch.randn(param.shape, generator=generator)
                param.grad = grad if index < 2 or step % 2 else None
            alone.step()
        for mine, param in zip(params, whole, strict=True):
            assert torch.equal(mine.full_tensor(), param), kind  # type: ignore[attr-defined]


def test_steps_over_rows_are_those_over_whole_parameters() -> None:
    run_ranks(2, rows_and_whole_steps)


def test_only_sharded_parameters_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(
        "qfsdp.training.optimizer.LocalSteps", lambda optimizer: made.append(optimizer)
    )
    build_optimizer(Component("torch.optim.AdamW", {}), [nn.Parameter(torch.zeros(3))])
    assert not made


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "message"),
    [
        ("torch.optim.LBFGS", None, "optimizer: torch.optim.LBFGS needs 'closure' in every step"),
        ("torch.optim.SparseAdam", None, "SparseAdam does not support dense gradients"),
        (
            "torch.optim.SGD",
            "torch.optim.lr_scheduler.ReduceLROnPlateau",
            "lr_scheduler: torch.optim.lr_scheduler.ReduceLROnPlateau needs 'metrics' in every",
        ),
    ],
)
def test_a_step_that_no_recipe_can_take(
    optimizer: str, scheduler: str | None, message: str
) -> None:
    schedule = None if scheduler is None else Component(scheduler)
    with pytest.raises(UserError, match=re.escape(message)):
        check_optimizer(Component(optimizer), schedule)


def test_a_constructor_that_fails() -> None:
    adamw = Component("torch.optim.AdamW", {"betas": [0.9]})
    with pytest.raises(UserError, match="torch.optim.AdamW refuses its arguments: list index out"):
        check_optimizer(adamw, None)


@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "Adagrad"])
def test_one_that_makes_nan_of_no_gradient(name: str) -> None:
    with pytest.raises(UserError, match=f"^optimizer: torch.optim.{name} makes nan of a weight"):
        check_optimizer(Component(f"torch.optim.{name}", {"lr": 0.1, "eps": 0.0}), None)


@pytest.mark.parametrize(
    ("schedule", "kwargs"),
    [("StepLR", {"step_size": 0}), ("CosineAnnealingLR", {"T_max": 0})],
)
def test_a_schedule_that_fails_in_its_first_step(schedule: str, kwargs: dict[str, Any]) -> None:
    sgd = Component("torch.optim.SGD", {"lr": 0.1})
    path = f"torch.optim.lr_scheduler.{schedule}"
    with pytest.raises(UserError, match=f"lr_scheduler: {path} refuses its arguments: .* zero"):
        check_optimizer(sgd, Component(path, kwargs))


def test_a_schedule_that_sets_both_rates_of_lora_plus() -> None:
    sgd = Component("torch.optim.SGD", {"lr": 0.1})
    cycle = {"max_lr": 0.1, "total_steps": 9}
    one_rate = Component("torch.optim.lr_scheduler.OneCycleLR", cycle)
    check_optimizer(sgd, one_rate)
    with pytest.raises(UserError, match="OneCycleLR sets the rate of B itself"):
        check_optimizer(sgd, one_rate, 16.0)
    check_optimizer(sgd, Component(one_rate.path, cycle | {"max_lr": [0.1, 1.6]}), 16.0)
    check_optimizer(sgd, Component("torch.optim.lr_scheduler.StepLR", {"step_size": 2}), 16.0)


def test_capturable_steps_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    adamw = Component("torch.optim.AdamW", {"lr": 0.1, "capturable": True})
    with pytest.raises(UserError, match="optimizer: torch.optim.AdamW refuses .*capturable=True"):
        check_optimizer(adamw, None)
    monkeypatch.setattr("qfsdp.training.optimizer.accelerator_count", lambda: 1)
    check_optimizer(adamw, Component("torch.optim.lr_scheduler.StepLR", {"step_size": 2}))


def test_an_optimizer_that_refuses_the_parameters() -> None:
    muon = Component("torch.optim.Muon", {})
    with pytest.raises(UserError, match="optimizer: torch.optim.Muon refuses .* 2D parameters"):
        build_optimizer(muon, [nn.Parameter(torch.zeros(3))])


def refused() -> None:
    for path in ("torch.optim.Adafactor", "bitsandbytes.optim.PagedAdamW8bit"):
        with pytest.raises(UserError, match=f"{path} needs all rows of a weight"):
            build_optimizer(Component(path, {}), parameters())


def test_an_optimizer_of_whole_matrices_refuses_shards() -> None:
    run_ranks(2, refused)


def told() -> list[str]:
    found: list[str] = []
    logger = logging.getLogger("qfsdp")
    logger.addFilter(lambda record: bool(found.append(record.getMessage())))
    matrices = [param for param in parameters() if param.dim() == 2]
    build_optimizer(Component("torch.optim.Muon", {}), matrices)
    return found


def test_muon_tells_that_ranks_change_its_updates() -> None:
    """Of a 64 x 48 matrix on two ranks by 2.2 %, where another order of columns changes 2e-5."""
    (line,) = run_ranks(2, told)[0]
    assert line.startswith("torch.optim.Muon adds up products of shards in bf16")


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_norm_of_a_large_gradient(in_backward: bool) -> None:
    """A CPU's own norm of 8 million fp32 numbers is 3e-4 too small; in fp64 it is exact."""
    weight = nn.Parameter(torch.zeros(8192, 1024))
    grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    build_optimizer(Component("torch.optim.SGD", {"lr": 0.0}), [weight], in_backward)
    (weight * grad).sum().backward()
    norm = clip_grad_norm([weight], None)
    exact = torch.linalg.vector_norm(grad, dtype=torch.float64)
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)
