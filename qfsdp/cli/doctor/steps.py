"""Two updates of a tiny QDoRA on any number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.common.files import write_json
from qfsdp.config import recipe_files as recipes
from qfsdp.data import Batch
from qfsdp.distributed.world import init_world
from qfsdp.modules.adapters.linears import parameter_groups
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.modules.transformer import Decoder
from qfsdp.training.steps import StepClock

# 195 and 131 rows: 2, 4 and 8 ranks do not divide them.
TINY: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
TINY |= {"vocab_size": 131, "hidden_size": 96, "intermediate_size": 195, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
TINY |= {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False}


def steps(folder: Path, ranks: int, rank: int, size: int) -> dict[str, list[float]]:
    """Losses of two updates, with a base in fp32 and in NF4, by the recipe's own functions.

    Args:
        folder: where the model is written.
        ranks: rows of an update, of which this rank takes every `size`-th from `rank` on.
    """
    os.environ["QFSDP_EAGER_KERNELS"] = "1"  # compiling them takes longer than all else
    found = recipes.find_recipe("recipes/qdora_distributed")
    assert found is not None
    recipe, world = recipes.load_recipe(found), init_world()
    path = folder / f"model{rank}of{size}"
    path.mkdir()
    write_json(path / "config.json", TINY)
    torch.manual_seed(0)  # the same model on every rank
    weights = Decoder(DecoderConfig.from_dict(TINY)).named_parameters()
    of = {n: torch.randn(p.shape) * p.shape[-1] ** -0.5 + ("norm" in n) for n, p in weights}
    save_file(of, path / "model.safetensors", metadata={"format": "pt"})
    rows = torch.randint(131, (ranks, 1, 33), generator=torch.Generator().manual_seed(1))
    batches = [Batch(row[:, :-1], row[:, 1:], 32) for row in rows[rank::size]]
    losses: dict[str, list[float]] = {}
    for name, base in {"fp32": QuantizationConfig("none"), "nf4": QuantizationConfig()}.items():
        cfg = recipe.Config("", ModelConfig(str(path), dtype="fp32"), None, None, None)
        cfg.quantization = base
        model = recipe.load_model(cfg, world)
        optimizer = torch.optim.AdamW(parameter_groups(model, cfg.adapter), lr=0.01)
        given = (model, optimizer, None, batches, 1.0, world, StepClock(world.device))
        losses[name] = [recipe.train_step(*given)["loss"] for _ in range(2)]
    return losses
