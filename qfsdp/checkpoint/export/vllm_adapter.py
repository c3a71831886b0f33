"""Adapters that vLLM serves beside their base: what its loader takes, and what it refuses.

vLLM reads LoRA in PEFT's format, the format that qfsdp writes, so nothing is converted. It refuses
DoRA (`use_dora`) and knows no IA3; such adapters are merged. Its server has to be started with a
rank at least the adapter's, one of `RANKS`. As in `vllm/config/lora.py` and
`vllm/lora/peft_helper.py` of vLLM 0.33.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from shlex import join, quote

from qfsdp.checkpoint.adapter_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    read_adapter_config,
    read_adapter_header,
)
from qfsdp.checkpoint.expert_adapter_files import is_of_experts
from qfsdp.checkpoint.saved_template import TEMPLATE_FILE
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.fp8_layout import quantization_of
from qfsdp.checkpoint.weights.quantize import adapted_model, stored_quantization
from qfsdp.common.errors import UserError
from qfsdp.common.files import json_object, whole_file, writing
from qfsdp.distributed.world import World
from qfsdp.modules.adapters.config import NAMES

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # `--max-lora-rank`


@dataclass(frozen=True)
class VllmAdapter:
    """An adapter that vLLM loads.

    Fields:
        base: `model.path`.
        folder: of the adapter.
        rank: for `--max-lora-rank`.
    """

    base: str
    folder: Path
    rank: int

    def write(self, folder: Path, world: World) -> None:
        """Copies the adapter on rank 0; every rank must call it. Raises UserError: on every rank:
        the folder cannot be written."""
        with world.same_error():
            if world.rank != 0:
                return
            with writing("output_dir", folder):
                folder.mkdir(parents=True, exist_ok=True)
                for name in (TEMPLATE_FILE, WEIGHTS_FILE, CONFIG_FILE):
                    if (self.folder / name).is_file():
                        with whole_file(folder / name) as partial:
                            shutil.copyfile(self.folder / name, partial)

    def command(self, folder: Path) -> str:
        """The command that serves base and adapter, with the adapter in `folder`."""
        words = ["vllm", "serve", self.base, "--enable-lora", "--max-lora-rank", str(self.rank)]
        words += ["--lora-modules", f"{folder.resolve().name}={folder}"]
        if (self.folder / TEMPLATE_FILE).is_file():
            words += ["--chat-template", str(folder / TEMPLATE_FILE)]
        return join(words)


def plan_adapter(weights: ModelWeights, base: str, adapter: Path) -> VllmAdapter:
    """Checks that vLLM loads an adapter. Reads the adapter, and headers of the base.

    Args:
        base: `model.path`, as the user wrote it.

    Raises:
        UserError: vLLM does not load it, and the command that merges it, or does not load the base;
            or the adapter is not one of this base (see `check_adapter`).
    """
    config = read_adapter_config(adapter)
    experts = any(map(is_of_experts, read_adapter_header(adapter)))
    reason = None
    if config.method != "lora":
        reason = f"is {NAMES[config.method]}, which vLLM does not load"
    elif experts:
        reason = "adapts experts, which vLLM loads with options of its own"
    elif config.ends:
        reason = "has linears with a rank or alpha of their own, which vLLM does not read"
    elif config.trains_more:
        reason = "has whole modules or rows of tokens, which vLLM does not load"
    elif config.rank > RANKS[-1]:
        reason = f"has rank {config.rank}, and vLLM serves at most {RANKS[-1]}"
    if reason is not None:
        raise UserError(
            f"adapter: '{adapter}' {reason}; expected LoRA, or merge it: tune run recipes/merge "
            f"--config configs/merge.yaml model.path={quote(base)} adapter={quote(str(adapter))} "
            "output_dir=models/merged"
        )
    stored = quantization_of(json_object(weights.folder / "config.json"))
    if stored is not None and stored.get("quant_method") == "qfsdp":
        raise UserError(
            f"model.path: '{base}' is quantized in qfsdp's own layout, which vLLM does not load; "
            "expected the original model, or one that recipes/quantize writes with layout=bnb"
        )
    adapted_model(weights, stored_quantization(weights), adapter)
    return VllmAdapter(base, adapter, next(rank for rank in RANKS if rank >= config.rank))
