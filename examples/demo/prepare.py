"""`python -m qfsdp.examples.demo.prepare`: makes the model and the data of the demo's configs."""

from __future__ import annotations

from pathlib import Path

from qfsdp.common.errors import user_errors

from . import cache_dir


def prepare() -> tuple[Path, Path, Path]:
    """Makes the model and the data, if missing, at the paths in `configs/smollm2_135m_*.yaml`.

    Returns:
        The model's folder, the training file and the held-out file.
    """
    from .arithmetic import write_splits
    from .smollm2 import prepare_model

    model = prepare_model(cache_dir())
    train, heldout = write_splits(cache_dir() / "arithmetic")
    return model, train, heldout


if __name__ == "__main__":
    with user_errors():
        for path in prepare():
            print(path)
