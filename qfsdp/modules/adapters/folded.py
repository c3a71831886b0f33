"""Low-rank linears made ready for inference: nothing of an adapter is computed for each token.

`LowRankLinear` computes magnitude / norm, multiplies B by it and by the scaling, and casts A and B
in every call, because training changes them. Here this is done once:

    y = ratio * W x + B' A' x         B' = scaling * ratio * B,  A' = A, both in the compute dtype

The kernel that dequantizes W multiplies its rows by `ratio` while it writes them, as in training.
So a linear's results have the same bits as those of `LowRankLinear`. In fp32 those of a model
differ in the last bits: training multiplies the A of linears with one input together
(`low_rank.linear`). A plain W is not multiplied anew for every token: there the output is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qfsdp.modules.low_rank.adapted import AdaptedLinear
from qfsdp.modules.low_rank.linear import LowRankLinear
from qfsdp.modules.low_rank.product import scaled_b
from qfsdp.modules.targets import replace_module
from qfsdp.tensor_subclasses import few_rows
from qfsdp.tensor_subclasses.frozen_weight import frozen_weight
from qfsdp.tensor_subclasses.kernels.custom_op import custom_op
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor


@custom_op("qfsdp::folded_linear")
def _folded_linear(
    x: Tensor,
    weight: Tensor,
    metadata: Sequence[Tensor],
    a: Tensor,
    b: Tensor,
    ratio: Tensor | None,
    format: str,
    row_offset: int,
) -> Tensor:
    flat = x.flatten(0, -2)
    y = (flat @ a.t()) @ b.t()
    if format or ratio is None:
        w = frozen_weight(weight, metadata, format, x.size(-1), row_offset, x.dtype, ratio)
        y.addmm_(flat, w.t())
    else:
        y.add_((flat @ weight.t()) * ratio)
    return y.view(*x.shape[:-1], -1)


@torch.library.register_fake("qfsdp::folded_linear")
def _(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.size(0))


class FoldedLinear(AdaptedLinear):
    """A `LowRankLinear` whose adapter no longer changes; it has no gradient.

    Fields:
        a: `[rank, in]`; b: `[out, rank]`, with scaling and ratio; both of the compute dtype.
        ratio: fp32 `[out]`, DoRA's magnitude / norm; None with LoRA.
    """

    def __init__(self, linear: LowRankLinear) -> None:
        super().__init__(linear)
        a, b, scaling, ratio = linear._adapter()
        dtype = linear.weight.dtype
        self.a = nn.Parameter(a.to(dtype), requires_grad=False)
        self.b = nn.Parameter(scaled_b(b, ratio, scaling, dtype), requires_grad=False)
        self.ratio = None if ratio is None else nn.Parameter(ratio, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = few_rows.product(x, self.weight)
        y = self._whole_weight(x) if y is None else self._added(y, x)
        return y if self.bias is None else y + self.bias

    def _whole_weight(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        metadata: Sequence[Tensor] = ()
        which = ("", 0)
        if isinstance(weight, QuantizedTensor):
            which = (weight.format, weight.row_offset)
            metadata, weight = weight.metadata, weight.qdata
        return _folded_linear(x, weight, metadata, self.a, self.b, self.ratio, *which)

    def _added(self, product: Tensor, x: Tensor) -> Tensor:
        """The linear's output from the product by its base."""
        scaled = product if self.ratio is None else (product * self.ratio).to(x.dtype)
        return scaled + (x @ self.a.t()) @ self.b.t()


@torch.no_grad()
def fold_adapters(model: nn.Module) -> None:
    """Replaces every plain `LowRankLinear` of a loaded, unsharded model by a `FoldedLinear`.

    DoRA's norms must be up to date. Its subclasses, the adapters of experts and of routers, have
    another `forward` than a linear and stay as they are. So does IA3.
    """
    for name, module in list(model.named_modules()):
        if type(module) is LowRankLinear:
            replace_module(model, name, FoldedLinear(module))
