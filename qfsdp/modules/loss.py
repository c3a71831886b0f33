"""The training loss, without the logits of a whole micro-batch.

A vocabulary of 128k makes the logits the largest tensor of a step: 8,192 tokens take 4.2 GB in
fp32, and cross entropy keeps them and their gradient. Here the output layer and the loss run on
some hundred tokens at a time. The same pass computes the gradient of the hidden state: backward
needs nothing else if the output layer is frozen. If its weight is trained, the gradients of the
chunks are added up in fp32. Positions without a target (prompts, padding) are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfsdp.data.loader import IGNORE_INDEX
from qfsdp.tensor_subclasses.kernels.compiled import compiled

# Logits of a chunk: 128 MB in bf16, 512 tokens of a vocabulary of 128,256.
CHUNK_LOGITS = 1 << 26
# The tokens of a chunk are a multiple of a GPU's tile. 523 tokens would fit above. They make five
# rows of tiles, so the gradient of the hidden state has 160 tiles of 128 x 128: two rounds on the
# 132 processors of an H200. 512 tokens make 128 tiles, one round.
TILE = 128
# Weights of the output layer whose gradient is added at a time: 32 MB in bf16.
GRADIENT_CHUNK_WEIGHTS = 1 << 24


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in fp32, summed over the target tokens.

    A sum, because the mean is over the target tokens of the *global* step. No single micro-batch
    knows their number. Divided by it once, the update does not depend on how samples are split
    over ranks and micro-batches.

    Args:
        logits: `[..., vocab]`, floating point.
        labels: int64 `[...]`, the target of each position; -100 for none.

    Returns:
        fp32 scalar; 0 where there is no target.
    """
    return F.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def head_loss(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """`summed_cross_entropy(head(hidden), labels)`, in chunks of `CHUNK_LOGITS` logits.

    Args:
        head: any output layer: plain (frozen or trained), quantized or adapted. Its `forward` is
            called without hooks: gather a sharded one first (`FSDPModule.unshard`).
        hidden: `[batch, seq, hidden]`.
        labels: int64 `[batch, seq]`.

    Returns:
        fp32 scalar, with gradients for `hidden` and the trained parameters of `head`.
    """
    trained = [p for p in head.parameters() if p.requires_grad and torch.is_grad_enabled()]
    return _HeadLoss.apply(hidden.flatten(0, -2), labels.flatten(), head, *trained)


class _HeadLoss(torch.autograd.Function):
    """Computes gradients in forward, while a chunk's logits exist; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, labels: Tensor, head: nn.Module, *given: Tensor
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0] or any(ctx.needs_input_grad[3:])
        # `nonzero` waits for the GPU to know the number of targets, once per micro-batch.
        chosen, ctx.tokens = (labels != IGNORE_INDEX).nonzero().squeeze(1), len(labels)
        hidden, labels = hidden[chosen], labels[chosen]
        trained = given if wanted else ()
        loss = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.zeros_like(hidden) if wanted else None
        grads = [torch.zeros_like(param, dtype=torch.float32) for param in trained]
        weight = cast(Tensor, head.weight)
        step = CHUNK_LOGITS // weight.size(0) or 1
        step -= step % TILE if step > TILE else 0
        logits, gradients = head.forward, partial(_of_any, head, trained)
        if isinstance(head, nn.Linear):
            weight = weight.detach()
            logits, gradients = partial(F.linear, weight=weight), partial(_of_plain, weight)
        for start in range(0, len(hidden), step):
            part = slice(start, start + step)
            if grad_hidden is None:
                loss += _loss_and_gradient_(logits(hidden[part]), labels[part])[0]
                continue
            of_chunk, grad_hidden[part] = gradients(hidden[part], labels[part], grads)
            loss += of_chunk
        ctx.dtypes = [param.dtype for param in trained]
        ctx.save_for_backward(*([] if grad_hidden is None else [chosen, grad_hidden, *grads]))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        chosen, grad_hidden, *grads = ctx.saved_tensors
        scaled = (
            torch.mul(of_param, grad, out=torch.empty_like(of_param, dtype=dtype))
            for of_param, dtype in zip(grads, ctx.dtypes, strict=True)
        )
        # Autograd's gradient of `hidden[chosen]` would find the chosen tokens again and sort them.
        spread = grad_hidden.new_zeros(ctx.tokens, grad_hidden.size(1))
        return spread.index_copy_(0, chosen, grad_hidden * grad), None, None, *scaled


def _of_any(
    head: nn.Module, trained: Sequence[Tensor], hidden: Tensor, labels: Tensor, grads: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The loss of a chunk and its hidden state's gradient; adds those of `trained` to `grads`."""
    chunk = hidden.detach().requires_grad_()
    with torch.enable_grad():
        logits = head.forward(chunk)
    # DoRA keeps its output for backward. No other output layer does: it may be overwritten.
    numbers = logits.detach().clone() if trained else logits.detach()
    loss, grad_logits = _loss_and_gradient_(numbers, labels)
    of_chunk, *of_params = torch.autograd.grad(logits, [chunk, *trained], grad_logits)
    for grad, of_param in zip(grads, of_params, strict=True):
        grad += of_param
    return loss, of_chunk


def _of_plain(
    weight: Tensor, hidden: Tensor, labels: Tensor, grads: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """`_of_any` for a plain weight, without another tensor of its size; `grads`: [] if frozen."""
    rows = max(1, GRADIENT_CHUNK_WEIGHTS // hidden.size(1))
    loss, grad_logits = _loss_and_gradient_(F.linear(hidden, weight), labels)
    for grad in grads:
        for into, columns in zip(grad.split(rows), grad_logits.split(rows, dim=1), strict=True):
            into += columns.t() @ hidden
    return loss, grad_logits @ weight


def _loss_and_gradient_(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross entropy of `[n, vocab]`, and its gradient, which overwrites the logits."""
    labels = labels.unsqueeze(1)
    targets = logits.gather(1, labels).float()
    total = _softmax_(logits)
    rows = torch.arange(len(logits), device=logits.device).unsqueeze(1)
    # `scatter_` copied all logits: 59 ms per chunk, a quarter of the loss.
    logits.index_put_((rows, labels), torch.expm1(targets - total).to(logits.dtype))
    return (total - targets).sum(), logits


@compiled
def _softmax_(logits: Tensor) -> Tensor:
    """Softmax over each row of `[n, vocab]`, in place and in fp32; returns the logsumexp, fp32
    `[n, 1]`. Makes three passes over a row in cache: 1.6 G logits/s per core (AVX-512)."""
    numbers = logits.float()
    largest = numbers.amax(1, keepdim=True)
    total = (numbers - largest).exp().sum(1, keepdim=True).log() + largest
    logits.copy_((numbers - total).exp())
    return total
