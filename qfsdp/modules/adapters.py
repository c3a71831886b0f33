"""LoRA and DoRA adapters on the linears of a decoder.

LoRA (https://arxiv.org/abs/2106.09685) adds a low-rank product to a frozen weight W:

    y = W x + (alpha / rank) * B A x        A [rank, in]   B [out, rank], B = 0 at the start

DoRA (https://arxiv.org/abs/2402.09353) splits the adapted weight into a direction and a
trained length per row, `magnitude`:

    y = magnitude / norm * (W x + (alpha / rank) * B A x)
    norm[i] = || row i of (W + (alpha / rank) * B A) ||

The paper (section 4.3) treats `norm` as a constant in backward. It then depends on W, A and
B only, which change once per optimizer step; so it is computed once per optimizer step, by
`refresh_dora_norms`, and not in every forward, micro-batch and recomputation. It needs the
rows of W and B that a rank holds anyway, and all of A; the result is a frozen parameter,
sharded and gathered with the layer's others. At the start magnitude equals norm, so the
adapted model is the base model.

Adapters are fp32 and are cast to the activations' dtype where they multiply them. The ratio
magnitude / norm is applied in fp32 and the product rounded once: rounded to bf16 first, any
change of a magnitude below 0.4 % would have no effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qfsdp.compiled import on_cpu
from qfsdp.errors import InvalidField
from qfsdp.modules.adapted_op import adapted_linear
from qfsdp.modules.packed_linear import PackedLinear
from qfsdp.modules.shards import local_part, local_rows, on_mesh, whole_tensors
from qfsdp.modules.targets import ALL_LINEAR, check_targets, replace_module, target_modules
from qfsdp.tensor_subclasses.packed import PackedTensor, frozen_weight

# Weights at a time in `refresh_dora_norms`: 8 MB in bf16 stay in a CPU's cache; a GPU takes 128 MB,
# as it would wait for the launches of smaller ones.
NORM_CHUNK_WEIGHTS, NORM_CHUNK_ON_GPU = 1 << 22, 1 << 26


@dataclass
class AdapterConfig:
    """Section `adapter`: what is trained.

    Fields:
        method: "dora" or "lora".
        rank: inner dimension of the low-rank product.
        alpha: the product is scaled by alpha / rank.
        dropout: probability, on the input of the low-rank product.
        targets: "all-linear" (every linear of every layer), or a list of names; `lm_head`
            can be named too.
        rslora: scale by alpha / sqrt(rank) instead (https://arxiv.org/abs/2312.03732): the
            product keeps its size at large ranks.
        start_from: a PEFT adapter folder whose tensors are the start; null: fresh adapters.
    """

    method: Literal["lora", "dora"] = "dora"
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str | list[str] = ALL_LINEAR
    rslora: bool = False
    start_from: str | None = None

    @property
    def scaling(self) -> float:
        """What the low-rank product is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def check(self) -> None:
        if self.rank < 1:
            raise InvalidField("rank", self.rank, "an integer of at least 1")
        if not self.alpha > 0:
            raise InvalidField("alpha", self.alpha, "a number above 0")
        if not 0.0 <= self.dropout < 1.0:
            raise InvalidField("dropout", self.dropout, "a probability of at least 0, below 1")
        check_targets("adapter.targets", self.targets)


class AdaptedLinear(nn.Module):
    """A frozen linear, packed or plain, with a LoRA or DoRA adapter.

    Fields:
        weight: `[out, in]`, frozen, packed or plain.
        bias: `[out]` or None, frozen.
        lora_A: fp32 `[rank, in]`; lora_B: fp32 `[out, rank]`.
        magnitude: fp32 `[out]`, DoRA's trained row length, or None.
        weight_norm: fp32 `[out]`, frozen, the row norms of W + scaling * B A, or None.
        base_squares: fp32, the squared norms of this rank's rows of W, once they were needed.
    """

    def __init__(self, base: nn.Linear | PackedLinear, config: AdapterConfig) -> None:
        super().__init__()
        out_features, in_features = base.weight.shape
        self.scaling = config.scaling
        self.dropout = config.dropout
        self.weight = base.weight.requires_grad_(False)
        self.bias = base.bias if base.bias is None else base.bias.requires_grad_(False)

        def fp32(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=base.weight.device))

        self.lora_A = fp32(config.rank, in_features)
        self.lora_B = fp32(out_features, config.rank)
        dora = config.method == "dora"
        self.magnitude = fp32(out_features) if dora else None
        self.weight_norm = fp32(out_features).requires_grad_(False) if dora else None
        self.base_squares: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(x, self.dropout) if self.dropout and self.training else None
        ratio = None
        if self.magnitude is not None and self.weight_norm is not None:
            ratio = self.magnitude / self.weight_norm
        y = adapted_linear(x, self.weight, self.lora_A, self.lora_B, self.scaling, ratio, dropped)
        return y if self.bias is None else y + self.bias  # DoRA must not scale the bias


def add_adapters(model: nn.Module, config: AdapterConfig) -> None:
    """Freezes `model` and puts an `AdaptedLinear` in place of every targeted linear.

    The new parameters are unset: call `init_adapters` once the base weights are loaded.
    """
    model.requires_grad_(False)
    for name, module in target_modules(model, config.targets, (nn.Linear, PackedLinear)):
        assert isinstance(module, nn.Linear | PackedLinear)
        replace_module(model, name, AdaptedLinear(module, config))


def adapted_linears(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """(name, module) of every adapted linear, in model order."""
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            yield name, module


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """Sets every adapter to its start: A uniform within 1 / sqrt(in) (what LoRA's authors
    and PEFT use), B zero, magnitudes the row norms of the loaded base.

    A's numbers depend on `seed` and the module's name alone, not on ranks or order.
    """
    for name, module in adapted_linears(model):
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        bound = module.lora_A.shape[1] ** -0.5
        a = torch.empty(module.lora_A.shape).uniform_(-bound, bound, generator=generator)
        local_part(module.lora_A).copy_(a[local_rows(module.lora_A)])
        local_part(module.lora_B).zero_()
    refresh_dora_norms(model)
    for _, module in adapted_linears(model):
        if module.magnitude is not None and module.weight_norm is not None:
            local_part(module.magnitude).copy_(local_part(module.weight_norm))


@torch.no_grad()
def refresh_dora_norms(model: nn.Module) -> None:
    """Recomputes `weight_norm` of every DoRA linear; call it after each optimizer step.

    On a sharded model each rank does its own rows; every rank must call it (A is gathered).
    """
    modules = [module for _, module in adapted_linears(model) if module.weight_norm is not None]
    for module, a in zip(modules, whole_tensors([m.lora_A for m in modules]), strict=True):
        assert module.weight_norm is not None
        b = on_mesh(module.lora_B)
        weight = _held_rows(module.weight, module.lora_B, b.device)
        if module.base_squares is None:
            module.base_squares = _squared_norms(weight)
        squares = _adapted_squares(weight, a, b, module.scaling, module.base_squares)
        # A row of zeros (an unused vocabulary entry): magnitude and norm are alike, their ratio 1.
        tiny = torch.finfo(torch.float32).tiny
        local_part(module.weight_norm).copy_(squares.sqrt_().clamp_(min=tiny))


def _held_rows(weight: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """On `device`, the rows of a frozen weight that this rank holds of `like`: not all that it
    has, where the base is whole on every rank and the adapters are spread."""
    if not isinstance(weight, DTensor):
        return weight.detach()[local_rows(like)]
    held = weight.to_local()
    if isinstance(held, PackedTensor):
        held = held.fetch()
    return held.to(device)


def _row_chunks(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """A frozen weight in pieces, as the plain rows that forward multiplies by; each piece is
    overwritten by the next."""
    chunk = NORM_CHUNK_WEIGHTS if on_cpu(weight) else NORM_CHUNK_ON_GPU
    step = max(1, chunk // weight.size(1))
    for start in range(0, weight.size(0), step):
        part = slice(start, min(start + step, weight.size(0)))
        rows = weight[part]
        if isinstance(rows, PackedTensor):
            which = (rows.format, rows.cols, rows.row_offset, rows.dtype)
            rows = frozen_weight(rows.packed, rows.extras, *which)
        yield part, rows


def _squared_norms(weight: Tensor) -> Tensor:
    """fp32 `[rows]`, the squared norm of each row."""
    squares = torch.empty(weight.size(0), dtype=torch.float32, device=weight.device)
    for part, rows in _row_chunks(weight):
        torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32, out=squares[part])
    return squares.square_()


def _adapted_squares(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, base_squares: Tensor
) -> Tensor:
    """fp32 `[rows]`, the squared row norms of W + scaling * B A, without B A:

    |w + s b A|^2 = |w|^2 + 2 s (w A^T) . b + s^2 b (A A^T) b^T
    """
    squares = torch.empty_like(base_squares)
    a = a.to(weight.dtype)
    gram = (a.float() @ a.t().float()) * scaling**2
    for part, rows in _row_chunks(weight):
        mixed = torch.addmm((rows @ a.t()).float(), b[part], gram, beta=2 * scaling)
        torch.add(base_squares[part], (mixed * b[part]).sum(1), out=squares[part])
    return squares.clamp_(min=0.0)
