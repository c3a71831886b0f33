"""Time to dequantize NF4 weights to bf16: ours, torchao's, bitsandbytes', and a plain copy.

    python benchmarks/dequantize.py [--quick] [--json dequantize.json] [--device cpu]
                                    [--processor-time]
    python benchmarks/dequantize.py --before CHECKOUT [--shapes ...] [--json dequantize.json]

All write into new memory. Bits are compared with bitsandbytes' before anything is timed.
Shapes on a CPU: the linears of SmolLM2-135M and Llama-3-8B and two of Llama-3-70B; with --quick
those of SmolLM2 and two of 8B. On a GPU: those of 70B. torchao needs sizes that 16,384 divides;
with --quick it gets none above 16 M weights, because it quantizes 7 M a second. `--shapes
8192x8192 ...` takes others. With `--before`, the code of another checkout and of this one take
turns in processes of their own: whoever changes `tensor_subclasses/` compares with the commit
before.

Keys of the JSON file; on a GPU the prefix is `gpu_`. A ratio is the geometric mean over shapes of
the medians over rounds; its `_min` and `_max` are over all shapes and rounds:

    cpu_vs_torchao_compiled            seconds of torchao's compiled dequantize over ours
    cpu_vs_bitsandbytes                seconds of bitsandbytes, double quantized, over ours
    cpu_vs_bitsandbytes_same_memory    the same, with a tensor to write to
    cpu_vs_bitsandbytes_fp32_absmax    bitsandbytes without double quantization over ours with it
    cpu_dequantize_over_copy           bytes read and written a second, over those of `copy_`
                                       between bf16 tensors of the same shape
    cpu_elements_per_second            weights a second, over all shapes
    gpu_temporaries_over_output        peak of temporary bytes over the bytes of the output
    before_over_now_quantize           seconds of the other checkout over ours (--before), and
    before_over_now_dequantize         the same for bf16 and fp32 results
    cpu_ROWSxCOLS_...                  the same for one shape, and NAME_seconds, medians
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import (
    Clock,
    Figures,
    Times,
    arguments,
    geometric,
    in_turns,
    ratios,
    table,
    tell,
    write_figures,
)
from qfsdp.tensor_subclasses import nf4
from qfsdp.tensor_subclasses.frozen_weight import frozen_weight
from qfsdp.tensor_subclasses.kernels.compiled import can_compile
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

SMOLLM2 = [(576, 576), (192, 576), (1536, 576), (576, 1536)]
LLAMA_8B = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
LLAMA_70B = [(8192, 8192), (28672, 8192), (8192, 28672), (1024, 8192)]
TORCHAO_BLOCK = 64 * 256  # weights per second-level scale; torchao needs whole blocks
QUICK_TORCHAO = 1 << 24  # weights
RATIOS = {  # key: seconds of the first over seconds of the second
    "vs_torchao_compiled": ("torchao", "ours"),
    "vs_bitsandbytes": ("bitsandbytes", "ours"),
    "vs_bitsandbytes_same_memory": ("bitsandbytes_same_memory", "ours"),
    "vs_bitsandbytes_fp32_absmax": ("bitsandbytes_fp32_absmax", "ours"),
}
NAMES = ["ours", "copy", "torchao", "bitsandbytes", "bitsandbytes_same_memory"]
NAMES += ["bitsandbytes_fp32_absmax"]


def ours(weight: QuantizedTensor) -> Tensor:
    which = (weight.format, weight.cols, weight.row_offset, torch.bfloat16)
    return frozen_weight(weight.qdata, weight.metadata, *which)


def bitsandbytes_cases(weight: Tensor, expected: Tensor) -> dict[str, Callable[[], Any]]:
    """bitsandbytes' variants; the double quantized one must equal `expected`."""
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
    """The CPU path of `dequantize_4bit`, with an output tensor, which that does not take."""
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
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4
    except ImportError as error:
        print(f"torchao: skipped, {error}")
        return {}
    return {"torchao": partial(original_weight, to_nf4(weight))}


@partial(torch.compile, dynamic=False)
def original_weight(weight: Any) -> Tensor:
    return weight.get_original_weight()


def measure(
    shape: tuple[int, int], device: str, quick: bool, rounds: int, clock: Clock
) -> tuple[Times, Figures]:
    torch.manual_seed(0)
    weight = torch.randn(shape, device=device).mul_(0.02).bfloat16()
    quantized, copied = nf4.quantize(weight), torch.empty_like(weight)
    cases: dict[str, Callable[[], Any]] = {
        "ours": partial(ours, quantized),
        "copy": lambda: copied.copy_(weight),
    }
    cases |= bitsandbytes_cases(weight, ours(quantized))
    cases |= torchao_cases(weight, quick)
    times = in_turns(cases, rounds, device, clock=clock)
    found: Figures = {}
    for key, (over, under) in RATIOS.items():
        if over in times and under in times:
            found |= ratios(key, times[over], times[under])
    held = sum(t.nbytes for t in (quantized.qdata, *quantized.metadata))
    moved = (held + weight.nbytes) / (2 * weight.nbytes)
    speed = ratios("dequantize_over_copy", times["copy"], times["ours"])
    found |= {k: v * moved for k, v in speed.items()}
    if device == "cuda":
        found["temporaries_over_output"] = temporaries(quantized) / weight.nbytes
    return times, found


def temporaries(quantized: QuantizedTensor) -> int:
    """Peak bytes on the GPU while it dequantizes, without the output."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = ours(quantized)
    return torch.cuda.max_memory_allocated() - before - out.nbytes


# Runs in both checkouts: what it calls has had these names since the first release.
WORKER = """
import json, sys, time
import torch
from qfsdp.tensor_subclasses import nf4

clock = getattr(time, sys.argv[2])

def seconds(call, least=0.3):
    call()
    calls, since = 0, clock()
    while clock() - since < least:
        call()
        calls += 1
    return (clock() - since) / calls

found = {}
for rows, cols in json.loads(sys.argv[1]):
    torch.manual_seed(0)
    weight = torch.randn(rows, cols).mul_(0.02).bfloat16()
    quantized, shape = nf4.quantize(weight), f"{rows}x{cols}"
    found[f"{shape} quantize"] = seconds(lambda: nf4.quantize(weight))
    for name in ("bfloat16", "float32"):
        dtype = getattr(torch, name)
        found[f"{shape} dequantize {name}"] = seconds(lambda: quantized.dequantize(dtype))
print(json.dumps(found))
"""


def against(
    before: Path, shapes: list[tuple[int, int]], rounds: int, clock: Clock, json_file: Path | None
) -> None:
    """Prints seconds of `WORKER`'s calls in another checkout and in this one, and their ratios."""
    checkouts = {"before": before.resolve(), "now": Path(__file__).resolve().parent.parent}
    times: dict[str, dict[str, list[float]]] = {name: {} for name in checkouts}
    for _ in range(rounds):
        for name, folder in checkouts.items():
            env = os.environ | {"PYTHONPATH": str(folder)}
            command = [sys.executable, "-P", "-c", WORKER, json.dumps(shapes), clock.__name__]
            output = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
            for case, seconds in json.loads(output.stdout.splitlines()[-1]).items():
                times[name].setdefault(case, []).append(seconds)
    rows = [["milliseconds", *checkouts, "before / now"]]
    parts: dict[str, list[Figures]] = {"quantize": [], "dequantize": []}
    for case, seconds in times["now"].items():
        found = ratios("ratio", times["before"][case], seconds)
        parts[case.split()[1]].append(found)
        medians = [1e3 * statistics.median(times[name][case]) for name in checkouts]
        spread = f"{found['ratio']:.3f} ({found['ratio_min']:.2f} to {found['ratio_max']:.2f})"
        rows.append([case, *(f"{value:.3f}" for value in medians), spread])
    table(rows)
    figures: Figures = {}
    for name, part in parts.items():
        figures |= geometric(f"before_over_now_{name}", part, "ratio")
    tell(figures, json_file)


def shape_of(text: str) -> tuple[int, int]:
    rows, cols = map(int, text.split("x"))
    return rows, cols


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", type=shape_of, metavar="ROWSxCOLS")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="compare with its code")
    parser.add_argument(
        "--processor-time", action="store_true", help="of one thread on a CPU that others use too"
    )
    args = parser.parse_args()
    clock = time.process_time if args.processor_time else time.perf_counter
    if args.before:
        against(args.before, args.shapes or SMOLLM2 + LLAMA_8B[:1], args.repeat, clock, args.json)
        return
    warnings.filterwarnings("ignore", module="torchao|bitsandbytes")
    torch._dynamo.config.recompile_limit = 64  # torchao compiles once per shape
    prefix, shapes = "cpu", SMOLLM2 + (LLAMA_8B[:2] if args.quick else LLAMA_8B + LLAMA_70B[:2])
    if args.device == "cuda":
        prefix, shapes = "gpu", LLAMA_70B
    shapes = args.shapes or shapes
    details: Figures = {}
    parts: list[Figures] = []
    weights = seconds = 0.0
    rows = [["milliseconds", *(name.replace("bitsandbytes", "bnb") for name in NAMES)]]
    for shape in shapes:
        times, part = measure(shape, args.device, args.quick, args.repeat, clock)
        parts.append(part)
        key = f"{shape[0]}x{shape[1]}"
        medians = {name: statistics.median(of_name) for name, of_name in times.items()}
        details |= {f"{prefix}_{key}_{name}_seconds": value for name, value in medians.items()}
        details |= {f"{prefix}_{key}_{name}": value for name, value in part.items()}
        rows.append([key, *(f"{1e3 * medians[n]:.3f}" if n in medians else "-" for n in NAMES)])
        write_figures(args.json, details)  # a later shape may fail
        weights += shape[0] * shape[1]
        seconds += medians["ours"]
    table(rows)
    found: Figures = {f"{prefix}_elements_per_second": weights / seconds}
    for name in (*RATIOS, "dequantize_over_copy"):
        found |= geometric(f"{prefix}_{name}", parts, name)
    if args.device == "cuda":
        found["gpu_temporaries_over_output"] = max(p["temporaries_over_output"] for p in parts)
    tell(found, args.json, details)


if __name__ == "__main__":
    main()
