"""One update on one screen, for recipes and for training loops of your own.

    loss = forward_backward(loss_of, batches, optimizer, world)
    metrics = optim_step(model, optimizer, loss, world, clip=1.0)

The first adds up gradients, the second uses them. Between them they do what fails silently if it
is left out: the loss scale of fp16, the gradient norm over all ranks, no update from NaN, DoRA's
norms. What a batch's loss is stands in the recipe.

`save` writes the adapters in PEFT's format (`save_adapter`). `sample` (`qfsdp.training.rollouts`)
draws answers from the model that trains.
"""

from __future__ import annotations

import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.profiler import record_function

from qfsdp.checkpoint.adapter_files import save_adapter as save
from qfsdp.common import progress
from qfsdp.common.long_waits import long_wait
from qfsdp.data.batch import Batch
from qfsdp.distributed.gradients import LARGE_NORM, REDUCES_NOW, USED_GRAD_NORM
from qfsdp.distributed.world import World
from qfsdp.modules.low_rank.linear import refresh_dora_norms
from qfsdp.tensor_subclasses.dtensor import mesh_device
from qfsdp.tensor_subclasses.kernels import dry_run
from qfsdp.training.steps_in_backward import StepsInBackward

if TYPE_CHECKING:
    from qfsdp.training.cuda_graphs import StepGraphs

__all__ = ["forward_backward", "optim_step", "save"]

AnyBatch = TypeVar("AnyBatch", bound=Batch)

DECIDE = ("loss", "grad_norm", "lr")  # an update is left out if one of them is not finite
LOSS_SCALE = "loss_scale"  # of fp16, in the first group of the optimizer


def forward_backward(
    loss_of: Callable[[AnyBatch], Tensor],
    batches: Sequence[AnyBatch],
    optimizer: Optimizer,
    world: World,
    clock: StepClock | None = None,
    model: nn.Module | None = None,
    graphs: StepGraphs | None = None,
) -> Tensor:
    """Adds the gradients of a loss over all micro-batches of all ranks to those of the model.

    Every rank must call it, with the same number of micro-batches: passes contain collectives.

    Args:
        loss_of: the part of the loss that is a micro-batch's, a floating point scalar with
            gradients. The loss is the sum of all parts. For a mean, divide by the number of tokens
            or samples of *all* ranks and micro-batches: then nothing depends on how they are split.
        batches: this rank's micro-batches, on any device; `loss_of` gets them on the rank's.
        clock: takes the time of the phases "forward" and "backward"; of a replayed graph "graph".
        model: whose gradients are reduced once, with the last micro-batch, if
            `sharding.reduce_gradients` says so; None: with every micro-batch.
        graphs: of the run; `loss_of` must use the same tensors in every step then, besides its
            batch.

    Returns:
        The parts of this rank, summed; `[]`, without gradients. `optim_step` adds up the ranks'.
    """
    clock = clock or StepClock(world.device)
    loss = torch.zeros((), device=world.device)

    def captured(batch: AnyBatch) -> Tensor:  # without phases: a graph has no events of its own
        part = loss_of(batch)
        backward(part, optimizer, world)
        return part.detach()

    for number, batch in enumerate(batches, 1):
        reduce_gradients(model, now=number == len(batches))
        moved = cast(AnyBatch, batch.to(world.device))
        part = None if graphs is None else graphs.micro_batch(captured, moved, clock)
        if part is None:
            with clock.phase("forward"):
                part = loss_of(moved)
            with clock.phase("backward"):
                backward(part, optimizer, world)
        loss = loss + part.detach()
    return loss


def backward(loss: Tensor, optimizer: Optimizer, world: World) -> None:
    """`loss.backward()`, times the loss scale of fp16. If it would update weights
    (`StepsInBackward`), it is left out for a loss that is NaN or infinite on some rank."""
    if isinstance(optimizer, StepsInBackward) and not optimizer.may_begin(loss, world):
        return
    (loss * loss_scale(optimizer)).backward()  # type: ignore[no-untyped-call]


def loss_scale(optimizer: Optimizer) -> float:
    """The factor of the loss in backward; 1 unless the model computes in fp16."""
    return float(optimizer.param_groups[0].get(LOSS_SCALE, 1.0))


def optim_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Tensor,
    world: World,
    clip: float | None = None,
    scheduler: LRScheduler | None = None,
    clock: StepClock | None = None,
    graphs: StepGraphs | None = None,
) -> dict[str, float]:
    """Updates the weights from the gradients that `forward_backward` has added up, and frees them.

    Nothing is updated if the loss or a gradient is NaN or infinite on any rank. `NonFiniteWatch`
    acts on such metrics, and adapts the loss scale of fp16: a loop that trains in fp16 needs one.

    Args:
        loss: of `forward_backward`.
        clip: largest norm of all gradients together; None: not clipped.
        scheduler: steps once, if the weights do.
        clock: takes the time of the phases "optimizer" and "norm_refresh".

    Returns:
        `loss` of all ranks, `grad_norm` before clipping, and `lr`; the same on every rank.
    """
    clock = clock or StepClock(world.device)
    with clock.phase("optimizer"):
        total, scale = loss.detach().double().view(1), loss_scale(optimizer)
        trained = [param for param in model.parameters() if param.requires_grad]
        grad_norm = clip_grad_norm(trained, clip, scale, total, world)
        read = step_if_finite(optimizer, total[0], grad_norm)
        optimizer.zero_grad()
    with clock.phase("norm_refresh"):
        # A and B have changed; they change nowhere else.
        refresh_dora_norms(model) if graphs is None else graphs.refresh_norms()
    metrics = read()  # the host waits only here, while the device has work
    if scheduler is not None and are_finite(metrics):
        scheduler.step()
    return metrics


# ---- gradients of all ranks ----------------------------------------------------------------------


def reduce_gradients(model: nn.Module | None, now: bool) -> None:
    """Says whether the next backward pass reduces gradients over ranks, or adds them up unsharded.

    Does nothing to a model whose gradients are reduced in every micro-batch.
    """
    if isinstance(model, FSDPModule) and getattr(model, REDUCES_NOW, now) != now:
        model.set_requires_gradient_sync(now)
        setattr(model, REDUCES_NOW, now)


def clip_grad_norm(
    parameters: Iterable[Tensor],
    max_norm: float | None,
    loss_scale: float = 1.0,
    sums: Tensor | None = None,
    world: World | None = None,
) -> Tensor:
    """Scales the gradients in place so that their global L2 norm is at most `max_norm`.

    Args:
        max_norm: None clips nothing.
        loss_scale: the gradients are too large by this factor, and are divided by it.
        sums: fp64 `[n]`, on the device: this rank's parts of other numbers. They are summed over
            all ranks of `world` in place, in the all-reduce of the norm.

    Returns:
        The norm before clipping, over all parameters of all ranks, fp32 `[]`. It is a tensor, so
        the host does not wait for it. A gradient that was used in backward counts with the norm
        that it left (`USED_GRAD_NORM`).
    """
    parameters = list(parameters)
    # On local rows: the same operations on DTensors took 2 to 5 times as long (420 adapters).
    grads = [param.grad for param in parameters if param.grad is not None]
    rows = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    norms = _norms(rows) if rows else []
    for param in parameters:
        if (used := getattr(param, USED_GRAD_NORM, None)) is not None:
            norms.append(used)
            delattr(param, USED_GRAD_NORM)
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if sharded := [param for param in parameters if isinstance(param, DTensor)]:
        norm = _over_ranks(norm, sharded[0].device_mesh, sums)
    elif sums is not None and world is not None:
        world.sum_of(sums)
    norm = norm / loss_scale
    factor = torch.full_like(norm, 1 / loss_scale)
    if max_norm is not None:
        factor *= torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if rows and (max_norm is not None or loss_scale != 1):
        torch._foreach_mul_(rows, factor.to(rows[0].device))
    return norm


def _norms(grads: list[Tensor]) -> list[Tensor]:
    """The L2 norm of each, fp32 `[]`."""
    if grads[0].is_cpu and dry_run.current is None:
        of_rows = functools.partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float32)
        grads = [of_rows(grad) if grad.numel() > LARGE_NORM else grad for grad in grads]
    return list(torch._foreach_norm(grads, 2, torch.float32))


def _over_ranks(norm: Tensor, mesh: DeviceMesh, sums: Tensor | None) -> Tensor:
    """The norm over the ranks that share rows; sums `sums` over all ranks in the same all-reduce.

    On a mesh of replicate x shard every group of ranks holds all rows. The sum of squares over all
    ranks is then too large by the number of groups, so it is divided by that number.
    """
    square = norm.square().double().to(mesh_device(mesh)).view(1) * mesh.size(-1) / mesh.size()
    both = square if sums is None else torch.cat([square, sums])
    dist.all_reduce(both)
    if sums is not None:
        sums.copy_(both[1:])
    return both[0].sqrt().float()


# ---- no update from NaN or infinity --------------------------------------------------------------


def start_reading(loss: Tensor, grad_norm: Tensor, lr: float) -> Callable[[], dict[str, float]]:
    """Starts to copy the loss and the gradient norm of an update to the host.

    Args:
        loss, grad_norm: of all ranks, `[]`.

    Returns:
        A function that waits for the copy, and for nothing that the device is given after it; it
        returns `loss`, `grad_norm` and `lr`, the same on every rank.
    """
    copy = torch.stack([loss.double(), grad_norm.to(loss.device).double()])
    ended = None
    if copy.device.type != "cpu":
        copy, ended = copy.to("cpu", non_blocking=True), torch.Event(copy.device)
        ended.record()

    @functools.cache
    def read() -> dict[str, float]:
        if ended is not None:
            ended.synchronize()
        numbers = copy.tolist()
        return {"loss": numbers[0], "grad_norm": numbers[1], "lr": lr}

    return read


def step_if_finite(
    optimizer: Optimizer, loss: Tensor, grad_norm: Tensor
) -> Callable[[], dict[str, float]]:
    """`optimizer.step()`, unless the loss, the gradient norm or the learning rate is not finite.

    PyTorch's fused optimizers decide on the device (`found_inf`, as `torch.amp.GradScaler` tells
    them). For others the host waits for the two numbers first.

    Args:
        loss, grad_norm: of all ranks, `[]`.

    Returns:
        As of `start_reading`.
    """
    lr = float(optimizer.param_groups[0]["lr"])  # a tensor in some optimizers
    read = start_reading(loss, grad_norm, lr)
    if decides_on_device(optimizer, loss.device) and math.isfinite(lr):
        finite = torch.isfinite(loss) & torch.isfinite(grad_norm.to(loss.device))
        told: Any = optimizer
        told.found_inf = (~finite).float()
        try:
            optimizer.step()
        finally:
            del told.found_inf
    elif are_finite(read()):
        optimizer.step()
    return read


def decides_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether a tensor on `device` can tell the optimizer to leave an update out.

    Not if parameters lie in host memory: PyTorch copies the tensor to them without waiting, so the
    optimizer could read an old value.
    """
    groups = optimizer.param_groups
    fused = all(group.get("fused") for group in groups)
    beside = all(param.device == device for group in groups for param in group["params"])
    return fused and beside and getattr(optimizer, "_step_supports_amp_scaling", False)


def are_finite(metrics: Mapping[str, float]) -> bool:
    """Whether an update may be applied: its loss, gradient norm and learning rate are neither NaN
    nor infinite. Other metrics, as rewards, are only logged."""
    return all(math.isfinite(metrics[name]) for name in DECIDE)


# ---- the time of phases --------------------------------------------------------------------------


class StepClock:
    """Measures the time that the phases of training steps take.

        with clock.phase("forward"):
            loss = model(tokens)

    Phases of one name add up. Time in a phase within another phase counts for both. A profiler's
    trace shows each phase as a range. Compiled code cannot use phases.

    On an accelerator the time of a phase is that of its stream, measured by events without waiting
    for the device. Work of the host that the device does not wait for takes no time, such as
    collating a batch while the last step still runs.

    Args:
        tells: say so when a phase takes long; a dry run does not.

    Attributes:
        now: the innermost phase that runs; after an exception the phase that raised it.
    """

    def __init__(self, device: torch.device, tells: bool = True) -> None:
        self.now: str | None = None
        self._device, self._tells = device, tells
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.Event, torch.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of a `with` block to the phase `name`, unless the block raises."""
        outer, self.now = self.now, name
        with record_function(name), self._told(name), progress.phase(name):
            if self._device.type == "cpu":
                since = time.perf_counter()
                yield
                self._spent[name] += time.perf_counter() - since
            else:
                begin, end = _event(self._device), _event(self._device)
                begin.record()
                yield
                end.record()
                self._events.append((name, begin, end))
        self.now = outer

    def _told(self, name: str) -> AbstractContextManager[None]:
        """Says so if a phase takes long that has not ended before: it may compile kernels."""
        known = name in progress.NOW.ended or not self._tells
        return nullcontext() if known else long_wait(f"step {progress.NOW.step}: {name}")

    def seconds(self, wait: bool = True) -> dict[str, float]:
        """Seconds of each phase that ended since the last call.

        Args:
            wait: for the device; else phases that it still runs count for the next call.
        """
        running = []
        for name, begin, end in self._events:
            if not wait and not end.query():
                running.append((name, begin, end))
                continue
            end.synchronize()
            self._spent[name] += begin.elapsed_time(end) / 1000
        spent = dict(self._spent)
        self._spent.clear()
        self._events = running
        return spent


def _event(device: torch.device) -> torch.Event:
    return torch.Event(device, enable_timing=True)
