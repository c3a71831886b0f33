"""LoRA and DoRA on a frozen linear; linears with the same input run as one operation.

`qfsdp.modules.adapters.linears` says what LoRA and DoRA compute. DoRA needs the row norms of
W + scaling * B A. They are computed without the product B A:

    |w + s b A|^2 = |w|^2 + (2 s w A^T + s^2 b A A^T) . b

W is read in pieces, as the plain rows that forward multiplies by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from qfsdp.modules.low_rank import product
from qfsdp.modules.low_rank.adapted import AdaptedLinear
from qfsdp.modules.low_rank.copies import Copies, ready_copies
from qfsdp.tensor_subclasses.dtensor import on_mesh, whole_tensors
from qfsdp.tensor_subclasses.frozen_weight import held_rows, row_chunks
from qfsdp.tensor_subclasses.kernels.compiled import compiled

if TYPE_CHECKING:
    from qfsdp.modules.adapters.config import AdapterConfig


class LowRankLinear(AdaptedLinear):
    """A linear with a LoRA or DoRA adapter.

    Fields:
        lora_A: fp32 `[rank, in]`; lora_B: fp32 `[out, rank]`.
        magnitude: fp32 `[out]`, DoRA's trained row length; None with LoRA.
        weight_norm: fp32 `[out]`, frozen, the row norms of W + scaling * B A; None with LoRA.
        base_squares: fp32, the squared norms of this rank's rows of W; None until they are needed.
        changes_base: whether a part of the base moved into A and B at the start, whose values then
            are in `start`.
        copies, copied, stacked_a: see `qfsdp.modules.low_rank.copies`.
    """

    multiplies_together = True  # with others of the same input

    def __init__(self, base: Any, config: AdapterConfig, count: int = 1) -> None:
        super().__init__(base)
        out_features, in_features = base.weight.shape
        self.scaling = config.scaling
        self.dropout = config.dropout
        self.changes_base = config.changes_base
        self.lora_A = self._fp32(count * config.rank, in_features)
        self.lora_B = self._fp32(out_features, config.rank)
        dora = config.method == "dora"
        self.magnitude = self._fp32(out_features) if dora else None
        self.weight_norm = self._fp32(out_features).requires_grad_(False) if dora else None
        self.base_squares: Tensor | None = None
        self.copies: Copies | None = None
        self.copied: list[tuple[int, int]] = []
        self.stacked_a: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return low_rank_outputs(x, [self])[0]

    def is_like(self, other: LowRankLinear) -> bool:
        """Whether one operation can have both: their format, rank and method are the same."""
        return bool(
            self.multiplies_together
            and type(self.weight) is type(other.weight)
            and self.weight.dtype == other.weight.dtype
            and self.lora_B.size(1) == other.lora_B.size(1)
            and self.scaling == other.scaling
            and self.fp8 == other.fp8
            and (self.magnitude is None) == (other.magnitude is None)
            and self.is_reference == other.is_reference
        )

    def _adapter(self) -> tuple[Tensor, Tensor, float, Tensor | None]:
        """A, B, the factor of their product, and the factors of rows.

        A reference without adapters multiplies by the same tensors, with factor 0. Without this
        product it would round differently, and the first loss of DPO would not be ln 2.
        """
        norm = self.weight_norm
        ratio = None if self.magnitude is None or norm is None else self.magnitude / norm
        if not self.is_reference:
            return self.lora_A, self.lora_B, self.scaling, ratio
        if not self.start:
            ones = None if ratio is None else torch.ones_like(ratio)
            return self.lora_A, self.lora_B, 0.0, ones
        if ratio is not None:
            ratio = self.start["magnitude"] / self.start["weight_norm"]
        return self.start["lora_A"], self.start["lora_B"], self.scaling, ratio

    def _dropped(self, x: Tensor) -> Tensor | None:
        """The input of the product B A after dropout; None: x itself."""
        return F.dropout(x, self.dropout) if self.dropout and self.training else None

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """A and B, with every number as often as it is multiplied."""
        return self.lora_A, self.lora_B

    def held_b(self) -> Tensor:
        """The rows of B that belong to this rank's rows of W. Every rank must call it."""
        return on_mesh(self.lora_B) if isinstance(self.lora_B, DTensor) else self.lora_B.detach()

    def norms(self, weight: Tensor, a: Tensor, b: Tensor, base_squares: Tensor) -> Tensor:
        """Row norms of W + scaling * B A, of the rows that this rank holds in `weight` and `b`."""
        return adapted_norms(weight, a, b, self.scaling, base_squares)


# ---- linears with the same input -----------------------------------------------------------------


def outputs(x: Tensor, linears: Sequence[nn.Module]) -> list[Tensor]:
    """`[linear(x) for linear in linears]`; as one operation if their adapters are alike."""
    if 1 < len(linears) <= product.MOST_TOGETHER and _are_one(linears):
        return low_rank_outputs(x, linears)
    return [linear(x) for linear in linears]


def _are_one(linears: Sequence[Any]) -> bool:
    """Whether the linears may be one operation. FSDP2's hooks on a linear and those of a second
    look must run, and dropout gives every linear an input of its own."""
    for linear in linears:
        if not isinstance(linear, LowRankLinear) or not linear.is_like(linears[0]):
            return False
        if isinstance(linear, FSDPModule) or (linear.dropout and linear.training):
            return False
        hooks = linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear)
        if hooks and not torch.compiler.is_compiling():
            return False
    return True


def low_rank_outputs(x: Tensor, linears: Sequence[Any]) -> list[Tensor]:
    """The outputs of `LowRankLinear`s that are alike."""
    given = [linear._adapter() for linear in linears]
    a, b, (scaling, *_), ratios = zip(*given, strict=True)
    ready = None if linears[0].copies is None else ready_copies(linears, x.dtype)
    trained = [m.magnitude for m in linears if m.magnitude is not None and not m.is_reference]
    made = product.adapted_linears(
        x,
        [linear.weight for linear in linears],
        a,
        b,
        scaling,
        () if ratios[0] is None else ratios,
        trained,
        linears[0]._dropped(x),
        ready,
        linears[0].fp8,
    )
    for at, linear in enumerate(linears):
        if linear.bias is not None:  # DoRA must not scale the bias
            made[at] = made[at] + linear.bias
    return made


# ---- the linears of a model, and DoRA's norms ----------------------------------------------------


def low_rank_linears(model: nn.Module) -> Iterator[tuple[str, LowRankLinear]]:
    """(name, module) of every linear with LoRA or DoRA, in model order."""
    for name, module in model.named_modules():
        if isinstance(module, LowRankLinear):
            yield name, module


def dora_linears(model: nn.Module) -> list[LowRankLinear]:
    """Every linear with DoRA's norms, in model order."""
    return [module for _, module in low_rank_linears(model) if module.weight_norm is not None]


@torch.no_grad()
def refresh_dora_norms(model: nn.Module, b_is_zero: bool = False) -> None:
    """Recomputes `weight_norm` of every DoRA linear; call it after each optimizer step.

    Each rank computes its own rows. Every rank must call it, as A is gathered. With `b_is_zero`
    (everywhere) the norms are those of W, which is then dequantized once instead of twice.
    """
    modules = dora_linears(model)
    factors: Iterable[Tensor] = (module.lora_A.detach() for module in modules)
    if any(isinstance(module.lora_A, DTensor) for module in modules):
        factors = whole_tensors([module.lora_A for module in modules])
    for module, a in zip(modules, factors, strict=True):
        held = module.weight_norm
        assert held is not None
        b = module.held_b()
        weight = held_rows(module.weight, held, b.device)
        if (squares := module.base_squares) is None:
            squares = module.base_squares = squared_norms(weight)
        norms = roots(squares) if b_is_zero else module.norms(weight, a, b, squares)
        (held.to_local() if isinstance(held, DTensor) else held).copy_(norms)


def squared_norms(weight: Tensor) -> Tensor:
    """fp32 `[rows]`, the squared norm of each row."""
    squares = torch.empty(weight.size(0), dtype=torch.float32, device=weight.device)
    for part, rows in row_chunks(weight):
        torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32, out=squares[part])
    return squares.square_()


def adapted_norms(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, base_squares: Tensor
) -> Tensor:
    """fp32 `[rows]`, the row norms of W + scaling * B A."""
    mixed = torch.empty_like(b, dtype=weight.dtype)  # W A^T, `[rows, rank]`
    a = a.to(mixed.dtype)
    for part, rows in row_chunks(weight):
        torch.mm(rows, a.t(), out=mixed[part])
    return _norms(mixed, a, b * scaling, base_squares)


@compiled
def _norms(mixed: Tensor, a: Tensor, b: Tensor, base_squares: Tensor) -> Tensor:
    """Row norms, without the product B A. `mixed` is w A^T of rows w, `base_squares` their squared
    norms; b is scaled."""
    gram = a.float() @ a.t().float()
    return roots(base_squares + ((2 * mixed.float() + b @ gram) * b).sum(1))


def roots(squares: Tensor) -> Tensor:
    """Row norms, fp32 `[rows]`, from their squares."""
    # In a row of zeros (an unused vocabulary entry) magnitude and norm are equal: their ratio is 1.
    return squares.clamp(min=0.0).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
