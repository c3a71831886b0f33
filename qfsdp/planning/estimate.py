"""Estimates the memory of a training step by a dry run of the recipe's own code.

The recipe's `build_model` and `train_step`, sharding and the optimizer run on fake tensors under a
`MemoryTracker`, as the first rank of a fake process group of any size. So there is no second
description of the recipe that could differ from it, and neither a GPU nor weights are needed.

Every row is `max_seq_len` long and every token is a target: the most that the config allows. Layers
run uncompiled; compiled layers keep 0.54 to 0.93 of that memory (benchmarks/results).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from qfsdp.checkpoint.resume import CheckpointConfig
from qfsdp.checkpoint.state import Stager, trained_tensors
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.common.devices import sum_dtype
from qfsdp.common.errors import UserError
from qfsdp.common.sizes import parse_size
from qfsdp.data import Batch
from qfsdp.data.joined import joined
from qfsdp.data.preferences.batch import full_preferences
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.distributed.sharding import copies_ahead, shard_model
from qfsdp.distributed.world import World
from qfsdp.evaluation.inference_model import build_frozen
from qfsdp.hub.download import local_folder
from qfsdp.modules.compute_dtype import planned_for
from qfsdp.modules.hub_models.config import SHARED, HubConfig
from qfsdp.modules.hub_models.depth import with_layers
from qfsdp.modules.hub_models.dry_run import as_in_a_run
from qfsdp.modules.low_rank.linear import dora_linears
from qfsdp.modules.transformer import Decoder
from qfsdp.planning.graph_pools import captured, kept_by_graphs
from qfsdp.planning.kernel_memory import CUBLAS_WORKSPACES, Target
from qfsdp.planning.known_models import find_config, stored_formats
from qfsdp.planning.tracker import CHECKPOINT, GRAPHS, TEACHER, MemoryTracker, Point
from qfsdp.tensor_subclasses.dtensor import local_part
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from qfsdp.training.distillation import CachedTeacher, Teacher, of_teacher
from qfsdp.training.learning_rate import any_lr
from qfsdp.training.memory_usage import OPTIMIZER, PLAIN, QUANTIZED, TRAINED, plain_tensors
from qfsdp.training.optimizer import build_optimizer
from qfsdp.training.preference import step_options
from qfsdp.training.steps import StepClock

__all__ = ["Estimate", "Point", "Target", "estimate", "model_folder", "reserved_bytes"]

BuildModel = Callable[[Any, Any], Any]  # (cfg, weights) -> the model on the meta device
TrainStep = Callable[..., dict[str, float]]  # one update; arguments as in the training recipes
Kinds = dict[str, int]  # bytes by kind of tensor
RING = "ring_of_the_base"  # kind of host memory: the read-ahead of a base on disk
MICRO_BATCHES = 2  # at most in a dry step: a later one adds to gradients, the first makes them
# Allowances, not measured here: unused memory of the caching allocator, and the CUDA context of a
# process with its kernels and NCCL's buffers.
FRAGMENTATION, CONTEXT_BYTES = 0.04, 768 << 20


@dataclass(frozen=True)
class Estimate:
    """Memory and traffic of the first rank, whose shards are the largest, in bytes.

    Fields:
        peak: most memory allocated on the device at any time of a step.
        at_peak: bytes by kind of tensor at the peak; their sum is `peak`.
        where: phase ("backward") and module of the peak.
        steady: allocated on the device between steps.
        host: most in host memory, by kind of tensor: what is offloaded and, for a GPU, the copy
            that checkpoints are written from.
        wire: sent per step, by name of the collective; as much is received.
        moved: copied per step, "to_device", "to_host" and "from_disk"; the last at most: units that
            are still in the ring, where backward follows forward, are not read again.
        timeline: the peaks of all modules in their order.
        reserved: the peak and an allowance for other memory of a GPU (`reserved_bytes`); 0 for a
            CPU.
        between: of `wire`, what all ranks of a machine together send to other machines.
        launches: kernels that a step starts (`MemoryTracker.launches`).
    """

    peak: int
    at_peak: Kinds
    where: Point
    steady: int
    host: Kinds = field(default_factory=dict)
    wire: Kinds = field(default_factory=dict)
    moved: Kinds = field(default_factory=dict)
    timeline: list[Point] = field(default_factory=list)
    reserved: int = 0
    between: Kinds = field(default_factory=dict)
    launches: int = 0


def reserved_bytes(peak: int) -> int:
    """Memory of a GPU that a process takes when it allocates at most `peak` bytes."""
    return int(peak * (1 + FRAGMENTATION)) + CONTEXT_BYTES


def estimate(
    build_model: BuildModel,
    train_step: TrainStep,
    cfg: Any,
    world_size: int,
    local_world_size: int | None = None,
    target: Target = "cuda",
    layers: int | None = None,
) -> Estimate:
    """Estimates a step of a recipe after its first one.

    Args:
        build_model, train_step: the recipe's functions.
        cfg: the recipe's config. `model.path` is the name of a known model, or a model folder with
            at least `config.json`.
        world_size: number of ranks.
        local_world_size: number of ranks per machine; default: all are on one.
        target: device type whose allocator and attention kernels are followed.
        layers: number of layers, in place of the one in `config.json`.

    Raises:
        UserError: the model is not known, or the config does not fit it or the number of ranks.
        RuntimeError: this process has a process group already.
    """
    compiled, cfg = cfg.compile, replace(cfg, compile=False)
    with ExitStack() as stack:
        folder, formats = stack.enter_context(model_folder(cfg.model, layers))
        cfg = replace(cfg, model=replace(cfg.model, path=str(folder)))
        world = stack.enter_context(_fake_world(world_size, local_world_size or world_size))
        with planned_for(target):
            model = build_model(cfg, formats)
        teacher, tokens = planned_teacher(cfg, target), micro_batch_tokens(cfg)
        if teacher is not None and cfg.sharding.strategy != "ddp":
            shard_model(teacher, of_teacher(cfg), world)
        shard_model(model, cfg.sharding, world, None if teacher is not None else tokens)
        sum_dtype(world.device)  # tries fp64 once in a process: no launch of a step
        tracker = MemoryTracker(target, cfg.sharding.cpu_offload, local_world_size)
        if target == "cuda":
            tracker.workspace(CUBLAS_WORKSPACES, keep=True)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(tracker.following(model))
        stack.enter_context(as_in_a_run(model, cfg.packed))
        # torchao's optimizers compile their step; here it runs uncompiled.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        step = partial(train_step, **_options(cfg, teacher, world, tracker))
        found = _run(step, cfg, model, world, tracker)
        parts = captured(replace(cfg, compile=compiled), model, world, target)
        return found if parts == "nothing" else _with_graphs(found, parts == "norms")


def planned_teacher(cfg: Any, target: Target) -> Any:
    """The teacher on the meta device; None for another config, or if its words are in files."""
    if (given := getattr(cfg, "teacher", None)) is None or given.logprobs != "live":
        return None
    with model_folder(given.model, None) as (folder, formats), planned_for(target):
        model = replace(given.model, path=str(folder))
        return build_frozen(model, given.quantization, given.adapter, formats).eval()


def _options(cfg: Any, teacher: Any, world: World, tracker: MemoryTracker) -> dict[str, Any]:
    """What the recipe's step takes besides the arguments of all; a teacher gets fake weights."""
    if teacher is None and hasattr(cfg, "teacher"):
        return {"teacher": CachedTeacher.of_a_dry_run(cfg.distillation, world)}
    if teacher is None:
        return step_options(cfg)
    teacher.to_empty(device=world.device)
    teacher.tie_weights()
    _mark_parameters(teacher, tracker, TEACHER)
    return {"teacher": Teacher(teacher, cfg.distillation, world, teacher.config.vocab_size)}


def _run(
    train_step: TrainStep, cfg: Any, model: Decoder, world: World, tracker: MemoryTracker
) -> Estimate:
    """Runs the steps of a model without storage, under the fake mode and the tracker."""
    model.to_empty(device=world.device)
    model.tie_weights()
    model.train()
    _mark_parameters(model, tracker)
    tracker.host_peak = tracker.host.copy()  # before, parameters were not marked by kind
    in_backward = getattr(cfg, "optimizer_in_backward", False)
    optimizer = build_optimizer(any_lr(cfg.optimizer), trainable_parameters(model), in_backward)
    batches = _batches(cfg)
    clock = StepClock(world.device, tells=False)

    def step() -> None:
        tracker.start_step()
        train_step(model, optimizer, None, batches, cfg.clip_grad_norm, world, clock)
        tracker.note_peak()

    if in_backward:
        step()
    else:
        _first_update(model, optimizer, clock, tracker)
    for state in optimizer.state.values():
        for value in state.values():
            for inner in plain_tensors(value) if isinstance(value, Tensor) else ():
                tracker.follow(inner, OPTIMIZER)
    if copies_ahead(cfg.sharding, world):
        step()  # the order is learned: without, 141 GB were counted at 70B instead of 106
    saves: CheckpointConfig | None = getattr(cfg, "checkpoint", None)  # None: a loop of your own
    kept = []
    if saves is not None and saves.during_training:
        kept = _checkpoint_copy(saves, model, optimizer, world, tracker)
    step()
    steady = sum(tracker.now.values())
    if saves is not None and not kept:
        with clock.phase("checkpoint save"):
            kept = _checkpoint_copy(saves, model, optimizer, world, tracker)
            tracker.note_peak()
    del kept
    if cfg.sharding.offload_base == "disk":
        tracker.host_peak[RING] = parse_size(cfg.sharding.ring_memory)
    more = cfg.gradient_accumulation_steps - len(batches)
    peak = tracker.peak
    return Estimate(
        peak=peak.total,
        at_peak=dict(peak.by_kind),
        where=peak,
        steady=steady,
        host=dict(+tracker.host_peak),
        wire=tracker.per_step(tracker.wire, more),
        between=tracker.per_step(tracker.between, more),
        moved=tracker.per_step(tracker.copies, more),
        launches=sum(tracker.per_step(tracker.launches, more).values()),
        timeline=tracker.points,
        reserved=reserved_bytes(peak.total) if tracker.target == "cuda" else 0,
    )


def _with_graphs(found: Estimate, only_norms: bool) -> Estimate:
    """The estimate with a row for what CUDA graphs keep."""
    more, at_rest = kept_by_graphs(found.timeline, found.steady, only_norms)

    def added(point: Point) -> Point:
        return replace(point, by_kind=point.by_kind | {GRAPHS: more})

    timeline, where = [added(point) for point in found.timeline], added(found.where)
    return replace(
        found,
        peak=where.total,
        at_peak=dict(where.by_kind),
        where=where,
        steady=found.steady + at_rest,
        timeline=timeline,
        reserved=reserved_bytes(where.total),
    )


def _first_update(
    model: nn.Module, optimizer: Optimizer, clock: StepClock, tracker: MemoryTracker
) -> None:
    """Creates what loading and the first step leave behind: DoRA's squared norms and the optimizer
    state. A whole further step took half of an estimate's time."""
    for module in dora_linears(model):
        assert module.weight_norm is not None
        module.base_squares = torch.empty_like(local_part(module.weight_norm))
    for param in trainable_parameters(model):
        param.grad = torch.empty_like(param)
        tracker.mark_gradient(param)
    with clock.phase("optimizer"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _checkpoint_copy(
    config: CheckpointConfig,
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    tracker: MemoryTracker,
) -> list[Tensor]:
    """The host memory that a save leaves behind. It counts for as long as the caller keeps it.

    The copy of plain tensors stays for the next save (`Stager`). Others (of 8-bit optimizers) are
    copied anew for each save, and are there until it is written: during steps if `asynchronous`.

    Not counted: rank 0 reads what is trained once more to write an adapter.
    """
    with tracker.paused():
        staged = Stager(world).copy_tensors(trained_tensors(model), optimizer)
    kept = list(staged.local.values())
    if config.asynchronous:
        kept += [value for value in tree_leaves(staged.alone) if isinstance(value, Tensor)]
    for tensor in kept:
        tracker.follow(tensor, CHECKPOINT)
        if tracker.target == "cuda":
            tracker.in_host_memory(tensor)
    return kept


def _mark_parameters(model: nn.Module, tracker: MemoryTracker, own: str | None = None) -> None:
    for param in model.parameters():
        local = local_part(param)
        quantized = QUANTIZED if isinstance(local, QuantizedTensor) else PLAIN
        kind = own or (TRAINED if param.requires_grad else quantized)
        for inner in plain_tensors(local):
            tracker.follow(inner, kind)
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(tracker.mark_gradient)


def _batches(cfg: Any) -> list[Batch]:
    """Micro-batches of full rows; a packed row holds one sample, of the largest possible length."""
    parts = cfg.sharding.context_parallel
    rows, seq = rows_of(cfg) // adapters_of(cfg), -(-cfg.max_seq_len // parts) * parts
    tokens = torch.zeros(rows, seq, dtype=torch.int64)
    batch = Batch(tokens, tokens.clone(), rows * seq, targets=rows * seq)
    if hasattr(cfg, "adapters"):
        batch = joined([batch] * adapters_of(cfg))
    if cfg.packed:
        ends = torch.zeros(-(-(len(batch.tokens) + 1) // 64) * 64, dtype=torch.int32)
        batch = replace(batch, positions=batch.tokens.clone(), cu_seqlens=ends)
    if (objective := step_options(cfg).get("objective")) is not None:
        batch = full_preferences(batch, objective.takes(labels=False), parts)
    elif parts > 1:
        batch = batch.cut(parts - 1, parts)  # the last part sees the most keys
    return [batch] * min(cfg.gradient_accumulation_steps, MICRO_BATCHES)


def rows_of(cfg: Any) -> int:
    """Rows of a micro-batch: those of a pair are two, unless it is packed."""
    paired = any(objective.takes(labels=False) for objective in step_options(cfg).values())
    return int(cfg.batch_size) * (2 if paired and not cfg.packed else 1) * adapters_of(cfg)


def adapters_of(cfg: Any) -> int:
    """How many adapters have rows of their own in a micro-batch."""
    return len(getattr(cfg, "adapters", ())) or 1


def micro_batch_tokens(cfg: Any) -> int | None:
    """The most tokens of a micro-batch; None if the config (of a loop of your own) does not say."""
    if not hasattr(cfg, "max_seq_len"):
        return None
    return rows_of(cfg) * -(-int(cfg.max_seq_len) // cfg.sharding.context_parallel)


@dataclass(frozen=True)
class StoredFormats:
    """What `build_model` reads of a model folder's weights.

    Fields:
        formats: parameter name -> format, for the weights that are stored quantized.
    """

    formats: dict[str, str]


@contextmanager
def model_folder(model: Any, layers: int | None) -> Iterator[tuple[Path, StoredFormats]]:
    """A folder with the `config.json` of a section `model`, with `layers` layers if given, and its
    formats."""
    config = find_config(model.path)
    folder = local_folder(model.path)
    stored = any(folder.glob("*.safetensors"))
    weights = ModelWeights(folder, model.implementation) if stored else None
    if weights is not None and isinstance(weights.config, HubConfig):
        config = config | {SHARED: getattr(weights.config.hf, SHARED, False)}
    if layers is not None:
        config = with_layers(config, layers)
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "config.json").write_text(json.dumps(config))
        formats = stored_formats(config) if weights is None else weights.formats
        try:
            yield Path(temporary), StoredFormats(formats)
        except UserError as error:
            error.args = (str(error).replace(temporary, str(model.path)),)
            raise


@contextmanager
def _fake_world(size: int, local_size: int) -> Iterator[World]:
    """The first rank of a process group whose collectives return at once and send nothing."""
    if dist.is_initialized():
        raise RuntimeError("a process group exists; expected none, as a dry run makes its own")
    cpu, excepthook = torch.device("cpu"), sys.excepthook
    with torch.random.fork_rng(devices=[]):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        try:
            yield World(cpu, 0, size, init_device_mesh("cpu", (size,)), local_size)
        finally:
            dist.destroy_process_group()
            sys.excepthook = excepthook  # init_process_group wraps it to print the rank
