"""Which checkpoint a run resumes from: the newest, or the newest that is not damaged."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qfsdp.checkpoint.compatibility import SETTINGS_FILE, check_settings, read_settings
from qfsdp.checkpoint.digests import Verification, check_size
from qfsdp.common.errors import UserError
from qfsdp.common.sealed import Damaged

AUTO = "auto"
FOLDER = "checkpoints"
DAMAGED = ".damaged"


@dataclass
class Choice:
    """The checkpoints that a run may resume from.

    Fields:
        folders: newest first; none for a new run. All their files are there and have their sizes.
            More than one, if the user has not named a checkpoint.
        damaged: folder -> how it is damaged.
        output_dir: of the run that resumes, for messages.
    """

    output_dir: Path | None = None
    folders: list[Path] = field(default_factory=list)
    damaged: dict[Path, str] = field(default_factory=dict)

    def check(self, settings: dict[str, Any]) -> list[str]:
        """Compares settings with those of the first of `folders`; see `check_settings`. Raises
        UserError: they are not the checkpoint's."""
        return check_settings(settings, self.folders[0]) if self.folders else []

    def drop(self, folder: Path, damage: str) -> None:
        """Moves a folder to `damaged`. Raises UserError: no other is left."""
        self.damaged[folder] = damage
        if folder in self.folders:
            self.folders.remove(folder)
        if not self.folders:
            raise UserError(self.all_damaged())

    def newest_first(self) -> list[tuple[Path, str]]:
        """The items of `damaged`."""
        return sorted(self.damaged.items(), key=lambda item: step_of(item[0]), reverse=True)

    def all_damaged(self) -> str:
        """The message if no checkpoint is left; names an intact one beside a single damaged one."""
        if len(self.damaged) > 1:
            parent = next(iter(self.damaged)).parent
            how = "; ".join(f"{path.name}: {text}" for path, text in self.newest_first())
            return (
                f"resume: all checkpoints in '{parent}' are damaged ({how}); expected an intact one"
            )
        ((folder, how),) = self.damaged.items()
        run = folder.parent.parent
        beside = (path for path in published(run)[::-1] if path.name != folder.name)
        expected = "an intact one"
        if (intact := next(filter(_is_intact, beside), None)) is not None:
            own = self.output_dir is not None and run.resolve() == self.output_dir.resolve()
            expected = (
                f"resume=auto, which takes '{intact}'" if own else f"'{intact}', an intact one"
            )
        return f"resume: '{folder}' is damaged ({how}); expected {expected}"


def published(output_dir: Path) -> list[Path]:
    """The checkpoints of a run that were completely written, oldest first. They may be damaged
    since. Raises OSError: the folder may not be read."""
    try:
        found = list((output_dir / FOLDER).iterdir())
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null character
        return []
    return sorted((path for path in found if _is_published(path)), key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _is_published(path: Path) -> bool:
    return re.fullmatch(r"step_\d{8,}", path.name) is not None


def find_checkpoints(resume: str | None, output_dir: Path) -> Choice:
    """The checkpoints that a run may resume from.

    Args:
        resume: null, "auto" (the newest checkpoint in `output_dir`, if any), the folder of a
            checkpoint, or the output_dir of another run (its newest checkpoint).

    Raises:
        UserError: there is no such checkpoint, all are damaged, or `output_dir` has checkpoints of
            another run.
    """
    try:
        return _find(resume, output_dir)
    except OSError as error:  # a path too long, a folder that may not be read
        key = "output_dir" if str(error.filename).startswith(f"{output_dir}/") else "resume"
        raise UserError(f"{key}: '{error.filename}' cannot be read: {error.strerror}") from None


def _find(resume: str | None, output_dir: Path) -> Choice:
    own = published(output_dir)
    if resume is None and own:
        raise UserError(
            f"output_dir: '{output_dir}' has checkpoints, up to step {step_of(own[-1])}; "
            "expected resume=auto to continue it, or another output_dir"
        )
    if resume is None or (resume == AUTO and not own):
        return Choice(output_dir)
    if resume == AUTO:
        return _undamaged(own, output_dir)
    path = Path(resume).expanduser()
    is_named = _is_published(path) and os.path.lexists(path)
    inside = [] if is_named else published(path)
    if not (inside or is_named or (path / SETTINGS_FILE).is_file()):
        raise UserError(
            f"resume: '{resume}' is no checkpoint and contains none; expected auto, a folder such "
            f"as .../{FOLDER}/step_00000040, or an output_dir with checkpoints"
        )
    found = inside[-1] if inside else path
    if own and own[-1].resolve() != found.resolve():
        raise UserError(
            f"resume: '{found}' is not the last checkpoint of '{output_dir}', which is step "
            f"{step_of(own[-1])}; expected resume=auto to continue it, or another output_dir"
        )
    return _undamaged(inside or [path], output_dir)


def _undamaged(folders: list[Path], output_dir: Path) -> Choice:
    """Looks at everything but the content of files; `folders` are oldest first."""
    choice = Choice(output_dir, folders[::-1])
    for folder in folders[::-1]:
        try:
            check_files(folder)
        except Damaged as error:
            choice.drop(folder, str(error))
    return choice


def check_files(folder: Path) -> dict[str, Any]:
    """The values of `facts.json`, if all files of the checkpoint have the sizes that are in it.
    Raises Damaged: they have not."""
    try:
        values = read_settings(folder)
    except OSError as error:
        raise Damaged(f"unreadable ({error.strerror})") from None
    for name, expected in values.get("files", {}).items():
        check_size(folder / name, name, expected)
    return values


def check_resume(
    resume: str | None, output_dir: str, settings: Callable[[], dict[str, Any]] | None = None
) -> None:
    """The preflight of `Checkpointer.find`.

    Args:
        settings: computes the settings that are known before data is read; not called for a new
            run. None: they are not compared.

    Raises:
        UserError: see `find_checkpoints` and `check_settings`.
    """
    choice = find_checkpoints(resume, Path(output_dir).expanduser())
    if choice.folders and settings is not None:
        choice.check(settings())


def set_aside(folder: Path) -> str:
    """Renames a damaged checkpoint, so that its step can be saved again and it is not counted by
    `keep_last`. It is never deleted. Returns what was done."""
    aside, number = folder.with_name(folder.name + DAMAGED), 1
    while os.path.lexists(aside):
        number += 1
        aside = folder.with_name(f"{folder.name}{DAMAGED}{number}")
    try:
        folder.rename(aside)
    except OSError as error:
        return f"cannot be renamed: {error.strerror}"
    return f"kept as '{aside.name}'"


def _is_intact(folder: Path) -> bool:
    try:
        files = check_files(folder).get("files")
        return files is not None and Verification(folder, files, 0, 1).damage() is None
    except Damaged:
        return False
