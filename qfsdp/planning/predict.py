"""Predicts the memory and time of a config, and of the same config with some values changed.

Memory and traffic come from a dry run (`qfsdp.planning.estimate`), seconds from a roofline.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from qfsdp.common.errors import UserError
from qfsdp.common.long_waits import SLOW_S, long_wait
from qfsdp.common.sizes import format_size
from qfsdp.distributed.global_batch import split_batch
from qfsdp.modules.activations import LEAST_TILE
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES, planned_for
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.experts.mixture import expert_parameters
from qfsdp.modules.hub_models.config import HubConfig
from qfsdp.modules.hub_models.refused import check_hub_run, may_share
from qfsdp.modules.low_rank.linear import dora_linears
from qfsdp.modules.transformer import Decoder, DecoderLayer
from qfsdp.planning.changes import Changes, as_words, changed, differing
from qfsdp.planning.estimate import (
    CONTEXT_BYTES,
    BuildModel,
    Estimate,
    TrainStep,
    micro_batch_tokens,
    model_folder,
    planned_teacher,
    rows_of,
)
from qfsdp.planning.extrapolate import estimate_fast
from qfsdp.planning.hardware import Hardware
from qfsdp.planning.known_models import planned_config
from qfsdp.planning.roofline import Load, StepTime, step_time
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from qfsdp.training.preference import step_options
from qfsdp.training.run_config import not_with_tiles
from qfsdp.training.throughput import step_flops

# Host memory of a rank without offloaded tensors; with a GPU also CUDA and NCCL (not measured). On
# a CPU, with SmolLM2: libraries 430 MiB, compiled kernels 105, a dry run and the tokenizer 85. Not
# counted: freed memory that the C library keeps, 50 to 200 MiB and what tokenizing leaves.
PROCESS_BYTES, CPU_PROCESS_BYTES = 3 << 30, 620 << 20


@dataclass(frozen=True)
class Prediction:
    """Memory and time of a config.

    Fields:
        changes: of the original config.
        device_bytes: of one GPU, including the process's CUDA context.
        host_bytes: of one machine with all its ranks: offloaded tensors and the processes.
        kinds: bytes on the device at the peak, by kind of tensor.
        time: of a step.
        tokens_per_second: of all ranks together.
    """

    changes: Changes
    device_bytes: int
    host_bytes: int
    kinds: dict[str, int]
    time: StepTime
    tokens_per_second: float

    def fits(self, hardware: Hardware) -> bool:
        return self.fits_device(hardware) and self.fits_host(hardware)

    def fits_device(self, hardware: Hardware) -> bool:
        return self.device_bytes <= hardware.device_memory

    def fits_host(self, hardware: Hardware) -> bool:
        return hardware.host_memory is None or self.host_bytes <= hardware.host_memory


def check_fits(found: Prediction, hardware: Hardware, given: str, what: str, expected: str) -> None:
    """Raises UserError: `what`, which a run does beside its training steps, does not fit.

    Args:
        given: the key that decides it, with its value.
        expected: what to change.
    """
    if not found.fits(hardware):
        needs, memory = format_size(found.device_bytes), format_size(hardware.device_memory)
        raise UserError(
            f"{given}; {what} needs {needs} per rank; available: {memory}; expected {expected}"
        )


def between(one: Prediction, other: Prediction, share: float) -> Prediction:
    """The prediction at `share` of the line from `one` (0) to `other` (1)."""

    def at(a: float, b: float) -> float:
        return a + share * (b - a)

    kinds = one.kinds | other.kinds
    return replace(
        one,
        device_bytes=int(at(one.device_bytes, other.device_bytes)),
        host_bytes=int(at(one.host_bytes, other.host_bytes)),
        kinds={k: int(at(one.kinds.get(k, 0), other.kinds.get(k, 0))) for k in kinds},
        time=replace(one.time, seconds=at(one.time.seconds, other.time.seconds)),
    )


Predict = Callable[[Changes], Prediction]


@dataclass(eq=False)
class Predictor:
    """Predicts one config with any changes; makes each prediction once.

    Fields:
        build_model, train_step: the recipe's functions.
        cfg: the recipe's config.
        world_size: number of ranks.
        local_world_size: number of ranks per machine.
        hardware: of every machine.
        target: "cuda", or "cpu" for a run without accelerators.
        estimate: has the arguments of `estimate_fast`.
    """

    build_model: BuildModel
    train_step: TrainStep
    cfg: Any
    world_size: int
    local_world_size: int
    hardware: Hardware
    target: str = "cuda"
    estimate: Callable[..., Estimate] = estimate_fast
    _known: dict[str, Prediction] = field(default_factory=dict, init=False)
    _models: dict[str, Decoder] = field(default_factory=dict, init=False)

    def on(self, world_size: int) -> Predictor:
        """The predictor for another number of ranks, on more or fewer such machines."""
        return replace(self, world_size=world_size)

    @property
    def experts(self) -> int:
        """Experts of a layer; 1: the model is no mixture."""
        config = planned_config(self.cfg.model)
        return 1 if config.experts is None else config.experts.count

    @property
    def has_long_rows(self) -> bool:
        """Whether a row is several tiles long, as `activation.tile_tokens: auto` has them."""
        hidden = planned_config(self.cfg.model).hidden_size
        return bool(self.cfg.max_seq_len >= 4 * max(LEAST_TILE, hidden))

    @property
    def sharing_ranks(self) -> list[int]:
        """By how many ranks a long row may be shared: 2, 4, ... of all."""
        shares = self.has_long_rows and self.cfg.sharding.context_parallel == 1
        if isinstance(config := planned_config(self.cfg.model), HubConfig):
            shares = shares and may_share(config)
        powers = (2**n for n in range(1, self.world_size.bit_length()))
        return [n for n in powers if shares and self.world_size % n == 0]

    @property
    def takes_tiles(self) -> bool:
        """Whether `activation.tile_tokens` is of use."""
        native = isinstance(planned_config(self.cfg.model), DecoderConfig)
        fits = native and self.experts == 1 and not not_with_tiles(self.cfg)
        return fits and self.has_long_rows

    @property
    def count(self) -> int:
        """Dry runs so far."""
        return len(self._known)

    def __call__(self, changes: Changes) -> Prediction:
        """Predicts the config with `changes`. Raises what `changed` and the estimate raise."""
        changes = differing(self.cfg, changes)
        key = repr(sorted(changes.items()))
        if key not in self._known:
            what = as_words(changes) or "a step"
            with long_wait(f"memory: estimating {what}", every=SLOW_S):
                self._known[key] = self._predict(changes)
        return self._known[key]

    def _predict(self, changes: Changes) -> Prediction:
        cfg = changed(self.cfg, changes)
        if isinstance(config := planned_config(cfg.model), HubConfig):
            check_hub_run(cfg, config)
        with suppress(UserError):  # on another number of ranks it may not divide
            split_batch(cfg, self.world_size)
        ranks = self.local_world_size
        functions = (self.build_model, self.train_step)
        found = self.estimate(*functions, cfg, self.world_size, ranks, self.target)
        load = step_load(self._model(cfg), cfg, found, self.world_size)
        time = step_time(load, self.hardware, ranks)
        host = sum(found.host.values())
        return Prediction(
            changes=changes,
            device_bytes=found.reserved or found.peak + host + CPU_PROCESS_BYTES,
            host_bytes=ranks * (PROCESS_BYTES + host),
            kinds=found.at_peak,
            time=time,
            tokens_per_second=step_tokens(cfg) * self.world_size / time.seconds,
        )

    def _model(self, cfg: Any) -> Decoder:
        """The model on the meta device; configs with equal activation settings share one."""
        key = repr(cfg.activation)
        if key not in self._models:
            cfg = replace(cfg, compile=False)
            with model_folder(cfg.model, None) as (folder, formats):
                cfg = replace(cfg, model=replace(cfg.model, path=str(folder)))
                with planned_for(self.target):
                    self._models[key] = self.build_model(cfg, formats)
        return self._models[key]


def check_process_fits(hardware: Hardware, processes: int = 0) -> None:
    """Checks that there is more memory than processes take without any tensor.

    Without this check, a search ends after a minute of dry runs that cannot fit.

    Args:
        processes: on one machine, with `hardware.host_memory`; 0: only the GPU is checked.

    Raises:
        UserError: there is not.
    """
    if hardware.host_memory is not None and hardware.host_memory <= processes * PROCESS_BYTES:
        raise UserError(
            f"host_memory: {format_size(hardware.host_memory)}; expected more than the "
            f"{format_size(processes * PROCESS_BYTES)} of the processes on a machine"
        )
    if hardware.device_memory <= CONTEXT_BYTES:
        raise UserError(
            f"device_memory: {format_size(hardware.device_memory)}; expected more than the "
            f"{format_size(CONTEXT_BYTES)} that CUDA takes for every process"
        )


def check_micro_batch(cfg: Any, available: int) -> None:
    """Checks that the largest tensors of one layer fit: a bound that needs no dry run.

    In every layer the hidden states and two intermediate ones of the whole micro-batch exist at
    once; in a mixture of experts, those of all experts of a token. In tiles only hidden states do.
    Ranks that share rows (`sharding.context_parallel`) share these too.

    Args:
        available: bytes of one rank.

    Raises:
        UserError: they do not fit.
    """
    config = planned_config(cfg.model)
    width, parts = config.hidden_size, cfg.sharding.context_parallel
    if not isinstance(config, HubConfig) and cfg.activation.tile_tokens is None:
        width += 2 * _inner_width(config)
    tokens = parts * (available // (width * COMPUTE_DTYPES[cfg.model.dtype].itemsize))
    if cfg.max_seq_len > tokens:
        what, most = f"max_seq_len: {cfg.max_seq_len}", f"{tokens} tokens"
    elif rows_of(cfg) * cfg.max_seq_len > tokens:
        what = f"batch_size: {rows_of(cfg)} rows of {cfg.max_seq_len} tokens"
        most = f"{tokens // cfg.max_seq_len} rows, and gradient_accumulation_steps for the rest"
    else:
        return
    raise UserError(f"{what}; {format_size(available)} per rank hold one layer of at most {most}")


def _inner_width(config: DecoderConfig) -> int:
    """Intermediate numbers of a token in the widest kind of layer."""
    widths = {config.intermediate_size for layer in config.layers if not layer.mixture}
    if config.experts is not None:
        widths.add(config.experts.top_k * config.experts.intermediate_size)
    return max(widths)


def step_tokens(cfg: Any) -> int:
    """Tokens of one rank in one step, where every row is `max_seq_len` long."""
    return int(micro_batch_tokens(cfg) or 0) * int(cfg.gradient_accumulation_steps)


def step_load(model: Decoder, cfg: Any, found: Estimate, world_size: int) -> Load:
    """The work and traffic of one rank in a step.

    Counts every row as full and every token as a target. Of ranks that share rows, each counts as
    the mean: with causal attention the last one computes up to twice as much of it.

    Args:
        model: on the meta device.
        found: the estimate for `cfg`.
    """
    rows = rows_of(cfg) * cfg.gradient_accumulation_steps / cfg.sharding.context_parallel
    flops = step_flops(model, [cfg.max_seq_len], cfg.max_seq_len)
    objectives = step_options(cfg).values()
    further = sum(objective.further_passes for objective in objectives)  # without gradients
    parts = dict.fromkeys(expert_parameters(model), cfg.sharding.expert_parallel)
    dequantized = sum(_dequantized_bytes(p) / parts.get(p, 1) for p in model.parameters())
    hardware_flops, of_teacher = flops.hardware + further * flops.forward, 0.0
    if (teacher := planned_teacher(cfg, "cuda")) is not None:
        hardware_flops += step_flops(teacher, [cfg.max_seq_len], cfg.max_seq_len).forward
        of_teacher = sum(_dequantized_bytes(param) for param in teacher.parameters())
    # DoRA's norms: once an update, each rank its own rows.
    refreshed = sum(_dequantized_bytes(m.weight) for m in dora_linears(model)) / world_size
    # Weights are dequantized in forward, in backward, and when a whole layer is computed again.
    passes = further + (3 if cfg.activation.checkpointing == "full" else 2)
    return Load(
        flops=rows * hardware_flops,
        dequantized_bytes=(dequantized * passes + of_teacher - _held_bytes(model, cfg))
        * cfg.gradient_accumulation_steps
        + refreshed,
        wire_bytes=sum(found.wire.values()),
        network_bytes=sum(found.between.values()),
        to_device_bytes=found.moved.get("to_device", 0),
        to_host_bytes=found.moved.get("to_host", 0),
        disk_bytes=found.moved.get("from_disk", 0),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad) / world_size,
        units=model.config.num_hidden_layers,
        prefetched=cfg.sharding.prefetch > 0,
        host_optimizer=cfg.sharding.cpu_offload,
    )


def _held_bytes(model: Decoder, cfg: Any) -> int:
    """Bytes of dequantizing that a micro-batch in tiles saves: backward dequantizes weights of the
    feed-forward once, to compute it again and for gradients."""
    tokens = micro_batch_tokens(cfg) or 0
    layers = [layer for layer in model.parts.layers if isinstance(layer, DecoderLayer)]
    tiled = [layer.feed_forward for layer in layers if tokens > (layer.tile_tokens or tokens)]
    return sum(_dequantized_bytes(param) for mlp in tiled for param in mlp.parameters())


def _dequantized_bytes(weight: Tensor) -> int:
    """Bytes read and written to dequantize a weight; 0 for one that is not quantized."""
    if not isinstance(weight.data, QuantizedTensor):
        return 0
    return weight.data.qdata.numel() + weight.numel() * weight.dtype.itemsize
