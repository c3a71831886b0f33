"""Preference data: answers in pairs, or answers with a label, from rows to batches.

`datasets` has the builders that configs name. Prompts that two answers share stand once in a
packed row.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:  # what the module of this name had in version 0.1
    from qfsdp.common.moved import name_in_package

    return name_in_package(__name__, name)
