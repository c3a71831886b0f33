"""Products in FP8 against bf16: `torch._scaled_mm`, and the frozen products that use it.

    python benchmarks/gpu_scaled_mm.py [--quick] [--json scaled_mm.json] [--device cpu]

The four linear shapes of Llama-3-8B, with 2,048 and 8,192 tokens.

    bf16             x @ W.T
    tensorwise       e4m3, one scale for each operand
    rowwise          e4m3, a scale for each token and each row of W, as `quantization.compute: fp8`
    rowwise_fast     the same with `use_fast_accum`
    forward, backward            NF4 to bf16, and the product; forward, and for the gradient of x
    fp8_forward, fp8_backward    NF4 and tokens to e4m3, and the product

Keys: `TOKENS_OUTxIN_NAME_flops_per_second`; `TOKENS_fp8_over_bf16_NAME`, seconds of bf16's way over
FP8's, the geometric mean over shapes; `OUTxIN_fp8_error`, rms against fp32.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import Figures, arguments, geometric, in_turns, ratios, tell, write_figures
from qfsdp.tensor_subclasses import fp8, nf4
from qfsdp.tensor_subclasses.frozen_weight import frozen_weight

SHAPES = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
PAIRS = [("rowwise", "bf16"), ("tensorwise", "bf16"), ("rowwise_fast", "bf16")]
PAIRS += [("fp8_forward", "forward"), ("fp8_backward", "backward")]


def cases(shape: tuple[int, int], tokens: int, device: str) -> dict[str, Callable[[], Any]]:
    rows, cols = shape
    torch.manual_seed(0)
    weight = torch.randn(shape, device=device).mul_(0.02).bfloat16()
    q = nf4.quantize(weight)
    parts = (q.qdata, q.metadata, "nf4")
    x, grad = (torch.randn(tokens, n, device=device).bfloat16() for n in (cols, rows))
    x8, x_scale = fp8.to_fp8(x, None)
    w8, w_scale = fp8.frozen_weight_fp8(*parts, cols, 0)
    one = torch.ones((), device=device)

    def scaled(a: Any, b: Any, fast: bool = False) -> Any:
        return torch._scaled_mm(x8, w8.t(), a, b, out_dtype=torch.bfloat16, use_fast_accum=fast)

    dense = partial(frozen_weight, *parts, cols, 0, torch.bfloat16)
    return {
        "bf16": lambda: x @ weight.t(),
        "tensorwise": lambda: scaled(one, one),
        "rowwise": lambda: scaled(x_scale, w_scale.unsqueeze(0)),
        "rowwise_fast": lambda: scaled(x_scale, w_scale.unsqueeze(0), fast=device == "cuda"),
        "forward": lambda: x @ dense().t(),
        "backward": lambda: grad @ dense(),
        "fp8_forward": lambda: fp8.forward_product(x, *parts, 0, None),
        "fp8_backward": lambda: fp8.backward_product(grad, *parts, cols, 0, None),
    }


def working(given: dict[str, Callable[[], Any]], key: str) -> dict[str, Callable[[], Any]]:
    """Those that run here; a line for each that does not."""
    found = {}
    for name, case in given.items():
        try:
            case()
            found[name] = case
        except (RuntimeError, NotImplementedError) as error:
            print(f"{key} {name}: does not run: {str(error).splitlines()[0]}")
    return found


def error_of(shape: tuple[int, int], device: str) -> float:
    """Relative rms error of a product in FP8 with 256 tokens."""
    torch.manual_seed(0)
    q = nf4.quantize(torch.randn(shape, device=device).mul_(0.02), torch.bfloat16)
    x = torch.randn(256, shape[1], device=device).bfloat16()
    exact = x.double() @ q.dequantize(torch.float32).double().t()
    y = fp8.forward_product(x, q.qdata, q.metadata, "nf4", 0, None)
    return float((y - exact).norm() / exact.norm())


def main() -> None:
    args = arguments(__doc__).parse_args()
    shapes = [(256, 256), (512, 256)] if args.quick else SHAPES
    details: Figures = {}
    found: Figures = {}
    for tokens in (64,) if args.quick else (2048, 8192):
        parts: list[Figures] = []
        for shape in shapes:
            key = f"{tokens}_{shape[0]}x{shape[1]}"
            times = in_turns(
                working(cases(shape, tokens, args.device), key), args.repeat, args.device
            )
            part: Figures = {}
            for name, of_name in times.items():
                flops = 2 * tokens * shape[0] * shape[1]
                details[f"{key}_{name}_flops_per_second"] = flops / statistics.median(of_name)
            for over, under in PAIRS:
                if over in times and under in times:
                    part |= ratios(over, times[under], times[over])
            parts.append(part)
            write_figures(args.json, details | found)
        for over, _ in PAIRS:
            found |= geometric(f"{tokens}_fp8_over_bf16_{over}", parts, over)
    for shape in shapes:
        found[f"{shape[0]}x{shape[1]}_fp8_error"] = error_of(shape, args.device)
    tell(found, args.json, details)


if __name__ == "__main__":
    main()
