"""A small random model on disk, whose sizes no number of ranks divides."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qfsdp.config import recipe_files as recipes
from qfsdp.config.load import load_config
from qfsdp.tensor_subclasses.kernels.ability import has_compiler

needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason="inductor needs a C++ compiler (install g++)"
)
ROOT = Path(__file__).parent.parent
TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 577,
    "hidden_size": 192,
    "intermediate_size": 577,  # rows that 2, 3, 4 ranks do not divide, columns that 64 does not
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
DELTA: dict[str, Any] = {  # changes: one of its two layers is recurrent
    **{"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "head_dim": 32},
    **{"num_hidden_layers": 2, "full_attention_interval": 2, "linear_num_value_heads": 4},
    **{"linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
}
MOE: dict[str, Any] = {  # changes: a mixture of experts
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 16},
    **{"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 36},
}
GPT_OSS: dict[str, Any] = {  # changes: one with sinks and windows
    **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 32},
    **{"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 36},
    "sliding_window": 16,
}


def write_tiny_model(folder: Path, shards: int = 1, seed: int = 0, **changes: object) -> Path:
    """A random model folder: `shards` safetensors files, with an index if there are several."""
    from qfsdp.modules.decoder_config import DecoderConfig
    from qfsdp.modules.transformer import Decoder

    folder.mkdir(parents=True, exist_ok=True)
    config = TINY_CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    model = Decoder(DecoderConfig.from_dict(config))
    tensors = {}
    for name, param in model.named_parameters():
        scale = 0.3 if "norm" in name else param.shape[-1] ** -0.5
        tensors[name] = torch.randn_like(param) * scale + (1.0 if "norm" in name else 0.0)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_tiny_run(folder: Path, config: str, **changes: object) -> Path:
    """A folder with a random model and `config.yaml`, in which `{folder}` is this folder."""
    write_tiny_model(folder / "model", **changes)
    (folder / "config.yaml").write_text(config.format(folder=folder))
    return folder


def write_tiny_model_with_tokenizer(folder: Path, tokenizer: Path, **changes: object) -> Path:
    """A random model folder with the tokenizer of another folder: SmolLM2's 49,152 tokens."""
    write_tiny_model(folder, vocab_size=49152, **changes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(tokenizer / name)
    return folder


def load_recipe(name: str = "qdora_distributed") -> ModuleType:
    """A recipe file as a module; `recipes/` is not a package."""
    return recipes.load_recipe(ROOT / f"recipes/{name}.py")


def recipe_config(
    recipe: Any, folder: Path, dtype: str = "fp32", implementation: str = "auto", **fields: Any
) -> Any:
    """A recipe's config without data and optimizer, for tests that call the recipe's functions."""
    model = recipe.ModelConfig(str(folder), dtype=dtype, implementation=implementation)
    unused = {"output_dir": "unused", "tokenizer": None, "dataset": None, "optimizer": None}
    return recipe.Config(**unused | {"model": model} | fields)


def run_recipe(name: str, argv: list[str]) -> None:
    """Runs a recipe in this process, or on each rank that calls it.

    Rank 0 alone checks: others could see files that it writes already. A command checks before it
    starts ranks.
    """
    recipe = load_recipe(name)
    cfg = load_config(recipe.Config, argv)
    if os.environ.get("RANK", "0") == "0":
        recipe.check(cfg)
    recipe.main(cfg)


def run_in_turn(name: str, folder: Path, *runs: Sequence[str]) -> None:
    """Runs a recipe with the config of a folder and the words of each run, as `run_recipe` does."""
    for words in runs:
        run_recipe(name, ["--config", f"{folder}/config.yaml", *words])
