"""HQQ against the hqq package, NF4 and plain weights: equal codes, perplexity, time.

    python benchmarks/hqq_parity.py --text wikitext2/test.txt [--quick] [--json hqq.json]

Codes: the linears of SmolLM2-135M (all 210; with --quick those of every tenth layer) are quantized
by us and by the package, in fp32 on the CPU, and compared part by part. Perplexity: of --text in
windows of 1024 tokens (the first 32, 1 with --quick; --windows 0: all), computed in bf16, or in
fp32 on a CPU without bf16 products. The model's linears lie on a 4-bit grid with blocks of 32, so
groups of 32 would lose nothing and are not shown. Times: SmolLM2's linears, and dequantizing one
linear of Llama-3-8B into memory that the next call overwrites.

Keys of the JSON file; ratios have `_min` and `_max` over rounds:

    differing_codes, differing_scales, differing_zeros    among `weights`, against the package
    dequantized_max_difference, dequantized_mean_difference   fp32, both with fp16 scales
    fp32_scales_max_difference, fp32_scales_mean_difference   against fp32 scales of the package
    perplexity_bf16, perplexity_nf4, perplexity_hqq, perplexity_hqq_package   over `tokens`
    quantize_weights_per_second, package_weights_per_second, nf4_quantize_weights_per_second
    quantize_vs_package                seconds of the package over ours
    hqq_dequantize_weights_per_second, nf4_dequantize_weights_per_second
    hqq_over_copy, nf4_over_copy       bytes read and written a second over those of `copy_`
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import Figures, arguments, in_turns, ratios, tell, usual_dtype
from examples.demo import cache_dir
from examples.demo.smollm2 import prepare_model
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.data import hf_tokenizer
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World
from qfsdp.evaluation.inference_model import load_for_inference
from qfsdp.evaluation.perplexity import TextConfig, dataset_loss, text_windows
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.tensor_subclasses.four_bit import BLOCK
from qfsdp.tensor_subclasses.frozen_weight import frozen_weight
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor

LLAMA_8B = (14336, 4096)
WINDOW = 1024


def quantize(weight: Tensor, format: str) -> QuantizedTensor:
    rows, cols = weight.shape
    quantized = FORMATS[format].empty(rows, cols, weight.dtype, weight.device)
    quantized.quantize_(weight)
    return quantized


def parts(weight: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 `[rows, cols]`, scales and zeros fp16 `[rows, groups]` of an HQQ weight."""
    code_bytes, per_row = -(-weight.cols // 2), -(-weight.cols // BLOCK)
    codes, fp16 = weight.qdata[:, :code_bytes], weight.qdata[:, code_bytes:]
    codes = torch.stack([codes >> 4, codes & 15], dim=2).flatten(1)[:, : weight.cols]
    scales, zeros = fp16.contiguous().view(torch.float16).split(per_row, dim=1)
    return codes, scales, zeros


def of_package(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The package's codes uint8 `[rows, cols]`, scales and zeros fp32 `[rows, groups]`."""
    from hqq.core.quantize import Quantizer

    codes, meta = Quantizer.quantize(
        weight, nbits=4, group_size=BLOCK, axis=1, bitpack=False, device="cpu"
    )
    scales, zeros = (meta[key].view(len(weight), -1) for key in ("scale", "zero"))
    return codes.view(weight.shape).to(torch.uint8), scales, zeros


def dequantized_by_package(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The package's fp32 weights from codes, scales and zeros of any dtype."""
    from hqq.core.quantize import Quantizer

    meta = {"scale": scales.view(-1, 1), "zero": zeros.view(-1, 1), "shape": codes.shape}
    meta |= {"packing": None, "compute_dtype": torch.float32}
    return Quantizer.dequantize(codes.view(-1, BLOCK), meta)


def has_package() -> bool:
    try:
        import hqq.core.quantize  # noqa: F401
    except ImportError as error:
        print(f"hqq: skipped, {error}; pip install -c constraints.txt hqq")
        return False
    return True


def linears(folder: Path, quick: bool) -> Iterator[tuple[str, Tensor]]:
    source = ModelWeights(folder).files
    for name, stored in source.tensors.items():
        if name.endswith("_proj.weight") and not (quick and int(name.split(".")[2]) % 10):
            yield name, source.read(stored)


def compare(folder: Path, quick: bool) -> Figures:
    """Quantizes every linear with ours and with the package, and compares."""
    quantize(torch.randn(512, 512), "hqq").dequantize()  # compiles
    counts, weights = torch.zeros(3, dtype=torch.int64), 0
    largest, sums, seconds = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
    for _, weight in linears(folder, quick):
        since = time.perf_counter()
        ours = quantize(weight, "hqq")
        between = time.perf_counter()
        theirs = of_package(weight)
        seconds[0] += between - since
        seconds[1] += time.perf_counter() - between
        halves = (theirs[0], theirs[1].half(), theirs[2].half())
        counts += torch.tensor(
            [int((a != b).sum()) for a, b in zip(parts(ours), halves, strict=True)]
        )
        values = ours.dequantize(torch.float32)
        for at, given in enumerate((halves, theirs)):
            off = (values - dequantized_by_package(*given)).abs()
            largest[at] = max(largest[at], off.max().item())
            sums[at] += off.double().sum().item()
        weights += weight.numel()
    found: Figures = {"weights": weights}
    found |= {
        f"differing_{k}": n
        for k, n in zip(("codes", "scales", "zeros"), counts.tolist(), strict=True)
    }
    for at, key in enumerate(("dequantized", "fp32_scales")):
        found[f"{key}_max_difference"] = largest[at]
        found[f"{key}_mean_difference"] = sums[at] / weights
    found["quantize_weights_per_second"] = weights / seconds[0]
    found["package_weights_per_second"] = weights / seconds[1]
    return found | {"quantize_vs_package": seconds[1] / seconds[0]}


def perplexities(folder: Path, text: Path, windows: int, package: bool) -> Figures:
    """Perplexity of the plain model, of ours in NF4 and HQQ, and of the package's weights."""
    tokenizer = hf_tokenizer(str(folder))
    config = TextConfig(str(text), WINDOW, max_tokens=windows * WINDOW or None)
    dataset, world = text_windows("text", config, tokenizer), World(torch.device("cpu"))
    found: Figures = {}
    dtype = usual_dtype("cpu")
    print(f"computed in {dtype}")
    formats: dict[str, Any] = {"bf16": "none", "nf4": "nf4", "hqq": "hqq"}
    for name, format in (formats | ({"hqq_package": "none"} if package else {})).items():
        quantization = QuantizationConfig(format)
        model = load_for_inference(
            ModelConfig(str(folder), dtype), quantization, None, ShardingConfig(), world
        )
        if name == "hqq_package":
            weights = dict(model.named_parameters())
            for key, weight in linears(folder, quick=False):
                codes, scales, zeros = of_package(weight)
                values = dequantized_by_package(codes, scales.half(), zeros.half())
                weights[key].data.copy_(values)
        loss = dataset_loss(model, dataset, 1, world, tokenizer.pad_id, None, name)
        found |= {f"perplexity_{name}": loss.perplexity, "tokens": loss.tokens}
        print(f"{name}: perplexity {loss.perplexity:.3f}", flush=True)
    return found


def times(rounds: int) -> Figures:
    torch.manual_seed(0)
    weight = torch.randn(LLAMA_8B).mul_(0.02).bfloat16()
    copied = torch.empty_like(weight)
    cases: dict[str, Any] = {"copy": lambda: copied.copy_(weight)}
    held = {}
    for name in ("nf4", "hqq"):
        quantized = quantize(weight, name)
        held[name] = sum(t.nbytes for t in (quantized.qdata, *quantized.metadata))

        def dequantize(quantized: QuantizedTensor = quantized) -> Tensor:
            which = (quantized.format, quantized.cols, 0, torch.bfloat16)
            return frozen_weight(quantized.qdata, quantized.metadata, *which)

        cases[name] = dequantize
    taken = in_turns(cases, rounds)
    found: Figures = {}
    for name, size in held.items():
        moved = (size + weight.nbytes) / (2 * weight.nbytes)
        speed = ratios(f"{name}_over_copy", taken["copy"], taken[name])
        found |= {key: value * moved for key, value in speed.items()}
        seconds = statistics.median(taken[name])
        found[f"{name}_dequantize_weights_per_second"] = weight.numel() / seconds
    since = time.perf_counter()
    quantize(weight, "nf4")
    found["nf4_quantize_weights_per_second"] = weight.numel() / (time.perf_counter() - since)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--text", type=Path, required=True, help="a plain text file, for perplexity"
    )
    parser.add_argument(
        "--windows", type=int, help="number of windows of 1024 tokens; 0: all of the text"
    )
    args = parser.parse_args()
    windows = args.windows if args.windows is not None else (1 if args.quick else 32)
    folder, package = prepare_model(cache_dir()), has_package()
    found = times(args.repeat)
    found |= compare(folder, args.quick) if package else {}
    if args.text.is_file():
        found |= perplexities(folder, args.text, windows, package)
    else:
        print(f"perplexity: skipped, {args.text} does not exist")
    tell(found, args.json)


if __name__ == "__main__":
    main()
