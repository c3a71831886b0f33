"""Measured memory: by kind, at the peak, on the rank that has the most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qfsdp.data.batch import Batch
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.distributed.sharding import quantized_bytes
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.training import memory_usage as usage
from qfsdp.training.memory_usage import (
    MemoryUsage,
    bytes_by_kind,
    peak_memory_bytes,
    reset_peak_memory,
)
from qfsdp.training.steps import StepClock
from qfsdp.training.throughput import Meter
from tests.models import adapted_model, cpu_world
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")
CPU = torch.device("cpu")


def trained_step(folder: Path, **build: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that has gradients and optimizer state."""
    model = adapted_model(folder, AdapterConfig("dora", 5), **build)
    optimizer = torch.optim.AdamW(trainable_parameters(model))
    tokens = torch.arange(40).view(2, 20)
    model(tokens, labels=tokens).backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("tied", [False, True])
def test_every_storage_counts_once(tied: bool, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, tie_word_embeddings=tied)
    model, optimizer = trained_step(folder)
    held = bytes_by_kind(model, optimizer, CPU)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    plain = [p for p in model.parameters() if not p.requires_grad and not hasattr(p, "qdata")]
    metadata = sum(e.nbytes for p in model.parameters() if hasattr(p, "qdata") for e in p.metadata)
    steps = 4 * len(optimizer.state)
    assert held == {
        usage.QUANTIZED: quantized_bytes(model) + metadata,
        usage.PLAIN: sum(p.nbytes for p in plain),
        usage.TRAINED: trained,
        usage.GRADIENTS: trained,
        usage.OPTIMIZER: 2 * trained + steps,
    }
    optimizer.zero_grad()
    assert usage.GRADIENTS not in bytes_by_kind(model, None, CPU)


@pytest.mark.long
def test_eight_bit_states_count_with_their_real_size(tmp_path: Path) -> None:
    low_bit = pytest.importorskip("torchao.optim")
    param = nn.Parameter(torch.randn(64, 256))
    optimizer = low_bit.AdamW8bit([param])
    param.square().sum().backward()
    optimizer.step()
    held = bytes_by_kind(nn.ParameterList([param]), optimizer, CPU)[usage.OPTIMIZER]
    assert 2 * param.numel() < held < 2.2 * param.numel()


def test_host_memory_has_kinds_of_its_own_on_accelerators(tmp_path: Path) -> None:
    model, _ = trained_step(write_tiny_model(tmp_path))
    held = bytes_by_kind(model, None, torch.device("cuda"))
    assert held and all(kind.endswith("_in_host") for kind in held)


def on_ranks(folder: Path) -> tuple[dict[str, int], dict[str, float], dict[str, float]]:
    model, optimizer = trained_step(folder)
    world = cpu_world()
    memory = MemoryUsage(model, optimizer, world)
    memory.reset()
    if world.rank == 1:
        torch.ones(200 << 20, dtype=torch.uint8)  # released at once
    held = bytes_by_kind(model, optimizer, CPU)
    optimizer.zero_grad()
    read = [memory.read(world.exchange(*memory.numbers())) for _ in range(2)]
    return held, read[0], read[1]


def test_on_two_ranks(tmp_path: Path) -> None:
    whole = bytes_by_kind(*trained_step(write_tiny_model(tmp_path)), CPU)
    results = run_ranks(2, on_ranks, tmp_path)
    for kind, size in whole.items():
        parts = [held[kind] for held, _, _ in results]
        # Metadata and step counts of the optimizer are on both ranks, odd rows on one of them.
        assert size <= sum(parts) < 1.1 * size and max(parts) < 0.6 * size, kind
    first, second = results[0][1:]
    assert first["memory/peak_rank"] == 1 and first["memory/load_peak_gib"] > 0
    assert "memory/load_peak_gib" not in second
    assert first["peak_memory_gib"] == results[1][1]["peak_memory_gib"]
    for held, read, _ in results:
        for kind, size in held.items():
            assert read[f"memory/{kind}_gib"] == size / 2**30


def test_peaks_can_be_reset() -> None:
    reset_peak_memory(CPU)
    before = peak_memory_bytes(CPU)
    torch.ones(300 << 20, dtype=torch.uint8)
    peak = peak_memory_bytes(CPU)
    assert peak > before + (250 << 20)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not allow it")
    reset_peak_memory(CPU)
    assert peak_memory_bytes(CPU) < peak - (250 << 20)


def test_the_meter_reads_memory(tmp_path: Path) -> None:
    model, optimizer = trained_step(write_tiny_model(tmp_path))
    meter = Meter(model, cpu_world(), StepClock(CPU), optimizer)
    tokens = torch.arange(40).view(2, 20)
    meter.add([Batch(tokens, tokens, 40)])
    metrics = meter.read()
    assert metrics["memory/load_peak_gib"] > 0 and metrics["peak_memory_gib"] > 0
    assert metrics["memory/gradients_gib"] == metrics["memory/parameters_trained_gib"] > 0
    assert metrics["memory/optimizer_state_gib"] > 0
