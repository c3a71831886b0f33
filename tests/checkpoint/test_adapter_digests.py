"""A changed bit of an adapter that qfsdp wrote is refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qfsdp.checkpoint.adapter_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_parameters,
    check_adapter,
    load_adapter,
    write_adapter,
)
from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.config import AdapterConfig
from tests.models import build_meta_model
from tests.tiny import write_tiny_model

DORA = AdapterConfig("dora", rank=5, alpha=7.0)


def test_changed_tensors_are_refused_and_changed_settings_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_meta_model(write_tiny_model(tmp_path / "model"), adapter=DORA)
    shapes = {name: param.shape for name, param in adapter_parameters(model).items()}
    tensors = {name: torch.rand(shape) for name, shape in shapes.items()}
    folder = tmp_path / "adapter"
    write_adapter(tensors, DORA, "base", folder)
    check_adapter(DORA, folder, model)
    assert capsys.readouterr().err == ""

    weights, config = folder / WEIGHTS_FILE, folder / CONFIG_FILE
    for number in range(8):
        write_adapter(tensors, DORA, "base", tmp_path / f"again{number}")
        assert (tmp_path / f"again{number}" / WEIGHTS_FILE).read_bytes() == weights.read_bytes()
    whole, settings = weights.read_bytes(), json.loads(config.read_text())
    for at in (-1, len(whole) // 2):
        data = bytearray(whole)
        data[at] ^= 1
        weights.write_bytes(data)
        with pytest.raises(UserError, match=rf"^{weights}: content changed \(SHA-256\)"):
            check_adapter(DORA, folder, model)
        with pytest.raises(UserError, match="content changed"):  # ranks that nobody checked before
            load_adapter(model, folder)
    weights.write_bytes(whole)

    config.write_text(json.dumps(settings | {"base_model_name_or_path": "moved"}))
    check_adapter(DORA, folder, model)
    assert capsys.readouterr().err == ""
    config.write_text(json.dumps(settings | {"lora_alpha": 9.0}))
    other = AdapterConfig("dora", rank=5, alpha=9.0)
    check_adapter(other, folder, build_meta_model(tmp_path / "model", adapter=other))
    assert f"{folder}: not as it was written" in capsys.readouterr().err

    # Other programs keep no digests.
    config.write_text(json.dumps(settings))
    save_file({k: v * 2 for k, v in load_file(weights).items()}, weights, {"format": "pt"})
    check_adapter(DORA, folder, model)
    assert capsys.readouterr().err == ""
