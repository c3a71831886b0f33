"""Rotary position embedding (arXiv:2104.09864) and its stretching for long contexts.

A pair of numbers of a head is turned by `position * frequency`, and each pair has its frequency. A
scaling changes the frequencies, so that a model reads positions that it was not trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from qfsdp.modules.rope_scalings import QueryScaling


def powers(theta: float | Tensor, dim: int, device: torch.device) -> Tensor:
    """theta ** (0, 2/dim, 4/dim, ...): fp32 `[..., dim // 2]`."""
    powers: Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    return powers


@dataclass(frozen=True)
class Scaling:
    """The frequencies of the paper; those for long contexts are in `rope_scalings`.

    Attributes:
        magnitude: multiplies rotated queries and keys.
        by_length: frequencies depend on the length of a document.
    """

    magnitude = 1.0
    by_length: ClassVar[bool] = False

    def inverse(self, theta: float, dim: int, lengths: Tensor) -> Tensor:
        """Radians per position of each of `dim // 2` pairs: fp32 `[dim // 2]`, or `[batch or 1, seq
        or 1, 1, dim // 2]` if they depend on `lengths`, see `RopeConfig.tables`."""
        return 1.0 / powers(theta, dim, lengths.device)


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding of a layer.

    Fields:
        theta: its base.
        scaling: how frequencies are changed.
        share: the part of a head that is rotated, its first numbers; the others are left alone.
        interleaved: neighbours are pairs (GLM). False: the numbers i and i + half are.
        query_scaling: what else multiplies queries.
    """

    theta: float = 10000.0
    scaling: Scaling = Scaling()
    share: float = 1.0
    interleaved: bool = False
    query_scaling: QueryScaling | None = None

    def rotated(self, head_dim: int) -> int:
        """How many numbers of a head are rotated."""
        return int(head_dim * self.share)

    def tables(
        self, head_dim: int, positions: Tensor, lengths: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles, for `rotate`.

        Args:
            positions: int64 `[batch or 1, seq]`.
            lengths: int64 `[batch or 1, seq or 1]`, of the document that a token belongs to.

        Returns:
            Each `[batch or 1, seq, 1 or 2, rotated]` of `dtype`, computed in fp32: with 2, the
            first is for queries and the last for keys. The sine is negated where the rotation
            subtracts, at the first number of every pair.
        """
        inverse = self.scaling.inverse(self.theta, self.rotated(head_dim), lengths)
        angles = positions[:, :, None, None].float() * inverse
        cos, sin = angles.cos(), angles.sin()
        if self.scaling.magnitude != 1.0:
            cos, sin = cos * self.scaling.magnitude, sin * self.scaling.magnitude
        if self.query_scaling is not None:
            factors = self.query_scaling.factors(positions)[:, :, None, None]
            cos, sin = (torch.cat((table * factors, table), dim=2) for table in (cos, sin))
        cos, sin = cos.to(dtype), sin.to(dtype)
        if self.interleaved:
            return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class _Rotate(torch.autograd.Function):
    """Rotates every pair of numbers of `[batch, seq, heads, rotated]`: see `RopeConfig`.

    `sin` is negated at the first number of a pair, see `RopeConfig.tables`. The gradient, the
    rotation back, is written out. Autograd's gradient of an index adds values into zeros one by
    one. Compiled code for GPUs uses atomics for it: 1.3 G in a step of 8,192 tokens of Llama-3-8B.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return x * cos + _swapped(x, interleaved) * sin

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return grad * cos - _swapped(grad, ctx.interleaved) * sin, None, None, None


def _swapped(x: Tensor, interleaved: bool) -> Tensor:
    """`x` with the two numbers of every pair exchanged."""
    if interleaved or torch.compiler.is_compiling():
        # The compiler keeps the result of `cat` for backward, but computes an index again.
        order = 1 - torch.arange(2, device=x.device)
        if interleaved:
            return x.unflatten(-1, (-1, 2))[..., order].flatten(-2)
        return x.unflatten(-1, (2, -1))[..., order, :].flatten(-2)
    return torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first numbers of every head of `[batch, seq, heads, head_dim]`, as many as the
    tables have; the others are left alone."""
    rotated = cos.shape[-1]
    if rotated == x.shape[-1]:
        return _Rotate.apply(x, cos, sin, interleaved)
    turned = _Rotate.apply(x[..., :rotated], cos, sin, interleaved)
    return torch.cat((turned, x[..., rotated:]), dim=-1)


@contextmanager
def kept_unrotated(*rotated: tuple[Tensor, Tensor, Tensor, Tensor, bool]) -> Iterator[None]:
    """Within it autograd keeps, of results of `rotate`, what was rotated, and backward rotates
    again: the same bits, for two launches of a GPU. That saves memory where something else keeps
    the unrotated tensor. Hooks around this context do not see what is kept.

    Args:
        rotated: each result and the arguments that it was made of.
    """
    made = {turned.untyped_storage()._cdata: (x.detach(), *how) for turned, x, *how in rotated}

    def pack(kept: Tensor) -> Any:
        given = made.get(kept.untyped_storage()._cdata)
        if given is None:
            return kept.detach()  # a result that an operation keeps would keep itself alive
        return given, (kept.shape, kept.stride(), kept.storage_offset())

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else rotate(*kept[0]).as_strided(*kept[1])

    with saved_tensors_hooks(pack, unpack):
        yield
