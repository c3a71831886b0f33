"""Forward and backward of one linear: plain, quantized, with LoRA, with DoRA; and the peers'.

    python benchmarks/linear.py [--quick] [--json linear.json] [--device cpu] [--tokens 2048]

The input needs a gradient, as within a model. Activations are bf16 (fp32 on a CPU without bf16
products). Adapters have rank 16, in fp32; PEFT's run under bf16 autocast, as in its Trainer. Our
DoRA norms are computed once per update and not included; PEFT computes them in every forward.

    plain     F.linear with a frozen weight
    nf4       our QuantizedLinear                      bnb        bitsandbytes' Linear4bit
    lora      our LowRankLinear on NF4            peft_lora  PEFT's LoRA on Linear4bit
    dora      the same with DoRA                    peft_dora  PEFT's DoRA on Linear4bit

Keys of the JSON file, for each shape (prefix `OUTxIN_`) and as the geometric mean over shapes;
ratios of seconds, with `_min` and `_max`:

    nf4_over_plain, lora_over_plain, dora_over_plain, lora_over_nf4, dora_over_lora
    bnb_over_plain, bnb_over_nf4, peft_lora_over_lora, peft_dora_over_dora
    NAME_seconds, NAME_saved_bytes     by shape; saved bytes are those that autograd keeps for
                                       backward, without parameters and quantized weights; DoRA's
                                       include its output, which the next operation keeps too
"""

from __future__ import annotations

import copy
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import (
    Figures,
    arguments,
    geometric,
    in_turns,
    ratios,
    table,
    tell,
    usual_dtype,
    write_figures,
)
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import init_adapters
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES
from qfsdp.modules.low_rank.linear import LowRankLinear
from qfsdp.modules.quantized_linear import QuantizedLinear
from qfsdp.tensor_subclasses import nf4
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

RANK, ALPHA = 16, 32
QUICK = [(1536, 576), (2048, 2048)]
CPU = [(1536, 576), (576, 1536), (4096, 4096), (14336, 4096)]
GPU = [(8192, 8192), (28672, 8192), (8192, 28672), (1024, 8192)]
RATIOS = ["nf4_over_plain", "lora_over_plain", "dora_over_plain", "lora_over_nf4", "dora_over_lora"]
RATIOS += ["bnb_over_plain", "bnb_over_nf4", "peft_lora_over_lora", "peft_dora_over_dora"]

Forward = Callable[[Tensor], Tensor]


def ours(weight: Tensor) -> dict[str, nn.Module]:
    """Our linears; B of the adapters is not zero, as after some training."""
    rows, cols = weight.shape
    plain = nn.Linear(cols, rows, bias=False, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    quantized = QuantizedLinear(nf4.quantize(weight), None)
    made: dict[str, nn.Module] = {"plain": plain, "nf4": quantized}
    for method in ("lora", "dora"):
        adapted = LowRankLinear(quantized, AdapterConfig(method, RANK, ALPHA))  # type: ignore[arg-type]
        init_adapters(adapted, seed=0)
        nn.init.normal_(adapted.lora_B, std=0.02)
        made[method] = adapted
    return made


def bitsandbytes(weight: Tensor) -> dict[str, nn.Module]:
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError as error:
        print(f"bitsandbytes: skipped, {error}")
        return {}
    rows, cols = weight.shape
    linear = Linear4bit(cols, rows, bias=False, compute_dtype=weight.dtype, quant_type="nf4")
    linear.weight = Params4bit(weight.cpu(), requires_grad=False, quant_type="nf4")
    return {"bnb": linear.to(weight.device)} | peft(linear)


def peft(base: nn.Module) -> dict[str, nn.Module]:
    """PEFT's layers, built without a model around them."""
    try:
        from peft import LoraConfig
        from peft.tuners.lora.bnb import Linear4bit
    except ImportError as error:
        print(f"peft: skipped, {error}")
        return {}
    made: dict[str, nn.Module] = {}
    for method in ("lora", "dora"):
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, use_dora=method == "dora")
        config.init_lora_weights = True
        adapted = Linear4bit(copy.deepcopy(base), "default", config, r=RANK, lora_alpha=ALPHA)
        for name, param in adapted.named_parameters():
            param.requires_grad_("lora_" in name)
        nn.init.normal_(adapted.get_parameter("lora_B.default.weight"), std=0.02)
        made[f"peft_{method}"] = adapted
    return made


def with_autocast(module: nn.Module, device: str) -> Forward:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return module(x)

    return forward


def step(module: nn.Module, forward: Forward, x: Tensor, grad: Tensor) -> Callable[[], None]:
    def call() -> None:
        x.grad = None
        module.zero_grad()
        forward(x).backward(grad)

    return call


def saved_bytes(module: nn.Module, forward: Forward, x: Tensor) -> int:
    """Bytes that autograd keeps of a forward pass, by distinct storages, without parameters."""
    known = {address for param in module.parameters() for address in storages(param)}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved.update(storages(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = forward(x)
    del y
    return sum(size for address, size in saved.items() if address not in known)


def storages(tensor: Tensor) -> dict[int, int]:
    """Address -> bytes of the storages of a tensor."""
    inner: list[Tensor] = [tensor]
    if isinstance(tensor, QuantizedTensor):
        inner = [tensor.qdata, *tensor.metadata]
    elif (state := getattr(tensor, "quant_state", None)) is not None:
        inner = [tensor, state.absmax, state.code, state.offset, *vars(state.state2).values()]
    found = [t.untyped_storage() for t in inner if isinstance(t, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def measure(shape: tuple[int, int], tokens: int, device: str, rounds: int) -> tuple[Any, Figures]:
    """Median seconds by name, and the figures of one shape."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"device": device, "dtype": COMPUTE_DTYPES[usual_dtype(device)]}
    weight = torch.randn(shape, **given).mul_(0.02)
    x = torch.randn(1, tokens, shape[1], **given, requires_grad=True)
    grad = torch.randn(1, tokens, shape[0], **given)
    cases, found = {}, Figures()
    for name, module in (ours(weight) | bitsandbytes(weight)).items():
        module = module.to(device)
        mixed = name.startswith("peft") and x.dtype == torch.bfloat16
        forward = with_autocast(module, device) if mixed else module
        cases[name] = step(module, forward, x, grad)
        found[f"{name}_saved_bytes"] = saved_bytes(module, forward, x)
    times = in_turns(cases, rounds, device)
    medians = {name: statistics.median(of_name) for name, of_name in times.items()}
    for key in RATIOS:
        over, under = key.split("_over_")
        if over in times and under in times:
            found |= ratios(key, times[over], times[under])
    return medians, found | {f"{name}_seconds": value for name, value in medians.items()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, help="default 2048; 512 with --quick")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")  # the peers warn
    tokens = args.tokens or (512 if args.quick else 2048)
    shapes = QUICK if args.quick else GPU if args.device == "cuda" else CPU
    details, parts = Figures(), []
    for shape in shapes:
        key = f"{shape[0]}x{shape[1]}"
        medians, part = measure(shape, tokens, args.device, args.repeat)
        parts.append(part)
        details |= {f"{key}_{name}": value for name, value in part.items()}
        write_figures(args.json, details)  # a later shape may fail
        what = f"{key}, {tokens} tokens, {usual_dtype(args.device)}"
        rows = [[what, "ms", "over plain", "saved MB"]]
        for name, seconds in medians.items():
            saved = part[f"{name}_saved_bytes"] / 1e6
            over = seconds / medians["plain"]
            rows.append([name, f"{1e3 * seconds:.2f}", f"{over:.2f}", f"{saved:.2f}"])
        table(rows)
    found = Figures()
    for name in RATIOS:
        found |= geometric(name, parts, name)
    tell(found, args.json, details)


if __name__ == "__main__":
    main()
