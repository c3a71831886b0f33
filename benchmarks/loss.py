"""Time and memory of the loss over a large vocabulary: forward and backward to the hidden state.

    python benchmarks/loss.py [--quick] [--json loss.json]

Compares three ways to compute the same loss and gradient, in turns: whole logits, torch's
`F.linear_cross_entropy` (since 2.13), and `qfsdp.modules.loss.head_loss`. head_loss skips
positions without a target; it is measured with all positions as targets, and with half of them.
In bf16; in fp32 on a CPU without bf16 products.

    time_over_plain, memory_over_plain      head_loss over whole logits, every position a target
    torch_time_over_plain, torch_memory_over_plain
    half_time_over_plain, half_memory_over_plain
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.memory import PeakMemory
from benchmarks.timing import usual_dtype
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES
from qfsdp.modules.loss import head_loss
from tests.models import summed_cross_entropy

Way = Callable[[nn.Linear, Tensor, Tensor], Tensor]


def plain(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    return summed_cross_entropy(head(hidden), labels)


def torchs(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(
        hidden.flatten(0, 1), head.weight, labels.flatten(), reduction="sum", options=options
    )


def run(way: Way, head: nn.Linear, hidden: Tensor, labels: Tensor) -> tuple[float, int, Tensor]:
    """Seconds, peak bytes and the gradient of one forward and backward."""
    hidden = hidden.detach().requires_grad_()
    memory, since = PeakMemory(), time.perf_counter()
    way(head, hidden, labels).backward()
    seconds = time.perf_counter() - since
    assert hidden.grad is not None
    return seconds, memory.stop(), hidden.grad


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer tokens, a narrower model")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeat", type=int, help="runs of each; default: 3, 1 with --quick")
    args = parser.parse_args()
    repeat = args.repeat or (1 if args.quick else 3)
    tokens, width, vocabulary = (1024, 512, 128256) if args.quick else (4096, 1024, 128256)
    torch.manual_seed(0)
    dtype = usual_dtype("cpu")
    hidden = torch.randn(1, tokens, width, dtype=COMPUTE_DTYPES[dtype])
    head = nn.Linear(width, vocabulary, bias=False, dtype=hidden.dtype).requires_grad_(False)
    labels = torch.randint(0, vocabulary, (1, tokens))
    half = labels.masked_fill(torch.arange(tokens) < tokens // 2, -100)
    cases: dict[str, tuple[Way, Tensor]] = {"plain": (plain, labels), "ours": (head_loss, labels)}
    cases |= {"half": (head_loss, half)}
    if hasattr(F, "linear_cross_entropy"):
        cases |= {"torch": (torchs, labels)}
    for way, targets in cases.values():
        run(way, head, hidden[:, :64], targets[:, -64:])
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in cases}
    for _ in range(repeat):
        for name, (way, targets) in cases.items():
            seconds, peak, _ = run(way, head, hidden, targets)
            found[name].append((seconds, peak))
    figures: dict[str, float] = {}
    print(f"{tokens} tokens, width {width}, vocabulary {vocabulary}, {dtype}")
    for name, of_name in found.items():
        ratios = [t / p for (t, _), (p, _) in zip(of_name, found["plain"], strict=True)]
        seconds = statistics.median(t for t, _ in of_name)
        peak = max(m for _, m in of_name)
        over = peak / max(m for _, m in found["plain"])
        prefix = {"ours": "", "torch": "torch_", "half": "half_"}.get(name)
        print(
            f"{name:6} {seconds:7.2f} s ({min(ratios):.2f} to {max(ratios):.2f} of plain) "
            f"{peak / 1e6:6.0f} MB ({over:.2f} of plain)"
        )
        if prefix is not None:
            figures[f"{prefix}time_over_plain"] = statistics.median(ratios)
            figures[f"{prefix}memory_over_plain"] = over
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
