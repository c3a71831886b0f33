"""Insert decoder blocks into a model without changing what it computes (Llama-Pro).

    tune run recipes/block_expansion --config configs/block_expansion.yaml \\
        model.path=meta-llama/Meta-Llama-3-8B rate=0.25 output_dir=models/Meta-Llama-3-8B-pro

The result is a model folder: 40 blocks instead of 32; 8 are new and add zero. Its config.json lists
them as `expanded_layers`. A training config takes the folder as `model.path`. recipes/quantize can
quantize it afterwards, not before.

A rank holds some megabytes, so a model of any size fits. Several ranks divide the files among them:
one process per visible accelerator, or `--nproc_per_node N`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qfsdp.checkpoint.weights.expand import (
    blocks_of_rate,
    check_plain,
    expand_folder,
    expanded_positions,
)
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.output_folder import check_output
from qfsdp.checkpoint.weights.write import MAX_FILE_BYTES
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.distributed.world import init_world
from qfsdp.launch.start import launch
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.decoder_parts import MOST_LAYERS
from qfsdp.planning.oom import Run, explain_out_of_memory


@dataclass
class Source:
    """Section `model`: the model to expand.

    Fields:
        path: a Hugging Face model folder with weights that are not quantized; they keep their
            dtype.
    """

    path: str


@dataclass
class Config:
    """Keys of the YAML file and the command line; one of `rate` and `new_blocks` is set."""

    model: Source
    output_dir: str  # the new model folder
    rate: float | None = None  # new blocks per old one; the number of blocks is rounded, halves up
    new_blocks: int | None = None  # or the number of new blocks
    max_file_bytes: int = MAX_FILE_BYTES  # of one safetensors file

    def check(self) -> None:
        if (self.rate is None) == (self.new_blocks is None):
            given = "both are given" if self.rate is not None else "neither is given"
            fix = "rate=null new_blocks=8, or rate=0.25 new_blocks=null"
            raise UserError(f"rate, new_blocks: {given}; expected one of them, e.g. {fix}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise InvalidField("rate", self.rate, "a number above 0")
        if self.new_blocks is not None and self.new_blocks < 1:
            raise InvalidField("new_blocks", self.new_blocks, "an integer of at least 1")
        if self.max_file_bytes < 1:
            raise InvalidField("max_file_bytes", self.max_file_bytes, "a number of bytes above 0")


def count_blocks(cfg: Config, depth: int) -> int:
    """The number of new blocks for a model of `depth` blocks."""
    if cfg.new_blocks is not None:
        key, count = f"new_blocks: {cfg.new_blocks}", cfg.new_blocks
    else:
        assert cfg.rate is not None
        key, count = f"rate: {cfg.rate:g}", blocks_of_rate(depth, cfg.rate)
    if count > (most := MOST_LAYERS - depth):
        raise UserError(f"{key} is too much for {depth} blocks; expected at most {most} new ones")
    if count < 1:
        least = f"at least {1 / depth:.2g}"
        raise UserError(f"rate: {cfg.rate:g} of {depth} blocks is no new block; expected {least}")
    return count


def check(cfg: Config) -> None:
    """Finds mistakes outside the config file, before any weight is read."""
    count_blocks(cfg, check_plain(ModelWeights(cfg.model.path)))
    check_output(Path(cfg.output_dir).expanduser())


@explain_out_of_memory
def main(cfg: Config, _: Run) -> None:
    world = init_world()
    folder = Path(cfg.output_dir).expanduser()
    weights = ModelWeights(cfg.model.path)
    depth = DecoderConfig.of_text(weights.folder).num_hidden_layers
    count = count_blocks(cfg, depth)
    expand_folder(weights, count, folder, world, cfg.max_file_bytes)
    if world.rank == 0:
        places = ", ".join(map(str, expanded_positions(depth, count)))
        print(f"{depth} blocks, and {count} new ones at {places}: {folder}")


if __name__ == "__main__":
    launch(__file__, Config, check, main)
