"""A small real model to try recipes on, made from packages of the Python package index."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where demo models are kept: `$QFSDP_CACHE`, or `~/.cache/qfsdp`."""
    return Path(os.environ.get("QFSDP_CACHE") or Path.home() / ".cache" / "qfsdp")
