"""Custom ops give results of the layout that they announce, whatever the layout of their arguments:
the compiler chooses that, and differs between devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qfsdp.data.batch import Batch
from qfsdp.data.loader import collate
from qfsdp.modules.adapters.config import AdapterConfig
from tests.models import adapted_model, randomize_adapters
from tests.tensor_subclasses.test_quantized_tensor import RecordedOps
from tests.tiny import DELTA, GPT_OSS, MOE, write_tiny_model

MODELS: dict[str, tuple[dict[str, Any], AdapterConfig]] = {
    "dora": ({}, AdapterConfig("dora", rank=4, dropout=0.1)),
    "frozen": ({}, AdapterConfig("lora", rank=4, targets=["q_proj"])),
    "delta": (DELTA, AdapterConfig("lora", rank=4)),
    "experts": (MOE, AdapterConfig("dora", rank=4)),
    "sinks": (GPT_OSS, AdapterConfig("lora", rank=4, dropout=0.1)),
}


def transposed(given: Any) -> Any:
    """The same numbers, of which matrices lie column by column."""
    if isinstance(given, list):
        return [transposed(part) for part in given]
    if not isinstance(given, Tensor) or given.dim() < 2 or not given.is_floating_point():
        return given
    return given.detach().mT.contiguous().mT


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_layouts_of_results(name: str, packed: bool, tmp_path: Path) -> None:
    changes, adapter = MODELS[name]
    model = adapted_model(write_tiny_model(tmp_path / "model", **changes), adapter)
    randomize_adapters(model)
    tokens = torch.arange(60).view(2, 30)
    row = {"tokens": tokens.flatten(), "labels": tokens.flatten(), "lengths": [25, 35]}
    batch = collate([row], pad_id=0, max_seq_len=60) if packed else Batch(tokens, tokens, 60)
    called: dict[Any, Any] = {}
    with RecordedOps() as record:
        given = {"labels": batch.labels, "cu_seqlens": batch.cu_seqlens}
        model.train()(batch.tokens, batch.positions, **given).backward()
    for op, arguments in record.calls:
        called.setdefault(op, arguments)  # of backward the last layer's: its input has a gradient
    assert any("backward" in op.name() for op in called)
    for op, arguments in called.items():
        torch.library.opcheck(op, tuple(transposed(list(arguments))), test_utils="test_faketensor")
