"""Frozen linears with packed weights, and how a decoder gets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from qfsdp.errors import UserError
from qfsdp.modules.targets import ALL_LINEAR, check_targets, replace_module, target_modules
from qfsdp.tensor_subclasses import nf4  # noqa: F401  (registers the format)
from qfsdp.tensor_subclasses.packed import FORMATS, linear


@dataclass
class QuantizationConfig:
    """Section `quantization`: which weights of the frozen base are packed, and how.

    Fields:
        format: "nf4" (4.127 bits a weight), or "none".
        targets: "all-linear" (every linear of every layer), or a list of names; `lm_head`
            can be named too: `[all-linear, lm_head]`.
    """

    format: Literal["nf4", "none"] = "nf4"
    targets: str | list[str] = ALL_LINEAR

    def check(self) -> None:
        check_targets("quantization.targets", self.targets)


class PackedLinear(nn.Module):
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


def pack_linears(model: nn.Module, config: QuantizationConfig) -> None:
    """Replaces the targeted `nn.Linear`s of `model` by `PackedLinear`s with unset bytes.

    For a model on the meta device (or one whose weights are loaded afterwards): nothing is
    quantized here, the loader writes the bytes.

    Raises:
        UserError: `lm_head` is a target, but its weight is the token embedding.
    """
    if config.format == "none":
        return
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, module in target_modules(model, config.targets, nn.Linear):
        weight = module.weight
        assert isinstance(weight, Tensor)
        if id(weight) in embeddings:
            raise UserError(
                f"quantization.targets: {name!r} is tied to the token embeddings in this model "
                "and cannot be packed; leave it out"
            )
        rows, cols = weight.shape
        packed = FORMATS[config.format].empty(rows, cols, weight.dtype, weight.device)
        bias = module.bias
        assert bias is None or isinstance(bias, Tensor)
        replace_module(model, name, PackedLinear(packed, bias))
