"""Rows of tokens that are trained alone, against PEFT's `trainable_token_indices`: ten updates in
fp32 over a plain and a quantized base, files that PEFT loads, and PEFT's that are loaded here,
merged weights; and mistakes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from qfsdp.checkpoint.adapter_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_parameters,
    check_adapter,
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
from qfsdp.modules.adapters.trained_rows import DELTA
from qfsdp.modules.quantized_linear import QuantizationConfig
from tests.checkpoint.test_peft_updates import UPDATES, add_theirs, trained_here
from tests.models import build_meta_model, cpu_world, load_model, randomize_adapters
from tests.peft_oracle import dequantized_base
from tests.tiny import write_tiny_model

pytestmark = [pytest.mark.usefixtures("eager")]

IDS = [576, 3, 301]
CASES = {
    "tied": AdapterConfig("lora", 5, 7.0, trainable_token_indices=IDS),
    "embedding": AdapterConfig("lora", 5, 7.0, trainable_token_indices=IDS),
    "both": AdapterConfig(
        "lora", 5, 7.0, trainable_token_indices={"embed_tokens": IDS, "lm_head": [301, 17]}
    ),
    "head and whole": AdapterConfig(
        "lora",
        5,
        7.0,
        modules_to_save=["embed_tokens"],
        trainable_token_indices={"lm_head": [301, 17]},
    ),
}
NAMES = [f"{name} {format}" for name in CASES for format in ("none", "nf4")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """For every case what we compute, and what PEFT does."""
    os.environ["QFSDP_EAGER_KERNELS"] = "1"  # the fixture `eager` is of each test
    found: dict[str, dict[str, Any]] = {}
    tokens = torch.randint(0, 577, (UPDATES, 2, 24), generator=torch.Generator().manual_seed(0))
    tokens[:, :, 3::5] = 301  # in every row, as an input and as a target
    for tied in (True, False):
        root = tmp_path_factory.mktemp("tied" if tied else "untied")
        base = write_tiny_model(root / "model", tie_word_embeddings=tied)
        cases = [case for case in NAMES if case.startswith("tied") == tied]
        for case in cases:
            name, _, format = case.rpartition(" ")
            given = (CASES[name], base, root / case.replace(" ", "_"), tokens, check_start)
            found[case] = trained_here(*given, format=format) | {"format": format}
        add_theirs([found[case] for case in cases], base, tokens, root)
    return found


def check_start(model: Any) -> None:
    for name, rows in ((n, r) for n, r in model.named_modules() if hasattr(r, "ids")):
        module = model.lm_head if name == "head_rows" else model.model.embed_tokens
        weight = dequantized_base(module)["weight"]
        assert torch.equal(rows.weight, weight[rows.ids]), "rows begin as the base's"


@pytest.mark.long
@pytest.mark.parametrize("case", NAMES)
def test_as_peft(case: str, results: dict[str, Any]) -> None:
    """Trained, saved, loaded there and here, and merged."""
    ours = results[case]
    theirs, logits, at, config = ours["theirs"], ours["logits"], ours["at"], ours["config"]
    losses = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    trained, params = load_file(at / "theirs" / WEIGHTS_FILE), adapter_parameters(ours["model"])
    assert trained.keys() == params.keys() == load_file(at / "ours" / WEIGHTS_FILE).keys()
    worst = max((trained[key] - param).abs().max().item() for key, param in params.items())
    differ = (logits - theirs["of_ours"]).abs().max().item() / logits.abs().max().item()
    print(f"{case}: losses {losses:.1e}, weights {worst:.1e}, logits {differ:.1e} of the largest")
    assert losses <= 1e-6 and worst <= 1e-5 and differ <= 1e-5
    assert ours["losses"][0] != pytest.approx(ours["losses"][-1], abs=1e-3), "it must train"
    settings = [json.loads((at / who / CONFIG_FILE).read_text()) for who in ("ours", "theirs")]
    assert settings[0]["trainable_token_indices"] == settings[1]["trainable_token_indices"]

    start = replace(config, start_from=str(at / "theirs"))
    model = load_model(ours["base"], adapter=start, format=ours["format"])
    check_adapter(start, at / "theirs", model)
    start_adapters(model, start, str(ours["base"]), seed=0)
    with torch.no_grad():
        bound = 1e-5 * logits.abs().max()
        assert (model(ours["tokens"]) - theirs["logits"]).abs().max() <= bound

    quantization = QuantizationConfig(ours["format"])
    quantization.targets = ["all-linear", *([] if case.startswith("tied") else ["lm_head"])]
    weights = ModelWeights(ours["base"])
    merge = Merge(weights, quantization, torch.float32, at / "ours", torch.float32)
    merge.write(at / "merged", cpu_world())
    merged = load_file(at / "merged/model.safetensors")
    assert case.startswith("tied") == ("lm_head.weight" not in merged)
    for key, value in theirs["merged"].items():
        key = key if key in merged else "model.embed_tokens.weight"
        torch.testing.assert_close(merged[key], value, rtol=0, atol=4e-6, msg=key)


@pytest.mark.parametrize("name", ["tied", "both"])
@pytest.mark.parametrize("format", ["none", "nf4"])
def test_the_loss_in_chunks(name: str, format: str, tmp_path: Path) -> None:
    """The loss that never has whole logits: the numbers and gradients of cross entropy, of a sum
    and of each sample."""
    config = CASES[name]
    base = write_tiny_model(tmp_path / "model", tie_word_embeddings=name == "tied")
    model = load_model(base, adapter=config, format=format)
    start_adapters(model, config, str(base), seed=0)
    randomize_adapters(model)
    tokens = torch.randint(0, 577, (2, 24), generator=torch.Generator().manual_seed(0))
    tokens[:, 3::5], tokens[1, 20:] = 301, 576
    labels = tokens.roll(-1, 1)
    labels[:, :3] = -100
    params = list(adapter_parameters(model).values())

    def gradients(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, params))

    plain = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="none")
    plain, weights = plain.view(2, 24).sum(1), torch.tensor([0.3, -1.1])
    ids = torch.tensor([[0], [1]]).expand(2, 24)
    each = model(tokens, labels=labels, sample_ids=ids, num_samples=2)
    torch.testing.assert_close(each, plain)
    whole = model(tokens, labels=labels)
    torch.testing.assert_close(whole, plain.sum())
    torch.testing.assert_close(gradients(each @ weights), gradients(plain @ weights))
    plain = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(gradients(whole), gradients(plain))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, labels=labels), whole)


def test_mistakes(tmp_path: Path) -> None:
    """Each is one line, before anything is loaded."""
    config = CASES["tied"]
    for ids in ([], [3, 3], [-1], {}, {"norm": [3]}, {"lm_head": []}):
        with pytest.raises(InvalidField, match="different ids of tokens, or some for each of"):
            AdapterConfig("lora", trainable_token_indices=ids).check()
    with pytest.raises(InvalidField, match="null with method miss"):
        AdapterConfig("miss", trainable_token_indices=IDS).check()
    tied = write_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    untied = write_tiny_model(tmp_path / "untied")
    cases = [
        (tied, {"trainable_token_indices": [577]}, "577; expected ids of this model, 0 to 576"),
        (tied, {"trainable_token_indices": {"lm_head": IDS}}, "other ids of lm_head; expected the"),
        (tied, {"modules_to_save": ["embed_tokens", "lm_head"]}, "embed_tokens is trained as a wh"),
        (untied, {"trainable_token_indices": {"lm_head": IDS}, "targets": ["lm_head"]}, "is adapt"),
    ]
    for base, changes, message in cases:
        with pytest.raises(UserError, match=message):
            build_meta_model(base, adapter=replace(config, **changes), targets=["all-linear"])
    with pytest.raises(UserError, match="expected null with reference: base"):
        keep_start(build_meta_model(tied, adapter=config), "base", config)

    model = load_model(tied, adapter=config)
    start_adapters(model, config, str(tied), seed=0)
    folder = tmp_path / "adapter"
    save_adapter(model, config, str(tied), folder, cpu_world())
    assert read_adapter_config(folder).trainable_token_indices == IDS
    for ids in (None, IDS[:2], IDS[::-1]):
        other = replace(config, trainable_token_indices=ids)
        with pytest.raises(
            UserError, match=r"expected adapter.trainable_token_indices=\[576,3,301"
        ):
            check_adapter(other, folder, build_meta_model(tied, adapter=other))
    tensors, start = load_file(folder / WEIGHTS_FILE), "base_model.model."
    rows = tensors[f"{start}model.embed_tokens.{DELTA}"]
    copies = {f"{start}lm_head.{DELTA}": rows.clone()}  # as PEFT writes beside a resized base
    save_file(tensors | copies, folder / WEIGHTS_FILE)
    check_adapter(config, folder, model)
    settings = (folder / CONFIG_FILE).read_text()
    for wrong in ('"a"', "[1, 1]", '{"norm": [1]}', "[-1]", "true", "[true]", '{"lm_head": 3}'):
        written = json.loads(settings) | {"trainable_token_indices": json.loads(wrong)}
        (folder / CONFIG_FILE).write_text(json.dumps(written))
        with pytest.raises(UserError, match="expected different ids of tokens, of embed_tokens"):
            read_adapter_config(folder)


@pytest.mark.long
@pytest.mark.parametrize("name", ["tied", "both"])
def test_adapters_of_one_base(name: str, tmp_path: Path) -> None:
    """Each has its own rows; the base keeps its own."""
    base = write_tiny_model(tmp_path / "model", tie_word_embeddings=name == "tied")
    model = load_model(base, adapter=CASES[name], targets=["all-linear"])
    start_adapters(model, CASES[name], str(base), seed=0)
    randomize_adapters(model)
    save_adapter(model, CASES[name], str(base), tmp_path / "adapter", cpu_world())
    section, nf4 = ModelConfig(str(base), dtype="fp32"), QuantizationConfig("nf4")
    adapters = {"own": str(tmp_path / "adapter")}
    found = load_adapters_of_one_base(section, nf4, "base", adapters, cpu_world())
    tokens = torch.arange(24).view(1, 24)
    tokens[0, ::4] = 301
    with torch.no_grad():
        expected, plain = model(tokens), load_model(base, targets=["all-linear"])(tokens)
        torch.testing.assert_close(found["own"](tokens), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(found["base"](tokens), plain, rtol=0, atol=1e-5)
