"""The optimizer's step over the adapters of SmolLM2-135M: plain tensors, DTensors, 8-bit states.

    python benchmarks/optimizer_step.py [--quick] [--json optimizer.json] [--device cpu] [--rank 16]

LoRA on every linear, fp32, fused AdamW unless the key says otherwise. DTensors are compared with
plain tensors of the same rows, in one process, in turns. On a CPU with 2 ranks over gloo (a core
each) and with 1 rank; on a GPU with 1 rank.

Keys of the JSON file; ratios of seconds, with `_min` and `_max`, of rank 0 of 2. The suffix
`_1rank` means a mesh of one rank; a GPU has only these:

    dtensor_over_tensor          with `qfsdp.training.optimizer.build_optimizer`, as in recipes
    torch_dtensor_over_tensor    with torch.optim.AdamW itself
    foreach_dtensor_over_tensor, loop_dtensor_over_tensor     not fused, with foreach and without
    foreach_over_fused, loop_over_fused                       on plain tensors
    eightbit_over_fused          torchao's AdamW8bit on plain tensors; it compiles for half a
    eightbit_dtensor_over_tensor minute, so only with 1 rank, and not with --quick
    eightbit_state_bytes_over_fp32
    clip_dtensor_over_tensor     `qfsdp.training.steps.clip_grad_norm`; with DTensors it
                                 has one all-reduce, which waits for the other rank
    first_clip_dtensor_seconds   the first call, in which torch works out the sharding
    zero_dtensor_over_tensor     `zero_grad`
    NAME_seconds                 medians
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Shard
from torch.optim import Optimizer

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import Figures, Times, arguments, in_turns, ratios, seconds_of, table, tell
from qfsdp.config.component import Component
from qfsdp.tensor_subclasses.dtensor import local_part, sharded
from qfsdp.training.optimizer import build_optimizer
from qfsdp.training.steps import clip_grad_norm
from tests.ranks import run_ranks

LAYERS, HIDDEN, INTERMEDIATE, KEYS = 30, 576, 1536, 192
LINEARS = [(HIDDEN, HIDDEN)] * 2 + [(KEYS, HIDDEN)] * 2  # [out, in]
LINEARS += [(INTERMEDIATE, HIDDEN)] * 2 + [(HIDDEN, INTERMEDIATE)]
RATIOS = {  # key: seconds of the first over seconds of the second
    "dtensor_over_tensor": ("ours_dtensor", "fused"),
    "torch_dtensor_over_tensor": ("fused_dtensor", "fused"),
    "foreach_dtensor_over_tensor": ("foreach_dtensor", "foreach"),
    "loop_dtensor_over_tensor": ("loop_dtensor", "loop"),
    "foreach_over_fused": ("foreach", "fused"),
    "loop_over_fused": ("loop", "fused"),
    "eightbit_over_fused": ("eightbit", "fused"),
    "eightbit_dtensor_over_tensor": ("eightbit_dtensor", "eightbit"),
    "clip_dtensor_over_tensor": ("clip_dtensor", "clip"),
    "zero_dtensor_over_tensor": ("zero_dtensor", "zero"),
}
ADAMW: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "foreach": partial(torch.optim.AdamW, lr=1e-4, foreach=True),
    "loop": partial(torch.optim.AdamW, lr=1e-4, foreach=False),
}
OURS = Component("torch.optim.AdamW", {"lr": 1e-4, "fused": True})


def eightbit() -> Callable[[list[Tensor]], Optimizer] | None:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        print(f"torchao: skipped, {error}")
        return None
    return partial(AdamW8bit, lr=1e-4)


def sharded_adapters(rank: int, device: str) -> list[Tensor]:
    """A and B of every linear, sharded as FSDP2 shards them."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    shapes = [s for out, into in LINEARS * LAYERS for s in ((rank, into), (out, rank))]
    made = [distribute_tensor(torch.randn(s, device=device), mesh, [Shard(0)]) for s in shapes]
    return [nn.Parameter(tensor) for tensor in made]


def set_gradients(params: list[Tensor]) -> None:
    for param in params:
        grad = torch.full_like(local_part(param), 1e-3)
        if isinstance(param, DTensor):
            grad = sharded(grad, param.device_mesh, param.placements, param.shape)
        param.grad = grad


def state_bytes(optimizer: Optimizer) -> int:
    states = [v for fields in optimizer.state.values() for v in fields.values()]
    total = 0
    for state in (local_part(s) for s in states if isinstance(s, Tensor) and s.dim()):
        inner = [state]
        if hasattr(state, "__tensor_flatten__"):
            inner = [getattr(state, name) for name in state.__tensor_flatten__()[0]]
        total += sum(t.nbytes for t in inner)
    return total


def measure(rank: int, rounds: int, with_eightbit: bool, device: str) -> tuple[Times, Figures]:
    """Runs on every rank; seconds of each case, and counted figures."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    sharded = sharded_adapters(rank, device)
    plain: list[Tensor] = [nn.Parameter(local_part(p).clone()) for p in sharded]
    kinds = dict(ADAMW)
    if with_eightbit and (made := eightbit()) is not None:
        kinds["eightbit"] = made
    optimizers = {name: make(plain) for name, make in kinds.items()}
    optimizers |= {f"{name}_dtensor": make(sharded) for name, make in kinds.items()}
    optimizers["ours_dtensor"] = build_optimizer(OURS, sharded)
    for params in (plain, sharded):
        set_gradients(params)
    cases: dict[str, Any] = {name: optimizer.step for name, optimizer in optimizers.items()}
    cases |= {"clip": partial(clip_grad_norm, plain, 1e9)}
    cases |= {"clip_dtensor": partial(clip_grad_norm, sharded, 1e9)}
    figures: Figures = {"first_clip_dtensor_seconds": seconds_of(cases["clip_dtensor"])}
    times = in_turns(cases, rounds, device, calls=1)
    names = ("zero", "fused"), ("zero_dtensor", "ours_dtensor")
    zero = {name: optimizers[of].zero_grad for name, of in names}
    times |= in_turns(zero, rounds, device)  # last, because it removes the gradients
    if "eightbit" in optimizers:
        held = state_bytes(optimizers["eightbit"]) / state_bytes(optimizers["fused"])
        figures["eightbit_state_bytes_over_fp32"] = held
    return times, figures


def one_rank(*args: Any) -> tuple[Times, Figures]:
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(
            "nccl" if args[-1] == "cuda" else "gloo", store=store, rank=0, world_size=1
        )
        try:
            return measure(*args)
        finally:
            dist.destroy_process_group()


def report(title: str, times: Times, end: str) -> Figures:
    medians = {name: statistics.median(of_name) for name, of_name in times.items()}
    rows = [[title, "ms", "DTensors", "ratio"]]
    for name in [name for name in medians if not name.endswith("_dtensor")]:
        other = medians.get(f"{name}_dtensor", float("nan"))
        both = [f"{1e3 * seconds:.3f}" for seconds in (medians[name], other)]
        rows.append([name, *both, f"{other / medians[name]:.2f}"])
    ours = medians["ours_dtensor"]
    rows.append(["ours", "-", f"{1e3 * ours:.3f}", f"{ours / medians['fused']:.2f}"])
    table(rows)
    found = {f"{name}_seconds{end}": value for name, value in medians.items()}
    for key, (over, under) in RATIOS.items():
        if over in times and under in times:
            found |= ratios(f"{key}{end}", times[over], times[under])
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    args = parser.parse_args()
    rounds = min(args.repeat, 5) if args.quick else 3 * args.repeat
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    found: Figures = {}
    if args.device == "cpu":
        times, _ = run_ranks(2, measure, args.rank, rounds, False, args.device)[0]
        found |= report("rank 0 of 2", times, "")
    times, counted = one_rank(args.rank, rounds, not args.quick, args.device)
    found |= report("1 rank", times, "_1rank") | counted
    tell({k: v for k, v in found.items() if "_over_" in k}, args.json, found)


if __name__ == "__main__":
    main()
