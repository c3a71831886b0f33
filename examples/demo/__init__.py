"""A demonstration on a small real model, and the model and data for tests and benchmarks.

The model comes from a package of the Python package index, so no access to the Hugging Face hub is
needed.
"""

from __future__ import annotations

import os
from pathlib import Path

from qfsdp.common.devices import check_system
from qfsdp.common.errors import user_errors

with user_errors():
    check_system()  # before what it lacks is imported


def cache_dir() -> Path:
    """The folder of the demo's model and data: `$QFSDP_CACHE`, `$XDG_CACHE_HOME/qfsdp`, or
    `~/.cache/qfsdp`."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QFSDP_CACHE") or Path(caches) / "qfsdp")
