"""A train step of a small mixture of experts: QLoRA against LoRA, and experts against one product.

    python benchmarks/mixture.py [--quick] [--json mixture.json] [--device cpu]

8 experts, 2 of them per token, random weights and tokens. Two ratios, each of a pair in turns:

    qlora_over_lora   tokens per second of a step with an NF4 base, over those with the same base
                      in the compute dtype; LoRA of rank 8 on all linears, experts too
    loop_over_dense   seconds of the experts of a layer, forward and backward to their input, over
                      those of one dense feed-forward with the same FLOPs; plain weights

In bf16; in fp32 on a CPU without bf16 products.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import Figures, arguments, in_turns, ratios, tell, usual_dtype
from qfsdp.cli.component import Component
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.modules.adapter_config import AdapterConfig
from qfsdp.modules.adapters import add_adapters, init_adapters
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.decoder_parts import ExpertsConfig, LayerConfig, RouterConfig
from qfsdp.modules.experts import Experts
from qfsdp.modules.mlp import MLP
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from qfsdp.training.optimizer import build_optimizer

EXPERTS = ExpertsConfig(8, 2, 1024, RouterConfig(normalised=True))
OPTIMIZER = Component("torch.optim.AdamW", {"lr": 1e-4, "fused": True})


def config_of(layers: int, intermediate_size: int = 1024) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=intermediate_size,
        layers=(LayerConfig(mixture=True),) * layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        experts=EXPERTS,
    )


def train_step(format: str, layers: int, tokens: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    torch.manual_seed(0)
    model = Decoder(config_of(layers)).to(tokens.device, dtype)
    for param in model.parameters():
        nn.init.normal_(param, std=0.02)
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    quantize_linears(model, QuantizationConfig(format))  # type: ignore[arg-type]
    for name, param in model.named_parameters():
        param.requires_grad_(False)
        if isinstance(param.data, QuantizedTensor):
            param.data.quantize_(weights[name])
    add_adapters(model, AdapterConfig("lora", 8, 16))
    init_adapters(model, seed=0)
    optimizer = build_optimizer(OPTIMIZER, trainable_parameters(model))

    def step() -> None:
        (model(tokens, labels=tokens) / tokens.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def feed_forwards(
    rows: int, dtype: torch.dtype, device: str
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The experts of a layer, and a dense feed-forward that is as wide as a token's experts."""
    torch.manual_seed(0)
    wide = config_of(1, EXPERTS.top_k * EXPERTS.intermediate_size)
    experts, dense = Experts(wide.hidden_size, EXPERTS), MLP(wide)
    for module in (experts, dense):
        module.to(device, dtype).requires_grad_(False)
        for param in module.parameters():
            nn.init.normal_(param, std=0.02)
    x = torch.randn(rows, wide.hidden_size, dtype=dtype, device=device, requires_grad=True)
    best = torch.rand(rows, EXPERTS.count, device=device).topk(EXPERTS.top_k)
    weights = best.values.softmax(-1).to(dtype)

    def of_experts() -> None:
        experts(x, best.indices, weights).sum().backward()

    return of_experts, lambda: dense(x).sum().backward()


def main() -> None:
    args = arguments(__doc__).parse_args()
    rounds, layers = (min(args.repeat, 5), 2) if args.quick else (args.repeat, 4)
    name = usual_dtype(args.device)
    tokens = torch.randint(0, 512, (2, 1024), device=args.device)
    given = (layers, tokens, COMPUTE_DTYPES[name])
    steps = in_turns({f: train_step(f, *given) for f in ("nf4", "none")}, rounds, args.device)
    both = feed_forwards(tokens.numel(), COMPUTE_DTYPES[name], args.device)
    parts = in_turns(dict(zip(("experts", "dense"), both, strict=True)), rounds, args.device)
    found: Figures = ratios("qlora_over_lora", steps["none"], steps["nf4"])
    found |= ratios("loop_over_dense", parts["experts"], parts["dense"])
    for key, way in (("qlora", "nf4"), ("lora", "none")):
        found[f"{key}_tokens_per_second"] = tokens.numel() / statistics.median(steps[way])
    print(f"{layers} layers, {tokens.numel()} tokens, {name}, {torch.get_num_threads()} threads")
    tell(found, args.json)


if __name__ == "__main__":
    main()
