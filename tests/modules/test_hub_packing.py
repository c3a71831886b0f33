"""Samples of a packed row in models of transformers: apart, or the row is refused."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from qfsdp.checkpoint.adapter_files import adapter_parameters
from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.gated_delta_rule import gated_delta_rule
from qfsdp.modules.hub_models import documents
from qfsdp.modules.hub_models.config import hub_config
from qfsdp.modules.hub_models.packing import check_packed, module_names
from tests import hub_models

RECURRENT = ["qwen3_5_whole", "qwen3_5_moe", "qwen3_next", "lfm2"]
LENGTHS = [[9, 1, 30], [40], [3, 21, 16]]  # of the samples of each row; the last one is padding


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "name",
    [
        *("gemma3", "deepseek_v3", "llama", "qwen3_5"),
        *(pytest.param(name, marks=pytest.mark.long) for name in RECURRENT),
    ],
)
def test_a_pack_equals_its_samples_alone(name: str, tmp_path: Path) -> None:
    """Loss and all gradients of DoRA over NF4; Gemma 3's window of 16 tokens ends in samples."""
    hub_models.save_hub_model(name, tmp_path)
    tokens = torch.randint(3, 577, (3, 40), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for row in LENGTHS for n in row]).view(3, 40)
    labels = tokens.roll(-1, 1)
    labels[positions.roll(-1, 1) == 0] = -100  # the last token of each sample
    labels[2, -16:] = -100
    borders = torch.tensor([0, *accumulate(n for row in LENGTHS for n in row)], dtype=torch.int32)

    found: list[tuple[Any, dict[str, Any]]] = []
    for packed in (True, False):
        model = hub_models.built(tmp_path, AdapterConfig("dora", rank=4, alpha=8))
        if packed:
            loss = model(tokens, positions, labels=labels, cu_seqlens=borders)
        else:
            pairs = [
                (part[None], label[None])
                for row, lengths in enumerate(LENGTHS)
                for part, label in zip(
                    tokens[row].split(lengths), labels[row].split(lengths), strict=True
                )
                if (label != -100).any()
            ]
            loss = torch.stack([model(part, labels=label) for part, label in pairs]).sum()
        loss.backward()
        found.append((loss, {key: p.grad for key, p in adapter_parameters(model).items()}))
    (loss, gradients), (expected, of_samples) = found
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for key, grad in of_samples.items():
        atol = 2e-6 * float(grad.abs().max())  # some products round differently
        torch.testing.assert_close(gradients[key], grad, rtol=0, atol=atol, msg=key)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma3", {}, None),
        ("llama", {}, None),
        ("qwen3_5", {}, None),
        ("lfm2", {}, None),
        ("mamba", {}, "not known to be apart .see docs/reference/models.md"),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "factor": 2.0,
                    "original_max_position_embeddings": 128,
                    "rope_theta": 1e4,
                }
            },
            "rope of the kind dynamic",
        ),
    ],
)
def test_what_would_mix_samples_is_refused(
    name: str, changes: dict[str, Any], message: str | None
) -> None:
    """Layers that carry a state along the row, and angles that depend on the longest position."""
    config = hub_models.config(name)
    given = config.to_dict() | changes
    found = hub_config(given, "config.json")
    if message is None:
        check_packed(found)
        return
    with pytest.raises(UserError, match=f"^packed: true; expected false: .*{message}"):
        check_packed(found)


def test_modules_that_were_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config may have kinds of layers that the tiny model of its architecture did not have."""
    seen = {"LlamaForCausalLM": frozenset({"LlamaAttention"})}
    monkeypatch.setattr("qfsdp.modules.hub_models.packing.packed_modules", lambda: seen)
    with pytest.raises(UserError, match="[(]Embedding was not compared[)]"):
        check_packed(hub_config(hub_models.config("llama").to_dict(), "config.json"))


def test_another_vision_model_may_be_packed() -> None:
    """Only the text model is trained, so only its modules count."""
    given = hub_models.config("mistral3").to_dict()
    clip = {"model_type": "clip_vision_model", "hidden_size": 32, "num_attention_heads": 2}
    given["vision_config"] = clip | {"intermediate_size": 64, "num_hidden_layers": 2}
    given["architectures"] = ["Mistral3ForConditionalGeneration"]
    found = hub_config(given, "config.json")
    assert "CLIPVisionModel" in module_names(found.meta)
    check_packed(found)


def each_alone(*given: torch.Tensor, cu_seqlens: torch.Tensor, **_: Any) -> Any:
    """Stands in for flash-linear-attention's kernel."""
    lengths = cu_seqlens.diff().tolist()
    assert len(given[0]) == 1 and given[0].shape[1] == sum(lengths) and 0 not in lengths
    split = zip(*(part.split(lengths, 1) for part in given), strict=True)
    return torch.cat([gated_delta_rule(*alone)[0] for alone in split], 1), None


def test_kernels_are_told_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention takes one row with the borders of its samples, none of them empty;
    causal-conv1d takes the samples' numbers."""
    monkeypatch.setattr(documents, "has_kernel", lambda *_: True)
    torch.manual_seed(0)
    parts = [torch.randn(3, 40, 2, 8) for _ in range(3)]
    parts += [-torch.rand(3, 40, 2), torch.rand(3, 40, 2)]
    positions = torch.cat([torch.arange(n) for row in LENGTHS for n in row]).view(3, 40)
    numbers = documents.numbers_of_samples(positions)
    borders = torch.tensor([0, *accumulate(n for row in LENGTHS for n in row), 120, 120])

    ours = documents.OURS["torch_chunk_gated_delta_rule"]
    found, _ = ours(each_alone, *parts, seq_idx=numbers, cu_seqlens=borders)
    torch.testing.assert_close(found, gated_delta_rule(*parts, documents=numbers)[0])
    told = documents.OURS["causal_conv1d_fn"](
        lambda *_, **more: more, parts[3], parts[4], activation="silu", seq_idx=numbers
    )
    assert told == {"activation": "silu", "seq_idx": numbers}
