"""Tokens added to a model: ids, rows and logits as transformers has them after
`resize_token_embeddings`, and a merge that keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qfsdp.checkpoint.adapter_files import save_adapter
from qfsdp.checkpoint.weights.add_tokens import NewTokens, add_tokens, plan_tokens
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.mean_rows import TABLES
from qfsdp.checkpoint.weights.merge import Merge
from qfsdp.checkpoint.weights.safetensors_folder import SINGLE
from qfsdp.checkpoint.weights.write import MAX_FILE_BYTES
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.data import hf_tokenizer
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.quantized_linear import QuantizationConfig
from tests.models import adapted_model, cpu_world, randomize_adapters
from tests.tiny import ROOT, load_recipe, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")

TOKENS = ["<think>", "</think>"]
WORDS = "new_tokens=[<think>,</think>]"


def model_of(folder: Path, tokenizer: Path, rows: int, **changes: object) -> Path:
    write_tiny_model(folder, vocab_size=rows, hidden_size=48, num_hidden_layers=1, **changes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(tokenizer / name)
    return folder


def run(model: Path, output: Path, *words: str) -> None:
    recipe = load_recipe("add_tokens")
    argv = ["--config", str(ROOT / "configs/add_tokens.yaml"), f"model.path={model}"]
    cfg = load_config(recipe.Config, [*argv, f"output_dir={output}", *words])
    recipe.check(cfg)
    recipe.main(cfg)


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
def test_as_transformers(tied: bool, smollm2_dir: Path, tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", smollm2_dir, 49152, tie_word_embeddings=tied)
    run(model, tmp_path / "out", WORDS)
    theirs = AutoTokenizer.from_pretrained(model)
    theirs.add_tokens(TOKENS)
    text = "Hm. <think>2 + 3</think> 5"
    ids = theirs(text).input_ids
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text).input_ids == ids
    assert hf_tokenizer(str(tmp_path / "out")).encode_as_stored(text) == ids
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        old = before(torch.arange(20).view(1, 20)).logits
    before.resize_token_embeddings(len(theirs), pad_to_multiple_of=64)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    expected = before.state_dict()
    for key, value in after.state_dict().items():  # theirs adds noise of 1e-9 of the covariance
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-4, msg=key)
    assert len(after.get_input_embeddings().weight) == after.config.vocab_size == 49216
    with torch.no_grad():
        assert torch.equal(after(torch.arange(20).view(1, 20)).logits[..., :49152], old)


def test_tokens_before_that_have_no_rows(tmp_path: Path) -> None:
    """A padding token that was added to a tokenizer alone: its row was read from the bytes of
    another weight."""
    model = write_tiny_model(tmp_path / "model", vocab_size=48)
    new = NewTokens({"<q>": 50}, 64, {})
    add_tokens(ModelWeights(model), new, tmp_path / "out", cpu_world(), MAX_FILE_BYTES)
    before, after = (load_file(folder / SINGLE) for folder in (model, tmp_path / "out"))
    for name in TABLES:
        assert torch.equal(after[name][:48], before[name])
        mean = before[name].double().mean(0).float()
        assert torch.equal(after[name][48:], mean.expand(16, -1))


@pytest.mark.long
def test_unused_rows_and_merge(smollm2_dir: Path, tmp_path: Path) -> None:
    """Rows beyond the tokenizer are used first; a merged model has rows and tokenizer."""
    model = model_of(tmp_path / "model", smollm2_dir, 49153, tie_word_embeddings=True)
    run(model, tmp_path / "one", "new_tokens=[<think>]", "special=true")
    assert ModelWeights(tmp_path / "one").plain["model.embed_tokens.weight"].rows == 49153
    assert hf_tokenizer(str(tmp_path / "one")).special_tokens["<think>"] == 49152
    run(model, tmp_path / "out", WORDS, "pad_to_multiple_of=1")
    rows = ModelWeights(tmp_path / "out").plain["model.embed_tokens.weight"]
    assert rows.shape == (49154, 48)

    config = AdapterConfig("lora", 2, modules_to_save=["embed_tokens", "lm_head"])
    adapted = adapted_model(tmp_path / "out", config, format="none")
    weight = adapted.model.embed_tokens.weight
    torch.testing.assert_close(weight[-1], weight[:49152].mean(0), rtol=0, atol=1e-6)
    assert torch.equal(weight[-2], weight[-1])
    randomize_adapters(adapted)
    save_adapter(adapted, config, str(tmp_path / "out"), tmp_path / "adapter", cpu_world())
    merge = Merge(
        ModelWeights(tmp_path / "out"),
        QuantizationConfig("none"),
        torch.float32,
        tmp_path / "adapter",
        torch.float32,
    )
    merge.write(tmp_path / "merged", cpu_world())
    written = json.loads((tmp_path / "merged/config.json").read_bytes())
    assert written["vocab_size"] == 49154
    assert hf_tokenizer(str(tmp_path / "merged")).encode_as_stored("</think>")[-1] == 49153
    again = adapted_model(tmp_path / "merged", config, format="none").model.embed_tokens.weight
    assert torch.equal(again, weight)


@pytest.mark.long
def test_mistakes(smollm2_dir: Path, tmp_path: Path) -> None:
    weights = ModelWeights(model_of(tmp_path / "model", smollm2_dir, 49152))
    for tokens, message in (
        (["<|im_end|>"], r"new_tokens: '<\|im_end\|>' is token 2 already; expected new ones"),
        (["<a>", "<a>"], "new_tokens: '<a>'; expected different texts that are not empty"),
        ([" "], "new_tokens: ' '; expected different texts"),
    ):
        with pytest.raises(UserError, match=message):
            plan_tokens(weights, tokens, False, 64)
