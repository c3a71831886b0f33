"""Frozen linears with packed weights, and how a decoder gets them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from qfsdp.errors import UserError
from qfsdp.modules.targets import ALL_LINEAR, check_targets, replace_module, target_modules
from qfsdp.tensor_subclasses import hqq, nf4  # noqa: F401  (registers the formats)
from qfsdp.tensor_subclasses.packed import FORMATS, linear


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


def pack_linears(
    model: nn.Module,
    config: QuantizationConfig,
    stored: Mapping[str, str] | None = None,
    plain: Collection[str] = (),
) -> None:
    """Replaces the targeted `nn.Linear`s of `model` by `PackedLinear`s with unset bytes.

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
    for name, packed_as in stored.items():
        if packed_as.partition("_")[0] != config.format.partition("_")[0]:
            kind = packed_as.partition("_")[0]
            raise UserError(
                f"quantization.format: {config.format!r}, but the model folder holds {name!r} "
                f"packed as {packed_as}; set quantization.format={kind}"
            )
    targeted = [] if config.format == "none" else _targeted(model, config)
    formats: dict[str, str] = {name: config.format for name in targeted}
    formats |= {name.removesuffix(".weight"): packed_as for name, packed_as in stored.items()}
    for name, module in list(model.named_modules()):
        if name in formats and name not in plain and isinstance(module, nn.Linear):
            rows, cols = module.weight.shape
            weight = module.weight
            packed = FORMATS[formats[name]].empty(rows, cols, weight.dtype, weight.device)
            replace_module(model, name, PackedLinear(packed, module.bias))


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
