"""Fold adapters into their base: one model folder, for any inference engine.

    tune run recipes/merge --config configs/merge.yaml \\
        model.path=meta-llama/Meta-Llama-3-70B adapter=runs/x/adapter output_dir=models/x

The merged model computes what training computed: an adapter that was trained over 4-bit weights is
folded into their dequantized values. So `model.path`, `model.dtype` and `quantization` come
from the adapter's folder; a warning tells what keys change. Weights that are quantized while they
are loaded differ between GPUs and CPUs in one scale of 700: merge on the hardware of the run, or
use a quantized folder as `model.path` in both.

`requantize=nf4-bnb` writes 4-bit weights, which transformers loads with bitsandbytes, and qfsdp
as `model.path`. Weights with an adapter, and those of an HQQ base, are rounded once more.

Several adapters of one base are joined first, as PEFT's `add_weighted_adapter` does, to an adapter
or into the base (`qfsdp/checkpoint/join.py` has the formulas):

    tune run recipes/merge --config configs/join.yaml into=adapter output_dir=runs/both/adapter \\
        'adapters=[{path: runs/a/adapter, weight: 0.7}, {path: runs/b/adapter, weight: 0.3}]'

A rank holds one weight at a time, so a model of any size fits. Several ranks divide the files among
them: one process per visible accelerator, or `--nproc_per_node N`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Literal

from qfsdp.checkpoint.adapter_base import OfAdapter, tell_another_base, whole_model
from qfsdp.checkpoint.join import Join, JoinMethod, Part
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
    output_dir: str  # the new folder
    adapter: str | None = None  # a folder in PEFT's format: `adapter/` of a run, or PEFT's own
    adapters: list[Part] = field(default_factory=list)  # instead: several LoRA adapters to join
    method: JoinMethod = "svd"  # how they are joined
    density: float = 0.5  # share of the numbers that ties and dare keep
    joined_rank: int | None = None  # of svd; null: the largest of the adapters
    seed: int = 0  # of dare
    into: Literal["base", "adapter"] = "base"  # of several adapters: what is written
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"  # of the merged model
    requantize: Requantize = "none"  # or "nf4-bnb": the weights that `quantization` selects
    push_to_hub: str | None = None  # org/name, for the merged model; a new one is private
    max_file_bytes: int = MAX_FILE_BYTES  # of one safetensors file

    def check(self) -> None:
        if self.max_file_bytes < 1:
            raise InvalidField("max_file_bytes", self.max_file_bytes, "a number of bytes above 0")
        if (self.adapter is None) != bool(self.adapters):
            raise InvalidField("adapter", self.adapter, "a folder, or null and several `adapters`")
        if not 0 < self.density <= 1:
            raise InvalidField("density", self.density, "a share above 0, at most 1")
        if self.joined_rank is not None and (self.method != "svd" or self.joined_rank < 1):
            expected = "null, or an integer of at least 1 with method svd"
            raise InvalidField("joined_rank", self.joined_rank, expected)
        if self.into == "adapter" and not self.adapters:
            raise InvalidField("into", "adapter", "base, as only several `adapters` are joined")
        if any(part.weight == 0 for part in self.adapters):
            raise InvalidField("adapters", "a weight of 0", "other weights, or fewer adapters")

    @property
    def output(self) -> Path:
        return Path(self.output_dir).expanduser()


def joined_folder(cfg: Config) -> Path:
    """Where the joined adapter is written: beside a model."""
    beside = cfg.output.with_name(f"{cfg.output.name}_adapter")
    return cfg.output if cfg.into == "adapter" else beside


def join(cfg: Config) -> Join:
    """The adapters that are joined, and how."""
    how = cfg.method, cfg.joined_rank, cfg.density, cfg.seed
    return Join(cfg.model.weights(), cfg.adapters, *how)


def build(cfg: Config, adapter: Path | None) -> Merge:
    """The base, the adapter and the formats of the merge."""
    return Merge(
        cfg.model.weights(),
        cfg.quantization,
        COMPUTE_DTYPES[cfg.model.dtype],
        adapter,
        COMPUTE_DTYPES[cfg.dtype],
        cfg.requantize,
    )


def check(cfg: Config) -> None:
    """Finds mistakes outside the config file, before any weight is read."""
    tell_another_base(cfg)
    if cfg.adapters:
        join(cfg).plan()
        check_output(joined_folder(cfg))
    if cfg.into == "base":
        build(cfg, None if cfg.adapter is None else local_folder(cfg.adapter)).plan()
        check_output(cfg.output)


@explain_out_of_memory
def main(cfg: Config, _: Run) -> None:
    world = init_world()
    adapter = joined_folder(cfg) if cfg.adapter is None else local_folder(cfg.adapter)
    if cfg.adapters:
        with world.same_error():
            if world.rank == 0:
                join(cfg).write(adapter, cfg.model.path)
                print(f"joined adapter: {adapter}")
    if cfg.into == "base":
        texts = {CARD_FILE: model_card(cfg, cfg.output)}
        if cfg.requantize == "none":
            texts |= whole_model(cfg.model.dtype)
        build(cfg, adapter).write(cfg.output, world, cfg.max_file_bytes, texts)
    push(cfg, cfg.output, world)
    if world.rank == 0 and cfg.into == "base":
        size = sum(file.stat().st_size for file in cfg.output.glob("*.safetensors"))
        print(f"merged model ({size / 2**30:.2f} GiB): {cfg.output}")
        print(f"to use it: qfsdp chat model.path={quote(str(cfg.output))}")


if __name__ == "__main__":
    launch(__file__, Config, check, main)
