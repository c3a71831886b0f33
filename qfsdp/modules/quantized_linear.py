"""Frozen linears with packed weights, and how a decoder gets them."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qfsdp.cli.errors import UserError
from qfsdp.modules.targets import ALL_LINEAR, check_targets, replace_module, target_modules
from qfsdp.tensor_subclasses import hqq, nf4, nf4_fp32_absmax  # noqa: F401  (registers formats)
from qfsdp.tensor_subclasses.kernels.cpu import product_dtype
from qfsdp.tensor_subclasses.kernels.custom_op import custom_op
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor, frozen_weight


@dataclass
class QuantizationConfig:
    """Section `quantization`: which weights of the frozen base are packed, and how.

    Fields:
        format: "nf4" (4.127 bits a weight), "nf4_fp32_absmax" (without double quantization, 4.5
            bits), "hqq" (affine, 4.5 bits), or "none". Weights that the model folder has packed
            already stay as they are.
        targets: "all-linear" (every linear of every layer), or a list of names; `lm_head`
            can be named too: `[all-linear, lm_head]`.
    """

    format: Literal["nf4", "nf4_fp32_absmax", "hqq", "none"] = "nf4"
    targets: str | list[str] = ALL_LINEAR

    def check(self) -> None:
        check_targets("quantization.targets", self.targets)


class QuantizedLinear(nn.Module):
    """`y = x @ W.T + bias` with a frozen W, packed or plain.

    Fields:
        weight: `[out_features, in_features]`, no gradient.
        bias: `[out_features]` or None, no gradient.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def quantize_linears(
    model: nn.Module,
    config: QuantizationConfig,
    stored: Mapping[str, str] | None = None,
    plain: Collection[str] = (),
) -> None:
    """Replaces the targeted `nn.Linear`s of `model` by `QuantizedLinear`s with unset bytes.

    For a model on the meta device (or one whose weights are loaded afterwards): nothing is
    quantized here, the loader writes the bytes.

    Args:
        stored: weight name -> format, of weights that are stored packed. They are packed in
            that format, targeted or not.
        plain: names of linears that stay as they are, targeted or stored packed: they are trained.

    Raises:
        UserError: `lm_head` is a target, but its weight is the token embedding; or stored
            weights are packed in a format of another kind than `config.format`.
    """
    stored = {n: f for n, f in (stored or {}).items() if n.removesuffix(".weight") not in plain}
    for name, quantized_as in stored.items():
        if quantized_as.partition("_")[0] != config.format.partition("_")[0]:
            kind = quantized_as.partition("_")[0]
            raise UserError(
                f"quantization.format: {config.format!r}, but the model folder holds {name!r} "
                f"packed as {quantized_as}; set quantization.format={kind}"
            )
    targeted = [] if config.format == "none" else _targeted(model, config)
    formats: dict[str, str] = {name: config.format for name in targeted}
    formats |= {name.removesuffix(".weight"): quantized_as for name, quantized_as in stored.items()}
    for name, module in list(model.named_modules()):
        if name in formats and name not in plain and isinstance(module, nn.Linear):
            rows, cols = module.weight.shape
            weight = module.weight
            qdata = FORMATS[formats[name]].empty(rows, cols, weight.dtype, weight.device)
            replace_module(model, name, QuantizedLinear(qdata, module.bias))


def _targeted(model: nn.Module, config: QuantizationConfig) -> Iterator[str]:
    """Names of the linears that the config means."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, module in target_modules(model, config.targets, nn.Linear):
        if id(module.weight) in embeddings:
            raise UserError(
                f"quantization.targets: {name!r} is tied to the token embeddings in this model "
                "and cannot be packed; leave it out"
            )
        yield name


# ---- the quantized linear ------------------------------------------------------------------
# Two custom ops. If the dequantize code were traced into a compiled decoder layer, the
# partitioner could keep what it likes of it for backward: it kept one byte per weight when we
# tried. Around custom ops `_QuantizedProduct` says what is saved: the bytes, which are a view
# of what FSDP2 gathers again for backward, and the extras.


_scratch = threading.local()
LARGEST_IN_HEAP = 32 << 20  # M_MMAP_THRESHOLD_MAX of glibc


def scratch(use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of this thread for the CPU, which the next call with the same `use` gives again."""
    size = math.prod(shape) * dtype.itemsize
    held = getattr(_scratch, use, None)
    if held is None or held.numel() < size:
        held = torch.empty(size, dtype=torch.uint8)
        setattr(_scratch, use, held)
    return held[:size].view(dtype).view(shape)


def factor_in(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in its `product_dtype`; a copy is overwritten by the next one."""
    return x if x.dtype == dtype else _workspace("factor", x.shape, dtype).copy_(x)


def product_in(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b`, to be cast to `dtype`; where that is another one, it is overwritten by the next.

    a is `[..., n]`, b `[n, m]`.
    """
    if a.dtype == dtype:
        return a @ b
    return torch.matmul(a, b, out=_workspace("product", (*a.shape[:-1], b.size(1)), a.dtype))


def _workspace(use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Scratch memory for what glibc would take from its heap, where fresh blocks left holes that
    no other tensor fitted into: 1650 MB of private memory instead of 1850 to 2040 for a step of
    SmolLM2 (4 x 512 tokens, `compile: true`). Larger blocks are mapped, and leave none."""
    if math.prod(shape) * dtype.itemsize < LARGEST_IN_HEAP:
        return scratch(use, shape, dtype)
    return torch.empty(shape, dtype=dtype)


@custom_op("qfsdp::packed_linear")
def _packed_linear(
    x: Tensor, qdata: Tensor, metadata: Sequence[Tensor], format: str, cols: int, row_offset: int
) -> Tensor:
    dtype = product_dtype(x)
    weight = frozen_weight(qdata, metadata, format, cols, row_offset, dtype)
    return product_in(factor_in(x, dtype), weight.t(), x.dtype).to(x.dtype)


@custom_op("qfsdp::packed_linear_backward")
def _packed_linear_backward(
    grad: Tensor, qdata: Tensor, metadata: Sequence[Tensor], format: str, cols: int, row_offset: int
) -> Tensor:
    dtype = product_dtype(grad)
    weight = frozen_weight(qdata, metadata, format, cols, row_offset, dtype)
    return product_in(factor_in(grad, dtype), weight, grad.dtype).to(grad.dtype)


@torch.library.register_fake("qfsdp::packed_linear")
def _(x: Tensor, qdata: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], qdata.size(0))


@torch.library.register_fake("qfsdp::packed_linear_backward")
def _(grad: Tensor, qdata: Tensor, metadata: Any, format: str, cols: int, *_: Any) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], cols)


class _QuantizedProduct(torch.autograd.Function):
    """`x @ weight.T` of a packed weight, given as its parts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        qdata: Tensor,
        metadata: Sequence[Tensor],
        which: tuple[str, int, int],  # format, cols, row_offset
    ) -> Tensor:
        ctx.which = which
        ctx.save_for_backward(qdata, *metadata)
        return _packed_linear(x, qdata, metadata, *which)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        qdata, *metadata = ctx.saved_tensors
        grad_x = _packed_linear_backward(grad, qdata, metadata, *ctx.which)
        return grad_x, None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for a plain or a packed frozen weight.

    Args:
        x: `[..., cols]`, floating point; the product is computed in its `product_dtype`.
        weight: `[rows, cols]`. A `QuantizedTensor` gets no gradient; autograd keeps its bytes
            and nothing else of the weight's size.
        bias: `[rows]` or None.

    Returns:
        `[..., rows]`, of x's dtype.
    """
    if isinstance(weight, QuantizedTensor):
        which = (weight.format, weight.cols, weight.row_offset)
        y = _QuantizedProduct.apply(x, weight.qdata, weight.metadata, which)
    elif product_dtype(x) == x.dtype:
        return F.linear(x, weight, bias)
    else:
        y = _WideLinear.apply(x, weight)
    return y if bias is None else y + bias


class _WideLinear(torch.autograd.Function):
    """`x @ weight.T` of plain matrices in their `product_dtype`; they are kept as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        of_x, of_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        dtype = product_dtype(x)
        return F.linear(x.to(dtype), weight.to(dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dtype, grad_x, grad_weight = product_dtype(grad), None, None
        g = grad.to(dtype)
        if weight is not None:
            grad_x = (g @ weight.to(dtype)).to(grad.dtype)
        if x is not None:
            rows = x.flatten(0, -2).to(dtype)
            grad_weight = (g.flatten(0, -2).t() @ rows).to(grad.dtype)
        return grad_x, grad_weight
