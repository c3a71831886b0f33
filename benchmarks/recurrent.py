"""Time and memory of the gated delta rule and the short convolution, ours and transformers'.

    OMP_NUM_THREADS=1 python benchmarks/recurrent.py [--quick] [--json recurrent.json]

Forward and backward of a row of 2,048 tokens (--quick: 512) in fp32, with an eighth of the heads of
Qwen3.5-9B: 2 of keys and 4 of values, 128 wide, and the 1,024 channels of their convolution. Ours
also with the samples of a packed row. transformers computes in PyTorch, as without
flash-linear-attention. Prints milliseconds, the bytes that are kept for backward, and ratios.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import arguments, in_turns, ratios, tell
from qfsdp.modules.gated_delta_rule import gated_delta_rule
from qfsdp.modules.short_convolution import short_convolution

TAPS = 4


def cases(tokens: int, device: str) -> dict[str, tuple[Any, list[Tensor]]]:
    """name -> (function, what it is computed of)."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    torch.manual_seed(0)
    sizes = [(2, 128), (2, 128), (4, 128), (4,), (4,), (1024,)]
    made = [torch.randn(1, tokens, *size, device=device) for size in sizes]
    made[3], made[4] = -F.softplus(made[3]), made[4].sigmoid()
    *parts, values = (part.requires_grad_() for part in made)
    weight = torch.randn(1024, TAPS, device=device)
    documents = torch.arange(tokens, device=device)[None] // 300

    def rule(*given: Tensor) -> Tensor:
        return theirs.torch_chunk_gated_delta_rule(*given, use_qk_l2norm_in_kernel=True)[0]

    def ours(*given: Any, documents: Tensor | None = None) -> Tensor:
        query, key, value, decay, step = given
        return gated_delta_rule(query, key, value, decay, step, documents)[0]

    packed = partial(short_convolution, weight=weight, documents=documents)
    return {
        "rule, transformers": (rule, parts),
        "rule, ours": (ours, parts),
        "rule, ours, packed": (partial(ours, documents=documents), parts),
        "convolution, transformers": (
            lambda given: theirs.causal_conv1d_fn(given.mT, weight).mT,
            [values],
        ),
        "convolution, ours": (partial(short_convolution, weight=weight), [values]),
        "convolution, ours, packed": (packed, [values]),
    }


def kept(function: Any, given: list[Tensor]) -> int:
    """Bytes that are kept for backward beside what was given."""
    seen: dict[int, Any] = {}

    def keep(part: Tensor) -> Tensor:
        seen[part.untyped_storage().data_ptr()] = part.untyped_storage()
        return part

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda part: part):
        found = function(*given)
    for part in given:
        seen.pop(part.untyped_storage().data_ptr(), None)
    assert found.requires_grad
    return sum(storage.nbytes() for storage in seen.values())


def update(function: Any, given: list[Tensor], weights: list[Tensor]) -> None:
    """Forward and backward; the gradient of the result is made once."""
    found = function(*given)
    if not weights:
        weights.append(torch.randn_like(found))
    torch.autograd.grad(found, given, weights[0])


def main() -> None:
    args = arguments(__doc__).parse_args()
    found = cases(512 if args.quick else 2048, args.device)
    runs = {name: partial(update, *case, []) for name, case in found.items()}
    times = in_turns(runs, args.repeat, args.device)
    figures: dict[str, float] = {}
    for name, case in found.items():
        size, first = kept(*case), f"{name.partition(',')[0]}, transformers"
        print(f"{name:26} {1e3 * statistics.median(times[name]):7.1f} ms {size / 2**20:6.1f} MiB")
        if name != first:
            key = name.replace(", ours", "").replace(", ", "_")
            figures |= ratios(f"{key}_time", times[name], times[first])
            figures[f"{key}_kept"] = size / kept(*found[first])
    tell(figures, args.json)


if __name__ == "__main__":
    main()
