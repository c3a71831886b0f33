"""What rows of new lengths cost attention: the first call of a length against the second.

    python benchmarks/gpu_lengths.py [--quick] [--json lengths.json]

On cards of compute capability 9.0 and 10.0 PyTorch's attention asks cuDNN first. cuDNN builds a
plan for each new shape. That takes 23 to 37 ms on an H100, and up to a second, with the backward
pass, on a B200 (modelscope/FunASR#3704). Rows that are neither compiled nor packed are padded to
the longest of their batch, a multiple of 8. With at most 2,048 tokens a run meets up to 256
lengths. Measured is attention of one layer of Llama-3-8B, four rows, forward and backward:

    lengths_new_seconds, lengths_known_seconds       medians over lengths; also with `_no_cudnn`
    lengths_no_cudnn_over_cudnn                      seconds of known lengths
    lengths_new_over_known                           with PyTorch's choice. If it is above 2, rows
                                                     of an uncompiled run should do without cuDNN
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import Figures, base_arguments, tell
from qfsdp.modules.attention.self_attention import attend

HEADS, KV_HEADS, HEAD_DIM, ROWS = 32, 8, 128, 4


def seconds_of(length: int, device: str) -> float:
    """Of attention and its gradients, for rows of this length."""
    heads = [HEADS, KV_HEADS, KV_HEADS]
    if device == "cpu":
        heads = [count // 8 for count in heads]
    q, k, v = (
        torch.randn(
            ROWS, count, length, HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True
        )
        for count in heads
    )
    grad = torch.randn_like(q)
    wait(device)
    since = time.perf_counter()
    attend(q, k, v, None).backward(grad)
    wait(device)
    return time.perf_counter() - since


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    args = base_arguments(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = range(16, 64, 8) if args.quick else range(1032, 1032 + 24 * 40, 40)
    found: Figures = {}
    for key, cudnn in {"": True, "_no_cudnn": False}.items():
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        seconds_of(lengths.start - 8, device)  # loads the libraries
        pairs = [(seconds_of(length, device), seconds_of(length, device)) for length in lengths]
        for name, values in zip(("new", "known"), zip(*pairs, strict=True), strict=True):
            found[f"lengths_{name}{key}_seconds"] = statistics.median(values)
    known = found["lengths_known_seconds"]
    found["lengths_no_cudnn_over_cudnn"] = found["lengths_known_no_cudnn_seconds"] / known
    found["lengths_new_over_known"] = found["lengths_new_seconds"] / known
    tell(found, args.json)


if __name__ == "__main__":
    main()
