"""Linears with quantized frozen weights, and the config section `quantization`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qfsdp.common.errors import InvalidField, UserError
from qfsdp.common.sizes import parse_size
from qfsdp.modules.compute_dtype import check_fp8_products
from qfsdp.modules.experts.stacked import ExpertLinear
from qfsdp.modules.low_rank.product import stand_in
from qfsdp.modules.targets import (
    ALL_LINEAR,
    check_present,
    check_targets,
    replace_module,
    target_modules,
)
from qfsdp.tensor_subclasses import few_rows
from qfsdp.tensor_subclasses.fp8 import TILE, backward_product, forward_product
from qfsdp.tensor_subclasses.frozen_weight import bytes_of, frozen_weight
from qfsdp.tensor_subclasses.kernels.custom_op import custom_op
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor

LINEARS = (nn.Linear, ExpertLinear)
"""What can be quantized."""


@dataclass
class QuantizationConfig:
    """Section `quantization`: which weights of the frozen base are quantized, and how.

    Fields:
        format: "nf4" (4.127 bits per weight), "nf4_fp32_absmax" (without double quantization, 4.5
            bits), "hqq" (affine, 4.5 bits), "mxfp4" (floating point, 4.25 bits, as gpt-oss is
            published), or "none". Weights that the model folder stores quantized stay as they are.
            Linears that such a folder stores plain are not quantized, unless `targets` names them.
        targets: "all-linear" (every linear of every layer), or a list of names. A list may also
            name `lm_head`: `[all-linear, lm_head]`.
        expert_chunk: memory for the dequantized experts of a layer, such as 256MiB. If all of them
            need more, they are dequantized in parts, and on GPUs the host waits for each.
        compute: numbers in which the linears of layers are multiplied by their quantized weights.
            "bf16": `model.dtype`. "fp8": 8-bit floating point, for formats of NF4 and GPUs from
            compute capability 8.9; outputs are off by 3.5 % rms. Adapters, experts and a quantized
            `lm_head` compute as with "bf16". Not yet measured on a GPU.
    """

    format: Literal["nf4", "nf4_fp32_absmax", "hqq", "mxfp4", "none"] = "nf4"
    targets: str | list[str] = ALL_LINEAR
    expert_chunk: str | int = "1GiB"
    compute: Literal["bf16", "fp8"] = "bf16"

    def check(self) -> None:
        check_targets("quantization.targets", self.targets)
        try:
            parse_size(self.expert_chunk)
        except ValueError as error:
            raise UserError(f"quantization.expert_chunk: {error}") from None
        if self.compute == "fp8" and not self.format.startswith("nf4"):
            raise InvalidField("compute", "fp8", f"bf16 with format {self.format!r}, or format nf4")


class QuantizedLinear(nn.Module):
    """`y = x @ W.T + bias` with a frozen W, quantized or plain.

    Fields:
        weight: `[out_features, in_features]`, no gradient.
        bias: `[out_features]` or None, no gradient.
        fp8: multiply in FP8 (`qfsdp.tensor_subclasses.fp8`).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, fp8: bool = False) -> None:
        super().__init__()
        self.fp8 = fp8
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if (y := few_rows.product(x, self.weight)) is not None:
            return y if self.bias is None else y + self.bias
        return linear(x, self.weight, self.bias, self.fp8)


def quantize_linears(
    model: nn.Module,
    config: QuantizationConfig,
    stored: Mapping[str, str] | None = None,
    plain: Collection[str] = (),
) -> None:
    """Replaces the targeted `nn.Linear`s of `model` by `QuantizedLinear`s with unset bytes, and the
    weights of targeted `ExpertLinear`s by unset bytes.

    Quantizes nothing itself: the loader writes the bytes. So `model` may be on the meta device.

    Args:
        stored: weight name -> format, of weights that are stored quantized. They keep their
            format, targeted or not. "none": stored plain in a quantized folder; only a
            target that names such a linear quantizes it.
        plain: names of linears that are trained. They stay plain, even if targeted or stored
            quantized.

    Raises:
        UserError: `lm_head` is a target, but its weight is the token embedding; or a target is not
            a linear of the model; or weights are stored in a format of another kind than
            `config.format` and it is not mxfp4.
    """
    stored = {n: f for n, f in (stored or {}).items() if n.removesuffix(".weight") not in plain}
    kept = {n.removesuffix(".weight") for n in stored if stored[n] == "none"}
    stored = {n: f for n, f in stored.items() if f != "none"}
    for name, quantized_as in stored.items():
        # gpt-oss is published with experts in MXFP4 and other weights in bf16, which take `format`.
        if quantized_as == "mxfp4" and config.format != "none":
            continue
        if quantized_as.partition("_")[0] != config.format.partition("_")[0]:
            kind = quantized_as.partition("_")[0]
            raise UserError(
                f"quantization.format: {config.format!r}, but {name!r} in the model folder is "
                f"stored as {quantized_as}; expected {kind}"
            )
    if config.compute == "fp8":
        check_fp8_products()
    targeted = [] if config.format == "none" else _targeted(model, config, kept)
    formats: dict[str, str] = {name: config.format for name in targeted}
    formats |= {name.removesuffix(".weight"): quantized_as for name, quantized_as in stored.items()}
    for name, module in list(model.named_modules()):
        if name in formats and name not in plain and isinstance(module, LINEARS):
            rows, cols = module.weight.shape
            weight = module.weight
            qdata = FORMATS[formats[name]].empty(rows, cols, weight.dtype, weight.device)
            if isinstance(module, ExpertLinear):
                module.requires_grad_(False).weight = nn.Parameter(qdata, requires_grad=False)
                module.chunk_bytes = parse_size(config.expert_chunk)
            else:
                fp8 = config.compute == "fp8" and name != "lm_head"
                if fp8:
                    _check_fp8_shape(name, formats[name], rows, cols)
                replace_module(model, name, QuantizedLinear(qdata, module.bias, fp8))


def _check_fp8_shape(name: str, format: str, rows: int, cols: int) -> None:
    if not format.startswith("nf4"):
        raise UserError(f"quantization.compute: 'fp8', but {name} is {format}; expected bf16")
    if rows % TILE or cols % TILE:
        shape = f"{name} has {rows} x {cols} weights, which {TILE} does not divide"
        raise UserError(f"quantization.compute: 'fp8', but {shape}; expected bf16")


def _targeted(model: nn.Module, config: QuantizationConfig, kept: set[str]) -> Iterator[str]:
    """Names of the linears that `config.targets` selects; those of `kept` by their own name, or if
    they are experts, which bitsandbytes does not quantize."""
    check_present("quantization.targets", config.targets, model)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, module in target_modules(model, config.targets, LINEARS):
        if id(module.weight) in embeddings:
            raise UserError(
                f"quantization.targets: {name!r} is tied to the token embeddings in this model "
                "and cannot be quantized; expected targets without it"
            )
        by_name = config.targets != ALL_LINEAR and name.rpartition(".")[2] in config.targets
        if name not in kept or by_name or isinstance(module, ExpertLinear):
            yield name


# ---- the quantized linear ------------------------------------------------------------------
# Forward and backward are custom ops. If the dequantize code were traced into a compiled decoder
# layer, the partitioner would choose what is kept for backward: it kept one byte per weight when we
# tried. `_Gradient` saves the quantized bytes, a view of what FSDP2 gathers again for
# backward, and the metadata.


@custom_op("qfsdp::packed_linear")
def _packed_linear(
    x: Tensor,
    qdata: Tensor,
    metadata: Sequence[Tensor],
    format: str,
    cols: int,
    row_offset: int,
    fp8: bool,
    bias: Tensor | None,
) -> Tensor:
    if fp8:
        y = forward_product(x.flatten(0, -2), qdata, metadata, format, row_offset, None)
        return y.view(*x.shape[:-1], -1)
    return F.linear(x, frozen_weight(qdata, metadata, format, cols, row_offset, x.dtype), bias)


@custom_op("qfsdp::packed_linear_backward")
def _packed_linear_backward(
    grad: Tensor,
    qdata: Tensor,
    metadata: Sequence[Tensor],
    format: str,
    cols: int,
    row_offset: int,
    fp8: bool,
) -> Tensor:
    if fp8:
        flat = grad.flatten(0, -2)
        dx = backward_product(flat, qdata, metadata, format, cols, row_offset, None)
        return dx.view(*grad.shape[:-1], cols)
    return grad @ frozen_weight(qdata, metadata, format, cols, row_offset, grad.dtype)


@torch.library.register_fake("qfsdp::packed_linear")
def _(x: Tensor, qdata: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], qdata.size(0))


@torch.library.register_fake("qfsdp::packed_linear_backward")
def _(grad: Tensor, qdata: Tensor, metadata: Any, format: str, cols: int, *_: Any) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], cols)


class _Gradient(torch.autograd.Function):
    """A stand-in for `x @ weight.T` of a quantized weight, given as its parts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        qdata: Tensor,
        metadata: Sequence[Tensor],
        which: tuple[str, int, int, bool],  # format, cols, row_offset, fp8
    ) -> Tensor:
        ctx.which = which
        ctx.save_for_backward(qdata, *metadata)
        return stand_in(x, qdata.size(0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        qdata, *metadata = ctx.saved_tensors
        grad_x = _packed_linear_backward(grad, qdata, metadata, *ctx.which)
        return grad_x, None, None, None


class _Product(torch.autograd.Function):
    """`x @ weight.T`, plus `bias` if given. Its gradient goes to the stand-in, `_`."""

    @staticmethod
    def forward(
        ctx: Any,
        _: Tensor,
        x: Tensor,
        qdata: Tensor,
        metadata: Sequence[Tensor],
        which: Any,
        bias: Tensor | None,
    ) -> Tensor:
        return _packed_linear(x, qdata, metadata, *which, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, None, None, None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fp8: bool = False) -> Tensor:
    """`x @ weight.T + bias` for a plain or a quantized frozen weight.

    Args:
        x: `[..., cols]`, floating point.
        weight: `[rows, cols]`. A `QuantizedTensor` gets no gradient; autograd keeps its bytes
            and nothing else of the weight's size.
        bias: `[rows]` or None.
        fp8: multiply by a quantized weight in FP8.

    Returns:
        `[..., rows]`, of x's dtype.

    Raises:
        ValueError: `weight` is flat, holds no weights yet, or requires a gradient.
    """
    if not isinstance(weight, QuantizedTensor):
        return F.linear(x, weight, bias)
    qdata, metadata, format, first = bytes_of(weight)
    which = (format, weight.size(1), first, fp8)
    before = _Gradient.apply(x, qdata, metadata, which)
    # `nn.Linear` rounds a product and its bias together. Plain bytes, as of an offloaded base, do
    # the same; quantized linears round twice, as those with adapters, which start as their base.
    together = format.startswith("plain") and bias is not None and not bias.requires_grad
    y = _Product.apply(before, x.detach(), qdata, metadata, which, bias if together else None)
    return y if bias is None or together else y + bias
