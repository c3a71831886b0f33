"""Files that are written whole."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from qfsdp.common import files
from qfsdp.common.errors import UserError
from qfsdp.common.files import check_folder, json_object, replace_folder, whole_file, write_text
from qfsdp.launch.start import checked


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_permissions_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    """safetensors writes a temporary file with 0600 and renames it."""
    before = os.umask(umask)
    try:
        write_text(tmp_path / "text", "words")
        with whole_file(tmp_path / "weights") as partial:
            save_file({"a": torch.zeros(2)}, partial)
    finally:
        os.umask(before)
    for name in ("text", "weights"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_file_systems_without_sync_and_modes(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    def forbid(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(Path, "chmod", forbid)
    (tmp_path / "new").mkdir()
    files.write_text(tmp_path / "new" / "file", "text")
    files.replace_folder(tmp_path / "new", tmp_path / "folder")
    assert (tmp_path / "folder" / "file").read_text() == "text"


def test_a_disk_that_fails_is_still_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        files.write_text(tmp_path / "file", "text")


@pytest.mark.parametrize("text", [None, "", "[1]", "{", "[" * 100_000, b"\xff{}"])
def test_what_is_no_json_object_is_empty(text: str | bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert json_object(file) == {}
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}')  # as Windows writes it
    assert json_object(file) == {"a": 1}


@pytest.mark.parametrize("kind", ["folder", "link", "dangling", "file"])
def test_a_folder_takes_the_place_of_whatever_was_there(tmp_path: Path, kind: str) -> None:
    """A link was left as best.replaced, and every later best state was refused."""
    best, target = tmp_path / "best", tmp_path / "target"
    if kind == "file":
        best.touch()
    elif kind == "folder":
        best.mkdir()
    else:
        best.symlink_to(target)
        target.mkdir() if kind == "link" else None
    for number in ("1", "2"):
        (tmp_path / "new").mkdir()
        (tmp_path / "new/number").write_text(number)
        replace_folder(tmp_path / "new", best)
        assert not best.is_symlink() and (best / "number").read_text() == number
    left = {"best", "target"} if kind == "link" else {"best"}
    assert {path.name for path in tmp_path.iterdir()} == left


@pytest.mark.parametrize("name", ["checkpoints", "adapter"])
def test_what_is_written_last_is_tried_first(tmp_path: Path, name: str) -> None:
    """A link to a disk that is not there ended the run at its first save, or after its last."""
    config = SimpleNamespace(output_dir=str(tmp_path), distributed=None)
    checked(lambda _: None, config)
    (tmp_path / name).symlink_to("/nowhere/scratch")
    with pytest.raises(UserError, match=f"^output_dir: '.*/{name}' cannot be written: No such"):
        checked(lambda _: None, config)


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    check_folder("output_dir", tmp_path / "runs/x")
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").mkdir()
    check_folder("output_dir", tmp_path / "runs/x")
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]
    (tmp_path / "file").touch()
    for folder in ("/proc/x", str(tmp_path / "file"), str(tmp_path / "file/x"), f"/{'a' * 300}/x"):
        with pytest.raises(UserError, match=f"^output_dir: '{folder}' cannot be written: "):
            check_folder("output_dir", Path(folder))
    for name in ("$HOME/x", "${HOME}/x", "$HOME"):  # files went to a folder of that name
        with pytest.raises(UserError, match=r"stays text; expected \$\{oc.env:HOME\} in its place"):
            check_folder("output_dir", Path(name))
    check_folder("output_dir", tmp_path / "$HOME/x")
