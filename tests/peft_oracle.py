"""PEFT, as installed with the project, on a plain transformers model in a separate process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.hub_models.decoder import HubDecoder
from qfsdp.modules.hub_models.experts import stacked_experts
from qfsdp.modules.hub_models.linears import transposed_weights
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

PREAMBLE = """
import sys
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

config_dir, folder, *arguments = sys.argv[1:]
tokens = torch.load(f"{folder}/tokens.pt")

def base_model():
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config_dir)).float().eval()
    missing, unexpected = model.load_state_dict(load_file(f"{folder}/base.safetensors"), False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model
"""


def dequantized_base(model: nn.Module) -> dict[str, Tensor]:
    """The base weights that `model` computes with, under their Hugging Face names; of a model of
    transformers in its shapes."""
    found = {
        name: (p.dequantize() if isinstance(p, QuantizedTensor) else p.detach()).contiguous()
        for name, p in base_parameters(model)
    }
    if isinstance(model, HubDecoder):
        for name, param in stacked_experts(model.config.meta):
            found[name] = found.pop(f"{name}.weight").view(param.shape)
        for name in transposed_weights(model.config.meta):
            found[name] = found[name].t().contiguous()
    return found


def load_dequantized(model: nn.Module, reference: nn.Module) -> Any:
    """Loads what `model` computes with into transformers' module; returns what is missing there,
    and what it does not have. Our experts of a layer are rows below each other, theirs a stack."""
    base = dequantized_base(model)
    for name, param in reference.named_parameters():
        if (rows := base.pop(f"{name}.weight", None)) is not None:
            base[name] = rows.view(param.shape)
    return reference.load_state_dict(base, strict=False)


def run_peft(
    script: str, model_dir: Path, base: dict[str, Tensor], tokens: Tensor, folder: Path, *words: Any
) -> dict[str, Any]:
    """Runs PREAMBLE and `script`, and returns the `result.pt` that it writes to `folder`.

    Args:
        model_dir: folder of the `config.json` that the model is built from.
        base: weights of the script's `base_model()`.
        tokens: the script's `tokens`.
        words: the script's `arguments`.
    """
    if importlib.util.find_spec("peft") is None:
        pytest.skip("PEFT is not installed (pip install -e '.[dev]')")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(base, folder / "base.safetensors")
    torch.save(tokens, folder / "tokens.pt")
    command = [sys.executable, "-c", PREAMBLE + script, model_dir, folder, *words]
    done = subprocess.run(
        list(map(str, command)),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "result.pt")
