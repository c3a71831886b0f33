"""Time to dequantize NF4 weights to bf16: ours, torchao's, bitsandbytes', and a copy beside them.

    python benchmarks/dequantize.py [--quick] [--json dequantize.json] [--device cpu]

Everyone writes where its users have it written: ours where training does (`frozen_weight`, on CPUs
over the previous weight), the others into new memory. Bits are compared with bitsandbytes' before
anything is timed. Shapes: on a CPU the linears of SmolLM2-135M and Llama-3-8B and two of
Llama-3-70B, with --quick only the two smallest of 8B; on a GPU those of 70B. torchao takes none
whose size 16,384 does not divide, and with --quick none above 16 M weights, as it quantizes 7 M a
second.

Keys of the JSON file; `gpu_` for `cpu_` on a GPU. Each ratio has `_min` and `_max`, over all shapes
and rounds, and is itself the geometric mean over shapes of medians over rounds:

    cpu_vs_torchao_compiled            seconds of torchao's compiled dequantize over ours
    cpu_vs_bitsandbytes                of bitsandbytes', double quantized
    cpu_vs_bitsandbytes_same_memory    of the same, given a tensor to write to
    cpu_vs_bitsandbytes_fp32_absmax    of bitsandbytes without double quantization over ours with
    cpu_dequantize_over_copy           bytes read and written a second over those of `copy_` between
                                       bf16 tensors of the shape
    cpu_elements_per_second            all shapes' elements over all shapes' medians
    cpu_selections_over_table          seconds: levels chosen by 15 selections, or looked up in a
                                       table, in the compiled kernel; each also over `copy_` as
    cpu_table_over_copy, cpu_selections_over_copy
    gpu_temporaries_over_output        most bytes allocated beside the output over those of it
    cpu_ROWSxCOLS_...                  the same of one shape, and NAME_seconds, medians
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import Figures, Times, arguments, geometric, in_turns, ratios, table, tell
from qfsdp.modules.quantized_linear import frozen_weight
from qfsdp.tensor_subclasses import nf4
from qfsdp.tensor_subclasses.kernels.compiled import _copy, can_compile, compiled
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

SMOLLM2 = [(576, 576), (192, 576), (1536, 576), (576, 1536)]
LLAMA_8B = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
LLAMA_70B = [(8192, 8192), (28672, 8192), (8192, 28672), (1024, 8192)]
TORCHAO_BLOCK = 64 * 256  # weights per second-level scale, none shorter
QUICK_TORCHAO = 1 << 24  # weights
RATIOS = {  # key: whose seconds over whose
    "vs_torchao_compiled": ("torchao", "ours"),
    "vs_bitsandbytes": ("bitsandbytes", "ours"),
    "vs_bitsandbytes_same_memory": ("bitsandbytes_same_memory", "ours"),
    "vs_bitsandbytes_fp32_absmax": ("bitsandbytes_fp32_absmax", "ours"),
    "selections_over_table": ("selections", "table"),
}
NAMES = ["ours", "copy", "torchao", "bitsandbytes", "bitsandbytes_same_memory"]
NAMES += ["bitsandbytes_fp32_absmax", "table", "selections"]
OVER_COPY = {"dequantize": "ours", "table": "table", "selections": "selections"}


def ours(weight: QuantizedTensor) -> Tensor:
    which = (weight.format, weight.cols, weight.row_offset, torch.bfloat16)
    return frozen_weight(weight.qdata, weight.metadata, *which)


@cache
def with_levels(level: Callable[[Tensor, Tensor], Tensor]) -> Callable[[QuantizedTensor], Tensor]:
    """Ours with other code for the levels, in builds of its own."""
    write = _copy(nf4._write_weights.__wrapped__)  # type: ignore[attr-defined]
    kernel = compiled(write, nf4.ONE_KERNEL, static_on_gpus=True)

    def run(weight: QuantizedTensor) -> Tensor:
        kept = nf4._level, nf4._write_weights
        nf4._level, nf4._write_weights = level, kernel  # type: ignore[assignment]
        try:
            return ours(weight)
        finally:
            nf4._level, nf4._write_weights = kept

    return run


def bitsandbytes_cases(weight: Tensor, expected: Tensor) -> dict[str, Callable[[], Any]]:
    """bitsandbytes' ways, of which the double quantized one must give `expected`."""
    try:
        from bitsandbytes import functional
    except ImportError as error:
        print(f"bitsandbytes: skipped, {error}")
        return {}
    quantize = partial(functional.quantize_4bit, weight, blocksize=64, quant_type="nf4")
    codes, state = quantize(compress_statistics=True)
    plain_codes, plain_state = quantize(compress_statistics=False)
    if not torch.equal(functional.dequantize_4bit(codes, state), expected):
        raise SystemExit(f"{tuple(weight.shape)}: not the bits of bitsandbytes")
    out = torch.empty_like(weight)
    same_memory = partial(functional.dequantize_4bit, codes, state, out=out)
    if not weight.is_cuda:
        same_memory = partial(bitsandbytes_cpu_kernel, codes, state, out)
    if not torch.equal(same_memory(), expected):
        raise SystemExit(f"{tuple(weight.shape)}: not the bits of bitsandbytes")
    return {
        "bitsandbytes": partial(functional.dequantize_4bit, codes, state),
        "bitsandbytes_same_memory": same_memory,
        "bitsandbytes_fp32_absmax": partial(functional.dequantize_4bit, plain_codes, plain_state),
    }


def bitsandbytes_cpu_kernel(codes: Tensor, state: Any, out: Tensor) -> Tensor:
    """What its `dequantize_4bit` does on a CPU, where it takes no `out`."""
    from bitsandbytes import functional
    from bitsandbytes.cextension import lib

    absmax = functional.dequantize_blockwise(state.absmax, state.state2)
    absmax += state.offset
    pointers = [functional.get_ptr(tensor) for tensor in (codes, absmax, out)]
    sizes = [ctypes.c_longlong(size) for size in (state.blocksize, *out.shape)]
    lib.cdequantize_blockwise_cpu_nf4_bf16(*pointers, *sizes)
    return out


def torchao_cases(weight: Tensor, quick: bool) -> dict[str, Callable[[], Any]]:
    if weight.numel() % TORCHAO_BLOCK or (quick and weight.numel() > QUICK_TORCHAO):
        return {}
    if not can_compile():
        return {}
    try:
        from torchao.dtypes.nf4tensor import to_nf4
    except ImportError as error:
        print(f"torchao: skipped, {error}")
        return {}
    packed = to_nf4(weight)
    return {"torchao": partial(original_weight, packed)}


@partial(torch.compile, dynamic=False)
def original_weight(packed: Any) -> Tensor:
    return packed.get_original_weight()


def measure(shape: tuple[int, int], device: str, quick: bool, rounds: int) -> tuple[Times, Figures]:
    torch.manual_seed(0)
    weight = torch.randn(shape, device=device).mul_(0.02).bfloat16()
    packed, copied = nf4.quantize(weight), torch.empty_like(weight)
    cases: dict[str, Callable[[], Any]] = {
        "ours": partial(ours, packed),
        "copy": lambda: copied.copy_(weight),
    }
    cases |= bitsandbytes_cases(weight, ours(packed))
    cases |= torchao_cases(weight, quick)
    if can_compile():
        expected = ours(packed).clone()
        for name, level in (
            ("table", nf4.level_from_table),
            ("selections", nf4.level_by_selections),
        ):
            cases[name] = partial(with_levels(level), packed)
            assert torch.equal(cases[name](), expected), name
    times = in_turns(cases, rounds, device)
    found: Figures = {}
    for key, (over, under) in RATIOS.items():
        if over in times and under in times:
            found |= ratios(key, times[over], times[under])
    held = sum(t.nbytes for t in (packed.qdata, *packed.metadata))
    moved = (held + weight.nbytes) / (2 * weight.nbytes)
    for key, name in OVER_COPY.items():
        if name in times:
            speed = ratios(f"{key}_over_copy", times["copy"], times[name])
            found |= {k: v * moved for k, v in speed.items()}
    if device == "cuda":
        found["temporaries_over_output"] = temporaries(packed) / weight.nbytes
    return times, found


def temporaries(packed: QuantizedTensor) -> int:
    """The most bytes on the GPU while it dequantizes, without the output."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = ours(packed)
    return torch.cuda.max_memory_allocated() - before - out.nbytes


def main() -> None:
    args = arguments(__doc__).parse_args()
    warnings.filterwarnings("ignore", module="torchao|bitsandbytes")
    torch._dynamo.config.recompile_limit = 64  # torchao's, once per shape
    prefix, shapes = "cpu", SMOLLM2 + (LLAMA_8B[:2] if args.quick else LLAMA_8B + LLAMA_70B[:2])
    if args.device == "cuda":
        prefix, shapes = "gpu", LLAMA_70B
    details: Figures = {}
    parts: list[Figures] = []
    weights = seconds = 0.0
    rows = [["milliseconds", *(name.replace("bitsandbytes", "bnb") for name in NAMES)]]
    for shape in shapes:
        times, part = measure(shape, args.device, args.quick, args.repeat)
        parts.append(part)
        key = f"{shape[0]}x{shape[1]}"
        medians = {name: statistics.median(of_name) for name, of_name in times.items()}
        details |= {f"{prefix}_{key}_{name}_seconds": value for name, value in medians.items()}
        details |= {f"{prefix}_{key}_{name}": value for name, value in part.items()}
        rows.append([key, *(f"{1e3 * medians[n]:.3f}" if n in medians else "-" for n in NAMES)])
        weights += shape[0] * shape[1]
        seconds += medians["ours"]
    table(rows)
    found: Figures = {f"{prefix}_elements_per_second": weights / seconds}
    for name in (*RATIOS, *(f"{name}_over_copy" for name in OVER_COPY)):
        found |= geometric(f"{prefix}_{name}", parts, name)
    if args.device == "cuda":
        found["gpu_temporaries_over_output"] = max(p["temporaries_over_output"] for p in parts)
    tell(found, args.json, details)


if __name__ == "__main__":
    main()
