"""The training loss, without the logits of a whole micro-batch.

A vocabulary of 128k makes the logits the largest tensor of a step: 8,192 tokens take 4.2 GB in
fp32, and cross entropy keeps them and their gradient. Here the output layer and the loss run on
some hundred tokens at a time. The same pass computes the gradient of the hidden state: backward
needs nothing else if the output layer is frozen. If its weight is trained, the gradients of the
chunks are added up in fp32. Positions without a target (prompts, padding) are left out.
`sample_losses` has the sums of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfsdp.data.batch import ALL_POSITIONS, IGNORE_INDEX
from qfsdp.modules.chunk_gradients import (
    LossesAndGradient,
    of_any,
    of_quantized,
    quantized_logits,
)
from qfsdp.modules.quantized_linear import QuantizedLinear
from qfsdp.modules.sample_losses import sums_of_samples
from qfsdp.tensor_subclasses.kernels.compiled import compiled

# Logits of a chunk: 128 MB in bf16, 512 tokens of a vocabulary of 128,256.
CHUNK_LOGITS = 1 << 26
# The tokens of a chunk are a multiple of a GPU's tile. 523 tokens would fit above. They make five
# rows of tiles, so the gradient of the hidden state has 160 tiles of 128 x 128: two rounds on the
# 132 processors of an H200. 512 tokens make 128 tiles, one round.
TILE = 128

# Weights of the output layer whose gradient is added at a time: 32 MB in bf16.
GRADIENT_CHUNK_WEIGHTS = 1 << 24


def head_loss(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    sample_ids: Tensor | None = None,
    num_samples: int = 0,
    num_targets: int | None = None,
    taught: Any = None,
    rows: Any = None,
) -> Tensor:
    """The cross entropy of `head(hidden)`, fp32, summed over the target tokens; in chunks of
    `CHUNK_LOGITS` logits.

    A sum, because the mean is over the target tokens of the *global* step. No single micro-batch
    knows their number. Divided by it once, the update does not depend on how samples are split
    over ranks and micro-batches.

    Args:
        head: any output layer: plain (frozen or trained), quantized or adapted. Its `forward` is
            called without hooks: gather a sharded one first (`FSDPModule.unshard`).
        hidden: `[batch, seq, hidden]`.
        labels: int64 `[batch, seq]`.
        sample_ids: int64 `[batch, seq]`, the sample of each position; None: one sum of all.
        num_samples: ids are below it.
        num_targets: number of labels that count; None: the host waits for the device to know it.
            `ALL_POSITIONS`, without `sample_ids`: all positions are computed, and those without a
            label count nothing.
        taught: what a teacher says (`qfsdp.modules.distillation.Taught`): its loss takes the place
            of cross entropy. With neither `sample_ids` nor `ALL_POSITIONS`.
        rows: of the output layer that are trained alone, a `TrainedRows`; None: none.

    Returns:
        fp32 scalar, or fp32 `[num_samples]`, the sums of the samples (added up in fp64, in an order
        that depends on nothing else). With gradients for `hidden` and the trained parameters of
        `head`.
    """
    trained: list[Tensor] = [p for p in head.parameters() if p.requires_grad]
    trained += [] if rows is None else rows.trained
    in_chunks = partial(_in_chunks, head, taught=taught, rows=rows)
    if not torch.is_grad_enabled():
        trained = []
    return summed_by_sample(
        in_chunks, trained, hidden, labels, sample_ids, num_samples, num_targets
    )


def summed_by_sample(
    in_chunks: Callable[..., Any],
    trained: Sequence[Tensor],
    hidden: Tensor,
    labels: Tensor,
    sample_ids: Tensor | None = None,
    num_samples: int = 0,
    num_targets: int | None = None,
) -> Tensor:
    """`head_loss` with the output layer given as a function.

    Args:
        in_chunks: as `_in_chunks` of an output layer.
        trained: tensors of the output layer that get gradients.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    chosen = _targets(labels, num_targets)
    if sample_ids is None:
        return _HeadLoss.apply(hidden, labels, chosen, in_chunks, *trained)
    assert chosen is not None
    ids = sample_ids.flatten()
    return sums_of_samples(in_chunks, trained, hidden, labels, chosen, ids, num_samples)


class _HeadLoss(torch.autograd.Function):
    """Computes gradients in forward, while a chunk's logits exist; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        chosen: Tensor | None,
        in_chunks: Callable[..., Any],
        *trained: Tensor,
    ) -> Tensor:
        wanted, weights, ctx.tokens = any(ctx.needs_input_grad), None, len(labels)
        if chosen is None:
            weights, labels = (labels != IGNORE_INDEX).float(), labels.clamp(min=0)
        else:
            hidden, labels = hidden[chosen], labels[chosen]
        ctx.dtypes = [param.dtype for param in trained]
        held = trained if wanted else ()
        losses, grad_hidden, grads = in_chunks(held, hidden, labels, wanted, weights)
        ctx.save_for_backward(*([chosen, grad_hidden, *grads] if wanted else []))
        if weights is not None:
            return torch.cat(losses) @ weights
        return sum((part.sum() for part in losses), hidden.new_zeros((), dtype=torch.float32))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        chosen, grad_hidden, *grads = ctx.saved_tensors
        scaled = (
            torch.mul(of_param, grad, out=torch.empty_like(of_param, dtype=dtype))
            for of_param, dtype in zip(grads, ctx.dtypes, strict=True)
        )
        of_hidden = torch.mul(grad_hidden, grad, out=torch.empty_like(grad_hidden))
        if chosen is not None:
            # Autograd's gradient of `hidden[chosen]` would find the tokens again and sort them.
            spread = of_hidden.new_zeros(ctx.tokens, of_hidden.size(1))
            of_hidden = spread.index_copy_(0, chosen, of_hidden)
        return of_hidden, None, None, None, *scaled


def _targets(labels: Tensor, number: int | None) -> Tensor | None:
    """The positions with a target; None: all. If their number is not given, `nonzero` waits for the
    device."""
    if number == ALL_POSITIONS:
        return None
    counts = labels != IGNORE_INDEX
    found = counts.nonzero() if number is None else torch.nonzero_static(counts, size=number)
    return found.squeeze(1)


def _in_chunks(
    head: nn.Module,
    trained: Sequence[Tensor],
    hidden: Tensor,
    labels: Tensor,
    wanted: bool,
    weights: Tensor | None = None,
    taught: Any = None,
    rows: Any = None,
) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
    """Runs the output layer and the loss over `hidden` `[n, hidden]`, all of whose rows count.

    Args:
        trained: parameters of `head` that get gradients, then those of `rows`.
        wanted: whether to compute gradients.
        weights: fp32 `[n]`, factors of the gradients; None: ones.
        taught, rows: as of `head_loss`.

    Returns:
        fp32 losses of the tokens, by chunk; the gradient of `hidden` or None; the gradients of
        `trained`, fp32.
    """
    grad_hidden = torch.zeros_like(hidden) if wanted else None
    grads = [torch.zeros_like(param, dtype=torch.float32) for param in trained]
    step = chunk_tokens(cast(Tensor, head.weight).size(0))
    loss, targets = _losses_and_gradient_, labels
    if taught is not None:
        loss, targets, step = taught.of_chunks(loss, labels, step)
    logits, gradients = chunk_functions(head, trained, loss, hidden.dtype, rows)
    losses = []
    for start in range(0, len(hidden), step):
        part = slice(start, start + step)
        if grad_hidden is None:
            losses.append(loss(logits(hidden[part]), targets[part], None)[0])
            continue
        of_rows = None if weights is None else weights[part]
        of_chunk, grad_hidden[part] = gradients(hidden[part], targets[part], of_rows, grads)
        losses.append(of_chunk)
    return losses, grad_hidden, grads


def chunk_functions(
    head: nn.Module,
    trained: Sequence[Tensor],
    loss: LossesAndGradient,
    dtype: torch.dtype | None = None,
    rows: Any = None,
    first: int = 0,
) -> tuple[Callable[[Tensor], Tensor], Callable[..., tuple[Tensor, Tensor]]]:
    """The logits of a chunk `[n, hidden]`; and, as `of_any`, its losses and gradients.

    Args:
        head: with all rows of the vocabulary, or with some, which `loss` must know.
        dtype: in which a plain weight is computed; None: its own.
        rows: as of `head_loss`; their weight ends `trained`.
        first: the token of the head's first row.
    """
    weight = cast(Tensor, head.weight)
    if rows is not None:
        held = range(first, first + weight.size(0))
        make = partial(chunk_functions, head, dtype=dtype)
        return cast(Any, rows.in_chunks(make, loss, held, trained))
    if isinstance(head, nn.Linear):
        weight = weight.detach().to(dtype or weight.dtype)
        return partial(F.linear, weight=weight), partial(_of_plain, weight, loss)
    if isinstance(head, QuantizedLinear) and head.bias is None:
        return partial(quantized_logits, weight), partial(of_quantized, weight, loss)
    return head.forward, partial(of_any, head, trained, loss)


def _of_plain(
    weight: Tensor,
    loss: LossesAndGradient,
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    grads: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """`of_any` for a plain weight, without another tensor of its size; `grads`: [] if frozen."""
    rows = max(1, GRADIENT_CHUNK_WEIGHTS // hidden.size(1))
    losses, grad_logits = loss(F.linear(hidden, weight), labels, weights)
    for grad in grads:
        for into, columns in zip(grad.split(rows), grad_logits.split(rows, dim=1), strict=True):
            into += columns.t() @ hidden
    return losses, grad_logits @ weight


def chunk_tokens(vocabulary: int) -> int:
    """The number of tokens whose logits are computed at a time."""
    step = CHUNK_LOGITS // vocabulary or 1
    return step - (step % TILE if step > TILE else 0)


def _losses_and_gradient_(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cross entropy of each row of `[n, vocab]`, fp32 `[n]`, and the gradient of its sum, whose
    rows `weights` scale; it overwrites the logits."""
    labels = labels.unsqueeze(1)
    targets = logits.gather(1, labels).float()
    total = _softmax_(logits)
    rows = torch.arange(len(logits), device=logits.device).unsqueeze(1)
    # `scatter_` copied all logits: 59 ms per chunk, a quarter of the loss.
    logits.index_put_((rows, labels), torch.expm1(targets - total).to(logits.dtype))
    if weights is not None:
        logits *= weights.unsqueeze(1)
    return (total - targets).squeeze(1), logits


@compiled
def _softmax_(logits: Tensor) -> Tensor:
    """Softmax over each row of `[n, vocab]`, in place and in fp32; returns the logsumexp, fp32
    `[n, 1]`. Makes three passes over a row in cache: 1.6 G logits/s per core (AVX-512)."""
    numbers = logits.float()
    largest = numbers.amax(1, keepdim=True)
    total = (numbers - largest).exp().sum(1, keepdim=True).log() + largest
    logits.copy_((numbers - total).exp())
    return total
