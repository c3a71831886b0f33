"""A frozen linear with several low-rank adapters, each for its own tokens, as one operation.

    y[t] = ratio_i * (W x[t] + scaling_i * B_i A_i x[t])          i: the adapter of token t

W is dequantized once in forward and once in backward, and meets the tokens of all adapters in one
product. The tokens of an adapter stand together, so its two small products read a slice. Autograd
keeps x, the products A_i x_i and, for the ratios of DoRA, y; of the weight its bytes alone.

DoRA's ratio multiplies outputs here, in fp32, and not rows of W: other adapters need W as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qfsdp.modules.low_rank.product import column_dots, scaled_b, stand_in
from qfsdp.tensor_subclasses.frozen_weight import bytes_of, frozen_weight


class Pair(NamedTuple):
    """The low-rank factors of an adapter.

    Fields:
        a, b: fp32 `[rank, in]` and `[out, rank]`.
        scaling: the factor of their product.
        magnitude, norm: fp32 `[out]`, of DoRA; None with LoRA. The norm gets no gradient.
    """

    a: Tensor
    b: Tensor
    scaling: float
    magnitude: Tensor | None = None
    norm: Tensor | None = None

    @property
    def ratio(self) -> Tensor | None:
        """fp32 `[out]`, DoRA's factors of rows; None with LoRA."""
        if self.magnitude is None or self.norm is None:
            return None
        return self.magnitude / self.norm


def several_adapters(
    x: Tensor, weight: Tensor, pairs: Sequence[Pair | None], tokens: Sequence[int]
) -> Tensor:
    """The outputs of a frozen linear without its bias, with an adapter for each part of the tokens.

    Args:
        x: `[..., in]`, bf16 or fp32.
        weight: `[out, in]`, frozen, quantized or plain.
        pairs: of every adapter; None: it has none on this linear.
        tokens: how many tokens of x each adapter has, one part after the other.

    Returns:
        `[..., out]`, of x's dtype, with gradients for x and every a, b and magnitude; of an
        adapter without tokens they are zeros.
    """
    held, metadata, format, first = bytes_of(weight)
    which = (format, weight.size(1), first)
    trained = [part for pair in pairs if pair for part in (pair.a, pair.b, pair.magnitude)]
    given = (x, held, metadata, which, pairs, tokens)
    with torch.no_grad():
        mine = zip(pairs, x.flatten(0, -2).split(list(tokens)), strict=True)
        small = [(part @ pair.a.to(x.dtype).t(), pair.ratio) for pair, part in mine if pair]
    y = _SeveralAdapters.apply(*given, small, *trained)
    if _has_dora(small):
        return y
    return _Outputs.apply(y, x.detach(), *given[1:], small)


Small = Sequence[tuple[Tensor, Tensor | None]]
"""Of each adapter: its tokens times A, and DoRA's factors of rows."""


def _has_dora(small: Small) -> bool:
    return any(ratio is not None for _, ratio in small)


def _outputs(
    x: Tensor,
    weight: Tensor,
    metadata: Sequence[Tensor],
    which: tuple[str, int, int],
    pairs: Sequence[Pair | None],
    tokens: Sequence[int],
    small: Small,
) -> Tensor:
    y = x.flatten(0, -2) @ frozen_weight(weight, metadata, *which, x.dtype).t()
    of_pairs = iter(small)
    for pair, into in zip(pairs, y.split(list(tokens)), strict=True):
        if pair is None:
            continue
        z, ratio = next(of_pairs)
        into.addmm_(z, scaled_b(pair.b, None, pair.scaling, x.dtype).t())
        if ratio is not None:
            into.mul_(ratio)
    return y.view(*x.shape[:-1], -1)


class _Outputs(torch.autograd.Function):
    """The result of `_outputs`. Its gradient goes to the stand-in, `_`."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, *given: Any) -> Tensor:
        return _outputs(*given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, *[None] * 7


class _SeveralAdapters(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        metadata: Sequence[Tensor],
        which: tuple[str, int, int],  # format, cols, row_offset
        pairs: Sequence[Pair | None],
        tokens: Sequence[int],
        small: Small,
        *trained: Tensor | None,
    ) -> Tensor:
        y = None
        if _has_dora(small):
            y = _outputs(x, weight, metadata, which, pairs, tokens, small)
        kept = [tensor for both in small for tensor in both]
        ctx.which, ctx.tokens, ctx.count = which, list(tokens), len(metadata)
        ctx.scalings = [None if pair is None else pair.scaling for pair in pairs]
        ctx.save_for_backward(x, y, weight, *metadata, *trained, *kept)
        return stand_in(x, weight.size(0)) if y is None else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, outputs, weight, *saved = ctx.saved_tensors
        metadata, rest = saved[: ctx.count], saved[ctx.count :]
        there = sum(scaling is not None for scaling in ctx.scalings)
        trained, kept = iter(rest[: 3 * there]), iter(rest[3 * there :])
        dtype, sizes, flat = x.dtype, ctx.tokens, x.flatten(0, -2)
        scaled = grad.flatten(0, -2)
        if outputs is not None:  # rows of DoRA are multiplied by its ratio below
            before, outputs, scaled = scaled, outputs.flatten(0, -2), scaled.clone()
        of_trained: list[Tensor | None] = []
        through: list[tuple[slice, Tensor, Tensor]] = []
        end = 0
        for scaling, size in zip(ctx.scalings, sizes, strict=True):
            part, end = slice(end, end + size), end + size
            if scaling is None:
                continue
            a, b, magnitude, z, ratio = *(next(trained) for _ in range(3)), next(kept), next(kept)
            of_magnitude = None
            if ratio is not None:
                of_magnitude = column_dots(before[part], outputs[part]) / magnitude
                scaled[part].mul_(ratio)
            g = scaled[part]
            of_z = g @ scaled_b(b, None, scaling, dtype)
            of_trained += [(of_z.t() @ flat[part]).float(), (g.t() @ z).float().mul_(scaling)]
            of_trained.append(of_magnitude)
            through.append((part, of_z, a))
        of_x = None
        if ctx.needs_input_grad[0]:
            which: tuple[str, int, int] = ctx.which
            of_x = scaled @ frozen_weight(weight, metadata, *which, dtype)
            for part, of_z, a in through:
                of_x[part].addmm_(of_z, a.to(dtype))
            of_x = of_x.view_as(x)
        return of_x, None, None, None, None, None, None, *of_trained
