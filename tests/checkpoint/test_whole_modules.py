"""Modules trained as a whole beside adapters, against PEFT's `modules_to_save`: ten updates in
fp32, files that PEFT loads, and PEFT's that are loaded here, merged weights; and mistakes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qfsdp.checkpoint.adapter_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_parameters,
    check_adapter,
    load_adapter,
    read_adapter_config,
    save_adapter,
)
from qfsdp.checkpoint.adapter_start import start_adapters
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.merge import Merge
from qfsdp.checkpoint.weights.model_config import ModelConfig
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.evaluation.inference_model import load_adapters_of_one_base
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.reference import keep_start
from qfsdp.modules.adapters.whole import EMBEDDING, HEAD
from qfsdp.modules.quantized_linear import QuantizationConfig
from tests.checkpoint.test_peft_updates import UPDATES, add_theirs, trained_here
from tests.models import build_meta_model, cpu_world, load_model, randomize_adapters
from tests.tiny import write_tiny_model

pytestmark = [pytest.mark.usefixtures("eager")]

BOTH = AdapterConfig("dora", 5, 7.0, modules_to_save=["embed_tokens", "lm_head"])
CASES = {
    "tied": {"both": replace(BOTH, method="lora")},
    "untied": {
        "both": replace(BOTH, method="lora"),
        "head": AdapterConfig("miss", 5, modules_to_save=["lm_head"]),
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """For every case what we compute over an NF4 base, and what PEFT does."""
    os.environ["QFSDP_EAGER_KERNELS"] = "1"  # the fixture `eager` is of each test
    found: dict[str, dict[str, Any]] = {}
    tokens = torch.randint(0, 577, (UPDATES, 2, 24), generator=torch.Generator().manual_seed(0))
    for ties, cases in CASES.items():
        root = tmp_path_factory.mktemp(ties)
        base = write_tiny_model(root / "model", tie_word_embeddings=ties == "tied")
        for name, config in cases.items():
            given = (config, base, root / name, tokens)
            found[f"{ties} {name}"] = trained_here(*given, targets=["all-linear"])
        add_theirs([found[f"{ties} {name}"] for name in cases], base, tokens, root)
    return found


@pytest.mark.long
@pytest.mark.parametrize("case", [f"{ties} {name}" for ties, of in CASES.items() for name in of])
def test_as_peft(case: str, results: dict[str, Any]) -> None:
    """Trained, saved, loaded there and here, and merged."""
    ours = results[case]
    theirs, logits, at = ours["theirs"], ours["logits"], ours["at"]
    losses = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    trained = load_file(at / "theirs" / WEIGHTS_FILE)
    params = adapter_parameters(ours["model"])
    if case.startswith("tied"):
        assert torch.equal(trained.pop(HEAD), trained[EMBEDDING])
    assert trained.keys() == params.keys()
    worst = max((trained[key] - param).abs().max().item() for key, param in params.items())
    print(f"{case}: losses differ by {losses:.1e}, weights by {worst:.1e}")
    assert losses <= 1e-6 and worst <= 1e-5
    assert ours["losses"][0] != pytest.approx(ours["losses"][-1], abs=1e-3), "it must train"
    bound = 1e-5 * logits.abs().max()
    assert (logits - theirs["of_ours"]).abs().max() <= bound

    start = replace(ours["config"], start_from=str(at / "theirs"))
    model = load_model(ours["base"], adapter=start, targets=["all-linear"])
    check_adapter(start, at / "theirs", model)
    start_adapters(model, start, str(ours["base"]), seed=0)
    with torch.no_grad():
        assert (model(ours["tokens"]) - theirs["logits"]).abs().max() <= bound

    quantization = QuantizationConfig("nf4")
    weights = ModelWeights(ours["base"])
    merge = Merge(weights, quantization, torch.float32, at / "ours", torch.float32)
    merge.write(at / "merged", cpu_world())
    merged = load_file(at / "merged/model.safetensors")
    ties = json.loads((at / "merged/config.json").read_bytes())["tie_word_embeddings"]
    assert ties == case.startswith("tied") == ("lm_head.weight" not in merged)
    for key, value in theirs["merged"].items():
        key = "model.embed_tokens.weight" if ties and key == "lm_head.weight" else key
        torch.testing.assert_close(merged[key], value, rtol=0, atol=4e-6, msg=key)


def test_half_precision_is_cast(tmp_path: Path) -> None:
    """fp32 weights beside a bf16 model: the output has the model's dtype, the gradients fp32, and
    the numbers of a model in which the weights are bf16."""
    base = write_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    tokens = torch.arange(48).view(2, 24)
    labels = tokens.clone()
    model = load_model(base, adapter=BOTH, dtype="bf16", format="none")
    start_adapters(model, BOTH, str(base), seed=0)
    plain = load_model(
        base, adapter=replace(BOTH, modules_to_save=None), dtype="bf16", format="none"
    )
    start_adapters(plain, BOTH, str(base), seed=0)
    weight = model.model.embed_tokens.weight
    assert weight is model.lm_head.weight and weight.dtype == torch.float32
    loss = model(tokens, labels=labels)
    assert torch.equal(loss, plain(tokens, labels=labels))
    loss.backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32 and weight.grad.any()
    assert model(tokens).dtype == torch.bfloat16


def test_mistakes(tmp_path: Path) -> None:
    """Each is one line, before anything is loaded."""
    for names in (["embeddings"], [], ["lm_head", "lm_head"]):
        with pytest.raises(InvalidField, match="some of embed_tokens, lm_head, or null"):
            AdapterConfig(modules_to_save=names).check()
    tied = write_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    untied = write_tiny_model(tmp_path / "untied")
    head, plain = replace(BOTH, modules_to_save=["lm_head"]), ["all-linear"]
    with pytest.raises(UserError, match=r"ties both weights; expected \[embed_tokens, lm_head\]"):
        build_meta_model(tied, adapter=head)
    with pytest.raises(UserError, match="lm_head is quantized; expected"):
        build_meta_model(untied, adapter=head)
    with pytest.raises(UserError, match="lm_head is adapted; expected"):
        adapted = replace(head, targets=["q_proj", "lm_head"])
        build_meta_model(untied, adapter=adapted, targets=plain)
    with pytest.raises(UserError, match="expected null with reference: base"):
        keep_start(build_meta_model(tied, adapter=BOTH), "base", BOTH)

    model = load_model(tied, adapter=BOTH)
    start_adapters(model, BOTH, str(tied), seed=0)
    folder = tmp_path / "adapter"
    save_adapter(model, BOTH, str(tied), folder, cpu_world())
    assert read_adapter_config(folder).modules_to_save == ["embed_tokens", "lm_head"]
    with pytest.raises(UserError, match=r"expected adapter.modules_to_save=\[embed_tokens,lm_head"):
        check_adapter(replace(BOTH, modules_to_save=None), folder, model)
    tensors, settings = load_file(folder / WEIGHTS_FILE), (folder / CONFIG_FILE).read_text()
    save_file(tensors | {HEAD: tensors[HEAD] + 1}, folder / WEIGHTS_FILE)
    with pytest.raises(UserError, match="differ; expected equal ones, as this model ties them"):
        check_adapter(BOTH, folder, model)
    (folder / CONFIG_FILE).write_text(settings.replace('"embed_tokens"', '"norm"'))
    with pytest.raises(UserError, match="expected some of embed_tokens, lm_head"):
        read_adapter_config(folder)


def test_load_adapter_fills_all(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    model = load_model(base, adapter=BOTH)
    start_adapters(model, BOTH, str(base), seed=0)
    randomize_adapters(model)
    save_adapter(model, BOTH, str(base), tmp_path / "adapter", cpu_world())
    other = load_model(base, adapter=BOTH)
    load_adapter(other, tmp_path / "adapter")
    assert torch.equal(other.lm_head.weight, model.model.embed_tokens.weight)


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
def test_adapters_of_one_base(tied: bool, tmp_path: Path) -> None:
    """Each has its own whole modules; the base keeps its own, which the others share."""
    base = write_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    model = load_model(base, adapter=BOTH, targets=["all-linear"])
    start_adapters(model, BOTH, str(base), seed=0)
    randomize_adapters(model)
    save_adapter(model, BOTH, str(base), tmp_path / "adapter", cpu_world())
    section, nf4 = ModelConfig(str(base), dtype="fp32"), QuantizationConfig("nf4")
    adapters = {"own": str(tmp_path / "adapter")}
    found = load_adapters_of_one_base(section, nf4, "base", adapters, cpu_world())
    tokens = torch.arange(24).view(1, 24)
    with torch.no_grad():
        expected, plain = model(tokens), load_model(base, targets=["all-linear"])(tokens)
        torch.testing.assert_close(found["own"](tokens), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(found["base"](tokens), plain, rtol=0, atol=1e-5)
    assert found["own"].model.norm.weight is found["base"].model.norm.weight
