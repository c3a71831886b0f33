"""DoRA's norms of all linears of an 8B model: as launched in pieces of three sizes, and as a graph.

    python benchmarks/gpu_norms.py [--quick] [--json norms.json] [--device cpu]

The 224 linears of Llama-3-8B in NF4, with adapters of rank 16 and 64. `refresh_dora_norms` runs
once per update; its launches take longer than the device's work. Seconds are those of the host from
the call until the device is through.

    norms_RANK_seconds            launched one after the other, in pieces of NORM_CHUNK_ON_GPU
    norms_RANK_chunk_N_seconds    in pieces of 2^N weights; those of 2^23 and 2^24 fit the cache
    norms_RANK_..._graph_seconds  one launch of a captured graph; a line says if it cannot be
    norms_RANK_chunk_N_difference largest relative difference of the norms
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import Figures, arguments, spread, tell, write_figures
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import init_adapters
from qfsdp.modules.low_rank.linear import (
    LowRankLinear,
    low_rank_linears,
    refresh_dora_norms,
)
from qfsdp.modules.quantized_linear import QuantizedLinear
from qfsdp.tensor_subclasses import frozen_weight, nf4

SHAPES = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]  # q, k, v, o
SHAPES += [(14336, 4096), (14336, 4096), (4096, 14336)]  # gate, up, down
LAYERS = 32
CHUNKS = (23, 24, 25)  # powers of two; the cache of an H100 holds 2^24 weights in bf16


def linears(rank: int, device: str, quick: bool) -> nn.ModuleList:
    """All linears; those of equal shape hold the same numbers in memory of their own."""
    drawn = {}
    for rows, cols in set(SHAPES):
        rows, cols = (rows // 16, cols // 16) if quick else (rows, cols)
        weight = torch.randn(rows, cols, device=device).mul_(0.02).bfloat16()
        drawn[rows, cols] = nf4.quantize(weight)
    made = nn.ModuleList()
    for _ in range(2 if quick else LAYERS):
        for weight in drawn.values():
            base = QuantizedLinear(weight._like(weight.qdata.clone()), None)
            made.append(LowRankLinear(base, AdapterConfig("dora", rank)))
    init_adapters(made, seed=0)
    for module in made:
        assert isinstance(module, LowRankLinear)
        nn.init.normal_(module.lora_B, std=0.01)
    return made


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """The replay of a CUDA graph of `call`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay  # type: ignore[no-any-return]


def seconds(call: Callable[[], None], rounds: int, device: str) -> list[float]:
    found = []
    for _ in range(2 + rounds):
        since = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - since)
    return found[2:]


def measure(model: nn.ModuleList, key: str, rounds: int, device: str) -> tuple[Figures, Tensor]:
    """Figures, and all norms."""

    def call() -> None:
        refresh_dora_norms(model)

    found = spread(f"{key}_seconds", seconds(call, rounds, device))
    held = [module.weight_norm for _, module in low_rank_linears(model)]
    norms = torch.cat([norm.detach() for norm in held if norm is not None])
    if device == "cuda":
        try:
            found |= spread(f"{key}_graph_seconds", seconds(captured(call), rounds, device))
        except RuntimeError as error:
            print(f"{key}: not captured: {str(error).splitlines()[0]}")
            torch.cuda.synchronize()
    return found, norms


def furthest(found: Tensor, norms: Tensor) -> float:
    """The largest relative difference."""
    return float(((found - norms) / norms).abs().max())


@contextmanager
def pieces_of(weights: int) -> Iterator[None]:
    """Norms of so many weights at a time, on any device."""
    with mock.patch.multiple(frozen_weight, NORM_CHUNK_ON_GPU=weights, NORM_CHUNK_WEIGHTS=weights):
        yield


def main() -> None:
    args = arguments(__doc__).parse_args()
    found: Figures = {}
    for rank in (16, 64):
        model = linears(rank, args.device, args.quick)
        figures, norms = measure(model, f"norms_{rank}", args.repeat, args.device)
        found |= figures
        for power in CHUNKS:
            with pieces_of(1 << power):
                figures, others = measure(
                    model, f"norms_{rank}_chunk_{power}", args.repeat, args.device
                )
            found |= figures | {f"norms_{rank}_chunk_{power}_difference": furthest(others, norms)}
            write_figures(args.json, found)
        del model
    tell(found, args.json)


if __name__ == "__main__":
    main()
