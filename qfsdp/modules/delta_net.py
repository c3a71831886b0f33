"""Gated DeltaNet (arXiv:2412.06464): what recurrent layers have in place of attention.

A short convolution mixes neighbours of queries, keys and values. The gated delta rule reads and
writes a state along the row. In generation, a row keeps its state and the last inputs of the
convolution (`LayerCache`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qfsdp.data.cut_rows import CutRows
from qfsdp.data.preferences.shared_prompts import SharedDocuments
from qfsdp.modules.attention.document_lengths import Documents, document_numbers
from qfsdp.modules.attention.kv_cache import LayerCache
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.delta_kernel import delta_kernel, in_one_row
from qfsdp.modules.gated_delta_rule import CHUNK, gated_delta_rule, next_state
from qfsdp.modules.kept_fp32 import KeepsFp32
from qfsdp.modules.low_rank.linear import outputs
from qfsdp.modules.shared_rows import SharedRows, with_tokens_before
from qfsdp.modules.short_convolution import short_convolution


class DeltaNet(KeepsFp32):
    """`[batch, seq, hidden]` -> the same, as `Attention` is called.

    `in_proj_a` and `in_proj_b` (or both in one) make a decay and a step for each head: they are few
    rows, not quantized, and adapted only if they are named.

    Fields:
        inner: names of the linears that make queries, keys, values and gates.
        A_log, dt_bias: fp32 `[value heads]`, of the decay.
        group: as of `Attention`.
        window: None, as of `Attention`.
    """

    window = None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        part, hidden = config.recurrent, config.hidden_size
        assert part is not None
        self.part, self.group = part, ""
        width, gates = sum(part.widths), part.widths[2]
        sizes = {"in_proj_qkv": width, "in_proj_z": gates}
        steps = {"in_proj_b": part.value_heads, "in_proj_a": part.value_heads}
        if part.fused:
            sizes, steps = {"in_proj_qkvz": width + gates}, {"in_proj_ba": 2 * part.value_heads}
        self.inner, self.steps = tuple(sizes), tuple(steps)
        for name, size in (sizes | steps).items():
            setattr(self, name, nn.Linear(hidden, size, bias=False))
        self.conv1d = nn.Conv1d(width, width, part.taps, groups=width, bias=False)
        self.A_log = nn.Parameter(torch.zeros(part.value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.ones(part.value_heads, dtype=torch.float32))
        self.norm = GatedRMSNorm(part.value_dim, config.norm.eps)
        self.out_proj = nn.Linear(gates, hidden, bias=False)

    @property
    def outer(self) -> nn.Module:
        """The last linear, as of `Attention`."""
        return self.out_proj

    @property
    def products(self) -> int:
        """Multiplications of a token in the gated delta rule, by chunks."""
        part, size = self.part, self.part.key_dim + self.part.value_dim
        within = 2 * part.key_heads * part.key_dim + part.value_heads * (size + part.value_dim)
        return CHUNK * within + 3 * part.value_heads * part.key_dim * part.value_dim

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        mask: Tensor | None,
        cu_seqlens: Documents,
        cache: LayerCache | None = None,
    ) -> Tensor:
        mixed, gate, b, a = self._projections(x)
        decay = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        if cache is None:
            y = self._rows(mixed, decay, b.sigmoid(), cu_seqlens)
        elif cache.slots is None:
            y = self._prompts(mixed, decay, b.sigmoid(), cache)
        else:
            y = self._next(mixed, decay, b.sigmoid(), cache)
        return cast(Tensor, self.out_proj(self.norm(y, gate.view_as(y)).flatten(2)))

    def _projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values in one, and gates, `[batch, seq, width]`; two numbers of each
        value head."""
        made, part = outputs(x, [getattr(self, name) for name in self.inner]), self.part
        steps = [getattr(self, name)(x) for name in self.steps]
        if not part.fused:
            return made[0], made[1], steps[0], steps[1]
        wide = part.widths[2] // part.key_heads
        sizes = [part.key_dim, part.key_dim, wide, wide]
        of_heads = made[0].unflatten(2, (part.key_heads, -1)).split(sizes, -1)
        *mixed, gate = (one.flatten(2) for one in of_heads)
        b, a = steps[0].unflatten(2, (part.key_heads, -1)).chunk(2, -1)
        return torch.cat(mixed, -1), gate, b.flatten(2), a.flatten(2)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[batch, seq, heads, size]`."""
        part = self.part
        q, k, v = mixed.split(part.widths, -1)
        q, k = (one.unflatten(2, (part.key_heads, part.key_dim)) for one in (q, k))
        return q, k, v.unflatten(2, (part.value_heads, part.value_dim))

    def _rows(self, mixed: Tensor, decay: Tensor, step: Tensor, documents: Documents) -> Tensor:
        shared, own = None, mixed.shape[1]
        numbers = document_numbers(documents, *mixed.shape[:2])
        if isinstance(documents, CutRows):
            shared = SharedRows(documents, self.group)
            mixed, numbers = with_tokens_before(mixed, self.part.taps - 1, shared)
        mixed = F.silu(short_convolution(mixed, self.conv1d.weight.squeeze(1), None, numbers))
        numbers = None if shared else numbers
        parts = self._heads(mixed[:, -own:])
        kernel = None if shared else delta_kernel(mixed)
        if kernel is not None:
            assert not isinstance(documents, SharedDocuments | CutRows)
            given = [*parts, decay, step]
            return in_one_row(kernel, given, documents, use_qk_l2norm_in_kernel=True)[0]
        return gated_delta_rule(*parts, decay, step, numbers, shared=shared)[0]

    def _prompts(self, mixed: Tensor, decay: Tensor, step: Tensor, cache: LayerCache) -> Tensor:
        """Padding leaves the state as it is: it neither decays nor writes."""
        assert cache.lengths is not None
        lengths, device = cache.lengths.unsqueeze(1), mixed.device
        padding = (torch.arange(mixed.shape[1], device=device) >= lengths).unsqueeze(2)
        last = lengths + torch.arange(1 - self.part.taps, 0, device=device)
        kept = mixed.gather(1, last.clamp(min=0).unsqueeze(2).expand(-1, -1, mixed.shape[2]))
        cache.keys.copy_(kept.masked_fill((last < 0).unsqueeze(2), 0))
        mixed = F.silu(short_convolution(mixed, self.conv1d.weight.squeeze(1)))
        parts = self._heads(mixed)
        decay, step = decay.masked_fill(padding, 0), step.masked_fill(padding, 0)
        y, state = gated_delta_rule(*parts, decay, step)
        cache.values.copy_(state)
        return y

    def _next(self, mixed: Tensor, decay: Tensor, step: Tensor, cache: LayerCache) -> Tensor:
        """One token of every row."""
        seen = torch.cat((cache.keys, mixed), 1)
        cache.keys.copy_(seen[:, 1:])
        found = (seen.float() * self.conv1d.weight.squeeze(1).t().float()).sum(1, keepdim=True)
        q, k, v = (part.squeeze(1) for part in self._heads(F.silu(found.to(mixed.dtype))))
        y, state = next_state(q, k, v, decay.squeeze(1), step.squeeze(1), cache.values)
        cache.values.copy_(state)
        return y.unsqueeze(1)


class GatedRMSNorm(nn.Module):
    """`weight * normalised * silu(gate)`; its weight is not stored less 1."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """`[..., size]` of each."""
        y: Tensor = _GatedNorm.apply(x, gate, self.weight, self.eps)
        return y


class _GatedNorm(torch.autograd.Function):
    """Rounds as transformers does: before the weight, and at the end. Keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        normed = F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype)
        return (weight * normed * F.silu(gate.float())).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, gate, weight = ctx.saved_tensors
        wide, wide_gate, grad = x.float(), gate.float(), grad.float()
        length = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
        normed = wide * length
        share = wide_gate.sigmoid()
        of_product = grad * wide_gate * share
        of_gate = grad * weight * normed * share * (1 + wide_gate * (1 - share))
        of_weight = (of_product * normed).flatten(0, -2).sum(0)
        of_normed = of_product * weight
        of_x = length * (of_normed - normed * (of_normed * normed).mean(-1, keepdim=True))
        return of_x.to(x.dtype), of_gate.to(gate.dtype), of_weight.to(weight.dtype), None
