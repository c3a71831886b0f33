"""Files that are written whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qfsdp.cli.files import whole_file, write_text


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
