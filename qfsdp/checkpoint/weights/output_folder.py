"""The folder that a conversion writes: no model until it is complete.

A marker file lies in the folder while it is written. `OutputFolder` starts over after an
interruption; `ResumableFolder` keeps the files that are complete.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qfsdp.checkpoint.lock import LOCK_FILE
from qfsdp.checkpoint.weights.qfsdp_layout import FAST_DIGESTS, MANIFEST, SETTINGS_DIGESTS
from qfsdp.checkpoint.weights.safetensors_folder import INDEX
from qfsdp.checkpoint.weights.write import COPIED, PlannedFile, is_complete
from qfsdp.common.errors import UserError
from qfsdp.common.files import PARTIAL, sha256, write_json, write_text, xxh3
from qfsdp.common.sealed import Damaged, read_sealed, sealed_json

BEGUN = "qfsdp_model.begun"
RESUMABLE_BEGUN = MANIFEST + ".begun"
# A process that is killed before it has written anything of the model may leave these.
LEFT_BY_A_KILL = {LOCK_FILE, BEGUN + PARTIAL, RESUMABLE_BEGUN + PARTIAL}


def check_output(folder: Path, unfinished: Collection[str] = ()) -> None:
    """Raises `UserError` if the folder holds anything but an unfinished result.

    Args:
        unfinished: files that a killed command may leave, besides those of a model.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir: '{folder}' is a file; expected a new folder")
    files = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    files = {name for name in files if not name.endswith(PARTIAL)}
    if files - LEFT_BY_A_KILL - set(unfinished) and BEGUN not in files:
        raise UserError(f"output_dir: '{folder}' is not empty; expected a new folder")


@dataclass(frozen=True)
class OutputFolder:
    """A folder that is written anew after an interruption.

    Fields:
        path: a new folder, or one that an interrupted conversion left.
        key: the config key that names it, for messages.
        texts: name -> text of files that replace those of the converted model, such as the chat
            template.
    """

    path: Path
    key: str = "output_dir"
    texts: Mapping[str, str] = field(default_factory=dict)

    def is_finished(self) -> bool:
        """Whether another process has finished the folder while this one waited for its lock."""
        return False

    @property
    def waits(self) -> bool:
        """Whether to wait for another process that writes the folder."""
        return False

    def begin(self) -> dict[str, str]:
        """Prepares the folder; rank 0 calls it with the folder locked.

        Returns:
            File name -> SHA-256, where an earlier conversion recorded them.

        Raises:
            UserError: the folder holds something else.
        """
        check_output(self.path)
        write_json(self.path / BEGUN, {})
        self._remove_weights()
        return {}

    def _remove_weights(self) -> None:
        left = [*self.path.glob(f"*{PARTIAL}"), *self.path.glob("model*.safetensors")]
        for file in (self.path / "config.json", self.path / INDEX, *left):
            file.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Frees the disk after an error, where the next conversion starts over; rank 0 calls it."""
        with suppress(OSError):
            self._remove_weights()

    def is_done(self, planned: PlannedFile, checksum: str | None) -> bool:
        """Whether the file is there already and need not be written."""
        return False

    def checksums(self, files: Sequence[PlannedFile]) -> dict[str, str]:
        """File name -> SHA-256 of written files, if the folder records them."""
        return {}

    def finish(self, checksums: dict[str, str]) -> None:
        """Marks the folder as complete; rank 0 calls it after everything else is written."""
        (self.path / BEGUN).unlink()


@dataclass(frozen=True)
class ResumableFolder(OutputFolder):
    """A folder that the same conversion finishes after an interruption.

    Its manifest records the settings, the weights and the files' SHA-256. A conversion into a
    finished folder writes the files again whose SHA-256 differs.

    Fields:
        settings: what the conversion is made from and how; they must equal those of the
            interrupted conversion.
        weights: the manifest's entry for every quantized weight.
        cache: it is a cache, which several runs may want to write at once; the first one does.
        repair: a cache of which something is damaged.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    cache: bool = False
    repair: bool = False

    @property
    def waits(self) -> bool:
        return self.cache

    def is_finished(self) -> bool:
        return self.cache and not self.repair and (self.path / MANIFEST).is_file()

    def begin(self) -> dict[str, str]:
        try:
            return self._begin()
        except UserError:
            if not self.cache:
                raise
        # Nothing in a cache is worth keeping.
        self._remove_weights()
        (self.path / MANIFEST).unlink(missing_ok=True)
        write_json(self.path / RESUMABLE_BEGUN, self.settings)
        return {}

    def _begin(self) -> dict[str, str]:
        found = [self.path / name for name in (RESUMABLE_BEGUN, MANIFEST)]
        file = next((file for file in found if file.is_file()), None)
        if file is None:
            if any(entry.name not in LEFT_BY_A_KILL for entry in self.path.iterdir()):
                raise UserError(f"{self.key}: '{self.path}' is not empty; expected a new folder")
            write_json(self.path / RESUMABLE_BEGUN, self.settings)
            return {}
        try:
            earlier = read_sealed(file, older=True)
            both = {name: (earlier[name], now) for name, now in self.settings.items()}
            if "source" in both:  # the path may differ
                was, now = both["source"]
                both["source"] = _same_model(was, now), _same_model(now, was)
            checksums = dict(earlier.get("files", {}))
        except (Damaged, KeyError, TypeError) as error:
            raise UserError(
                f"{self.key}: '{file}' is damaged ({error}); expected another folder, or remove "
                "this one"
            ) from None
        for setting, (was, now) in both.items():
            if was != now:
                raise UserError(
                    f"{self.key}: '{self.path}' was made with {setting} {was!r}; expected "
                    f"{now!r}, or another folder"
                )
        return checksums

    def abandon(self) -> None:
        """Keeps the files that are complete."""

    def is_done(self, planned: PlannedFile, checksum: str | None) -> bool:
        file = self.path / planned.name
        return is_complete(file, planned) and (checksum is None or sha256(file) == checksum)

    def checksums(self, files: Sequence[PlannedFile]) -> dict[str, str]:
        return {file.name: sha256(self.path / file.name) for file in files}

    def finish(self, checksums: dict[str, str]) -> None:
        manifest = self.settings | {"weights": self.weights, "files": checksums}
        others = [*(pattern for pattern in COPIED if pattern != "*.md"), "config.json"]
        copied = {f.name for pattern in others for f in self.path.glob(pattern)}
        names = sorted(copied - {MANIFEST})
        manifest[FAST_DIGESTS] = {name: xxh3(self.path / name) for name in sorted(checksums)}
        manifest[SETTINGS_DIGESTS] = {name: sha256(self.path / name) for name in names}
        write_text(self.path / MANIFEST, sealed_json(manifest))
        (self.path / RESUMABLE_BEGUN).unlink(missing_ok=True)


def _same_model(one: dict[str, Any], other: dict[str, Any]) -> Any:
    """What identifies the first source, in terms that both know: earlier versions have only a
    fingerprint of some bytes."""
    known = one.get("digest") and other.get("digest")
    return one["digest"] if known else one["fingerprint"]
