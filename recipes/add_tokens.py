"""Add tokens to a model and its tokenizer, for a finetune that trains them.

    tune run recipes/add_tokens --config configs/add_tokens.yaml \\
        model.path=meta-llama/Meta-Llama-3-8B output_dir=models/with-tokens \\
        'new_tokens=[<think>,</think>]'

The result is a model folder. A new token begins with the mean of the others' rows. A training
config takes the folder as `model.path`, and `adapter.modules_to_save=[embed_tokens,lm_head]` trains
the rows. The adapter belongs to this folder, also in PEFT. recipes/quantize can quantize it
afterwards, not before.

A rank holds some megabytes, so a model of any size fits. Several ranks divide the files among them:
one process per visible accelerator, or `--nproc_per_node N`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qfsdp.checkpoint.weights.add_tokens import NewTokens, add_tokens, plan_tokens
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.output_folder import check_output
from qfsdp.checkpoint.weights.write import MAX_FILE_BYTES
from qfsdp.common.errors import InvalidField
from qfsdp.distributed.world import init_world
from qfsdp.launch.start import launch
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
    """Keys of the YAML file and the command line."""

    model: Source
    output_dir: str  # the new model folder
    new_tokens: list[str]  # texts of the tokens; their ids follow the last one
    special: bool = False  # like <|im_end|>: decoding skips them, messages cannot spell them
    pad_to_multiple_of: int = 64  # the number of rows becomes a multiple of it, if rows are added
    max_file_bytes: int = MAX_FILE_BYTES  # of one safetensors file

    def check(self) -> None:
        if not self.new_tokens:
            raise InvalidField("new_tokens", self.new_tokens, "the texts of tokens")
        if not 1 <= self.pad_to_multiple_of <= 2**16:
            expected = "an integer from 1 to 65536"
            raise InvalidField("pad_to_multiple_of", self.pad_to_multiple_of, expected)
        if self.max_file_bytes < 1:
            raise InvalidField("max_file_bytes", self.max_file_bytes, "a number of bytes above 0")


def plan(cfg: Config, weights: ModelWeights) -> NewTokens:
    return plan_tokens(weights, cfg.new_tokens, cfg.special, cfg.pad_to_multiple_of)


def check(cfg: Config) -> None:
    """Finds mistakes outside the config file, before any weight is read."""
    plan(cfg, ModelWeights(cfg.model.path))
    check_output(Path(cfg.output_dir).expanduser())


@explain_out_of_memory
def main(cfg: Config, _: Run) -> None:
    world = init_world()
    folder, weights = Path(cfg.output_dir).expanduser(), ModelWeights(cfg.model.path)
    new = plan(cfg, weights)
    add_tokens(weights, new, folder, world, cfg.max_file_bytes)
    if world.rank == 0:
        ids = ", ".join(f"{token} {index}" for token, index in new.ids.items())
        print(f"new tokens {ids}; a vocabulary of {new.rows} rows: {folder}")


if __name__ == "__main__":
    launch(__file__, Config, check, main)
