"""Which linears of transformers' modules are quantized and adapted: by where they stand.

Every `nn.Linear` of the layers is, but for those of a few rows (gates, the step sizes of recurrent
layers), which cost nothing and are adapted only if they are named, and those whose weight a module
reads by itself: it would miss the adapter, and a quantized weight is bytes. Those that have a
number for a name are neither: PEFT would take the layers of that number too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

FEW = 16  # times fewer rows than columns
ROUTERS = ("gate", "router")
# A weight's dtype or device alone may be asked for.
READS = r"\.{}\.weight\b(?!\.(?:dtype|device|shape|size))"

# Classes that compute what `nn.Linear` does: Falcon's, and GPT-2's with `[in, out]` weights.
ALIKE, TRANSPOSED = "FalconLinear", "Conv1D"
# Class -> its module whose output the class changes in place. Autograd refuses that for outputs of
# custom functions, which our linears are. So these modules return a copy.
CHANGED_IN_PLACE = {"Llama4TextMoe": "shared_expert", "FalconDecoderLayer": "mlp"}
# So does an attention with `clip_qkv`.
CLIPS, CLIPPED = ("OlmoAttention", "OlmoeAttention"), ("q_proj", "k_proj", "v_proj")


def transposed_weights(hf: nn.Module) -> Iterator[str]:
    """Names of the weights that transformers holds as `[in, out]`."""
    for name, module in hf.named_modules():
        if type(module).__name__ == TRANSPOSED:
            yield f"{name}.weight"


def take_linears(hf: nn.Module) -> None:
    """Replaces linears of other classes in `hf`, on the meta device, by `nn.Linear`s of the same
    names, and has modules return copies where `CHANGED_IN_PLACE` says so."""
    for parent in list(hf.modules()):
        for child, module in list(parent.named_children()):
            if (kind := type(module).__name__) in (ALIKE, TRANSPOSED):
                held = cast(nn.Linear, module)
                weight = held.weight.mT if kind == TRANSPOSED else held.weight
                linear = nn.Linear(
                    weight.size(1), weight.size(0), device="meta", dtype=weight.dtype
                )
                linear.weight.requires_grad_(weight.requires_grad)
                linear.register_parameter("bias", held.bias)
                setattr(parent, child, linear)
        if (changed := CHANGED_IN_PLACE.get(type(parent).__name__)) is not None:
            parent.get_submodule(changed).register_forward_hook(_copy)
        attention: Any = parent
        if type(parent).__name__ in CLIPS and attention.config.clip_qkv is not None:
            attention.forward = MethodType(type(parent).forward, _Clipped(parent))


class _Clipped:
    """An attention whose `CLIPPED` return copies. What replaces them has no hooks of theirs."""

    def __init__(self, attention: nn.Module) -> None:
        self.attention = attention

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.attention, name)
        return (lambda hidden: value(hidden).clone()) if name in CLIPPED else value


def _copy(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output.clone()


def linears_of_layers(layers: nn.ModuleList, prefix: str) -> tuple[list[str], list[str], list[str]]:
    """Names of the linears that are quantized and adapted, of those that stay plain, and of these
    the ones that may have an adapter.

    Args:
        prefix: the name of `layers` in the model.
    """
    found = [
        (f"{name}.{child}", child, parent, module)
        for name, parent in layers.named_modules(prefix=prefix)
        for child, module in parent.named_children()
        if type(module) is nn.Linear
    ]
    # PEFT adapts all linears of a name, so a name is taken or stays as one.
    several = {
        child for _, child, _, module in found if module.out_features * FEW > module.in_features
    }
    frozen = {
        child
        for _, child, parent, _ in found
        if child in ROUTERS or child.isdigit() or reads_weight(cast(Any, type(parent)), child)
    }
    taken = [name for name, child, _, _ in found if child in several - frozen]
    plain = [name for name, child, _, _ in found if child not in several - frozen]
    return taken, plain, [name for name in plain if name.rpartition(".")[2] not in frozen]


@cache
def reads_weight(parent: Any, child: str) -> bool:
    """Whether the code of a module reads the weight of its linear `child` without calling it."""
    return re.search(READS.format(re.escape(child)), _source(parent)) is not None


@cache
def _source(kind: Any) -> str:
    classes = [base for base in kind.__mro__ if base.__module__.startswith("transformers.models.")]
    return "\n".join(inspect.getsource(base) for base in classes)
