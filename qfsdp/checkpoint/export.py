"""Adapters in PEFT's format: what transformers, vLLM and others load.

A folder with `adapter_config.json` (https://huggingface.co/docs/peft/developer_guides/checkpoint)
and `adapter_model.safetensors`, fp32, whose keys are the Hugging Face names of the linears
behind `base_model.model.`:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight            [rank, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight            [out, rank]
    base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector    [out]
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qfsdp.distributed import World
from qfsdp.errors import UserError
from qfsdp.modules.adapters import AdapterConfig, adapted_linears
from qfsdp.modules.shards import local_part, local_rows, whole_tensor

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_FIELDS = {
    "lora_A": "lora_A.weight",
    "lora_B": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
}


def adapter_parameters(model: nn.Module) -> dict[str, Tensor]:
    """PEFT's key -> parameter of every trained adapter tensor of `model`."""
    return {
        f"base_model.model.{name}.{peft_field}": param
        for name, module in adapted_linears(model)
        for field, peft_field in PEFT_FIELDS.items()
        if (param := getattr(module, field)) is not None
    }


@torch.no_grad()
def save_adapter(
    model: nn.Module, config: AdapterConfig, base: str, folder: Path, world: World
) -> None:
    """Writes the adapters of `model` to `folder` in PEFT's format, from rank 0.

    Every rank must call it: adapter tensors are gathered one at a time; the base is not.

    Args:
        base: the base model's path or name, recorded in `adapter_config.json`.
    """
    tensors = {}
    for key, param in adapter_parameters(model).items():
        tensor = whole_tensor(param)
        if world.rank == 0:
            tensors[key] = tensor.cpu().contiguous()
    if world.rank != 0:
        return
    targets = sorted({name.rpartition(".")[2] for name, _ in adapted_linears(model)})
    folder.mkdir(parents=True, exist_ok=True)
    # The config last and by rename: a folder that has it has all of its weights.
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    partial = folder / (CONFIG_FILE + ".partial")
    partial.write_text(json.dumps(_peft_config(config, targets, base), indent=2) + "\n")
    partial.replace(folder / CONFIG_FILE)


def _peft_config(config: AdapterConfig, targets: list[str], base: str) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_dora": config.method == "dora",
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


@torch.no_grad()
def load_adapter(model: nn.Module, folder: Path) -> None:
    """Fills the adapters of `model` from a folder that `save_adapter` wrote.

    The norms of DoRA follow from the loaded tensors: call `refresh_dora_norms` afterwards.

    Raises:
        UserError: the folder's tensors are not those of this model's adapters.
    """
    tensors, scaling = _read_adapter(folder)
    params = adapter_parameters(model)
    for key in sorted(params.keys() ^ tensors.keys()):
        where = "is missing" if key in params else "has no place in this model's adapters"
        raise UserError(f"{folder / WEIGHTS_FILE}: tensor {key!r} {where}")
    for name, module in adapted_linears(model):
        if module.scaling != scaling:
            raise UserError(
                f"{folder / CONFIG_FILE}: lora_alpha / r is {scaling}; this model's is "
                f"{module.scaling} ({name})"
            )
    for key, param in params.items():
        if tensors[key].shape != param.shape:
            raise UserError(
                f"{folder / WEIGHTS_FILE}: tensor {key!r} has shape {list(tensors[key].shape)}; "
                f"this model's is {list(param.shape)}"
            )
        local_part(param).copy_(tensors[key][local_rows(param)])


def _read_adapter(folder: Path) -> tuple[dict[str, Tensor], float]:
    """The tensors of an adapter folder, and lora_alpha / r."""
    weights, config = folder / WEIGHTS_FILE, folder / CONFIG_FILE
    for file in (weights, config):
        if not file.is_file():
            raise UserError(f"{file} does not exist; expected an adapter in PEFT's format")
    try:
        tensors = load_file(weights)
        written = json.loads(config.read_text())
        return tensors, written["lora_alpha"] / written["r"]
    except SafetensorError as error:
        raise UserError(f"{weights}: truncated or not a safetensors file ({error})") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{config}: not an adapter's config ({error!r})") from None
