"""The memory estimate against the memory of real runs.

    python benchmarks/estimate.py [--quick] [--json estimate.json]
    python benchmarks/estimate.py --published

Every case is two updates of two micro-batches by the recipe's functions, on 1, 2 or 4 processes
with one thread each, and a dry run of the same config (`qfsdp.planning.estimate`, target "cpu").
"Measured" is the peak of PyTorch's CPU allocator within a train step, from the memory events of its
profiler, on the rank with the highest peak, with the copy of a checkpoint. The profiler starts
before the model is built. Models: SmolLM2-135M, and 4 layers of 7B type, 2048 wide, with random
weights.

`--published` compares with measurements of others on two 24 GB GPUs (Answer.AI, "You can now train
a 70b language model at home", March 2024: FSDP and QLoRA with Hugging Face models; reserved memory
in GiB), target "cuda". Their figure over ours is above 1 if ours takes less.

Keys of the JSON file: `mean_error`, `max_error` (absolute value of estimate over measured, less 1),
`max_under` (largest share by which an estimate is too low), `cases`, and NAME_measured,
NAME_estimated in bytes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from bisect import bisect
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import Figures, arguments, table, tell
from examples.demo import cache_dir
from examples.demo.smollm2 import prepare_model
from qfsdp.checkpoint.state import Stager, TrainState
from qfsdp.common.sizes import format_size
from qfsdp.config.load import load_config
from qfsdp.config.recipe_files import load_recipe
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.transformer import Decoder
from qfsdp.planning.estimate import CONTEXT_BYTES
from qfsdp.planning.extrapolate import estimate_fast

ROOT = Path(__file__).parent.parent
METHODS = {
    "lora": ["quantization.format=none", "adapter.method=lora"],
    "qlora": ["adapter.method=lora"],
    "qdora": ["adapter.method=dora"],
}
WIDE_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
STEP = "measured_step"  # the range in the profiler's trace
STEPS = 2


@dataclass(frozen=True)
class Case:
    """One config; `model` is "smollm2" or "wide"."""

    model: str
    method: str
    ranks: int
    seq: int
    checkpointing: str
    micro_batches: int = 2

    @property
    def name(self) -> str:
        return f"{self.model}_{self.method}_{self.ranks}x{self.seq}_{self.checkpointing}"


def cases(quick: bool) -> list[Case]:
    if quick:
        chosen = [("lora", 1, "none"), ("qdora", 1, "full")]
        chosen += [("qdora", 2, "none"), ("qlora", 2, "full")]
        return [Case("smollm2", method, ranks, 128, kept, 1) for method, ranks, kept in chosen]
    small = product(["smollm2"], METHODS, (1, 2, 4), (256, 1024), ("none", "full"))
    wide = product(["wide"], METHODS, (1, 2), (256, 1024), ("none", "full"))
    return [Case(*fields) for fields in (*small, *wide)]


def config_of(case: Case, folders: dict[str, str]) -> tuple[Any, Any]:
    recipe = load_recipe(ROOT / "recipes/qdora_distributed.py")
    argv = ["--config", str(ROOT / "configs/smollm2_135m_qdora.yaml"), *METHODS[case.method]]
    argv += [f"model.path={folders[case.model]}", f"max_seq_len={case.seq}", "batch_size=1"]
    argv.append(f"gradient_accumulation_steps={case.micro_batches}")
    argv.append(f"activation.checkpointing={case.checkpointing}")
    if case.method != "lora":
        argv.append(f"model.quantize_cache={folders[case.model]}-quantized")
    return recipe, load_config(recipe.Config, argv)


def measure(chosen: list[Case], folders: dict[str, str]) -> list[int]:
    """The measured peak of each case in bytes."""
    peaks: dict[Case, int] = {}
    for size in sorted({case.ranks for case in chosen}):
        of_size = [case for case in chosen if case.ranks == size]
        peaks |= zip(of_size, _on_ranks(size, of_size, folders), strict=True)
    return [peaks[case] for case in chosen]


def _on_ranks(size: int, chosen: list[Case], folders: dict[str, str]) -> list[int]:
    """Runs one case after the other on `size` processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank, (size, chosen, folders, folder), nprocs=size, start_method="spawn"
        )
        of_ranks = [json.loads(Path(f"{folder}/{rank}").read_text()) for rank in range(size)]
    return [max(peaks) for peaks in zip(*of_ranks, strict=True)]


def _rank(rank: int, size: int, chosen: list[Case], folders: dict[str, str], out: str) -> None:
    torch.set_num_threads(1)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    if size > 1:
        store = dist.FileStore(f"{out}/store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    peaks = [_measure(case, folders) for case in chosen]
    Path(f"{out}/{rank}").write_text(json.dumps(peaks))
    if size > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort the interpreter as it shuts down


def _measure(case: Case, folders: dict[str, str]) -> int:
    recipe, cfg = config_of(case, folders)
    gc.collect()  # frees the model of the last case before the measurement
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        world = recipe.init_world()
        model = recipe.load_model(cfg, world)
        trained = trainable_parameters(model)
        optimizer = recipe.build_optimizer(cfg.optimizer, trained)
        tokens = torch.zeros(cfg.batch_size, cfg.max_seq_len, dtype=torch.int64)
        batch = recipe.Batch(tokens, tokens.clone(), tokens.numel())
        stager = Stager(world)
        for step in range(STEPS):
            clock = recipe.StepClock(world.device)
            with torch.profiler.record_function(STEP):
                batches = [batch] * case.micro_batches
                recipe.train_step(model, optimizer, None, batches, 1.0, world, clock)
            kept = stager.copy(TrainState(model, optimizer, None), step)
    del kept
    return _peak_within_steps(profiler)


@dataclass(frozen=True, order=True)
class Change:
    """An allocation, or with a negative size a release; `piece` numbers it (0: any)."""

    when: int
    address: int
    size: int
    piece: int


def _peak_within_steps(profiler: torch.profiler.profile) -> int:
    """The lowest peak of the steps after the first. The steps are equal except for memory that
    gloo's threads release late, or without an event."""
    begins, changes = _changes(profiler)
    peaks = [0] * (len(begins) + 1)
    live: dict[int, tuple[int, int]] = {}
    held = 0
    for change in sorted(changes):
        there, piece = live.get(change.address, (0, 0))
        if change.size > 0 or change.piece in (0, piece):
            # A block still known at this address was released without an event.
            held += max(0, change.size) - there
            live[change.address] = (max(0, change.size), change.piece)
        step = bisect(begins, change.when)
        peaks[step] = max(peaks[step], held)
    return min(peaks[2:])


def _changes(profiler: torch.profiler.profile) -> tuple[list[int], list[Change]]:
    """The start times of steps, and the allocations and releases of this thread.

    gloo has its own threads. Their allocations are not the training's, and the profiler may not
    see their releases. The memory of a collective counts until the collective allocates again
    (with all events visible it never held two blocks) or returns.
    """
    steps: list[Any] = []
    taken: list[tuple[int, int, Change]] = []  # thread, end of its collective
    of_gloo = defaultdict(list)
    tree = profiler.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    pending: list[tuple[Any, int]] = [(event, 0) for event in tree]
    while pending:
        event, returns = pending.pop()
        if event.tag == torch._C._profiler._EventType.Allocation:
            address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
            piece = len(taken) + 1 if size > 0 else 0
            change = Change(event.start_time_ns, address, size, piece)
            taken.append((event.start_tid, returns, change))
            continue
        steps += [event] if event.name == STEP else []
        inside = event.end_time_ns if event.name.startswith("c10d::") else returns
        pending += [(child, inside) for child in event.children]
    thread_of_steps = steps[0].start_tid
    changes = [c for thread, _, c in taken if c.size < 0 or thread == thread_of_steps]
    for thread, returns, change in taken:
        if change.size > 0 and returns and thread == thread_of_steps:
            of_gloo[returns].append(change)
    for returns, given in of_gloo.items():
        ends = [*(change.when for change in sorted(given)[1:]), returns]
        for change, end in zip(sorted(given), ends, strict=True):
            changes.append(Change(end, change.address, -change.size, change.piece))
    return sorted(step.start_time_ns for step in steps), changes


def write_wide_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(WIDE_MODEL))
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dict(WIDE_MODEL))
    tensors = {}
    for name, param in model.named_parameters():
        tensors[name] = torch.randn(param.shape, dtype=torch.bfloat16) * 0.02
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def compare(quick: bool) -> Figures:
    """Measures and estimates every case; prints a table, returns the figures."""
    chosen, figures = cases(quick), Figures()
    with tempfile.TemporaryDirectory() as scratch:
        folders = {"smollm2": f"{scratch}/smollm2", "wide": f"{scratch}/wide"}
        Path(folders["smollm2"]).symlink_to(prepare_model(cache_dir()))
        if any(case.model == "wide" for case in chosen):
            write_wide_model(Path(folders["wide"]))
        rows = [["case", "measured", "estimated", "error", "peak in", "dry run"]]
        with ThreadPoolExecutor(1) as executor:
            peaks = executor.submit(measure, chosen, folders)
            estimates = []
            for case in chosen:
                since = time.perf_counter()
                recipe, cfg = config_of(case, folders)
                functions = (recipe.build_model, recipe.train_step)
                found = estimate_fast(*functions, cfg, case.ranks, target="cpu")
                estimates.append((found, time.perf_counter() - since))
        for case, peak, (found, seconds) in zip(chosen, peaks.result(), estimates, strict=True):
            figures |= {f"{case.name}_measured": peak, f"{case.name}_estimated": found.peak}
            told = [format_size(peak), format_size(found.peak), f"{found.peak / peak - 1:+.2%}"]
            where = f"{found.where.phase} {found.where.module}"
            rows.append([case.name, *told, where, f"{seconds:.1f} s"])
        table(rows)
    errors = [figures[f"{c.name}_estimated"] / figures[f"{c.name}_measured"] - 1 for c in chosen]
    return figures | {
        "cases": len(errors),
        "mean_error": sum(map(abs, errors)) / len(errors),
        "max_error": max(map(abs, errors)),
        "max_under": max(0.0, -min(errors)),
    }


@dataclass(frozen=True)
class Published:
    """Reserved memory in GiB on each of two GPUs, measured by others."""

    model: str
    method: str
    batch: int
    seq: int
    offload: bool
    gib: float


PUBLISHED = [
    Published("Llama-2-7B", "qlora", 1, 512, False, 4.98),
    Published("Llama-2-7B", "qlora", 1, 2048, False, 5.21),
    Published("Llama-2-7B", "qlora", 10, 2048, False, 20.97),
    Published("Llama-2-7B", "lora", 1, 2048, False, 10.22),
    Published("Llama-2-7B", "lora", 6, 2048, False, 21.35),
    Published("Yi-34B", "qlora", 2, 2048, False, 23.05),
    Published("Yi-34B", "qlora", 4, 2048, True, 22.98),
    Published("Llama-2-70B", "qlora", 2, 2048, True, 14.92),
]


def compare_published() -> Figures:
    recipe = load_recipe(ROOT / "recipes/qdora_distributed.py")
    rows = [["case, 2 GPUs, rank 64", "theirs", "ours", "peak", "theirs/ours"]]
    figures = Figures()
    for case in PUBLISHED:
        argv = ["--config", str(ROOT / "configs/llama2_7b_qlora.yaml"), *METHODS[case.method]]
        argv += [f"model.path={case.model}", f"batch_size={case.batch}", "adapter.rank=64"]
        argv += [f"max_seq_len={case.seq}", f"sharding.cpu_offload={str(case.offload).lower()}"]
        argv += ["adapter.targets=[q_proj,k_proj,v_proj,gate_proj,up_proj,down_proj]"]
        argv += ["gradient_accumulation_steps=1", "activation.checkpointing=full"]
        cfg = load_config(recipe.Config, argv)
        found = estimate_fast(recipe.build_model, recipe.train_step, cfg, 2)
        fields = [str(value) for value in asdict(case).values()][:4] + ["offload"] * case.offload
        name = "_".join(fields)
        reserved = (found.reserved - CONTEXT_BYTES) / 2**30
        figures[f"{name}_theirs_over_ours"] = ratio = case.gib / reserved
        numbers = (case.gib, reserved, found.peak / 2**30, ratio)
        rows.append([name, *(f"{number:.2f}" for number in numbers)])
    table(rows)
    return figures


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--published", action="store_true", help="compare with Answer.AI's figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = compare_published() if args.published else compare(args.quick)
    named = {key: figures[key] for key in figures if key.startswith(("mean", "max", "cases"))}
    tell(named or figures, args.json, figures)


if __name__ == "__main__":
    main()
