"""The losses of samples, each summed over its tokens, in one pass of the output layer.

Preference losses need the log-probability of every sample. Their gradient gives each sample a
weight, which is known only after the whole batch. The gradient of a position is linear in the
weight of its sample, so backward scales rows. Of a trained output layer it computes the logits
again: one gradient per sample and weight would be too large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def sums_of_samples(
    in_chunks: Callable[..., Any],
    trained: Sequence[Tensor],
    hidden: Tensor,
    labels: Tensor,
    chosen: Tensor,
    ids: Tensor,
    count: int,
) -> Tensor:
    """`head_loss` of every sample, fp32 `[count]`.

    Args:
        in_chunks, trained: as of `loss.summed_by_sample`.
        hidden: `[tokens, hidden]`. labels: int64 `[tokens]`.
        chosen: int64 `[targets]`, the positions with a target.
        ids: int64 `[tokens]`, the sample of each position.
    """
    return _SampleLosses.apply(hidden, labels, chosen, ids, count, in_chunks, *trained)


class _SampleLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        chosen: Tensor,
        ids: Tensor,
        count: int,
        in_chunks: Callable[..., Any],
        *trained: Tensor,
    ) -> Tensor:
        wanted, ctx.tokens = any(ctx.needs_input_grad), len(labels)
        hidden, labels, ids = hidden[chosen], labels[chosen], ids[chosen]
        ctx.in_chunks, ctx.trained, ctx.again = in_chunks, trained, wanted and bool(trained)
        losses, grad_hidden, _ = in_chunks((), hidden, labels, wanted and not ctx.again)
        kept = [hidden, labels] if ctx.again else [grad_hidden]
        ctx.save_for_backward(*([chosen, ids, *kept] if wanted else []))
        return _sums(losses, ids, count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        chosen, ids, *kept = ctx.saved_tensors
        spread = kept[0].new_zeros(ctx.tokens, kept[0].size(1))
        of_head: list[Tensor] = []
        if ctx.again:
            _, of_hidden, grads = ctx.in_chunks(ctx.trained, *kept, True, grad[ids])
            both = zip(grads, ctx.trained, strict=True)
            of_head = [of_param.to(param.dtype) for of_param, param in both]
        else:
            weight = grad[ids].unsqueeze(1)
            of_hidden = torch.mul(kept[0], weight, out=torch.empty_like(kept[0]))
        return spread.index_copy_(0, chosen, of_hidden), *(None,) * 5, *of_head


def _sums(losses: list[Tensor], ids: Tensor, count: int) -> Tensor:
    """The sums of the samples, fp32 `[count]`. `index_add_` adds in any order on a GPU."""
    sums, at = ids.new_zeros(count, dtype=torch.float64), 0
    if losses and count >= len(ids):  # a sample for each token: a table would be count * count
        return sums.index_add_(0, ids, torch.cat(losses).double()).float()
    numbers = torch.arange(count, device=ids.device).unsqueeze(1)
    for part in losses:
        mine = ids[at : at + len(part)] == numbers
        sums += torch.where(mine, part.double(), 0.0).sum(1)
        at += len(part)
    return sums.float()
