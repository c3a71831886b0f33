"""Fold LoRA, DoRA or IA3 adapters into their base: one model folder, for any inference engine.

    tune run recipes/merge --config configs/merge.yaml \\
        model.path=meta-llama/Meta-Llama-3-70B adapter=runs/x/adapter output_dir=models/x

The merged model computes what training computed: an adapter that was trained over 4-bit weights is
folded into their dequantized values. So `model.path`, `model.dtype` and `quantization` come
from the adapter's folder; a warning tells what keys change. Weights that are quantized while they
are loaded differ between GPUs and CPUs in one scale of 700: merge on the hardware of the run, or
use a quantized folder as `model.path` in both.

`requantize=nf4-bnb` writes 4-bit weights, which transformers loads with bitsandbytes, and qfsdp
as `model.path`. Weights with an adapter, and those of an HQQ base, are rounded once more.

A rank holds one weight at a time, so a model of any size fits. Several ranks divide the files among
them: one process per visible accelerator, or `--nproc_per_node N`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from qfsdp.checkpoint.adapter_base import OfAdapter, tell_another_base
from qfsdp.checkpoint.model_card import CARD_FILE, model_card, push
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.checkpoint.weights.merge import Merge, Requantize
from qfsdp.checkpoint.weights.output_folder import check_output
from qfsdp.checkpoint.weights.write import MAX_FILE_BYTES
from qfsdp.common.errors import InvalidField
from qfsdp.distributed.world import init_world
from qfsdp.hub.download import local_folder
from qfsdp.launch.start import launch
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.planning.oom import Run, explain_out_of_memory


@dataclass
class Config(OfAdapter):
    """Keys of the YAML file and the command line; each section documents its own keys."""

    model: ModelConfig
    adapter: str  # a folder in PEFT's format: `adapter/` of a run, or PEFT's own
    output_dir: str  # the new model folder
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"  # of the merged model
    requantize: Requantize = "none"  # or "nf4-bnb": the weights that `quantization` selects
    push_to_hub: str | None = None  # org/name, for the merged model; a new one is private
    max_file_bytes: int = MAX_FILE_BYTES  # of one safetensors file

    def check(self) -> None:
        if self.max_file_bytes < 1:
            raise InvalidField("max_file_bytes", self.max_file_bytes, "a number of bytes above 0")


def build(cfg: Config) -> Merge:
    """The base, the adapter and the formats of the merge."""
    return Merge(
        cfg.model.weights(),
        cfg.quantization,
        COMPUTE_DTYPES[cfg.model.dtype],
        local_folder(cfg.adapter),
        COMPUTE_DTYPES[cfg.dtype],
        cfg.requantize,
    )


def check(cfg: Config) -> None:
    """Finds mistakes outside the config file, before any weight is read."""
    tell_another_base(cfg)
    merge = build(cfg)
    merge.plan()
    check_output(Path(cfg.output_dir).expanduser())


@explain_out_of_memory
def main(cfg: Config, _: Run) -> None:
    world = init_world()
    folder = Path(cfg.output_dir).expanduser()
    card = {CARD_FILE: model_card(cfg, folder)}
    build(cfg).write(folder, world, cfg.max_file_bytes, card)
    push(cfg, folder, world)
    if world.rank == 0:
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        print(f"merged model ({size / 2**30:.2f} GiB): {folder}")


if __name__ == "__main__":
    launch(__file__, Config, check, main)
