"""Quantize a model's linears to 4 bits once; later runs load the bytes as they are.

    tune run recipes/quantize --config configs/quantize.yaml \\
        model.path=meta-llama/Meta-Llama-3-70B output_dir=models/Meta-Llama-3-70B-nf4

The result is a model folder: weights, config and tokenizer. A training config takes it as
`model.path`, on any number of ranks. `layout=bnb` writes NF4 in the layout that transformers loads
with bitsandbytes; qfsdp loads it too.

A rank holds one weight at a time (HQQ: also its fp32 copy), so a model of any size fits. The same
command finishes an interrupted run; on a finished folder it checks the SHA-256 of the files.
Several ranks divide the files among them: one process per visible accelerator, or
`--nproc_per_node N`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.checkpoint.weights.quantize import Layout, quantize_folder, quantized_model
from qfsdp.checkpoint.weights.write import MAX_FILE_BYTES
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.distributed.world import init_world
from qfsdp.launch.start import launch
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.planning.oom import Run, explain_out_of_memory


@dataclass
class Config:
    """Keys of the YAML file and the command line; each section documents its own keys."""

    model: ModelConfig
    output_dir: str  # the new model folder
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    layout: Layout = "qfsdp"  # or "bnb", for transformers and bitsandbytes
    max_file_bytes: int = MAX_FILE_BYTES  # of one safetensors file

    def check(self) -> None:
        if self.max_file_bytes < 1:
            raise InvalidField("max_file_bytes", self.max_file_bytes, "a number of bytes above 0")


# Keys of the two sections that are for runs which load the folder.
OF_RUNS = (
    *("model.dtype", "model.quantize_cache", "model.router_aux_loss"),
    *("quantization.expert_chunk", "quantization.compute"),
)


def check(cfg: Config) -> None:
    """Finds mistakes outside the config file, before any weight is read."""
    for key in OF_RUNS:
        section, name = key.split(".")
        given = getattr(cfg, section)
        if (value := getattr(given, name)) != getattr(type(given), name):  # the default
            raise UserError(
                f"{key}: {value!r} changes nothing of a quantized folder; expected it in the "
                "config of a run that loads the folder"
            )
    if cfg.quantization.format == "none":
        raise UserError("quantization.format: 'none' quantizes nothing; expected nf4 or hqq")
    if cfg.layout == "bnb" and not cfg.quantization.format.startswith("nf4"):
        raise UserError(
            f"layout: 'bnb' is for NF4, and quantization.format is {cfg.quantization.format!r}; "
            "expected layout=qfsdp"
        )
    weights = cfg.model.weights()
    cfg.model.decoder()  # what is written is for qfsdp's own
    weights.check(quantized_model(weights, cfg.quantization))
    if Path(cfg.output_dir).expanduser().resolve() == weights.folder.resolve():
        raise UserError(f"output_dir: '{cfg.output_dir}' is model.path; expected another folder")


@explain_out_of_memory
def main(cfg: Config, _: Run) -> None:
    world = init_world()
    folder = Path(cfg.output_dir).expanduser()
    weights = cfg.model.weights()
    quantize_folder(weights, cfg.quantization, folder, world, cfg.layout, cfg.max_file_bytes)
    if world.rank == 0:
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        print(f"quantized model ({size / 2**30:.2f} GiB): {folder}")


if __name__ == "__main__":
    launch(__file__, Config, check, main)
