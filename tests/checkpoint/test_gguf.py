"""GGUF files: read back by the package `gguf`, and run by llama.cpp where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import Tensor

from examples.demo.smollm2 import find_gguf, interleaved_to_halves
from qfsdp.checkpoint.export.gguf_tokenizer import (
    NORMAL,
    PRE_TOKENIZERS,
    TEMPLATE_FILE,
    read_gguf_tokenizer,
)
from qfsdp.checkpoint.lock import LOCK_FILE, FolderLock
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.quantize import quantize_folder
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.quantized_linear import QuantizationConfig
from tests.checkpoint.test_merge import HEAD_TOO, greedy, merged, plain_model, trained
from tests.data.test_tokenizer import CHATML, CORPUS, byte_level, write_folder
from tests.disk_limits import largest_file
from tests.models import cpu_world
from tests.tiny import ROOT, load_recipe, write_tiny_model

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.usefixtures("eager")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 48}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
SMOLLM3 |= {"num_hidden_layers": 5, "pad_token_id": 0}
GRANITE = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
GRANITE |= {"residual_multiplier": 0.3, "logits_scaling": 8.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_biases": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "llama_linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 16},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen2_yarn": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_scaling": YARN,
    },
    "qwen3": QWEN3 | {"tie_word_embeddings": True},
    "smollm3": SMOLLM3,
    "granite": GRANITE | {"embedding_multiplier": 12.0, "attention_multiplier": 0.2},
}
SIZES = {"intermediate_size": 576, "vocab_size": 608, "sliding_window": None}


def exported(model: Path, output: Path, *words: str) -> Path:
    """The recipe's file with its shipped config and the overrides `words`."""
    recipe = load_recipe("export")
    argv = ["--config", str(ROOT / "configs/export.yaml"), f"model.path={model}"]
    argv += ["adapter=null", "quantization.format=none"]
    cfg = load_config(recipe.Config, [*argv, f"output_dir={output}", *words])
    recipe.check(cfg)
    recipe.main(cfg)
    return recipe.gguf_file(cfg)


def write_model(folder: Path, **changes: Any) -> Path:
    """A tiny model with a tokenizer."""
    write_tiny_model(folder, **SIZES | changes)
    return write_folder(folder, byte_level(), chat_template=CHATML)


def contents(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A file's metadata, and its tensors as the package's reader finds them."""
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def values(tensor: Any) -> Tensor:
    return torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))


# ---- weights -----------------------------------------------------------------------------------

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
}


def as_in_transformers(fields: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors under Hugging Face's names, with their rows in Hugging Face's order."""
    found, arch = {}, fields["general.architecture"]
    heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}
    for name, tensor in tensors.items():
        if name == "rope_freqs.weight":
            continue
        *block, stem, suffix = name.split(".")
        value = values(tensor)
        if arch in ("llama", "smollm3", "granite") and stem in heads:
            count = fields[f"{arch}.attention.{heads[stem]}"]
            rows = value.numpy().reshape(len(value), -1)
            value = torch.from_numpy(interleaved_to_halves(rows, count).copy()).view(value.shape)
        prefix = f"model.layers.{block[1]}." if block else ""
        if not stem.endswith("_exps"):
            found[f"{prefix}{NAMES[stem]}.{suffix}"] = value
    return found | experts(tensors, "model")


def experts(tensors: dict[str, Any], body: str) -> dict[str, Tensor]:
    """The weights of mixtures, gate and up in one tensor as transformers has them."""
    found = {}
    for name in tensors:
        if name.endswith("ffn_gate_exps.weight"):
            names = (name.replace("gate", one) for one in ("gate", "up", "down"))
            gate, up, down = (values(tensors[one]) for one in names)
            prefix = f"{body}.layers.{name.split('.')[1]}.mlp.experts."
            found[f"{prefix}gate_up_proj"] = torch.cat((gate, up), 1)
            found[f"{prefix}down_proj"] = down
    return found


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", **MODELS[name])
    fields, tensors = contents(exported(model, tmp_path / "out", "gguf_type=f32"))
    found = as_in_transformers(fields, tensors)
    theirs = plain_model(model)
    tied = theirs.config.tie_word_embeddings
    expected = {n: t for n, t in theirs.state_dict().items() if not (tied and "lm_head" in n)}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    arch = fields["general.architecture"]
    assert fields[f"{arch}.rope.freq_base"] == 10000
    assert fields[f"{arch}.attention.key_length"] == MODELS[name].get("head_dim", 32)
    assert fields[f"{arch}.context_length"] == 256


def test_a_quantized_base_with_dora(tmp_path: Path) -> None:
    """As the folder that `recipes/merge` writes; a tied output layer becomes a tensor."""
    model = write_model(tmp_path / "model", tie_word_embeddings=True)
    trained(model, AdapterConfig("dora", 5, 7.0, targets=HEAD_TOO), tmp_path / "adapter")
    words = ["model.dtype=fp32", "quantization.format=nf4"]
    folder = merged(model, tmp_path / "adapter", tmp_path / "merged", *words, "dtype=fp32")
    expected = plain_model(folder).state_dict()
    quantized = tmp_path / "nf4"
    config = QuantizationConfig("nf4")
    quantize_folder(ModelWeights(model), config, quantized, cpu_world())
    for number, base in enumerate((model, quantized)):
        out = tmp_path / f"out{number}"
        words += ["gguf_type=f32", f"adapter={tmp_path / 'adapter'}"]
        found = as_in_transformers(*contents(exported(base, out, *words)))
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), key


@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0", "q4_0", "q5_1"])
def test_types_are_those_of_gguf(type: str, tmp_path: Path) -> None:
    """Every tensor has the bytes that the package makes of the whole fp32 tensor."""
    model = write_model(tmp_path / "model", intermediate_size=577)
    _, exact = contents(exported(model, tmp_path / "out", "gguf_type=f32"))
    fields, tensors = contents(exported(model, tmp_path / "out", f"gguf_type={type}"))
    wanted = gguf.GGMLQuantizationType[type.upper()]
    assert fields["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{type.upper()}"]
    for name, tensor in tensors.items():
        rows = values(exact[name]).numpy()
        kind = wanted
        if rows.ndim == 1:
            kind = gguf.GGMLQuantizationType.F32
        elif rows.shape[1] == 577 and type.startswith("q"):
            kind = gguf.GGMLQuantizationType.F16
        elif name in ("token_embd.weight", "output.weight") and type.startswith("q"):
            kind = gguf.GGMLQuantizationType.Q8_0
        assert tensor.tensor_type == kind, name
        bytes_of_all = gguf.quants.quantize(rows, kind)
        assert np.array_equal(tensor.data.view(np.uint8), bytes_of_all.view(np.uint8)), name


@pytest.mark.long
def test_smollm2_is_the_file_it_was_made_from(smollm2_dir: Path, tmp_path: Path) -> None:
    """llama.cpp's own converter wrote the file that the demo's folder is made from: tensors,
    tokenizer and sizes are the same."""
    fields, tensors = contents(exported(smollm2_dir, tmp_path / "out", "gguf_type=f32"))
    theirs, original = contents(find_gguf())
    assert tensors.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(values(tensors[name]), values(tensor)), name
    for key, value in theirs.items():
        if not key.startswith(("general.", "GGUF.", "quantize.")):
            assert fields[key] == value, key


# ---- rotary embeddings -------------------------------------------------------------------------


def test_llama3_frequencies_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = write_model(tmp_path / "model", **MODELS["llama3"])
    _, tensors = contents(exported(model, tmp_path / "out"))
    config = AutoConfig.from_pretrained(model)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 10000 ** -(torch.arange(0, 32, 2) / 32)
    factors = values(tensors["rope_freqs.weight"])
    torch.testing.assert_close(plain / factors, scaled)
    assert factors.min() == 1 and factors.max() == 8


@pytest.mark.parametrize(
    "name, kind, factor", [("llama_linear", "linear", 2), ("qwen2_yarn", "yarn", 4)]
)
def test_other_scalings_are_keys(name: str, kind: str, factor: float, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", **MODELS[name])
    fields, tensors = contents(exported(model, tmp_path / "out"))
    prefix = f"{fields['general.architecture']}.rope.scaling"
    assert "rope_freqs.weight" not in tensors
    assert (fields[f"{prefix}.type"], fields[f"{prefix}.factor"]) == (kind, factor)
    if kind == "yarn":
        assert fields[f"{prefix}.original_context_length"] == 64


def test_a_sliding_window_ends_the_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model", **MODELS["mistral"] | {"sliding_window": 40})
    fields, _ = contents(exported(model, tmp_path / "out"))
    assert fields["llama.context_length"] == 40
    assert (
        "warning: the context is 40 tokens, the model's sliding window" in capsys.readouterr().err
    )


# ---- tokenizers --------------------------------------------------------------------------------


SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def tokenizer_of(pre_tokenizer: str, specials: Sequence[str] = SPECIALS) -> Tokenizer:
    """A small byte-level tokenizer that cuts text as llama.cpp's `pre_tokenizer` does."""
    steps, ignores = next((k, v[1]) for k, v in PRE_TOKENIZERS.items() if v[0] == pre_tokenizer)
    parts: list[Any] = []
    for step in steps:
        if step == "Digits":
            parts.append(pre_tokenizers.Digits(individual_digits=True))
        elif step != "ByteLevel":
            parts.append(pre_tokenizers.Split(Regex(step), "isolated"))
    plain = steps[-1] == "ByteLevel"
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=plain))
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignores))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*CORPUS, *TEXTS] * 3, trainer)
    return tokenizer


TEXTS = [
    "It's 12345 o'clock,  isn't IT?\n\n  def f(x):\n\treturn x**2  # 3.14",
    "Zażółć gęślą jaźń — 你好, мир! 🙂🙂 CamelCase HTTPServer can't WE'LL",
    " leading, trailing \n\n\n",
    "приветМир ЗАГЛАВНЫЕ строчные ÉcoleÉté",
    "नमस्ते दुनिया। سَلَامٌ עֲלֵיכֶם",  # marks that belong to the letter before them
]


@pytest.mark.parametrize("name", [name for name, _ in PRE_TOKENIZERS.values()])
def test_byte_level_tokenizers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "model", **SIZES)
    tokenizer = tokenizer_of(name)
    tokenizer.add_tokens(["<think>"])
    write_folder(model, tokenizer, chat_template=CHATML)
    fields, _ = contents(exported(model, tmp_path / "out"))
    told = (
        "llama.cpp cuts some words into other tokens than training did" in capsys.readouterr().err
    )
    assert told == (name == "tekken")
    oracle = Tokenizer.from_file(str(model / "tokenizer.json"))
    count = oracle.get_vocab_size()
    tokens = fields["tokenizer.ggml.tokens"]
    assert tokens[:count] == [oracle.id_to_token(i) for i in range(count)]
    assert tokens[count:] == [f"[PAD{i}]" for i in range(count, 608)]
    types = fields["tokenizer.ggml.token_type"]
    kinds = gguf.TokenType
    assert types[:4] == [kinds.CONTROL] * 4 and types[4] == kinds.NORMAL
    assert types[count - 2 :] == [kinds.NORMAL, kinds.USER_DEFINED] + [kinds.UNUSED] * (608 - count)
    merges = json.loads((model / "tokenizer.json").read_text())["model"]["merges"]
    assert fields["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]
    assert fields["tokenizer.ggml.model"] == "gpt2" and fields["tokenizer.ggml.pre"] == name
    assert not fields["tokenizer.ggml.add_bos_token"]
    modelfile = (tmp_path / "out/out-Q8_0.Modelfile").read_text()
    assert "FROM ./out-Q8_0.gguf\n" in modelfile and "<|im_start|>user\n{{ .C" in modelfile
    assert [line for line in modelfile.splitlines() if line.startswith("PARAMETER")] == [
        'PARAMETER stop "</s>"',
        'PARAMETER stop "<|im_end|>"',
    ]
    assert not fields["tokenizer.ggml.add_space_prefix"]
    assert fields["tokenizer.ggml.bos_token_id"] == 0
    assert fields["tokenizer.ggml.eos_token_id"] == 1
    assert fields["tokenizer.chat_template"] == CHATML


def write_sentence_pieces(folder: Path, prefix: bool = True, **changes: Any) -> Any:
    """Writes a small SentencePiece model as Llama 2 has it, and returns it. Without `prefix` as Yi
    has it: no space is put before a text."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    text = folder / "corpus.txt"
    text.write_text("\n".join([*CORPUS, *TEXTS] * 20))
    SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        **{"model_type": "bpe", "vocab_size": 400, "user_defined_symbols": ["<sep>"]} | changes,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        minloglevel=2,
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    added = {"400": {"content": "<|im_end|>", "special": True}}
    config |= {"added_tokens_decoder": added, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    sizes = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(sizes | {"bos_token_id": 1, "eos_token_id": 2}))
    return SentencePieceProcessor(str(folder / "tokenizer.model"))


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_pieces(prefix: bool, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", **SIZES)
    oracle = write_sentence_pieces(model, prefix)
    fields, _ = contents(exported(model, tmp_path / "out"))
    tokens, types = (fields[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type"))
    assert tokens[:401] == [*(oracle.IdToPiece(i) for i in range(400)), "<|im_end|>"]
    scores = fields["tokenizer.ggml.scores"]
    assert scores[:400] == [oracle.GetScore(i) for i in range(400)] and len(scores) == 608
    kinds = gguf.TokenType
    assert types[:3] == [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
    assert types[3:5] == [kinds.USER_DEFINED, kinds.BYTE]
    assert types[399:402] == [kinds.NORMAL, kinds.CONTROL, kinds.UNUSED]
    assert fields["tokenizer.ggml.model"] == "llama" and fields["tokenizer.ggml.pre"] == "default"
    assert fields["tokenizer.ggml.add_space_prefix"] == prefix
    assert fields["tokenizer.ggml.bos_token_id"] == 1
    assert fields["tokenizer.ggml.eos_token_id"] == 2


def test_words_of_sentence_pieces_that_a_folder_adds(tmp_path: Path) -> None:
    """Yi's files have <|im_start|> as a word of SentencePiece, and as a special token beside it."""
    model = write_tiny_model(tmp_path / "model", **SIZES)
    oracle = write_sentence_pieces(model)
    file = model / "tokenizer_config.json"
    added = {"3": {"content": "<sep>", "special": True}}
    added |= {"399": {"content": oracle.IdToPiece(399), "special": False}}
    added |= {"0": {"content": "<unk>", "special": True}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"added_tokens_decoder": added}))
    types, kinds = read_gguf_tokenizer(model, 608).types, gguf.TokenType
    assert (types[0], types[3], types[399]) == (kinds.UNKNOWN, kinds.CONTROL, kinds.USER_DEFINED)


def as_json(oracle: Any) -> Tokenizer:
    """A SentencePiece model as transformers writes it: all pairs that make a word, best first."""
    words = {oracle.IdToPiece(i): i for i in range(oracle.GetPieceSize())}
    pairs = [
        (word[:at], word[at:])
        for word in sorted(words, key=lambda word: -oracle.GetScore(words[word]))
        for at in range(1, len(word))
        if not word.startswith("<") and {word[:at], word[at:]} <= words.keys()
    ]
    model = models.BPE(words, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    replaced = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replaced])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(["<sep>"])
    return tokenizer


def test_sentence_pieces_of_tokenizer_json_alone(tmp_path: Path) -> None:
    """transformers 5 writes no tokenizer.model. One that merges pairs in another way is refused."""
    model = write_tiny_model(tmp_path / "model", **SIZES)
    tokenizer = as_json(write_sentence_pieces(model))
    write_folder(model, tokenizer)
    expected = read_gguf_tokenizer(model, 608)
    (model / "tokenizer.model").unlink()
    found = read_gguf_tokenizer(model, 608)
    assert (found.tokens, found.types) == (expected.tokens, expected.types)
    made = [i for i in range(4, 400) if found.types[i] == NORMAL and len(found.tokens[i]) > 1]
    order = [sorted(made, key=one.scores.__getitem__) for one in (found, expected)]
    assert len(made) > 20 and order[0] == order[1], "words are made in the same order"
    described = json.loads((model / "tokenizer.json").read_text())
    merges = described["model"]["merges"]
    words = ["".join(pair) for pair in merges]
    several = next(i for i, word in enumerate(words) if words.count(word) > 1)
    apart = [*merges[:several], *merges[several + 1 :]]  # one way to make a word of several
    for others in (apart, [*apart, merges[several]]):
        described["model"]["merges"] = others
        (model / "tokenizer.json").write_text(json.dumps(described))
        with pytest.raises(UserError, match="no tokenizer that llama.cpp has; expected"):
            read_gguf_tokenizer(model, 608)


def test_tokens_of_several_spaces(tmp_path: Path) -> None:
    """Gemma has such words: llama.cpp finds and prints them as they are in the file."""
    model = write_tiny_model(tmp_path / "model", **SIZES)
    write_sentence_pieces(model, False, user_defined_symbols=["\u2581\u2581", "<sep>"])
    assert read_gguf_tokenizer(model, 608).tokens[3:5] == ["  ", "<sep>"]


def test_what_training_puts_around_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens may be named in other files alone. `tokenizer.json` decides about bos, not the config.
    Ids that are no tokens are left out. A question never ends with eos. The file of the template
    comes before the one in the config."""
    model = write_tiny_model(tmp_path / "model", **SIZES)
    tokenizer, special = tokenizer_of("llama-bpe"), [("<s>", 0), ("</s>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", "$A $B", special)
    listed = {"500": {"content": "<think>", "special": False}}
    flags = {"add_bos_token": False, "add_eos_token": True, "chat_template": "another"}
    write_folder(model, tokenizer, added_tokens_decoder=listed, **flags)
    (model / TEMPLATE_FILE).write_text(CHATML)
    sizes = json.loads((model / "config.json").read_text())
    ids = {"pad_token_id": -1, "eos_token_id": [-1, 2], "unk_token_id": 4000, "sep_token_id": 3}
    (model / "config.json").write_text(json.dumps(sizes | ids))
    fields, _ = contents(exported(model, tmp_path / "out"))
    named = {key: value for key, value in fields.items() if key.endswith("_token_id")}
    assert {key.split(".")[-1].removesuffix("_token_id"): i for key, i in named.items()} == {
        **{"bos": 0, "eos": 1, "seperator": 3, "eot": 3},
    }
    assert fields["tokenizer.ggml.tokens"][500] == "<think>"
    assert fields["tokenizer.ggml.token_type"][500] == gguf.TokenType.USER_DEFINED
    assert fields["tokenizer.ggml.add_bos_token"] and not fields["tokenizer.ggml.add_eos_token"]
    assert fields["tokenizer.chat_template"] == CHATML
    assert "warning: the chat template has no bos, and llama.cpp" in capsys.readouterr().err
    (model / TEMPLATE_FILE).write_text("{{ bos_token }}" + CHATML)
    exported(model, tmp_path / "other")
    assert "bos" not in capsys.readouterr().err


def test_a_space_before_a_text_is_that_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tokenizer.json` is what training reads, where a folder has both. llama.cpp puts a space
    before a text and after special tokens, or nowhere: chats have the tokens of training."""
    model = write_tiny_model(tmp_path / "model", **SIZES)
    write_sentence_pieces(model)
    tokenizer = Tokenizer(models.BPE({"a": 0, "\u2581": 1}, [], unk_token="a"))
    write_folder(model, tokenizer)
    assert read_gguf_tokenizer(model, 608).given.spaces == (False, False)
    tokenizer.normalizer = normalizers.Prepend("\u2581")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    write_folder(model, tokenizer)
    assert read_gguf_tokenizer(model, 608).given.spaces == (True, True)
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    for template in (None, CHATML):
        write_folder(model, tokenizer, chat_template=template)
        fields, _ = contents(exported(model, tmp_path / f"out{bool(template)}"))
        assert fields["tokenizer.ggml.add_space_prefix"] is (template is None)
        assert "but not after special tokens; llama.cpp does" in capsys.readouterr().err


def test_the_template_of_the_adapter(tmp_path: Path) -> None:
    """An adapter that was trained with a template of its own answers with it, and ends with its
    end."""
    model = write_tiny_model(tmp_path / "model", **SIZES)
    write_folder(model, tokenizer_of("gpt-2"))
    trained(model, AdapterConfig("lora", 2), tmp_path / "adapter", format="none")
    (tmp_path / "adapter" / TEMPLATE_FILE).write_text(CHATML)
    fields, _ = contents(exported(model, tmp_path / "out", f"adapter={tmp_path / 'adapter'}"))
    assert fields["tokenizer.chat_template"] == CHATML
    assert fields["tokenizer.ggml.tokens"][fields["tokenizer.ggml.eot_token_id"]] == "<|im_end|>"


# ---- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        (
            {"architectures": ["OlmoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2},
            [],
            "config.json: gguf has no OlmoeForCausalLM here; expected LlamaForCausalLM, Mistral",
        ),
        (QWEN3 | {"attention_bias": True}, [], "attention_bias true; expected false: llama.cpp's"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            [],
            "rope type 'dynamic'; expected default, linear, llama3 or yarn: llama.cpp has no other",
        ),
        (
            {"rope_scaling": YARN | {"beta_fast": 16.0}},
            [],
            "yarn with settings of its own; expected factor and original_max_position_embeddings",
        ),
        (
            {"rope_scaling": LLAMA3, "architectures": ["Qwen2ForCausalLM"]},
            [],
            "rope type 'llama3'; expected another: llama.cpp's qwen2 has no such scaling",
        ),
        (GRANITE | {"mlp_bias": True}, [], "mlp_bias true; expected false: llama.cpp's granite"),
        (SMOLLM3 | {"no_rope_layer_interval": 3}, [], "no_rope_layers; expected every fourth"),
        ({"vocab_size": 300}, [], "the embeddings 300 rows; expected a row for every token"),
        (
            {},
            ["format=gptq"],
            "format: 'gptq' is not valid; expected one of 'gguf', 'w4a16', 'lora'",
        ),
        ({}, ["gguf_type=q4_k"], "gguf_type: 'q4_k' is not valid; expected one of 'f32', 'f16',"),
        (
            {},
            ["quantization.format=nf4"],
            "quantization.format: 'nf4'; expected none without adapter",
        ),
    ],
)
def test_mistakes_are_reported_in_one_line(
    changes: dict[str, Any], words: list[str], message: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", **changes)
    with pytest.raises(UserError) as error:
        exported(model, tmp_path / "out", *words)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_an_existing_file_and_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    file = exported(model, tmp_path / "out")
    names = {"out-Q8_0.gguf", "out-Q8_0.Modelfile", LOCK_FILE}
    assert {f.name for f in file.parent.iterdir()} == names
    with (
        FolderLock(tmp_path / "out", "output_dir"),
        pytest.raises(UserError, match="being written"),
    ):
        exported(model, tmp_path / "out", "gguf_type=f16")
    with pytest.raises(UserError, match=r"output_dir: '.*out-Q8_0.gguf' exists; expected a new"):
        exported(model, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)
        with pytest.raises(UserError, match=r"needs the package gguf; expected `pip install gguf"):
            exported(model, tmp_path / "other")


def test_tokenizers_that_llama_cpp_lacks(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", **SIZES)
    with pytest.raises(
        UserError, match="no tokenizer that llama.cpp has; expected a tokenizer.json"
    ):
        read_gguf_tokenizer(folder, 608)
    tokenizer = byte_level()
    by_space = [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(by_space)
    write_folder(folder, tokenizer)
    with pytest.raises(UserError, match=r"tokenizer.json: cuts text into words as no tokenizer of"):
        read_gguf_tokenizer(folder, 608)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_text("no model")
    with pytest.raises(
        UserError, match=r"tokenizer.model: cannot be read; expected a model of Sent"
    ):
        read_gguf_tokenizer(folder, 608)
    write_sentence_pieces(folder, model_type="unigram")
    with pytest.raises(
        UserError, match=r"tokenizer.model: is no BPE; expected one: llama.cpp cuts"
    ):
        read_gguf_tokenizer(folder, 608)


@pytest.mark.parametrize("type", ["f16", "q4_1"])  # q4_1: for the least number of a block
def test_a_number_that_f16_does_not_have(type: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = write_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = -70000.0
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(UserError, match="up_proj.weight has numbers too large for f16"):
        exported(model, tmp_path / "out", f"gguf_type={type}")
    assert not list((tmp_path / "out").glob("*.gguf*"))


def test_a_full_disk(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with largest_file(300_000), pytest.raises(UserError, match=r"out-F16.gguf' cannot be written"):
        exported(model, tmp_path / "out", "gguf_type=f16")
    assert not list((tmp_path / "out").glob("*.gguf*"))
    assert exported(model, tmp_path / "out", "gguf_type=f16").is_file()


# ---- memory ------------------------------------------------------------------------------------

MEMORY_SCRIPT = """
import json, re, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.checkpoint.test_gguf import exported

def peak():
    # Not ru_maxrss: in a child it starts with the value of its parent.
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024

folder, peaks = Path(sys.argv[2]), []
for size in ("small", "large"):
    words = ["quantization.format=nf4", f"adapter={folder / size / 'a'}"]
    exported(folder / size, folder / f"{size}.out", *words)
    peaks.append(peak())
print(json.dumps(peaks))
"""


@pytest.mark.long
def test_memory_is_that_of_some_rows(tmp_path: Path) -> None:
    """Compared with half as wide a feed-forward, of which no linear exists whole but in 4 bits. A
    copy of one in fp32 would add 102 MB, in bf16 51 MB."""
    wide = 800_000
    for name, inner in (("small", wide // 2), ("large", wide)):
        sizes = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
        write_model(tmp_path / name, num_hidden_layers=1, **sizes, intermediate_size=inner)
        section = AdapterConfig("dora", 4, 4.0, targets=["up_proj"])
        trained(tmp_path / name, section, tmp_path / name / "a", format="none")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, ROOT, tmp_path],
        # glibc's malloc keeps freed tensors of up to 32 MB, by chance some 200 MB of them.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    small, large = json.loads(done.stdout.splitlines()[-1])
    print(f"{small / 1e6:.0f} MB, and {(large - small) / 1e6:.0f} for twice the width")
    assert large - small < 0.8 * 2 * 64 * wide


# ---- llama.cpp ---------------------------------------------------------------------------------

PROMPTS = [
    *("The lighthouse keeper walked up the stairs", "Water boils at", "The quick brown fox"),
    *("In 1969, the first man", "def fibonacci(n):\n", "The capital of France is"),
    *("Once upon a time, there was a", "Photosynthesis is the process by which"),
    *("My favourite recipe for bread begins with", "The three laws of motion say that"),
]


def llama(file: Path, **options: Any) -> Any:
    """The file in llama.cpp, with keys and values in fp32: by default they are rounded to f16."""
    llama_cpp = pytest.importorskip("llama_cpp")
    options |= dict.fromkeys(("type_k", "type_v"), llama_cpp.GGML_TYPE_F32)
    return llama_cpp.Llama(str(file), n_ctx=256, n_threads=1, verbose=False, **options)


def greedy_in_llama_cpp(model: Any, tokens: list[int], count: int) -> list[int]:
    found: list[int] = []
    for token in model.generate(tokens, temp=0.0):
        found.append(token)
        if len(found) == count:
            break
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same(name: str, tmp_path: Path) -> None:
    """Every family, with positions beyond the original context of scaled rotary embeddings."""
    model = write_model(tmp_path / "model", **MODELS[name])
    runtime = llama(exported(model, tmp_path / "out", "gguf_type=f32"), logits_all=True)
    tokens = torch.randint(4, 400, (1, 120), generator=torch.Generator().manual_seed(0))
    runtime.eval(tokens[0].tolist())
    theirs = torch.from_numpy(np.array(runtime.scores[:120]))
    with torch.no_grad():
        ours = plain_model(model)(tokens).logits[0]
    difference = (theirs - ours).abs().max().item()
    print(f"{name}: logits differ by {difference:.1e}")
    assert difference < 1e-5 * ours.abs().max()


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [*(name for name, _ in PRE_TOKENIZERS.values()), "default", "json", "no prefix", "spaces"],
)
def test_llama_cpp_cuts_text_the_same(name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", **SIZES)
    if name in ("default", "json", "no prefix", "spaces"):
        words = ["<sep>", *("\u2581" * n for n in (2, 3, 4) if name == "spaces")]
        prefix = name in ("default", "json")
        oracle = write_sentence_pieces(folder, prefix, user_defined_symbols=words)
        encode = oracle.EncodeAsIds
        if name == "json":
            write_folder(folder, as_json(oracle))
            (folder / "tokenizer.model").unlink()
    else:
        write_folder(folder, tokenizer_of(name))
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.no_truncation()
        backend.no_padding()

        def encode(text: str) -> list[int]:
            return list(backend.encode(text, add_special_tokens=False).ids)

    runtime = llama(exported(folder, tmp_path / "out"), vocab_only=True)
    texts = [*CORPUS, *TEXTS, *PROMPTS]
    # With a prefix, llama.cpp puts a space after each of these too, as Llama's older tokenizers do.
    texts += ["one<sep>two  <sep>   three"] if name in ("no prefix", "spaces") else []
    if name == "spaces":
        assert runtime.detokenize(encode(texts[-1])).decode() == texts[-1]
    others = [text for text in texts if runtime.tokenize(text.encode(), False) != encode(text)]
    # A rule of llama.cpp's own in place of this tokenizer's; an export says so.
    assert others == (TEXTS[-1:] if name == "tekken" else [])


@pytest.mark.long
def test_llama_cpp_answers_as_we_do(smollm2_dir: Path, tmp_path: Path) -> None:
    """SmolLM2 with a DoRA adapter over 4-bit weights: greedy text of ten prompts."""
    section = AdapterConfig("dora", 8, 8.0)
    adapted = trained(smollm2_dir, section, tmp_path / "adapter")
    words = ["quantization.format=nf4", f"adapter={tmp_path / 'adapter'}"]
    runtime = llama(exported(smollm2_dir, tmp_path / "out", *words, "gguf_type=f16"))
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    for prompt in PROMPTS:
        tokens = tokenizer.encode(prompt).ids
        assert runtime.tokenize(prompt.encode(), add_bos=False, special=True) == tokens
        ours = greedy(adapted, torch.tensor([tokens]), 8)
        theirs = greedy_in_llama_cpp(runtime, tokens, 8)
        assert theirs == ours, prompt
