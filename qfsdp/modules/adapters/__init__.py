"""Adapters on frozen linears: LoRA, DoRA and IA3.

`config` has the section `adapter`, `linears` the modules, `row_norms` the norms of DoRA, `folded`
the same linears for inference, `reference` the model as it was at the run's start.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:  # what the module of this name had in version 0.1
    from qfsdp.common.moved import name_in_package

    return name_in_package(__name__, name)
