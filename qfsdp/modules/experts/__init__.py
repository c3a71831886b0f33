"""Mixtures of experts: the router, stacked experts, and their products.

`mixture` is what a decoder layer calls. A layer's experts are two stacked linears, whose rows are
sorted by expert before they are multiplied.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:  # what the module of this name had in version 0.1
    from qfsdp.common.moved import name_in_package

    return name_in_package(__name__, name)
