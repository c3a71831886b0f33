"""The schedule that shipped configs name, against torchtune's; schedules that end before a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup

from qfsdp.common.errors import UserError
from qfsdp.config.component import Component
from qfsdp.training import cosine_with_warmup
from qfsdp.training.schedule import check_length

PEAK = 0.5


def rates(schedule: object, warmup: int, total: int) -> list[float]:
    """The learning rate of every step of a run."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    made = schedule(optimizer, warmup, total)  # type: ignore[operator]
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return found


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 7), (1, 5), (4, 9), (4, 4), (9, 3)])
def test_first_step_trains_and_the_rest_is_torchtunes(warmup: int, total: int) -> None:
    ours = rates(cosine_with_warmup, warmup, total)
    theirs = rates(get_cosine_schedule_with_warmup, warmup, total)
    ramp = [PEAK * (n + 1) / warmup for n in range(min(warmup, total))]
    assert ours == pytest.approx(ramp + theirs[warmup:])
    assert all(rate > 0 for rate in ours)


@pytest.mark.parametrize(
    ("given", "ratio", "total", "warmup"),
    [(10, 0.1, 5, 1), (10, 0.1, 1000, 10), (None, 0.1, 1000, 100), (None, 0.0, 9, 0)],
)
def test_a_share_of_the_run(given: int | None, ratio: float, total: int, warmup: int) -> None:
    def shared(optimizer: torch.optim.Optimizer, steps: int, total: int) -> object:
        return cosine_with_warmup(optimizer, given, total, warmup_ratio=ratio)

    assert rates(shared, 0, total) == pytest.approx(rates(cosine_with_warmup, warmup, total))
    with pytest.raises(ValueError, match="from 0 to 1"):
        rates(lambda optimizer, *_: cosine_with_warmup(optimizer, 1, 9, warmup_ratio=3.0), 0, 9)


TORCH = "torch.optim.lr_scheduler"


@pytest.mark.parametrize(
    ("path", "length"),
    [
        (f"{TORCH}.CosineAnnealingLR", {"T_max": 9}),
        ("qfsdp.training.cosine_with_warmup", {"num_warmup_steps": 0, "num_training_steps": 9}),
    ],
)
def test_a_schedule_that_ends_before_the_run(
    path: str, length: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    check_length(None, 15)
    check_length(Component(path, length), 9)
    assert capsys.readouterr().err == ""
    check_length(Component(path, length), 15)
    key = list(length)[-1]
    assert capsys.readouterr().err == (
        f"warning: lr_scheduler.{key}: 9, and the run has 15 updates: rates after update 9 are "
        "past the schedule's end; expected 15\n"
    )


@pytest.mark.parametrize(
    ("length", "found"),
    [
        ({"total_steps": 9}, 9),
        ({"epochs": 3, "steps_per_epoch": 3}, 9),
        ({"total_steps": "many"}, "many"),
        ({"epochs": 3}, None),
        ({}, None),
    ],
)
def test_a_schedule_that_refuses_further_steps(length: dict[str, Any], found: Any) -> None:
    """It raised a ValueError in the middle of the run."""
    one_cycle = Component(f"{TORCH}.OneCycleLR", {"max_lr": 1e-3, **length})
    if found == 9:
        check_length(one_cycle, 9)
    told = f"has total_steps {found}, and the run 15; expected lr_scheduler.total_steps=15$"
    with pytest.raises(UserError, match=told):
        check_length(one_cycle, 15)
