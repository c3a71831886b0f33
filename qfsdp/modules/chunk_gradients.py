"""Gradients of the loss for output layers whose weight is not plain: quantized, or any other.

`qfsdp.modules.loss.chunk_functions` chooses among them, for a chunk of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from qfsdp.tensor_subclasses.frozen_weight import row_chunks

LossesAndGradient = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""As `qfsdp.modules.loss._losses_and_gradient_`."""


def of_any(
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


def of_quantized(
    weight: Tensor,
    loss: LossesAndGradient,
    hidden: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    grads: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """`of_any` for a quantized weight, dequantized some rows at a time: whole, that of a
    vocabulary of 201,088 took 1.1 GiB. It is frozen, so `grads` is empty."""
    losses, grad_logits = loss(quantized_logits(weight, hidden), labels, weights)
    of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
    for part, rows in row_chunks(weight):
        of_hidden += grad_logits[:, part] @ rows
    return losses, of_hidden.to(hidden.dtype)


def quantized_logits(weight: Tensor, hidden: Tensor) -> Tensor:
    """`hidden @ weight.T` of a quantized weight, dequantized some rows at a time."""
    logits = hidden.new_empty(hidden.size(0), weight.size(0))
    for part, rows in row_chunks(weight):
        logits[:, part] = hidden @ rows.t()
    return logits
