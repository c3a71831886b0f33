"""Which linears of transformers' modules are quantized and adapted: by where they stand.

Every `nn.Linear` of the layers is, but for those of a few rows (routers, gates, the step sizes of
recurrent layers), which cost nothing, and those whose weight a module reads by itself: it would
miss the adapter, and a quantized weight is bytes.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any, cast

from torch import nn

FEW = 16  # times fewer rows than columns
ROUTERS = ("gate", "router")
# A weight's dtype or device alone may be asked for.
READS = r"\.{}\.weight\b(?!\.(?:dtype|device|shape|size))"


def linears_of_layers(layers: nn.ModuleList, prefix: str) -> tuple[list[str], list[str]]:
    """Names of the linears that are quantized and adapted, and of those that stay plain.

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
    stay = {
        child
        for _, child, parent, _ in found
        if child not in several or child in ROUTERS or reads_weight(cast(Any, type(parent)), child)
    }
    taken = [name for name, child, _, _ in found if child not in stay]
    plain = [name for name, child, _, _ in found if child in stay]
    return taken, plain


@cache
def reads_weight(parent: Any, child: str) -> bool:
    """Whether the code of a module reads the weight of its linear `child` without calling it."""
    return re.search(READS.format(re.escape(child)), _source(parent)) is not None


@cache
def _source(kind: Any) -> str:
    classes = [base for base in kind.__mro__ if base.__module__.startswith("transformers.models.")]
    return "\n".join(inspect.getsource(base) for base in classes)
