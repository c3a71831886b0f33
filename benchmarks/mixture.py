"""A train step of a small mixture of experts: QLoRA against LoRA, and experts against one product.

    python benchmarks/mixture.py [--quick] [--json mixture.json] [--device cpu] [--tokens 16384]

8 experts, 2 of them per token, random weights and tokens. Ratios, each of a pair in turns:

    qlora_over_lora   tokens per second of a step with an NF4 base, over those with the same base
                      in the compute dtype; LoRA of rank 8 on all linears, experts too
    loop_over_dense   seconds of the experts of a layer, forward and backward to their input, over
                      those of one dense feed-forward with the same FLOPs; plain weights
    loop_over_grouped the same experts, their rows multiplied expert by expert, over all experts
                      in one `grouped_mm`; in bf16 only

A step has 16,384 tokens in rows of 1,024 (2,048 with --quick), and so has the layer. In bf16; in
fp32 on a CPU without bf16 products.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import Figures, arguments, in_turns, ratios, tell, usual_dtype
from qfsdp.config.component import Component
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.decoder_parts import ExpertsConfig, LayerConfig, RouterConfig
from qfsdp.modules.experts import product as expert_product
from qfsdp.modules.experts.stacked import Experts
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


def feed_forwards(rows: int, dtype: torch.dtype, device: str) -> dict[str, Callable[[], None]]:
    """Forward and backward of a layer's experts in a loop, of the same experts by `grouped_mm`
    (bf16), and of a dense feed-forward that is as wide as a token's experts."""
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

    def of_experts(grouped: bool) -> None:
        with mock.patch.object(expert_product, "takes_grouped", lambda *_: grouped):
            experts(x, best.indices, weights).sum().backward()

    cases = {"loop": lambda: of_experts(False), "dense": lambda: dense(x).sum().backward()}
    return cases | ({"grouped": lambda: of_experts(True)} if dtype == torch.bfloat16 else {})


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, help="a multiple of 1,024, or less")
    args = parser.parse_args()
    rounds, layers = (min(args.repeat, 5), 2) if args.quick else (args.repeat, 4)
    count = args.tokens or (2048 if args.quick else 16_384)
    name = usual_dtype(args.device)
    tokens = torch.randint(0, 512, (count // min(count, 1024), min(count, 1024)))
    tokens = tokens.to(args.device)
    given = (layers, tokens, COMPUTE_DTYPES[name])
    steps = in_turns({f: train_step(f, *given) for f in ("nf4", "none")}, rounds, args.device)
    cases = feed_forwards(tokens.numel(), COMPUTE_DTYPES[name], args.device)
    parts = in_turns(cases, rounds, args.device)
    found: Figures = ratios("qlora_over_lora", steps["none"], steps["nf4"])
    found |= ratios("loop_over_dense", parts["loop"], parts["dense"])
    if "grouped" in parts:
        found |= ratios("loop_over_grouped", parts["loop"], parts["grouped"])
    for key, way in (("qlora", "nf4"), ("lora", "none")):
        found[f"{key}_tokens_per_second"] = tokens.numel() / statistics.median(steps[way])
    print(f"{layers} layers, {tokens.numel()} tokens, {name}, {torch.get_num_threads()} threads")
    tell(found, args.json)


if __name__ == "__main__":
    main()
