"""Tensors of transformers' models that files hold in another form."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from qfsdp.checkpoint.weights.other_names import _rows
from qfsdp.checkpoint.weights.safetensors_folder import SINGLE, SafetensorsFolder
from qfsdp.modules.hub_models.names import Source


def test_stacked_matrices_are_read_transposed(tmp_path: Path) -> None:
    """Qwen3-VL's experts, as published; those that have the parameter's shape stay as they are."""
    stored = torch.randn(3, 8, 5)
    save_file({"experts": stored}, tmp_path / SINGLE)
    folder, source = SafetensorsFolder(tmp_path), Source(("experts",), transposed=True)
    for shape in ((3, 5, 8), (3, 8, 5)):
        found = _rows("experts", source, shape, folder.tensors)
        expected = stored if shape == stored.shape else stored.transpose(1, 2)
        assert found.shape == shape and torch.equal(folder.read(found), expected)
