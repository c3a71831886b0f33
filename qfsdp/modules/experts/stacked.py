"""The experts of a mixture, as two stacked linears.

All experts of a layer are one weight: rows of one expert after those of another. So what works for
the rows of a linear (quantizing, sharding, offload, checkpoints) works for experts. Tokens are
sorted by expert once per layer, and each expert multiplies its slice of them:

    tokens [n, hidden] -> every token once per expert that it chose, sorted [n * top_k, hidden]
                       -> gate and up [n * top_k, 2 * inner] -> activation(gate) * up
                       -> down [n * top_k, hidden] -> added up per token [n, hidden]

The router's weights multiply the input of `down`, not its output: it is linear, and its input is
the smaller one (768 numbers, not 2,048, in Qwen3-30B-A3B).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qfsdp.modules.decoder_parts import ExpertsConfig
from qfsdp.modules.experts.product import CHUNK_BYTES, expert_linear
from qfsdp.modules.mlp import ACTIVATIONS


class ClampedGate(torch.autograd.Function):
    """gpt-oss's `(up + 1) * gate * sigmoid(gain * gate)`, with gate at most `limit` and up between
    `-limit` and `limit`: `[..., inner]`.

    The gradient is written out, so that gate and up are all that is kept: autograd would keep six
    tensors of their size.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float, gain: float) -> Tensor:
        ctx.limit, ctx.gain = limit, gain
        ctx.save_for_backward(gate, up)
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(gain * gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gate, up), limit, gain = ctx.saved_tensors, ctx.limit, ctx.gain
        clamped = gate.clamp(max=limit)
        share = torch.sigmoid(gain * clamped)
        of_gate = grad * (up.clamp(-limit, limit) + 1)
        of_gate = of_gate * share * (1 + gain * clamped * (1 - share)) * (gate <= limit)
        return of_gate, grad * clamped * share * (up.abs() <= limit), None, None


class Dispatch(NamedTuple):
    """The order in which the choices of all tokens are computed: sorted by expert.

    Fields:
        order: int64 `[n * top_k]`; place in the sorted order -> choice (token * top_k + which).
        places: int64 `[n, top_k]`, the inverse: choice -> place in the sorted order.
        ends: int32 `[experts]`, where each expert's slice ends. On the device: the host never waits
            for it.
    """

    order: Tensor
    places: Tensor
    ends: Tensor


def dispatch(chosen: Tensor, experts: int) -> Dispatch:
    """Sorts the choices of tokens by expert. Choices of one expert keep their order.

    Args:
        chosen: int64 `[n, top_k]`, experts of each token.
        experts: their number.
    """
    sorted_experts, order = chosen.flatten().sort(stable=True)
    places = torch.empty_like(order)
    places.scatter_(0, order, torch.arange(order.numel(), device=order.device))
    bounds = torch.arange(experts, device=order.device)
    ends = torch.searchsorted(sorted_experts, bounds, right=True, out_int32=True)
    return Dispatch(order, places.view_as(chosen), ends)


class _Spread(torch.autograd.Function):
    """Tokens -> choices in sorted order. Both directions only read by index: no atomic additions,
    so results do not depend on the order of threads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order, places)
        return x[order // places.size(1)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        _, places = ctx.saved_tensors
        return grad[places].sum(1), None, None


class _Combine(torch.autograd.Function):
    """Choices in sorted order -> their sum per token: the adjoint of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order, places)
        return y[places].sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        order, places = ctx.saved_tensors
        return grad[order // places.size(1)], None, None


def spread(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Tokens `[n, hidden]` -> their choices in sorted order, `[n * top_k, hidden]`."""
    return _Spread.apply(x, order, places)


def combine(y: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Choices in sorted order -> their sum per token, `[n, hidden]`."""
    return _Combine.apply(y, order, places)


class ExpertLinear(nn.Module):
    """`y = x @ W[e].T + bias[e]`, where e is the expert of a row of x.

    Fields:
        experts: their number.
        weight: `[experts * out, in]`; frozen, quantized or plain, or plain and trained.
        bias: `[experts * out]` or None.
        chunk_bytes: of dequantized experts at a time.
    """

    def __init__(self, experts: int, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.experts, self.chunk_bytes = experts, CHUNK_BYTES
        self.weight = nn.Parameter(torch.empty(experts * out_features, in_features))
        self.bias = nn.Parameter(torch.empty(experts * out_features)) if bias else None

    def forward(self, x: Tensor, ends: Tensor, factors: Tensor | None = None) -> Tensor:
        """Multiplies rows that are sorted by expert.

        Args:
            x: `[rows, in]`.
            ends: int32 `[experts]`, where each expert's rows end.
            factors: `[rows]`, of the bias; None: ones. The caller has multiplied x by them.

        Returns:
            `[rows, out]`.
        """
        y = expert_linear(x, self.weight, ends, self.chunk_bytes)
        return y if self.bias is None else y + bias_of_rows(self.bias, x, ends, factors)


def bias_of_rows(bias: Tensor, x: Tensor, ends: Tensor, factors: Tensor | None = None) -> Tensor:
    """The bias `[experts * out]` of each row's expert, `[rows, out]`, times its factor."""
    rows = torch.arange(x.size(0), device=x.device, dtype=ends.dtype)
    of_rows = bias.view(ends.numel(), -1)[torch.searchsorted(ends, rows, right=True)]
    return of_rows if factors is None else of_rows * factors.unsqueeze(1)


def weighted_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: int,
    inner: Callable[[Tensor, Tensor], Tensor],
    activated: Callable[[Tensor], Tensor],
    outer: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """The weighted sum of the outputs of each token's experts.

    Args:
        x: `[n, hidden]`.
        chosen: int64 `[n, top_k]`, experts of each token.
        weights: `[n, top_k]`.
        experts: their number.
        inner, outer: the stacked linears, as `ExpertLinear.forward`.
        activated: what is computed between them.

    Returns:
        `[n, hidden]` of x's dtype.
    """
    order, places, ends = dispatch(chosen, experts)
    factors = weights.flatten()[order]
    rows = spread(x, order, places)
    y = activated(inner(rows, ends)) * factors.unsqueeze(1)
    return combine(outer(y.to(x.dtype), ends, factors), order, places)


class Experts(nn.Module):
    """Gated feed-forwards (see `MLP`) of which every token uses some.

    Fields:
        gate_up_proj: rows of an expert: gate, then up, or alternating.
        down_proj: back to the hidden size.
        count: number of experts that this rank computes; all, unless tokens travel
            (`qfsdp.distributed.expert_parallel`).
    """

    def __init__(self, hidden: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config, inner = config, config.intermediate_size
        self.count = config.count
        self.gate_up_proj = ExpertLinear(config.count, hidden, 2 * inner, config.bias)
        self.down_proj = ExpertLinear(config.count, inner, hidden, config.bias)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """`weighted_experts` of these."""
        linears = self.gate_up_proj, self.activated, self.down_proj
        return weighted_experts(x, chosen, weights, self.count, *linears)

    def activated(self, gate_up: Tensor) -> Tensor:
        """`[rows, 2 * inner]` -> `[rows, inner]`."""
        if self.config.interleaved:
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        else:
            gate, up = gate_up.chunk(2, dim=-1)
        if self.config.clamp is not None:
            return cast(Tensor, ClampedGate.apply(gate, up, *self.config.clamp))
        return ACTIVATIONS[self.config.activation](gate) * up
