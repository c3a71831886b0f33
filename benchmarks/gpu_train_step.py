"""Train steps of a random model with the shapes of an 8B: ours, or PEFT + bitsandbytes.

    python benchmarks/gpu_train_step.py CONTESTANT [KEY=VALUE ...] [--quick] [--model NAME]
                                        [--tokens 4096 ...] [--kernels] [--json FILE]

CONTESTANT is one of ours_qlora, ours_qdora, ours_lora (bf16 base), peft_qlora, peft_qdora. Weights
are drawn on the device and are the same for all, so nothing is read from disk. Our steps are the
recipe's `train_step` with compiled layers, and KEY=VALUE changes its config; PEFT's run under bf16
autocast with fused AdamW. Rank 16 on all linears, rows of 2048 tokens with a target at every
position, no activation checkpointing. `--kernels` prints a table of the kernels of one more step.
`--quick` tries the script on a CPU: two small layers, uncompiled there, two steps, rows of 64
tokens under the keys of the whole size. `cuda_graphs=true` takes one size, because graphs keep the
shapes that came first; steps that a GPU did not replay have no figures then.

    --model NAME     llama3_8b, llama3_1_8b, qwen3_8b, qwen3_5_9b, or llama3_70b_8_layers: 8 of 80
    --row TOKENS     length of a row, 2,048 by default; --tokens / --row rows are a micro-batch
    --steps COUNT    timed steps, 8 by default; before them up to four warm up
    --fsdp           wraps the model by FSDP2, which a single process otherwise does without
    --packed         rows hold documents of 128 to 1024 tokens
    --tf32           products in fp32, as in recurrent layers, may be rounded to TensorFloat32
    --estimate       compares the peak with the memory estimate; layers then run uncompiled, as in
                     the estimate
    --losses STEPS   no figures of time: the losses of so many steps over eight batches in turn
    --name NAME      of the keys, in place of CONTESTANT

Keys, for every number of tokens in a micro-batch that fits into memory, written as soon as they are
known: `CONTESTANT_8192_tokens_per_second`, `_seconds` (median of the steps), `_peak_bytes`
(allocated), `_reserved_bytes` (the only one of use for graphs), `_first_loss`, `_last_loss`; for
ours also `_model_flops_utilization`, `_hardware_flops_utilization` and `_seconds/PHASE`; with
`--estimate` `_estimated_bytes` and `_estimate_over_peak`; with `--losses` `_loss_N` for N updates.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import base_arguments, tell, usual_dtype, write_figures
from benchmarks.train_step_worker import ADAPTED, ALPHA, CLIP, LEARNING_RATE, Step, training_step
from qfsdp.config.load import load_config
from qfsdp.config.recipe_files import load_recipe
from qfsdp.data.batch import Batch
from qfsdp.data.loader import collate
from qfsdp.distributed import sharding, world
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.modules.adapters.linears import init_adapters
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.transformer import Decoder
from qfsdp.planning.estimate import StoredFormats
from qfsdp.planning.extrapolate import estimate_fast
from qfsdp.planning.known_models import find_config
from qfsdp.tensor_subclasses.dtensor import local_part
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from qfsdp.training.cuda_graphs import WARM_UP, StepGraphs
from qfsdp.training.memory_usage import peak_memory_bytes
from qfsdp.training.steps import StepClock
from qfsdp.training.throughput import matmul_rate, step_flops, utilization

MODELS: dict[str, dict[str, Any]] = {
    "llama3_8b": {"name": "Llama-3-8B"},
    "llama3_1_8b": {"name": "Llama-3.1-8B"},
    "qwen3_8b": {"name": "Qwen3-8B"},
    "qwen3_5_9b": {"name": "Qwen3.5-9B"},
    "llama3_70b_8_layers": {"name": "Llama-3-70B", "num_hidden_layers": 8},
}
TINY = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
TINY_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "full_attention_interval": 2}
TINY_DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes/qdora_distributed.py"
ROW, QUICK_ROW, RANK = 2048, 64, 16
WARMUP = WARM_UP + 1  # the first step compiles, the last captures a graph


@cache
def device() -> torch.device:
    """A GPU if there is one. Asked for late: a process that has asked cannot be forked any more."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Size:
    """A micro-batch: `rows` rows of `row` tokens."""

    rows: int
    row: int = ROW

    @property
    def tokens(self) -> int:
        return self.rows * self.row


def size_of(tokens: int, args: argparse.Namespace) -> Size:
    return Size(max(1, tokens // args.row), QUICK_ROW if args.quick else args.row)


@dataclass
class Contestant:
    """A train step and its clock; of ours also the model and its graphs."""

    step: Step
    clock: StepClock
    model: Decoder | None = None
    graphs: StepGraphs | None = None


def random_weight(name: str, like: Tensor) -> Tensor:
    """A bf16 weight that depends on its name only."""
    if "norm" in name:
        return torch.ones(like.shape, dtype=torch.bfloat16, device=device())
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    generator = torch.Generator(device()).manual_seed(seed)
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.bfloat16, device=device())
    return drawn.mul_(0.02)


def our_config(args: argparse.Namespace, folder: Path, rows: int) -> tuple[Any, Any]:
    """The recipe and its config for one contestant."""
    recipe = load_recipe(RECIPE)
    kind = args.contestant.partition("_")[2]
    words = ["--config", str(ROOT / "configs/llama3_8b_qlora.yaml"), f"model.path={folder}"]
    words += [f"quantization.format={'nf4' if kind.startswith('q') else 'none'}"]
    words += [f"adapter.method={'dora' if kind.endswith('dora') else 'lora'}"]
    words += [f"adapter.rank={RANK}", f"adapter.alpha={ALPHA}", "activation.checkpointing=none"]
    uncompiled = args.estimate or args.quick and not torch.cuda.is_available()
    words += [f"optimizer.lr={LEARNING_RATE}", f"compile={'false' if uncompiled else 'true'}"]
    words += [f"batch_size={rows}", f"max_seq_len={args.row}", "gradient_accumulation_steps=1"]
    words += [f"packed={'true' if args.packed else 'false'}", f"clip_grad_norm={CLIP}"]
    return recipe, load_config(recipe.Config, words + args.words)


def ours(args: argparse.Namespace, config: dict[str, Any], clock: StepClock) -> Contestant:
    if args.fsdp:
        sharding.needs_fsdp = world.needs_fsdp = lambda *_, **__: True
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        recipe, cfg = our_config(args, Path(folder), rows=1)
        of_rank = recipe.init_world(cfg.sharding, cfg.distributed)
        model = recipe.build_model(cfg, StoredFormats({}))
        sharding.shard_model(model, cfg.sharding, of_rank)
    model.to_empty(device=device())
    model.tie_weights()
    with torch.no_grad():
        for name, param in base_parameters(model):
            weight, held = random_weight(name, param), local_part(param)
            if isinstance(held, QuantizedTensor):
                held.quantize_(weight, name)
            else:
                held.copy_(weight)
    init_adapters(model, seed=args.seed)
    optimizer = recipe.build_optimizer(cfg.optimizer, trainable_parameters(model))
    obstacle = recipe.why_not(model, of_rank, cfg)
    graphs = recipe.StepGraphs(model, cfg.cuda_graphs, obstacle, of_rank)
    to_batch = packed_batch if args.packed else plain_batch
    step = recipe_step(recipe, model.train(), optimizer, of_rank, clock, graphs, to_batch)
    return Contestant(step, clock, model, graphs)


def plain_batch(tokens: Tensor, labels: Tensor) -> Batch:
    return Batch(tokens, labels, tokens.numel())


def packed_batch(tokens: Tensor, _: Tensor) -> Batch:
    """The same tokens as rows of documents of 128, 256, 512, 1024 and 128 tokens of 2,048."""
    lengths = [share * tokens.size(1) // 16 for share in (1, 2, 4, 8, 1)]
    packs = [{"tokens": row, "labels": row, "lengths": lengths} for row in tokens]
    return collate(packs, pad_id=0, max_seq_len=tokens.size(1))


def recipe_step(
    recipe: Any,
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    of_rank: world.World,
    clock: StepClock,
    graphs: StepGraphs | None = None,
    to_batch: Callable[[Tensor, Tensor], Batch] = plain_batch,
) -> Step:
    """The recipe's `train_step` of one micro-batch."""

    def step(tokens: Tensor, labels: Tensor) -> float:
        batches = [to_batch(tokens, labels)]
        metrics = recipe.train_step(model, optimizer, None, batches, CLIP, of_rank, clock, graphs)
        return float(metrics["loss"])

    return step


def estimated_bytes(args: argparse.Namespace, config: dict[str, Any], rows: int) -> int:
    """The peak of a dry run of the same config."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        recipe, cfg = our_config(args, Path(folder), rows)
        target = "cuda" if torch.cuda.is_available() else "cpu"
        functions = (recipe.build_model, recipe.train_step)
        return estimate_fast(*functions, cfg, 1, target=target).peak  # type: ignore[arg-type]


def peft(kind: str, config: dict[str, Any]) -> Step:
    import transformers
    from bitsandbytes.nn import Linear4bit, Params4bit
    from peft import LoraConfig, get_peft_model

    family = config["architectures"][0].removesuffix("ForCausalLM")
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    fields = {key: value for key, value in config.items() if key != "rope_theta"}
    of_model = getattr(transformers, f"{family}Config")(
        **fields, rope_parameters=rope, use_cache=False
    )
    torch.set_default_dtype(torch.bfloat16)
    with device():
        base = getattr(transformers, f"{family}ForCausalLM")(of_model)
    torch.set_default_dtype(torch.float32)
    for name, param in base.named_parameters():
        param.data = random_weight(name, param)
    for name, module in list(base.model.named_modules()):
        if isinstance(module, nn.Linear):
            linear = Linear4bit(
                module.in_features, module.out_features, False, torch.bfloat16, True, "nf4"
            )
            linear.weight = Params4bit(
                module.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
            )
            parent = base.model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], linear.to(device()))
    adapter = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=ADAPTED, use_dora=kind.endswith("dora")
    )
    model = get_peft_model(base, adapter).train()

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device().type, torch.bfloat16):
            return model(input_ids=tokens, labels=labels, shift_labels=labels).loss

    return training_step(model, loss, device().type)


def random_batch(size: Size, vocabulary: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, `[rows, row]` each; every position has a target."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, vocabulary, (size.rows, size.row + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def measure(
    step: Step, size: Size, vocabulary: int, steps: int, clock: StepClock
) -> dict[str, float]:
    """Median seconds, peak bytes and losses of `steps` steps after the warm-up."""
    seconds, losses = [], []
    warmup = min(WARMUP, steps)
    for index in range(warmup + steps):
        if index == warmup:
            clock.seconds()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
        batch = random_batch(size, vocabulary, index)
        since = time.perf_counter()
        losses.append(step(*batch))
        seconds.append(time.perf_counter() - since)  # reading the loss waited for the device
    median = statistics.median(seconds[warmup:])
    return {
        "seconds": median,
        "warmup_seconds": sum(seconds[:warmup]),
        "tokens_per_second": size.tokens / median,
        "peak_bytes": peak_memory_bytes(device()),
        # What a graph's pool holds is not allocated while it is replayed.
        "reserved_bytes": torch.cuda.max_memory_reserved() if device().type == "cuda" else 0,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    } | {f"seconds/{phase}": spent / steps for phase, spent in clock.seconds().items()}


def print_kernels(step: Step, size: Size, vocabulary: int) -> None:
    """Prints the 30 kernels (operations, on a CPU) that take most of one step."""
    batch = random_batch(size, vocabulary, seed=0)
    cuda = torch.cuda.is_available()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if cuda else kinds.CPU]) as profiler:
        step(*batch)
    most = "self_device_time_total" if cuda else "self_cpu_time_total"
    averages = profiler.key_averages()
    print(averages.table(sort_by=most, row_limit=30, max_name_column_width=80), flush=True)


def losses(step: Step, size: Size, vocabulary: int, name: str, updates: int) -> dict[str, float]:
    """Losses of `updates` updates on eight batches in turn, which a model can learn by heart."""
    every, found = max(1, updates // 10), {}
    for index in range(1, updates + 1):
        loss = step(*random_batch(size, vocabulary, index % 8))
        if index % every == 0:
            found[f"{name}_loss_{index}"] = loss
    return found


def shapes(args: argparse.Namespace) -> dict[str, Any]:
    """The `config.json` of the model."""
    chosen = dict(MODELS[args.model])
    config = find_config(chosen.pop("name")) | chosen
    config.setdefault("model_type", config["architectures"][0].partition("For")[0].lower())
    if "text_config" in config:  # without its images
        config = config["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"]}
    tiny = TINY | (TINY_DELTA if "linear_key_head_dim" in config else {})
    return config | tiny if args.quick else config


def arguments() -> argparse.Namespace:
    parser = base_arguments(__doc__)
    parser.add_argument("contestant")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--model", choices=MODELS, default="llama3_8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--row", type=int, default=ROW, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=8, help="that count, after the warm-up")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--losses", type=int, default=0, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0, help="of the adapters")
    parser.add_argument("--name")
    parser.add_argument("--kernels", action="store_true")
    args = parser.parse_intermixed_args()
    if len(args.tokens) > 1 and "cuda_graphs=true" in args.words:
        parser.error(f"--tokens: {args.tokens}; expected one size with cuda_graphs=true")
    return args


def figures_of(
    contestant: Contestant, size: Size, vocabulary: int, rate: float, args: argparse.Namespace
) -> dict[str, float]:
    """Figures of one size, without the contestant's name."""
    steps = min(args.steps, 2) if args.quick else args.steps
    found = measure(contestant.step, size, vocabulary, steps, contestant.clock)
    if contestant.model is not None:
        flops = step_flops(contestant.model, [size.row] * size.rows, size.tokens)
        found |= utilization(flops, found["seconds"], rate)
    graphs = contestant.graphs
    wanted = "cuda_graphs=true" in args.words and not args.fsdp and device().type == "cuda"
    if wanted and (graphs is None or not graphs.replayed):
        raise SystemExit(f"error: {size.tokens} tokens: the steps were not replayed")
    return found


def main() -> None:
    args = arguments()
    config, name = shapes(args), args.name or args.contestant
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    found: dict[str, float] = {}
    if args.estimate:  # first: a dry run makes a process group of its own
        for tokens in args.tokens:
            rows = size_of(tokens, args).rows
            found[f"{name}_{tokens}_estimated_bytes"] = estimated_bytes(args, config, rows)
    clock, dtype = StepClock(device()), COMPUTE_DTYPES[usual_dtype(device().type)]
    rate = found["matmul_flops_per_second"] = matmul_rate(device(), dtype)
    since = time.perf_counter()
    if args.contestant.startswith("ours"):
        contestant = ours(args, config, clock)
    else:
        contestant = Contestant(peft(args.contestant.partition("_")[2], config), clock)
    found[f"{name}_load_seconds"] = time.perf_counter() - since
    for tokens in args.tokens:
        size = size_of(tokens, args)
        if args.losses:
            updates = min(args.losses, 10) if args.quick else args.losses
            found |= losses(contestant.step, size, config["vocab_size"], name, updates)
            continue
        try:
            of_size = figures_of(contestant, size, config["vocab_size"], rate, args)
        except torch.OutOfMemoryError as error:  # PEFT allocates 76 GB at 8,192 tokens
            print(f"{name}, {tokens} tokens: out of memory: {error}")
            continue
        if args.estimate and device().type != "cpu":  # a CPU's peak is that of the process
            expected = found[f"{name}_{tokens}_estimated_bytes"]
            of_size["estimate_over_peak"] = expected / of_size["peak_bytes"]
        found |= {f"{name}_{tokens}_{key}": value for key, value in of_size.items()}
        write_figures(args.json, found)
        if args.kernels:
            print_kernels(contestant.step, size, config["vocab_size"])
    tell(found, args.json)
    sys.stdout.flush()
    if torch.distributed.is_initialized():
        os._exit(0)  # gloo's threads may abort the interpreter as it shuts down


if __name__ == "__main__":
    main()
