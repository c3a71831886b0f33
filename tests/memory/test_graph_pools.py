"""What CUDA graphs keep, in estimates."""

from __future__ import annotations

from pathlib import Path

import pytest

from qfsdp.planning.estimate import Estimate, estimate
from qfsdp.planning.graph_pools import kept_by_graphs
from qfsdp.planning.kernel_memory import CUBLAS_WORKSPACES
from qfsdp.planning.report import lines
from qfsdp.planning.tracker import ACTIVATIONS, GRADIENTS, GRAPHS, TRAINED, Point
from tests.memory.test_estimate import load
from tests.tiny import write_tiny_model

CAPTURED = ("cuda_graphs=true", "packed=true", "gradient_accumulation_steps=1")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", vocab_size=2048, intermediate_size=512)


def test_pools_are_added_up() -> None:
    lasting = {TRAINED: 100}
    points = [
        Point("forward", "layer", 1, lasting | {ACTIVATIONS: 40}),
        Point("", "", 1, lasting | {ACTIVATIONS: 45}),
        Point("backward", "layer", 2, lasting | {ACTIVATIONS: 50, GRADIENTS: 10}),
        Point("optimizer", "", 3, lasting | {GRADIENTS: 20, "temporaries": 7}),
        Point("norm_refresh", "", 4, lasting | {"temporaries": 30}),
    ]
    more, at_rest = kept_by_graphs(points, steady=100)
    workspace = CUBLAS_WORKSPACES // 2
    assert at_rest == 20 + 50 + 30 + workspace
    assert 160 + more == 100 + at_rest + 7  # the optimizer's temporaries come on top
    assert kept_by_graphs(points, 100, only_norms=True) == (30 + workspace, 30 + workspace)


@pytest.mark.long
def test_the_row_is_there_only_if_steps_are_captured(model: Path) -> None:
    def found(*words: str, ranks: int = 1, target: str = "cuda") -> Estimate:
        return estimate(*load(model, *words), ranks, target=target)  # type: ignore[arg-type]

    graphs, plain = found(*CAPTURED), found(*CAPTURED, "cuda_graphs=false")
    kept = graphs.at_peak[GRAPHS]
    assert kept > 0 and graphs.peak == plain.peak + kept == sum(graphs.at_peak.values())
    assert graphs.reserved > plain.reserved
    assert graphs.steady >= plain.steady + plain.at_peak[ACTIVATIONS]
    assert any(line.startswith("  kept by cuda graphs  ") for line in lines(graphs, None))
    compiled = found(*CAPTURED, "packed=false", "compile=true", "cuda_graphs=auto")
    assert compiled.at_peak[GRAPHS] > 0
    for norms_only in (
        found(*CAPTURED, ranks=2),
        found(*CAPTURED, "packed=false"),
        found(*CAPTURED, "activation.checkpointing=full"),
    ):
        assert 0 < norms_only.at_peak[GRAPHS] < kept
    for without in (
        plain,
        found(*CAPTURED, target="cpu"),
        found(*CAPTURED, "adapter.method=lora", ranks=2),
        found(*CAPTURED, "sharding.offload_base=cpu", ranks=2),
    ):
        assert GRAPHS not in without.at_peak
