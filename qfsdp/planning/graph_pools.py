"""Memory that CUDA graphs keep, worked out from a dry run of a step without them.

Each graph has a memory pool. PyTorch fills the pool during the capture, and no other code may use
it as long as the graph exists (PyTorch's notes on CUDA, "Graph memory management"). During a
capture freed memory is used again. So a pool is assumed to be as large as the most that its part
of a step allocates at once. What is counted:

    micro-batch   one pool: the peak of forward and backward, without what lasts between steps
    norm_refresh  another pool, as it may not use that of the micro-batch
    workspace     one workspace of cuBLAS, for the stream that captures
    gradients     they stay allocated, because the graphs add to them

Clipping and the optimizer run between graphs. They may not use the pools, so their memory is added.
Where only the norms are captured (several ranks), their pool and the workspace are counted.
Fragmentation within a pool is in the allowance for all memory. None of this was measured beside a
capture.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from qfsdp.distributed.world import World
from qfsdp.modules.transformer import Decoder
from qfsdp.planning.kernel_memory import CUBLAS_WORKSPACES, Target
from qfsdp.planning.tracker import GRADIENTS, Point
from qfsdp.training.cuda_graphs import why_not

# Phases of a step. Without a phase: between forward and backward, with all activations.
MICRO_BATCH, NORMS = ("forward", "", "backward"), ("norm_refresh",)


def captured(
    cfg: Any, model: Decoder, world: World, target: Target
) -> Literal["all", "norms", "nothing"]:
    """What of its steps a run captures. `world` is a dry run's; one rank has no mesh in a run."""
    if not getattr(cfg, "cuda_graphs", False):
        return "nothing"
    mesh = None if world.size == 1 else world.mesh
    obstacle = why_not(model, replace(world, device=torch.device(target), mesh=mesh), cfg)
    if obstacle is None:
        return "all"
    return "norms" if obstacle.norms else "nothing"


def kept_by_graphs(
    points: Sequence[Point], steady: int, only_norms: bool = False
) -> tuple[int, int]:
    """What graphs add to the peak of a step, and to what is allocated between steps, in bytes.

    Args:
        points: of a step without graphs.
        steady: allocated between steps without graphs.
    """

    def above(phases: Collection[str]) -> int:
        chosen = (point for point in points if point.phase in phases)
        most = max((p.total - p.by_kind.get(GRADIENTS, 0) for p in chosen), default=steady)
        return max(0, most - steady)

    if only_norms:
        pool = above(NORMS) + CUBLAS_WORKSPACES // 2
        return pool, pool
    gradients = max(point.by_kind.get(GRADIENTS, 0) for point in points)
    pools = above(MICRO_BATCH) + above(NORMS) + CUBLAS_WORKSPACES // 2
    between = above({point.phase for point in points} - {*MICRO_BATCH, *NORMS})
    whole = steady + gradients + pools + between
    return whole - max(point.total for point in points), gradients + pools
