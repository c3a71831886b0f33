"""What the loss asks of an output layer, for a chunk of tokens: logits, and gradients of the loss.

Each kind has its function: a plain weight, frozen or trained; a quantized one; any other, such as
an adapted one, through autograd. An output layer may have all rows of the vocabulary, or some
(`qfsdp.distributed.split_vocabulary`): the function that gives losses of logits knows which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfsdp.modules.adapters.row_norms import row_chunks
from qfsdp.modules.quantized_linear import QuantizedLinear

LossesAndGradient = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""As `qfsdp.modules.loss._losses_and_gradient_`."""

# Weights of the output layer whose gradient is added at a time: 32 MB in bf16.
GRADIENT_CHUNK_WEIGHTS = 1 << 24


def chunk_functions(
    head: nn.Module,
    trained: Sequence[Tensor],
    loss: LossesAndGradient,
    dtype: torch.dtype | None = None,
) -> tuple[Callable[[Tensor], Tensor], Callable[..., tuple[Tensor, Tensor]]]:
    """The logits of a chunk `[n, hidden]`; and, as `_of_any`, its losses and gradients.

    Args:
        head: with all rows of the vocabulary, or with some, which `loss` must know.
        dtype: in which a plain weight is computed; None: its own.
    """
    weight = cast(Tensor, head.weight)
    if isinstance(head, nn.Linear):
        weight = weight.detach().to(dtype or weight.dtype)
        return partial(F.linear, weight=weight), partial(_of_plain, weight, loss)
    if isinstance(head, QuantizedLinear) and head.bias is None:
        return partial(_logits, weight), partial(_of_quantized, weight, loss)
    return head.forward, partial(_of_any, head, trained, loss)


def _of_any(
    head: nn.Module,
    trained: Sequence[Tensor],
    loss: LossesAndGradient,
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    grads: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """The losses of a chunk and its hidden state's gradient; adds those of `trained` to `grads`."""
    chunk = hidden.detach().requires_grad_()
    with torch.enable_grad():
        logits = head.forward(chunk)
    # DoRA keeps its output for backward. No other output layer does: it may be overwritten.
    numbers = logits.detach().clone() if trained else logits.detach()
    losses, grad_logits = loss(numbers, labels, weights)
    of_chunk, *of_params = torch.autograd.grad(logits, [chunk, *trained], grad_logits)
    for grad, of_param in zip(grads, of_params, strict=True):
        grad += of_param
    return losses, of_chunk


def _of_plain(
    weight: Tensor,
    loss: LossesAndGradient,
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    grads: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """`_of_any` for a plain weight, without another tensor of its size; `grads`: [] if frozen."""
    rows = max(1, GRADIENT_CHUNK_WEIGHTS // hidden.size(1))
    losses, grad_logits = loss(F.linear(hidden, weight), labels, weights)
    for grad in grads:
        for into, columns in zip(grad.split(rows), grad_logits.split(rows, dim=1), strict=True):
            into += columns.t() @ hidden
    return losses, grad_logits @ weight


def _of_quantized(
    weight: Tensor,
    loss: LossesAndGradient,
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    grads: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """`_of_any` for a quantized weight, dequantized some rows at a time: whole, that of a
    vocabulary of 201,088 took 1.1 GiB. It is frozen, so `grads` is empty."""
    losses, grad_logits = loss(_logits(weight, hidden), labels, weights)
    of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
    for part, rows in row_chunks(weight):
        of_hidden += grad_logits[:, part] @ rows
    return losses, of_hidden.to(hidden.dtype)


def _logits(weight: Tensor, hidden: Tensor) -> Tensor:
    """`hidden @ weight.T` of a quantized weight, dequantized some rows at a time."""
    logits = hidden.new_empty(hidden.size(0), weight.size(0))
    for part, rows in row_chunks(weight):
        logits[:, part] = hidden @ rows.t()
    return logits
