"""Time of one layer of Gated DeltaNet, ours and transformers', forward and backward.

    OMP_NUM_THREADS=1 python benchmarks/delta_net.py [--quick] [--profile] [--json delta_net.json]

A row of 2,048 tokens (--quick: 512) through a layer with the proportions of Qwen3.5-9B at an eighth
of its widths: hidden size 512, 2 heads of keys and 4 of values, 128 wide. The weights are frozen
and plain, so a step has the gradients of its input, as a layer of QLoRA has. transformers' layer
computes in PyTorch, as without flash-linear-attention. In fp32 and in bf16. Prints milliseconds and
ratios; --profile what takes the time, --compile both compiled, too: Dynamo unrolls transformers'
loop over chunks, which takes minutes.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import arguments, in_turns, ratios, tell
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.delta_net import DeltaNet

CONFIG: dict[str, Any] = {
    **{"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 512},
    **{"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "hidden_act": "silu", "rms_norm_eps": 1e-6},
}


def layers(dtype: torch.dtype, device: str) -> tuple[nn.Module, nn.Module]:
    """transformers' and ours, with the same weights."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    torch.manual_seed(0)
    config: Any = theirs.Qwen3_5TextConfig(**CONFIG)
    reference = theirs.Qwen3_5GatedDeltaNet(config, 0).to(dtype)
    ours = DeltaNet(DecoderConfig.from_dict(CONFIG, "config")).to(dtype)
    ours.load_state_dict(reference.state_dict())
    for layer in (reference, ours):
        layer.to(device).requires_grad_(False)
    return reference, ours


def update(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    return torch.autograd.grad(layer(x), x, weight)[0]


def cases(tokens: int, dtype: torch.dtype, device: str, compiles: bool) -> dict[str, Any]:
    reference, ours = layers(dtype, device)
    x, weight = (torch.randn(1, tokens, 512, device=device, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    borders = torch.tensor([0, *range(300, tokens, 300), tokens], device=device).int()

    def rows(x: Tensor, documents: Tensor | None = None) -> Tensor:
        found: Tensor = ours(x, None, None, None, documents)
        return found

    named: dict[str, Any] = {"transformers": reference, "ours": rows}
    compiled = {f"{name}, compiled": torch.compile(layer) for name, layer in named.items()}
    named |= {"ours, packed": partial(rows, documents=borders)} | (compiled if compiles else {})
    made = {name: partial(update, layer, x, weight) for name, layer in named.items()}
    theirs, found = (made[name]() for name in ("transformers", "ours"))
    print(f"gradients apart by {(found - theirs).abs().max() / theirs.abs().max():.1e}")
    return made


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--profile", action="store_true", help="what takes the time")
    parser.add_argument("--compile", action="store_true", help="both compiled, too")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        runs = cases(512 if args.quick else 2048, dtype, args.device, args.compile)
        times = in_turns(runs, args.repeat, args.device)
        for name, found in times.items():
            print(f"{kind:9} {name:24} {1e3 * statistics.median(found):7.1f} ms")
            if name.startswith("ours"):
                first = "transformers, compiled" if "compiled" in name else "transformers"
                key = f"{kind}_{name.replace(', ', '_')}_time"
                figures |= ratios(key, found, times[first])
        if args.profile:
            for name in ("ours", "transformers"):
                with torch.profiler.profile() as seen:
                    runs[name]()
                print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=18))
    tell(figures, args.json)


if __name__ == "__main__":
    main()
