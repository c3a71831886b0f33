"""A new model folder: ranks share its files out, and it is no model before all are there.

A marker lies in the folder while it is written, and `config.json` comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from qfsdp.checkpoint.lock import LOCK_FILE, FolderLock
from qfsdp.checkpoint.weights.read import INDEX
from qfsdp.checkpoint.weights.write import PlannedFile, copy_companions, write_index, write_json
from qfsdp.cli.errors import UserError
from qfsdp.distributed.world import World

BEGUN = "qfsdp_model.begun"  # the folder was begun, and is not finished


def check_output(folder: Path) -> None:
    """Raises `UserError` if the folder holds anything but an unfinished model."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir: '{folder}' is a file; name a new folder")
    files = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    if files - {LOCK_FILE} and BEGUN not in files:
        raise UserError(f"output_dir: '{folder}' is not empty; name a new folder")


def write_model_folder(
    folder: Path,
    files: list[PlannedFile],
    write: Callable[[list[PlannedFile]], None],
    source: Path,
    config: Callable[[], dict[str, Any]],
    world: World,
) -> None:
    """Writes a model folder. Every rank must call it, and see `folder`; each writes a part of the
    files. What an interrupted call left there, maybe of another model, is removed first.

    Args:
        folder: new, or begun by such a call.
        files: all of them.
        write: writes the files that it is given to `folder`.
        source: the model folder from which tokenizer and other companions are copied.
        config: makes `config.json`; called by rank 0, last.

    Raises:
        UserError: `folder` holds something else, is being written by another process or cannot be
            written.
    """
    with FolderLock(folder, "output_dir") if world.rank == 0 else nullcontext():
        if world.rank == 0:
            _begin(folder)
        world.gather(None)  # no rank writes before the folder is there
        write(files[world.rank :: world.size])
        world.gather(None)  # nor is it complete before all of them have written
        if world.rank == 0:
            copy_companions(source, folder)
            write_index(folder, files)
            write_json(folder / "config.json", config())
            (folder / BEGUN).unlink()


def _begin(folder: Path) -> None:
    check_output(folder)
    write_json(folder / BEGUN, {})
    left = [*folder.glob("*.partial"), *folder.glob("model*.safetensors")]
    for file in (folder / "config.json", folder / INDEX, *left):
        file.unlink(missing_ok=True)
