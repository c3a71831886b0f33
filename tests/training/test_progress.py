"""What the watchdog sees of a step: `qfsdp.common.progress`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


@pytest.mark.parametrize("wrap", [tuple, list, lambda results: {"x": results[0]}])
def test_layers_may_return_more_than_a_tensor(
    wrap: Callable[[list[Tensor]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenAI GPT's layers return lists: a run ended at the first one."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return wrap([super().forward(x)])

    model = nn.Sequential(Layer(2, 2))
    seen: list[str] = []
    monkeypatch.setattr(progress, "moved", seen.append)
    model[0].register_forward_pre_hook(partial(progress.layer_begins, "0"))
    model[0].register_forward_hook(partial(progress.layer_ends, "0"))
    result = model(torch.ones(1, 2))
    next(iter(result.values() if isinstance(result, dict) else result)).sum().backward()
    assert seen == (["0"] if isinstance(result, dict) else ["0", "0"])
