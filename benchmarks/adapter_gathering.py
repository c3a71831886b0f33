"""Adapters gathered with their layer, or replicated on every rank: time, memory, bytes sent.

    python benchmarks/adapter_gathering.py [--quick] [--json gathering.json] [--device cpu]

QLoRA train steps of SmolLM2's layers (random weights, no vocabulary) on 2 ranks over gloo, with
adapters of rank 16 and 64:

    gathered     `shard_model`: adapters are gathered with their layer for forward and backward,
                 gradients are reduce-scattered, each rank's optimizer steps on its rows
    replicated   every rank holds all adapters and FSDP2 ignores them (`ignored_params`); after
                 backward one all-reduce sums all gradients, optimizers step on everything

Keys of the JSON file, for each adapter rank R; the two run in turns:

    rankR_replicated_over_gathered_time    ratio of seconds of a step, with `_min` and `_max`
    rankR_replicated_minus_gathered_bytes  additional memory per rank of replicated, counted:
                                           adapters, gradients and two optimizer states
    rankR_gathered_bytes_per_step, rankR_replicated_bytes_per_step
                                           bytes that a rank sends, computed for rings: all-gather
                                           and reduce-scatter of n bytes over w ranks send
                                           n (w - 1) / w each, an all-reduce twice that
    rankR_base_bytes_per_step              the part of the quantized base, the same for both
    rankR_gathered_seconds, rankR_replicated_seconds
"""

from __future__ import annotations

import os
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import Figures, arguments, in_turns, ratios, table, tell
from qfsdp.config.component import Component
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.distributed.sharding import quantized_bytes, shard_model
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.decoder_parts import LayerConfig
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from qfsdp.training.optimizer import build_optimizer
from qfsdp.training.steps import clip_grad_norm
from tests.ranks import run_ranks

SMOLLM2 = DecoderConfig(
    vocab_size=64,
    hidden_size=576,
    intermediate_size=1536,
    layers=(LayerConfig(),) * 30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=2048,
)
OPTIMIZER = Component("torch.optim.AdamW", {"lr": 1e-4, "fused": True})
Shards = Callable[[Decoder, World], Callable[[], None]]
NUMBERS_PER_ADAPTER = 4  # the number, its gradient, two optimizer states; all fp32


def build_model(config: DecoderConfig, rank: int) -> Decoder:
    """A decoder in bf16 with NF4 linears of random weights and LoRA on all of them."""
    torch.manual_seed(0)
    model = Decoder(config).bfloat16()
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    quantize_linears(model, QuantizationConfig("nf4"))
    for name, param in model.named_parameters():
        if isinstance(param.data, QuantizedTensor):
            param.data.quantize_(weights[name])
    add_adapters(model, AdapterConfig("lora", rank, 32))
    init_adapters(model, seed=0)
    return model


def gathered(model: Decoder, world: World) -> Callable[[], None]:
    shard_model(model, ShardingConfig(), world)
    return lambda: None


def replicated(model: Decoder, world: World) -> Callable[[], None]:
    """Shards the base only; returns a function that sums the adapters' gradients over ranks."""
    params = trainable_parameters(model)
    options: dict[str, Any] = {"mesh": world.mesh, "ignored_params": set(params)}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model.model.embed_tokens, mesh=world.mesh)
    fully_shard(model.lm_head, mesh=world.mesh, reshard_after_forward=False)
    fully_shard(model, **options)

    def reduce() -> None:
        grads = [param.grad for param in params if param.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [p.view_as(g) for p, g in zip(parts, grads, strict=True)])

    return reduce


def train_step(model: Decoder, shard: Shards, world: World, tokens: Tensor) -> Callable[[], float]:
    """Shards `model`; returns a train step like the recipe's, which returns the loss."""
    reduce = shard(model, world)
    params = trainable_parameters(model)
    optimizer = build_optimizer(OPTIMIZER, params)

    def step() -> float:
        loss = model(tokens, labels=tokens) / (tokens.numel() * world.size)
        loss.backward()
        reduce()
        clip_grad_norm(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return world.sum(loss.item())

    return step


def measure(rank: int, layers: int, seq: int, rounds: int) -> Figures:
    """Runs on every rank; figures of both ways for adapters of one rank R."""
    warnings.filterwarnings("ignore")
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    world = World(torch.device("cpu"), dist.get_rank(), size, mesh)
    config = DecoderConfig(**(vars(SMOLLM2) | {"layers": (LayerConfig(),) * layers}))
    torch.manual_seed(1 + world.rank)
    tokens = torch.randint(0, config.vocab_size, (1, seq))
    models = {"gathered": build_model(config, rank), "replicated": build_model(config, rank)}
    shards = {"gathered": gathered, "replicated": replicated}
    steps = {n: train_step(m, shards[n], world, tokens) for n, m in models.items()}
    times = in_turns(steps, rounds, calls=1)
    losses = {name: step() for name, step in steps.items()}
    if abs(losses["gathered"] - losses["replicated"]) > 0.02:
        raise SystemExit(f"losses: {losses}; expected equal ones")
    adapters = sum(param.numel() * 4 for param in trainable_parameters(models["gathered"]))
    part = (size - 1) / size
    base = (
        2 * quantized_bytes(models["gathered"]) * size * part
    )  # gathered in forward and in backward
    held = NUMBERS_PER_ADAPTER * (adapters - adapters // size)
    found = {
        "replicated_minus_gathered_bytes": held,
        "base_bytes_per_step": base,
        "gathered_bytes_per_step": base + 3 * adapters * part,
        "replicated_bytes_per_step": base + 2 * adapters * part,
    }
    found |= {f"{name}_seconds": statistics.median(of) for name, of in times.items()}
    over = ratios("replicated_over_gathered_time", times["replicated"], times["gathered"])
    return {f"rank{rank}_{key}": value for key, value in (found | over).items()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seq", type=int, help="tokens per rank and step; default 512")
    args = parser.parse_args()
    if args.device == "cuda":
        raise SystemExit("--device cuda: needs two devices; expected --device cpu")
    layers, seq = (4, args.seq or 64) if args.quick else (30, args.seq or 512)
    if not args.quick:  # compiling kernels takes longer than the quick steps
        os.environ.setdefault("QFSDP_EAGER_KERNELS", "0")
    found: Figures = {}
    for rank in (16, 64):
        found |= run_ranks(2, measure, rank, layers, seq, args.repeat)[0]
    print(f"{layers} layers, 2 ranks, {seq} tokens each")
    columns = ("gathered_seconds", "replicated_seconds", "replicated_over_gathered_time")
    sizes = ("replicated_minus_gathered_bytes", "gathered_bytes_per_step")
    rows = [["rank", "gathered s", "replicated s", "ratio", "more MB", "sent MB", "replicated"]]
    for rank in (16, 64):
        cells = [f"{found[f'rank{rank}_{column}']:.3f}" for column in columns]
        for column in (*sizes, "replicated_bytes_per_step"):
            cells.append(f"{found[f'rank{rank}_{column}'] / 1e6:.1f}")
        rows.append([f"{rank}", *cells])
    table(rows)
    tell({k: v for k, v in found.items() if "_over_" in k}, args.json, found)


if __name__ == "__main__":
    main()
