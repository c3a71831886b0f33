"""What a mixture of experts keeps for backward, and what loading it takes above the shard.

    python benchmarks/mixture_memory.py [--quick] [--json memory.json]

Kept for backward: the experts of a layer with the shapes of Qwen3-30B-A3B (hidden size 2,048, inner
size 768, 8 experts per token, 16 experts in all), bf16, on 512 tokens. Counts the storages that
autograd keeps: bytes of weights, and bytes per token of all else but the layer's input.

Loading: folders of random weights, one layer each, one tensor per expert in bf16 (Qwen3-30B-A3B, 32
of its experts, to NF4) and MXFP4 as published (gpt-oss-20b, its 32 experts), on 1 and 2 ranks. The
figures are those of benchmarks/load_base.py: the peak of private memory while a rank loads, less
the memory before and the bytes of its shard.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.load_base import measure
from benchmarks.timing import Figures, arguments, tell
from qfsdp.common.files import write_json
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.decoder_parts import ExpertsConfig
from qfsdp.modules.experts.stacked import Experts
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor

HIDDEN, INNER, TOP_K, TOKENS = 2048, 768, 8, 512
COMMON: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 1024, "tie_word_embeddings": False}
QWEN = COMMON | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
QWEN |= {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": 32}
QWEN |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
QWEN |= {"num_experts_per_tok": TOP_K, "torch_dtype": "bfloat16"}
GPT_OSS = COMMON | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
GPT_OSS |= {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32}
GPT_OSS |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
GPT_OSS |= {"num_experts_per_tok": 4, "torch_dtype": "bfloat16"}
GPT_OSS |= {"quantization_config": {"quant_method": "mxfp4"}}


# ---- kept for backward ---------------------------------------------------------------------------


def experts(format: str) -> Experts:
    """Frozen; `format` "": bf16."""
    torch.manual_seed(0)
    module = Experts(HIDDEN, ExpertsConfig(16, TOP_K, INNER))
    for linear in (module.gate_up_proj, module.down_proj):
        weight: Tensor = torch.randn_like(linear.weight).mul_(0.02).bfloat16()
        if format:
            rows, cols = weight.shape
            made = FORMATS[format].empty(rows, cols, torch.bfloat16, "cpu")
            made.quantize_(weight)
            weight = made
        linear.weight = nn.Parameter(weight, requires_grad=False)
    return module


def kept(format: str, compiled: bool) -> tuple[int, float]:
    """Bytes of weights that forward keeps, and bytes of all else but the input, per token."""
    module = experts(format)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    best = torch.rand(TOKENS, 16).topk(TOP_K)
    weights = best.values.bfloat16().requires_grad_()
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    run: Any = torch.compile(module, backend="aot_eager") if compiled else module
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(x, best.indices, weights)
    of_weights = 0
    for param in module.parameters():
        data = param.data
        parts = [data.qdata, *data.metadata] if isinstance(data, QuantizedTensor) else [data]
        of_weights += sum(held.pop(part.untyped_storage().data_ptr(), 0) for part in parts)
    for given in (x, best.indices, weights):
        held.pop(given.untyped_storage().data_ptr(), None)
    return of_weights, sum(held.values()) / TOKENS


def what_is_kept() -> Figures:
    figures: Figures = {}
    for compiled in (False, True):
        how = "compiled" if compiled else "eager"
        for format, name in (("nf4", "nf4"), ("", "bf16")):
            of_weights, per_token = kept(format, compiled)
            weights = f"{of_weights / 1e6:.1f} MB of weights"
            print(f"{how}, {name}: kept {weights}, {per_token:.0f} bytes per token")
            figures[f"kept_weights_bytes.{how}.{name}"] = float(of_weights)
            figures[f"kept_bytes_per_token.{how}.{name}"] = per_token
    return figures


# ---- loading -------------------------------------------------------------------------------------


def write_folder(folder: Path, config: dict[str, Any]) -> None:
    """A model of random weights with the names and shapes of its family's files."""
    folder.mkdir()
    write_json(folder / "config.json", config)
    with torch.device("meta"):
        params = dict(Decoder(DecoderConfig.from_dir(folder)).named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, param in params.items():
        stem, _, field = name.rpartition(".experts.")
        if not stem:
            tensors[name] = torch.randn(param.shape, dtype=torch.bfloat16)
        elif "quantization_config" in config:
            tensors |= as_blocks(f"{stem}.experts.{field}", param, config["num_local_experts"])
        else:
            tensors |= one_by_one(stem, field.removesuffix(".weight"), param, config["num_experts"])
    save_file(tensors, folder / "model.safetensors")


def one_by_one(stem: str, name: str, param: Tensor, count: int) -> dict[str, Tensor]:
    parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    shape = (param.size(0) // count // len(parts), param.size(1))
    return {
        f"{stem}.experts.{expert}.{part}.weight": torch.randn(shape, dtype=torch.bfloat16)
        for expert in range(count)
        for part in parts
    }


def as_blocks(name: str, param: Tensor, count: int) -> dict[str, Tensor]:
    stem, _, field = name.rpartition(".")
    out = param.size(0) // count
    if field == "bias":
        return {f"{stem}_bias": torch.randn(count, out, dtype=torch.bfloat16)}
    shape = (count, out, param.size(1) // 32)
    blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8)
    scales = torch.randint(118, 124, shape, dtype=torch.uint8)
    return {f"{stem}_blocks": blocks, f"{stem}_scales": scales}


def loading(repeat: int) -> Figures:
    figures: Figures = {}
    for name, config in (("qwen3_moe_bf16", QWEN), ("gpt_oss_mxfp4", GPT_OSS)):
        with tempfile.TemporaryDirectory() as work:
            write_folder(Path(work) / name, config)
            for size in (1, 2):
                found = measure(Path(work) / name, size, Path(work), repeat)
                shard, above = found["shard"] / 1e6, found["above"] / 1e6
                print(f"{name} on {size} ranks: shard {shard:.0f} MB, {above:.0f} MB above it")
                figures[f"peak_above_shard_bytes.{name}.{size}"] = found["above"]
                figures[f"shard_bytes.{name}.{size}"] = found["shard"]
    return figures


def main() -> None:
    args = arguments(__doc__).parse_args()
    figures = what_is_kept()
    figures |= loading(1 if args.quick else min(args.repeat, 3))
    tell(figures, args.json)


if __name__ == "__main__":
    main()
