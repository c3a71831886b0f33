"""`python -m examples.demo.prepare`: the model and the data of the demonstration configs."""

from __future__ import annotations

from pathlib import Path

from qfsdp.cli.errors import user_errors

from . import cache_dir
from .arithmetic import write_splits
from .smollm2 import prepare_model


def prepare() -> tuple[Path, Path, Path]:
    """Makes what is not there yet; returns the model's folder, the training and the held-out
    file. `configs/smollm2_135m_*.yaml` name the same places."""
    model = prepare_model(cache_dir())
    train, heldout = write_splits(cache_dir() / "arithmetic")
    return model, train, heldout


if __name__ == "__main__":
    with user_errors():
        for path in prepare():
            print(path)
