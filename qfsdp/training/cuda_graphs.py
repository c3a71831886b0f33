"""CUDA graphs: the host launches a micro-batch, and the refresh of DoRA's norms, as one thing each.

A step of 2,048 tokens of an 8B model waits for the host, which launches thousands of kernels. A
graph records them once, with the addresses of all tensors, and replays them. So:

    inputs       are copied into tensors that stay; so is the number of targets
    parameters   stay where they are: all without FSDP2, which gathers them into memory that moves
    gradients    are added to tensors that stay; the optimizer may set `.grad` to None meanwhile
    A and B      are prepared (`modules.low_rank.copies`) before a replay, outside of the graph
    shapes       are those of the first micro-batch that came `WARM_UP` times; others run as ever

So several ranks capture the norms only: these read the shards, which stay, and gather A in a
collective that is captured with them.

Passes before the capture count, and run the code that is captured, so that its kernels are loaded.
What is known not to be captured says why, once, and the run goes on without. A capture that fails
ends the run: PyTorch stays on the stream of the capture then, perhaps with its memory pool and
generator, and no later result could be trusted. `Device` is what a test replaces. An H200 has
captured steps of plain rows of an 8B model: 1.21 (QLoRA) and 1.43 (QDoRA) times the tokens of eager
steps of 4,096 tokens. Of packed rows and recurrent layers it has captured small models only, equal
to eager steps (tests/test_gpu_steps.py). So `cuda_graphs` is off unless a config turns it on.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from qfsdp.common.errors import UserError
from qfsdp.common.messages import first_line
from qfsdp.data.batch import ALL_POSITIONS, Batch
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.distributed.world import World
from qfsdp.modules.attention.documents import is_varlen_size
from qfsdp.modules.delta_kernel import is_installed
from qfsdp.modules.hub_models.decoder import AnyDecoder, HubDecoder
from qfsdp.modules.low_rank.copies import prepare
from qfsdp.modules.low_rank.linear import dora_linears, refresh_dora_norms
from qfsdp.modules.transformer import Decoder
from qfsdp.training.steps import StepClock

CudaGraphs = bool | Literal["auto"]
"""Whether steps are captured: "auto" says nothing where there is no GPU."""

WARM_UP = 3  # passes before a capture: libraries load, kernels are chosen and compiled


class Device:
    """What CUDA does."""

    def capture(self, fn: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, Any]:
        """A graph of `fn(*inputs)` and its result, which each replay writes. Runs nothing."""
        torch.cuda.synchronize()
        gc.collect()  # a graph that is freed during the capture would end it
        torch.cuda.empty_cache()  # of passes that ran without a graph: the pool needs it
        graph = torch.cuda.CUDAGraph()
        # The usual mode fails if another thread queries an event, as NCCL's watchdog does.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = fn(*inputs)
        return graph, result


class Captured:
    """A function of tensors, captured at its first call.

    Args:
        fn: uses tensors that stay, besides its arguments, and returns one or None.
        inputs: of the first call; copies of them become its arguments.
    """

    def __init__(self, fn: Callable[..., Any], inputs: Sequence[Tensor], device: Device) -> None:
        self.inputs = [value.clone() for value in inputs]
        self.graph, self.result = device.capture(fn, self.inputs)

    def __call__(self, *inputs: Tensor) -> Any:
        for into, value in zip(self.inputs, inputs, strict=True):
            into[: len(value)].copy_(value, non_blocking=True)
            if len(value) < len(into):  # ends of documents: the last is repeated
                into[len(value) :].copy_(value[-1:].expand(len(into) - len(value)))
        self.graph.replay()
        return self.result


@dataclass(frozen=True)
class Obstacle:
    """What keeps micro-batches from being captured.

    Fields:
        reason: in words.
        norms: whether DoRA's norms are captured all the same.
    """

    reason: str
    norms: bool = False


class StepGraphs:
    """The graphs of a run's steps; a context manager that frees them at its end.

    The process group must outlive them: `ncclCommDestroy` waits for ever for a graph that has a
    captured collective (pytorch#115388).

    Args:
        model: loaded; its parameters, or their shards, stay where they are.
        wanted: as in the config.
        obstacle: to capturing all (`why_not`).
    """

    def __init__(
        self,
        model: nn.Module,
        wanted: CudaGraphs,
        obstacle: Obstacle | None,
        world: World,
        device: Device | None = None,
    ) -> None:
        self._model = model
        self._device, self._world = device or Device(), world
        self._on = bool(wanted) and obstacle is None
        norms = bool(wanted) and (obstacle is None or obstacle.norms)
        self._norms_on = norms and bool(dora_linears(model))  # PyTorch warns of an empty graph
        if obstacle is not None and (wanted is True or world.device.type == "cuda" and wanted):
            self._say(obstacle.reason, "only for DoRA's norms" if obstacle.norms else "not used")
        self._seen: Counter[Any] = Counter()
        self._norms: Captured | None = None
        self._pass: Captured | None = None
        self._shapes: list[torch.Size] = []
        self._grads: list[tuple[nn.Parameter, Tensor]] = []
        self._targets: Tensor | None = None

    def __enter__(self) -> StepGraphs:
        return self

    def __exit__(self, *_: object) -> None:
        for captured in filter(None, (self._pass, self._norms)):
            captured.graph.reset()
        self._pass = self._norms = None
        self._on = self._norms_on = False

    def _say(self, reason: str, used: str = "not used") -> None:
        if self._world.rank == 0:
            print(f"cuda_graphs: {used}: {reason}", file=sys.stderr, flush=True)

    def _captured(self, name: str, fn: Callable[..., Any], inputs: Sequence[Tensor]) -> Captured:
        """The function, captured. Raises UserError if it cannot be."""
        try:
            return Captured(fn, inputs, self._device)
        except RuntimeError as error:
            reason = f"{name} cannot be captured: {first_line(error)}"
            raise UserError(f"cuda_graphs: {reason}; expected cuda_graphs=false") from error

    @property
    def replayed(self) -> bool:
        """Whether micro-batches are replayed, and not only warmed up."""
        return self._pass is not None

    # ---- DoRA's norms ----------------------------------------------------------------------

    def refresh_norms(self) -> None:
        """`refresh_dora_norms`, replayed after `WARM_UP` calls."""
        self._seen["norms"] += self._norms_on
        if self._norms_on and self._norms is None and self._seen["norms"] > WARM_UP:
            self._norms = self._captured(
                "norm_refresh", lambda: refresh_dora_norms(self._model), ()
            )
        if self._norms is None:
            refresh_dora_norms(self._model)
        else:
            self._norms()

    # ---- a micro-batch ---------------------------------------------------------------------

    def staying(self, targets: Tensor) -> Tensor:
        """The number of targets in a tensor that stays."""
        if not self._on:
            return targets
        if self._targets is None:
            self._targets = torch.empty_like(targets)
        return self._targets.copy_(targets)

    def micro_batch(
        self, forward_backward: Callable[[Any], Tensor], batch: Batch, clock: StepClock
    ) -> Tensor | None:
        """Runs a micro-batch as a graph, or as it will be captured; None: left to the caller.

        Args:
            forward_backward: of a batch on the device; adds gradients and returns the loss.
            clock: takes the time of the phase "graph".
        """
        if not self._on:
            return None
        tensors = (batch.tokens, batch.labels, batch.positions, batch.cu_seqlens)
        inputs = [value for value in tensors if isinstance(value, Tensor)]
        shapes = [value.shape for value in inputs]
        if self._pass is not None and not self._fits(shapes):
            return None
        if self._pass is None:
            self._seen[str(shapes)] += 1
            if self._seen[str(shapes)] <= WARM_UP:
                # With a clock of one phase: what is captured has no times of its parts.
                with clock.phase("graph"):
                    return forward_backward(replace(batch, targets=ALL_POSITIONS))
            self._capture(forward_backward, batch, inputs)
        with clock.phase("graph"):
            prepare(self._model)
            self._restore_gradients()
            assert self._pass is not None
            return cast(Tensor, self._pass(*inputs))

    def _fits(self, shapes: list[torch.Size]) -> bool:
        """Whether the inputs have the shapes of the graph; there may be fewer documents."""
        if len(shapes) != len(self._shapes):
            return False
        rows, documents = (shapes, []) if len(shapes) == 2 else (shapes[:3], shapes[3:])
        same = rows == self._shapes[: len(rows)]
        return same and all(size <= self._shapes[3] for size in documents)

    def _capture(
        self, forward_backward: Callable[[Any], Tensor], batch: Batch, inputs: list[Tensor]
    ) -> None:
        self._shapes = [value.shape for value in inputs]
        names = ("tokens", "labels", "positions", "cu_seqlens")
        for param in trainable_parameters(self._model):
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        prepare(self._model)

        def run(*given: Tensor) -> Tensor:
            changed: dict[str, Any] = dict(zip(names, given, strict=False))
            return forward_backward(replace(batch, targets=ALL_POSITIONS, **changed))

        self._pass = self._captured("a micro-batch", run, inputs)
        self._grads = [(p, p.grad) for p in trainable_parameters(self._model) if p.grad is not None]

    def _restore_gradients(self) -> None:
        """Makes `.grad` the tensors that the graph adds to."""
        away = [(param, grad) for param, grad in self._grads if param.grad is not grad]
        if new := [grad for param, grad in away if param.grad is None]:
            torch._foreach_zero_(new)
        for param, grad in away:
            if param.grad is not None:
                grad.copy_(param.grad)
            param.grad = grad


def why_not(model: AnyDecoder, world: World, cfg: Any) -> Obstacle | None:
    """Why the steps of a run, or all but DoRA's norms, cannot be captured; None if they may be."""
    if isinstance(model, HubDecoder):
        return Obstacle("transformers computes the layers; expected qfsdp's decoder", norms=False)
    layers = [cast(Any, layer) for layer in model.parts.layers]
    kept, head_dim = cfg.activation.checkpointing, model.config.head_dim
    by_fla = model.config.recurrent is not None and is_installed("fla")
    checks = [
        (world.device.type != "cuda", f"the device is {world.device.type}; expected cuda"),
        (world.mesh is not None, "FSDP2 gathers weights into memory that moves; expected one rank"),
        (cfg.model.dtype == "fp16", "model.dtype=fp16 changes its loss scale; expected bf16"),
        (
            not cfg.packed and not cfg.compile,
            "the sizes of batches vary; expected packed=true or compile=true",
        ),
        (
            cfg.packed and (cfg.model.dtype == "fp32" or not is_varlen_size(head_dim)),
            f"the host reads where packed samples end for {cfg.model.dtype} and heads of "
            f"{head_dim}; expected bf16, and a multiple of 8 up to 256",
        ),
        (
            cfg.adapter.dropout > 0,
            f"adapter.dropout={cfg.adapter.dropout} draws numbers; expected 0",
        ),
        (
            cfg.activation.offload,
            "activation.offload=true copies on another stream; expected false",
        ),
        (
            any(layer.recomputed != "none" for layer in layers),
            f"activation.checkpointing={kept}; expected none, or selective with compile=true",
        ),
        (model.config.experts is not None, "the host reads how many tokens each expert has"),
        (
            by_fla and cfg.packed and not cfg.compile,
            "flash-linear-attention reads where packed samples end; expected compile=true",
        ),
    ]
    reason = next((reason for wrong, reason in checks if wrong), None)
    return None if reason is None else Obstacle(reason, norms=_norms_stay(model, world, cfg))


def _norms_stay(model: Decoder, world: World, cfg: Any) -> bool:
    """Whether the model has norms of DoRA, and all that they are computed from stays in place."""
    fetched = cfg.sharding.cpu_offload or cfg.sharding.offload_base != "none"
    on_gpu, dense = world.device.type == "cuda", model.config.experts is None
    return on_gpu and dense and not fetched and bool(dora_linears(model))
