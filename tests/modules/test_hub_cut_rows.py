"""Models of transformers whose rows are cut into parts: losses and gradients of whole rows."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from qfsdp.checkpoint.adapter_files import adapter_parameters
from qfsdp.data.batch import Batch
from qfsdp.distributed.context_parallel import share_rows
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.hub_models.shared_rows import ARCHITECTURES
from tests import hub_models
from tests.models import cpu_world
from tests.ranks import run_ranks

# Name -> of the tiny model, and changes of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {})
    for name in (
        *("llama", "gemma3", "deepseek_v3", "lfm2", "falcon_h1", "qwen3_5", "qwen3_next"),
        *("qwen3_5_moe", "qwen3_5_whole", "qwen3", "gemma3_text"),
    )
}
WINDOWS = ["sliding_attention", "full_attention"] * 2
MODELS["qwen3 with windows"] = (
    "qwen3",
    {"use_sliding_window": True, "sliding_window": 30, "layer_types": WINDOWS},
)
# Of the samples of each row; the last one is padding. With 3 parts of 24 tokens borders are cut by
# samples, and a part has samples, or padding, alone. Chunks of recurrent layers have 64 tokens.
LENGTHS = [[9, 1, 62], [72], [24, 3, 17, 28], [2, 70]]
PADDED = (0, 0, 28, 70)


def batch() -> Batch:
    tokens = torch.randint(3, 577, (4, 72), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for row in LENGTHS for n in row]).view(4, 72)
    labels = tokens.roll(-1, 1)
    labels[positions.roll(-1, 1) == 0] = -100  # the last token of each sample
    for row, count in enumerate(PADDED):
        labels[row, 72 - count :] = -100
    borders = torch.tensor([0, *accumulate(n for row in LENGTHS for n in row)], dtype=torch.int32)
    return Batch(tokens, labels, tokens.numel(), positions, borders)


def loss_of(folder: Path, shared: bool, mode: Any = "none") -> tuple[Tensor, dict[str, Tensor]]:
    """The summed loss of a batch or of a part of it, and gradients."""
    adapter = AdapterConfig("dora", rank=4, alpha=8)
    model, given = hub_models.built(folder, adapter, ActivationConfig(mode)), batch()
    if shared:
        parts = dist.get_world_size()
        given = given.cut(dist.get_rank(), parts)
        share_rows(model, parts, cpu_world())
    loss = model(given.tokens, given.positions, None, given.labels, given.cu_seqlens)
    loss.backward()
    found = {key: p.grad for key, p in adapter_parameters(model).items()}
    return loss.detach(), {key: grad for key, grad in found.items() if grad is not None}


def parts_of(folders: list[Path], mode: Any) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Of every model."""
    return [loss_of(folder, True, mode) for folder in folders]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("parts", "mode", "names"),
    [
        pytest.param(3, "full", ["gemma3", "qwen3_5", "falcon_h1"], marks=pytest.mark.long),
        pytest.param(2, "none", list(MODELS), marks=pytest.mark.slow),
        pytest.param(3, "none", list(MODELS), marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_of_parts_add_up(
    parts: int, mode: str, names: list[str], tmp_path: Path
) -> None:
    for name in names:
        tiny, changes = MODELS[name]
        hub_models.save_hub_model(tiny, tmp_path / name, **changes)
    by_rank = run_ranks(parts, parts_of, [tmp_path / name for name in names], mode)
    for at, name in enumerate(names):
        loss, grads = loss_of(tmp_path / name, False)
        of_parts = [found[at] for found in by_rank]
        torch.testing.assert_close(sum(one[0] for one in of_parts), loss, rtol=1e-6, atol=0)
        for key, grad in grads.items():
            summed = torch.stack([one[1][key] for one in of_parts]).sum(0)
            worst = float((summed - grad).abs().max() / grad.abs().max())
            assert worst < 5e-6, (name, key, worst)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_layer_that_is_not_given_the_rows_raises(name: str, tmp_path: Path) -> None:
    """Attention, and layers with a state: alone they would compute a part as a whole row."""
    hub_models.save_hub_model(name, tmp_path)
    model, given = hub_models.built(tmp_path), batch().cut(0, 3)
    model.share_rows("some ranks")
    with pytest.raises(ValueError, match="sharding.context_parallel: .*rows"):
        model.parts.body(given.tokens, position_ids=given.positions)
    with pytest.raises(ValueError, match="sharding.context_parallel: whole rows"):
        model(given.tokens, labels=given.labels)


def test_all_that_are_taken_are_compared() -> None:
    configs = (hub_models.config(tiny) for tiny, _ in MODELS.values())
    assert {one.architectures[0] for one in configs} == ARCHITECTURES
