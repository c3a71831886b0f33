"""Runs a step that gave NaN or infinity again, and finds the first tensor that is not finite.

Hooks on every module look at weights before they are used, at inputs and outputs in forward, and at
the gradients of outputs in backward. The hooks read every tensor on the host, so they are there for
this second look only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qfsdp.data.batch import Batch
from qfsdp.distributed.sharding import reshard
from qfsdp.distributed.world import World
from qfsdp.tensor_subclasses.dtensor import local_part
from qfsdp.tensor_subclasses.finite import is_finite
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from qfsdp.training.steps_in_backward import StepsInBackward

FORWARD, BACKWARD, GRADIENT = range(3)  # the order of a step
LISTED_SAMPLES = 8


@dataclass(frozen=True)
class Part:
    """One of the losses of a micro-batch that are added up.

    Fields:
        name: in words, e.g. "loss 'sigmoid'".
        loss: `[]`, with gradients.
        logprobs: what it is computed from, a tensor of its own: gradients of other losses do not
            pass through it.
    """

    name: str
    loss: Tensor
    logprobs: Tensor


Losses = Callable[[Any], list[Part]]
"""Micro-batch -> its losses."""

StepParts = Callable[[nn.Module, Sequence[Any], World], Losses]
"""(model, this rank's micro-batches of a step, world) -> what computes the losses of each. Every
rank must call it."""


@dataclass(order=True)
class Finding:
    """The first tensor of a micro-batch that is not finite, on one rank. Earlier ones are less.

    Fields:
        phase: FORWARD, BACKWARD (the gradient of an output) or GRADIENT (of a parameter).
        place: number of tensors that were looked at before it in this phase.
        tensor: its name.
        rows: the rows of the micro-batch that are not finite; None: it has no rows.
    """

    phase: int
    place: int
    tensor: str
    rows: list[int] | None = field(default=None, compare=False)


def locate_nonfinite(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    world: World,
    parts: StepParts | None = None,
) -> str | None:
    """The first tensor of a training step that is not finite, in words, with ranks and samples.

    Every rank must call it, with weights and random state as they were when the step began. Nothing
    is updated and no gradient is kept. Compiled layers run uncompiled; there dropout drops other
    numbers. With `StepsInBackward` only forward runs again, as backward would change weights; after
    a backward pass that has done so, the gradients' norms tell.

    Args:
        batches: this rank's micro-batches of the step.
        parts: computes the losses; None: cross entropy, the model's own.

    Returns:
        None if everything is finite now.
    """
    targets = max(world.sum(sum(batch.num_targets for batch in batches)), 1)
    try:
        with torch.compiler.set_stance("force_eager"):
            losses = parts and parts(model, batches, world)
            look = _Look(model, losses)
            if isinstance(optimizer, StepsInBackward):
                look = _ForwardOnly(model, losses, optimizer)
            for batch in batches:
                found = look.at(batch.to(world.device), targets)
                if text := _agreed(found, batch, world):
                    return text
    finally:
        optimizer.zero_grad()
    return None


def _agreed(found: Finding | None, batch: Batch, world: World) -> str | None:
    """What the ranks have found in a micro-batch, in words; None if they have found nothing."""
    samples = batch.samples
    if found is not None and found.rows is not None:
        samples = tuple(samples[row] for row in found.rows if row < len(samples))
    every = world.gather((found, [index for row in samples for index in row]))
    findings = [finding for finding, _ in every if finding is not None]
    if not findings:
        return None
    first = min(findings)
    if first.phase == GRADIENT:  # it is the sum over all ranks
        ranks = list(range(world.size))
    else:
        ranks = [rank for rank, (f, _) in enumerate(every) if f and f.phase == first.phase]
    # Once each: both samples of a pair have the index of the pair.
    indices = list(dict.fromkeys(index for rank in ranks for index in every[rank][1]))
    return f"{first.tensor}, {_listed('rank', ranks)}, {_listed('sample', indices)}"


def _listed(kind: str, numbers: list[int]) -> str:
    """ "rank 0", "samples 3, 5", "samples 0, 1, 2, 3, 4, 5, 6, 7 and 24 more" """
    if not numbers:
        return f"no {kind}"
    shown = ", ".join(map(str, numbers[:LISTED_SAMPLES]))
    more = len(numbers) - LISTED_SAMPLES
    return f"{kind}{'s' * (len(numbers) > 1)} {shown}" + (f" and {more} more" if more > 0 else "")


class _Look:
    """Runs micro-batches with hooks. `at` gives the first tensor that is not finite, or None."""

    def __init__(self, model: nn.Module, losses: Losses | None) -> None:
        self._model, self._losses = model, losses
        self._found: Finding | None = None
        self._places = [0, 0]
        self._rows = 0

    def at(self, batch: Batch, targets: float) -> Finding | None:
        self._rows = len(batch.tokens)
        with self._hooks():
            self._run(batch, targets)
        return self._found or self._of_gradients()

    def _run(self, batch: Batch, targets: float) -> None:
        self._loss(batch, targets).backward()  # type: ignore[no-untyped-call]

    def _loss(self, batch: Batch, targets: float) -> Tensor:
        if self._losses is not None:
            parts = self._losses(batch)
            for part in parts:
                self._note(FORWARD, part.name, part.loss)
                self._note_gradient(part.name, part.logprobs)
            return torch.stack([part.loss for part in parts]).sum()
        given = {"labels": batch.labels, "cu_seqlens": batch.documents}
        loss: Tensor = self._model(batch.tokens, batch.positions, **given)
        return loss / targets

    def _of_gradients(self) -> Finding | None:
        """Of the parameters whose gradients are not finite: the last, which backward meets first.
        `clip_grad_norm` computes norms in fp32, so a norm that is too large for it counts too."""
        norms = {
            name: torch.linalg.vector_norm(local_part(param.grad), dtype=torch.float32)
            for name, param in self._model.named_parameters()
            if param.grad is not None
        }
        return _last_gradient(norms)

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        with ExitStack() as undo:
            for name, module in self._model.named_modules():
                # Within FSDP2's own hooks, so that parameters are gathered.
                before = module.register_forward_pre_hook(partial(self._enter, name))
                after = module.register_forward_hook(partial(self._leave, name), prepend=True)
                undo.callback(before.remove)
                undo.callback(after.remove)
            yield

    @torch.no_grad()
    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._weights(name, module)
        for value in args:
            self._note(FORWARD, f"input of {name}", value)

    def _leave(self, name: str, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if module is self._model:  # `Decoder` calls the output layer without its hooks
            name = getattr(self._model, "output_name", "lm_head")
            self._weights(name, self._model.get_submodule(name))
        out = out[0] if isinstance(out, tuple | list) else out  # a mixture also returns its routing
        self._note(FORWARD, f"output of {name}", out)
        if isinstance(out, Tensor):
            self._note_gradient(f"the output of {name}", out)

    def _note_gradient(self, name: str, value: Tensor) -> None:
        if value.requires_grad:
            value.register_hook(partial(self._note, BACKWARD, f"gradient of {name}"))

    def _weights(self, name: str, module: nn.Module) -> None:
        for weight, param in module.named_parameters(name, recurse=False):
            self._note(FORWARD, f"weight {weight}", local_part(param))

    @torch.no_grad()
    def _note(self, phase: int, name: str, value: Any) -> None:
        """Keeps `value` as the finding if it is the first that is not finite."""
        if self._found is not None or not isinstance(value, Tensor):
            return
        self._places[phase] += 1
        # Quantized weights are looked at as they are loaded.
        if isinstance(value, QuantizedTensor) or not value.is_floating_point() or is_finite(value):
            return
        rows = None
        if value.ndim > 1 and len(value) == self._rows and not name.startswith("weight"):
            finite = torch.isfinite(value).flatten(1).all(1).tolist()
            rows = [row for row, is_finite in enumerate(finite) if not is_finite]
        self._found = Finding(phase, self._places[phase], name, rows)


class _ForwardOnly(_Look):
    """For an optimizer that updates in backward."""

    def __init__(self, model: nn.Module, losses: Losses | None, optimizer: StepsInBackward) -> None:
        super().__init__(model, losses)
        self._grad_norms = optimizer.grad_norms

    def at(self, batch: Batch, targets: float) -> Finding | None:
        if self._grad_norms:  # backward has run and changed weights: they tell nothing any more
            return self._of_gradients()
        return super().at(batch, targets)

    @torch.no_grad()
    def _run(self, batch: Batch, targets: float) -> None:
        self._loss(batch, targets)
        reshard(self._model)

    def _of_gradients(self) -> Finding | None:
        norms = self._grad_norms
        parameters = self._model.named_parameters()
        return _last_gradient({name: norms[param] for name, param in parameters if param in norms})


def _last_gradient(norms: dict[str, Tensor]) -> Finding | None:
    """The last parameter with a norm that is not finite."""
    for place, (name, norm) in enumerate(reversed(norms.items())):
        if not torch.isfinite(norm):
            return Finding(GRADIENT, place, f"gradient of {name}")
    return None
