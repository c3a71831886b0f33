"""What the watchdog sees of a step: `qfsdp.common.progress`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qfsdp.common import progress
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.config import AdapterConfig
from tests.models import adapted_model
from tests.tiny import write_tiny_model


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_every_layer_moves_on(
    checkpointing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this the watchdog took a forward whose layers take minutes for a hang."""
    write_tiny_model(tmp_path, num_hidden_layers=3)
    model = adapted_model(tmp_path, AdapterConfig("dora", 4), format="none")
    model.set_activations(ActivationConfig(checkpointing=checkpointing))
    seen: list[str] = []
    monkeypatch.setattr(progress, "moved", seen.append)
    layers = [f"model.layers.{index}" for index in range(3)]
    tokens = torch.arange(8).unsqueeze(0)
    loss = model(tokens, labels=tokens)
    assert seen == layers
    loss.backward()
    assert seen == layers + layers[::-1]
