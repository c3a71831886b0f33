"""Folded adapters compute what the adapters of training compute, without their work per token."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.folded import FoldedLinear, fold_adapters
from qfsdp.modules.low_rank.linear import low_rank_linears
from tests.models import adapted_model, randomize_adapters
from tests.recipes.test_sharded_mixtures import MIXTURE
from tests.tiny import write_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("format", ["nf4", "hqq", "none"])
@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.usefixtures("eager")
@torch.no_grad()
def test_the_same_numbers(method: str, format: str, dtype: str, tiny: Path) -> None:
    model = adapted_model(tiny, AdapterConfig(method, 4), format=format, dtype=dtype)  # type: ignore[arg-type]
    randomize_adapters(model)
    folded = copy.deepcopy(model)
    fold_adapters(folded)
    assert not list(low_rank_linears(folded))
    linears = [module for module in folded.modules() if isinstance(module, FoldedLinear)]
    assert len(linears) == len(list(low_rank_linears(model)))
    tokens = torch.randint(577, (2, 9), generator=torch.Generator().manual_seed(1))
    expected, found = model(tokens), folded(tokens)
    if format == "none" and method == "dora":  # the output is scaled, not the weight
        assert (found - expected).abs().max() < (1e-4 if dtype == "fp32" else 0.1)
    elif dtype == "fp32":  # training multiplies the A of linears with one input together
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    else:
        assert torch.equal(found, expected)
    linears[0].b.zero_()
    assert not torch.equal(folded(tokens), found)


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.usefixtures("eager")
@torch.no_grad()
def test_routers_and_experts_keep_their_adapters(method: str, tmp_path: Path) -> None:
    """Neither is called as a linear is."""
    targets = ["all-linear", "gate"]
    config = AdapterConfig(method, 4, targets=targets)  # type: ignore[arg-type]
    model = adapted_model(write_tiny_model(tmp_path / "model", **MIXTURE), config)
    randomize_adapters(model)
    folded = copy.deepcopy(model)
    fold_adapters(folded)
    kept = {name.rpartition(".")[2] for name, _ in low_rank_linears(folded)}
    assert kept == {"gate", "gate_up_proj", "down_proj"}
    tokens = torch.randint(577, (2, 9), generator=torch.Generator().manual_seed(1))
    expected = model(tokens)
    assert (folded(tokens) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.usefixtures("eager")
@torch.no_grad()
def test_nothing_of_the_adapter_is_computed_per_token(tiny: Path) -> None:
    """The operations of a folded DoRA linear on plain tensors: no division, no cast, and no product
    with B's size but the two of the adapter."""
    model = adapted_model(tiny, AdapterConfig("dora", 4), format="none")
    fold_adapters(model)
    linear = next(module for module in model.modules() if isinstance(module, FoldedLinear))
    with torch.profiler.profile() as profile:
        linear(torch.ones(1, 1, linear.weight.shape[1]))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::mm"] == 3 and counts["aten::mul"] == 1
    assert not {"aten::div", "aten::_to_copy", "aten::linalg_vector_norm"} & counts.keys()
