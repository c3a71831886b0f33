"""Compiled against uncompiled decoder layers: graph breaks, recompilations, time, memory.

    python benchmarks/compile.py [--quick] [--json compile.json] [--device cpu] [--only qdora]

Runs the recipe's `load_model` and `train_step` with `compile: true` and without, in one process.
The two take turns on the same batches: 20 steps, each of a different length. QLoRA and QDoRA (rank
16), activations kept or checkpointed, 1 rank, and on CPUs also 2 ranks over gloo. The model is
SmolLM2-135M if it has been prepared; otherwise, and with --quick, a random model of two layers.

Keys of the JSON file. Each has a version per case, of rank 0 (prefix `qdora_`,
`qdora_checkpointed_`, `qdora_2ranks_`, ...), and without prefix the largest of all cases:

    graph_breaks                 in all compiled code, over all steps
    unique_graphs                builds of a layer's computation
    recompiles_after_step_2      builds in step 3 and later
    first_steps_seconds          the first two steps, compiled; also `eager_first_steps_seconds`
    max_loss_difference          largest difference of the losses in any step
    compiled_over_eager_time     over the steps after the second that did not compile; with `_min`
                                 and `_max`
    compiled_over_eager_memory   peak of a step of the largest length above what is held between
                                 steps
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch._dynamo.utils import counters, get_compilation_metrics

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.memory import PeakMemory
from benchmarks.timing import Figures, arguments, ratios, table, tell
from examples.demo import cache_dir
from qfsdp.config.component import Component
from qfsdp.config.recipe_files import load_recipe
from qfsdp.data import Batch
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.launch.ranks import share_cores
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.transformer import ActivationConfig, Decoder
from tests.ranks import run_ranks

RECIPE = Path(__file__).parent.parent / "recipes/qdora_distributed.py"
STEPS, BATCH = 20, 2
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
COLUMNS = ["graph_breaks", "unique_graphs", "recompiles_after_step_2", "first_steps_seconds"]
COLUMNS += ["compiled_over_eager_time", "compiled_over_eager_memory", "max_loss_difference"]


def lengths() -> list[int]:
    """Row lengths of the steps: all different, the longest last."""
    generator = torch.Generator().manual_seed(0)
    return (40 + 9 * torch.randperm(STEPS - 1, generator=generator)).tolist() + [256]


def random_model(folder: Path) -> Path:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.from_dict(TINY)).bfloat16()
    for name, param in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(param, std=0.02)
    tensors = {name: param.detach() for name, param in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def build_step(folder: str, method: str, checkpointing: str, compile: bool) -> Callable[..., float]:
    """Loads a model; returns a function that takes tokens, trains one step, returns its loss."""
    recipe = load_recipe(RECIPE)
    cfg = recipe.Config(
        output_dir="unused",
        model=recipe.ModelConfig(folder),
        tokenizer=None,
        dataset=None,
        optimizer=Component("torch.optim.AdamW", {"lr": 1e-4, "fused": True}),
        adapter=AdapterConfig(method, 16, 32),  # type: ignore[arg-type]
        activation=ActivationConfig(checkpointing),  # type: ignore[arg-type]
        compile=compile,
    )
    world = recipe.init_world()
    clock = recipe.StepClock(world.device)
    model = recipe.load_model(cfg, world)
    optimizer = recipe.build_optimizer(cfg.optimizer, trainable_parameters(model))

    def step(tokens: torch.Tensor) -> float:
        batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), tokens.numel())
        return recipe.train_step(model, optimizer, None, [batch], 1.0, world, clock)["loss"]

    return step


def builds() -> int:
    """How many times a layer's computation has been compiled so far."""
    metrics = get_compilation_metrics()
    return sum((m.co_filename or "").endswith("transformer.py") for m in metrics)


def peak_bytes(step: Callable[[], Any]) -> int:
    """Peak memory of a step in bytes, above what was allocated before it."""
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(
        0
    )  # gives back freed memory, so that the step's allocations count
    memory = PeakMemory()
    step()
    return memory.stop()


def measure(folder: str, method: str, checkpointing: str) -> Figures:
    """Runs both models in turns, on every rank."""
    warnings.filterwarnings("ignore")
    torch._logging.set_logs(dynamo=40, inductor=40)
    steps = {c: build_step(folder, method, checkpointing, c) for c in (False, True)}
    vocabulary = DecoderConfig.from_dir(folder).vocab_size
    seconds: dict[bool, list[float]] = {False: [], True: []}
    built, apart = [0], 0.0
    for index, length in enumerate(lengths()):
        torch.manual_seed(index)
        tokens = torch.randint(0, vocabulary, (BATCH, length + 1))
        losses = []
        for compiled, step in steps.items():
            since = time.perf_counter()
            losses.append(step(tokens))  # reading the loss waits for the device
            seconds[compiled].append(time.perf_counter() - since)
        built.append(builds())
        apart = max(apart, abs(losses[1] - losses[0]))
    memory = {compiled: peak_bytes(partial(step, tokens)) for compiled, step in steps.items()}
    steady = [i for i in range(2, STEPS) if built[i + 1] == built[i]]
    of_steady = [[seconds[c][i] for i in steady] for c in (True, False)]
    return {
        "graph_breaks": sum(counters["graph_break"].values()),
        "unique_graphs": built[-1],
        "recompiles_after_step_2": built[-1] - built[2],
        "first_steps_seconds": sum(seconds[True][:2]),
        "eager_first_steps_seconds": sum(seconds[False][:2]),
        "max_loss_difference": apart,
        "compiled_over_eager_memory": memory[True] / memory[False],
        **ratios("compiled_over_eager_time", *of_steady),
    }


def cases(args: Any) -> dict[str, tuple[str, str, int]]:
    """Name -> (method, checkpointing, ranks)."""
    found = {}
    for ranks in (1,) if args.device == "cuda" else (1, 2):
        for method in ("lora", "dora"):
            for checkpointing in ("none", "full"):
                name = f"q{method}" + ("_checkpointed" if checkpointing == "full" else "")
                found[name + ("_2ranks" if ranks == 2 else "")] = (method, checkpointing, ranks)
    if args.quick:
        found = dict([found.popitem()])  # QDoRA, checkpointed, on the most ranks
    return {name: case for name, case in found.items() if args.only in name}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # `run_ranks` would use uncompiled kernels; training uses compiled ones.
    os.environ.setdefault("QFSDP_EAGER_KERNELS", "0")
    share_cores(2)
    details: Figures = {}
    rows = [["", *(column.replace("_", " ") for column in COLUMNS)]]
    with tempfile.TemporaryDirectory() as scratch:
        folder = cache_dir() / "SmolLM2-135M-Instruct"
        if args.quick or not folder.exists():
            folder = random_model(Path(scratch))
        for name, (method, checkpointing, ranks) in cases(args).items():
            part = run_ranks(ranks, measure, str(folder), method, checkpointing)[0]
            rows.append([name, *(f"{part[column]:.3g}" for column in COLUMNS)])
            print(f"{name}: done", flush=True)
            details |= {f"{name}_{key}": value for key, value in part.items()}
    table(rows)
    found = {c: max(v for k, v in details.items() if k.endswith(f"_{c}")) for c in COLUMNS}
    tell(found, args.json, details)


if __name__ == "__main__":
    main()
