"""Write a model, merged with its adapter, for other programs: llama.cpp and vLLM.

    tune run recipes/export --config configs/export.yaml \\
        model.path=meta-llama/Meta-Llama-3-8B-Instruct adapter=runs/x/adapter output_dir=models/x

* `format=gguf`: one file for llama.cpp and others; `gguf_type` says how its matrices are stored.
  Beside it a Modelfile for Ollama. Families Llama, SmolLM, Granite, Mistral, Gemma 3, Qwen.
* `format=w4a16`: a folder with 4-bit integers in groups for the Marlin kernels of vLLM, in the
  layout of compressed-tensors. Each weight is rounded to the nearest number; nothing is calibrated.
* `format=lora`: the adapter as vLLM serves it beside its base, checked. vLLM loads no DoRA.

`model`, `quantization` and `adapter` are as in `recipes/merge`; without an adapter the model is
written as it is, dequantized where its folder is quantized. A rank holds one weight in 4 bits and
some rows, so a model of any size fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from qfsdp.checkpoint.adapter_base import OfAdapter, tell_another_base
from qfsdp.checkpoint.adapter_config_file import WEIGHTS_FILE
from qfsdp.checkpoint.export.gguf_file import GgufExport, GgufType, plan_gguf
from qfsdp.checkpoint.export.gguf_metadata import warn_of_limits
from qfsdp.checkpoint.export.vllm_adapter import VllmAdapter, plan_adapter
from qfsdp.checkpoint.export.w4a16 import GROUP_SIZES, plan_w4a16
from qfsdp.checkpoint.saved_template import TEMPLATE_FILE, chat_tokenizer
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.checkpoint.weights.merge import Merge
from qfsdp.checkpoint.weights.output_folder import check_output
from qfsdp.checkpoint.weights.write import MAX_FILE_BYTES
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.common.files import write_text, writing
from qfsdp.data.chat.ollama import modelfile
from qfsdp.distributed.world import init_world
from qfsdp.evaluation.prompts import stop_ids
from qfsdp.hub.download import local_folder
from qfsdp.launch.start import launch
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.planning.oom import Run, explain_out_of_memory


@dataclass
class Config(OfAdapter):
    """Keys of the YAML file and the command line; each section documents its own keys."""

    model: ModelConfig
    output_dir: str  # gguf: the folder of the file; others: a new folder
    format: Literal["gguf", "w4a16", "lora"] = "gguf"  # what is written
    adapter: str | None = None  # a folder in PEFT's format: `adapter/` of a run, or PEFT's own
    quantization: QuantizationConfig = field(
        default_factory=lambda: QuantizationConfig(format="none")
    )
    gguf_type: GgufType = "q8_0"  # of matrices; f16 and bf16 round to 16 bits, q4_0 to 4.5
    group_size: int = 128  # w4a16: weights of a row that share a scale; 32, 64 or 128
    dtype: Literal["bf16", "fp16"] = "bf16"  # w4a16: of scales and of weights that stay plain
    max_file_bytes: int = MAX_FILE_BYTES  # w4a16: of one safetensors file

    def check(self) -> None:
        if self.group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise InvalidField("group_size", self.group_size, f"one of {sizes}")
        if self.max_file_bytes < 1:
            raise InvalidField("max_file_bytes", self.max_file_bytes, "a number of bytes above 0")
        if self.format == "lora" and self.adapter is None:
            raise InvalidField("adapter", self.adapter, "the folder of an adapter, for format=lora")


def merge_of(cfg: Config) -> Merge:
    """The base, the adapter and the dtype of weights that are not quantized.

    An adapter was trained beside weights rounded to `model.dtype`. Without one nothing was, so
    a model's own values are exported: bf16 would take three bits from a model in fp16.
    """
    adapter = None if cfg.adapter is None else local_folder(cfg.adapter)
    base_dtype = COMPUTE_DTYPES["fp32" if adapter is None else cfg.model.dtype]
    dtype = COMPUTE_DTYPES[cfg.dtype]
    weights, format = cfg.model.weights(), cfg.quantization.format
    if adapter is None and format != "none" and not weights.quantized:
        expected = "expected none without adapter: it would only round plain weights"
        raise UserError(f"quantization.format: {format!r}; {expected}")
    return Merge(weights, cfg.quantization, base_dtype, adapter, dtype)


def gguf_file(cfg: Config) -> Path:
    """The file of `format=gguf`, named as is usual: NAME-Q8_0.gguf."""
    folder = Path(cfg.output_dir).expanduser()
    return folder / f"{folder.absolute().name}-{cfg.gguf_type.upper()}.gguf"


def write_modelfile(cfg: Config, export: GgufExport) -> None:
    """Writes a Modelfile for Ollama: the chat template, and the tokens that end an answer."""
    file, folder = gguf_file(cfg), export.tokenizer.folder
    tokenizer = chat_tokenizer(export.template, folder)
    stops = set() if tokenizer is None else stop_ids(tokenizer, export.merge.weights.folder)
    text = modelfile(file.name, tokenizer, export.tokenizer.given.bos, stops)
    with writing("output_dir", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file.with_suffix(".Modelfile"), text)


def adapter_of(cfg: Config) -> VllmAdapter:
    """The adapter of `format=lora`."""
    assert cfg.adapter is not None
    return plan_adapter(cfg.model.weights(), cfg.model.path, local_folder(cfg.adapter))


def check(cfg: Config) -> None:
    """Finds mistakes outside the config file, before any weight is read."""
    tell_another_base(cfg)
    if cfg.format == "lora":
        adapter_of(cfg)
        # Without its config, which is written last, an adapter is unfinished.
        return check_output(Path(cfg.output_dir).expanduser(), (TEMPLATE_FILE, WEIGHTS_FILE))
    cfg.model.decoder(text_alone=cfg.format != "gguf")
    merge = merge_of(cfg)
    if cfg.format == "gguf":
        plan = plan_gguf(merge, cfg.gguf_type)
        warn_of_limits(plan.model)
        plan.tokenizer.warn_of_words(plan.template)
        if (file := gguf_file(cfg)).exists():
            raise UserError(f"output_dir: '{file}' exists; expected a new file")
    else:
        plan_w4a16(merge, cfg.group_size)
        check_output(Path(cfg.output_dir).expanduser())


@explain_out_of_memory
def main(cfg: Config, _: Run) -> None:
    world = init_world()
    output = Path(cfg.output_dir).expanduser()
    if cfg.format == "lora":
        adapter = adapter_of(cfg)
        adapter.write(output, world)
        told = f"adapter for vLLM: {adapter.command(output)}"
    elif cfg.format == "gguf":
        export = plan_gguf(merge_of(cfg), cfg.gguf_type)
        with world.same_error():
            if world.rank == 0:
                write_modelfile(cfg, export)
        export.write(gguf_file(cfg), world)  # last: the same command completes what was stopped
        told = f"GGUF ({export.size / 2**30:.2f} GiB, {cfg.gguf_type}): {gguf_file(cfg)}"
    else:
        plan_w4a16(merge_of(cfg), cfg.group_size).write(output, world, cfg.max_file_bytes)
        size = sum(file.stat().st_size for file in output.glob("*.safetensors"))
        told = f"W4A16 ({size / 2**30:.2f} GiB, groups of {cfg.group_size}): {output}"
    if world.rank == 0:
        print(told)


if __name__ == "__main__":
    launch(__file__, Config, check, main)
