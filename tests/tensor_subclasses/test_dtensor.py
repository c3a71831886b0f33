"""Rows of all ranks, gathered one tensor at a time or many at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from qfsdp.tensor_subclasses import dtensor
from qfsdp.tensor_subclasses.dtensor import gather_rows, local_rows, whole_tensor, whole_tensors
from tests.models import cpu_world
from tests.ranks import run_ranks

SHAPES = ((7, 2), (2, 3), (6, 1), (1, 4))  # three ranks: some have fewer rows, some none


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def gathered() -> list[list[Tensor]]:
    mesh = cpu_world().mesh
    params = [
        distribute_tensor(numbers(*shape).requires_grad_(), mesh, [Shard(0)]) for shape in SHAPES
    ]
    found = [[*map(whole_tensor, params)], list(whole_tensors(params))]
    dtensor.GATHER_NUMBERS = 16  # two groups
    found.append(list(whole_tensors(params)))
    rows = numbers(7, 2, 3).to(torch.uint8)
    scales = [rows, rows[:, 0, 0]]
    return [*found, [gather_rows(params[0], whole[local_rows(params[0])]) for whole in scales]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_gets_all_rows(ranks: int) -> None:
    matrices, rows = [numbers(*shape) for shape in SHAPES], numbers(7, 2, 3).to(torch.uint8)
    for found in run_ranks(ranks, gathered):
        for one in found[:3]:
            assert not any(whole.requires_grad for whole in one)
            torch.testing.assert_close(one, matrices, rtol=0, atol=0)
        torch.testing.assert_close(found[3], [rows, rows[:, 0, 0]], rtol=0, atol=0)
