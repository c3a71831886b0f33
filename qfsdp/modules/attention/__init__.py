"""Attention: within rows, within the documents that are packed into rows, and with cached keys.

`self_attention` is what a decoder layer calls. The other files are its cases, rotary positions, and
the caches of generation.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:  # what the module of this name had in version 0.1
    from qfsdp.common.moved import name_in_package

    return name_in_package(__name__, name)
