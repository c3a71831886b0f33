"""Stops a run in which an adapter of an expert is not trained, though its expert is used.

A model with adapters that get no gradient learns less and says nothing: the loss still falls by
those that do. Experts without tokens have no gradient either, so what counts is the gradient of an
expert's output. The watch notes which rows of B have gradients in the first updates, on the device.
Only if an expert has none is the last step run again, without an update, to see whether gradients
arrive at its output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qfsdp.checkpoint.state import random_state, set_random_state
from qfsdp.common.errors import UserError
from qfsdp.data.loader import Batch
from qfsdp.distributed.world import World
from qfsdp.modules.adapters.linears import LowRankExpertLinear, low_rank_linears
from qfsdp.tensor_subclasses.dtensor import local_part, local_rows

UPDATES = 20

Found = set[tuple[str, int]]
"""(name, expert) of adapters."""


class GradientWatch:
    """Looks at the gradients of the first `UPDATES` updates that `optimizer` applies. Every rank
    makes one before the first, and calls `after` after every step."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        self._model, self._optimizer, self._world = model, optimizer, world
        self._modules = {
            name: module
            for name, module in low_rank_linears(model)
            if isinstance(module, LowRankExpertLinear) and module.lora_B.requires_grad
        }
        self._trained: dict[str, Tensor] = {}
        self._updates = 0
        if self._modules:
            self._hook = optimizer.register_step_pre_hook(self._look)

    @torch.no_grad()
    def _look(self, *_: Any) -> None:
        """Notes the experts of which rows of B, held here, have a gradient; of A if B is shared."""
        for name, module in self._modules.items():
            if (factor := module.of_each).grad is None:
                continue
            rows = (local_part(factor.grad) != 0).any(1)
            at = torch.arange(len(rows), device=rows.device) + local_rows(factor).start
            expert = at // (factor.size(0) // module.experts)
            if name not in self._trained:
                self._trained[name] = rows.new_zeros(module.experts, dtype=torch.int32)
            self._trained[name].scatter_reduce_(0, expert, rows.int(), "amax")
        self._updates += 1

    def after(self, batches: Sequence[Batch]) -> None:
        """Raises UserError on every rank if an adapter has had no gradient in the first updates and
        its expert has one in these micro-batches, the last step's."""
        if not self._modules or self._updates < UPDATES:
            return
        self._hook.remove()
        modules, self._modules = self._modules, {}
        untrained: Found = set()
        for name, module in modules.items():
            had = self._trained[name].tolist() if name in self._trained else [0] * module.experts
            untrained |= {(name, expert) for expert, any_ in enumerate(had) if not any_}
        untrained = set.intersection(*self._world.gather(untrained))
        if not untrained:
            return
        wanted: Found = set().union(*self._world.gather(self._wanted(modules, batches)))
        if wrong := sorted(untrained & wanted):
            name, expert = wrong[0]
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise UserError(
                f"adapter of {name}, expert {expert}{more}: no gradient in the first {UPDATES} "
                "updates, though the output of the expert has one; the run is stopped: expected "
                "every used adapter to be trained (adapter.targets without it leaves it out)"
            )

    def _wanted(self, modules: dict[str, LowRankExpertLinear], batches: Sequence[Batch]) -> Found:
        """The adapters whose expert's output has a gradient in these micro-batches."""
        found: Found = set()
        random = random_state(self._world.device)
        try:
            with torch.compiler.set_stance("force_eager"), _hooks(modules, found):
                for batch in batches:
                    b = batch.to(self._world.device)
                    args = {"labels": b.labels, "cu_seqlens": b.documents}
                    self._model(b.tokens, b.positions, **args).backward()
        finally:
            self._optimizer.zero_grad()
            set_random_state(random, self._world.device)
        return found


@contextmanager
def _hooks(modules: dict[str, LowRankExpertLinear], found: Found) -> Iterator[None]:
    """Within it, backward adds to `found`."""
    held = {  # the expert of this rank's first row; within a pass parameters are gathered
        name: local_rows(module.of_each).start // (module.of_each.size(0) // module.experts)
        for name, module in modules.items()
    }

    def note(name: str, ends: Tensor, grad: Tensor) -> None:
        rows = (grad != 0).any(1).nonzero().flatten().to(ends.dtype)
        experts = torch.searchsorted(ends, rows, right=True).unique()
        # With expert parallelism `ends` has the experts of this rank's part only.
        first = held[name] // ends.numel() * ends.numel()
        found.update((name, first + expert) for expert in experts.tolist())

    def leave(name: str, _: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        if y.requires_grad:
            y.register_hook(partial(note, name, args[1]))

    with ExitStack() as undo:
        for name, module in modules.items():
            # Within FSDP2's own hooks.
            hook = module.register_forward_hook(partial(leave, name), prepend=True)
            undo.callback(hook.remove)
        yield
