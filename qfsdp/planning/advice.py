"""Changes of a config that take less memory, the cheapest first.

Two places give advice. Preflight (`qfsdp.planning.preflight`) combines the options and ranks them
by dry runs. A message about a run out of memory (`qfsdp.planning.oom`) comes too late for dry runs:
it picks options by the kind of tensors that fill the memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.common.errors import UserError
from qfsdp.config.load import get_key
from qfsdp.planning.changes import (
    CHECKPOINTING,
    OFFLOAD,
    Changes,
    as_words,
    differing,
    micro_batches,
    strategy_over_all_ranks,
)
from qfsdp.training.memory_usage import OPTIMIZER
from qfsdp.training.run_config import not_with_tiles

SUGGESTIONS = 3  # that a message has at most
SMALL_SHARE = 0.1  # a kind of tensors with a smaller share of the memory is not worth a change
OF_8_BITS = ("lr", "betas", "eps", "weight_decay", "amsgrad")  # arguments of AdamW8bit
LONG_ROWS = 16384  # tokens from which tiles are advice
# Kinds of tensors, besides those of `qfsdp.training.memory_usage`.
TRANSIENT, PARAMETERS = "activations_and_temporaries", "parameters"


@dataclass(frozen=True)
class Option:
    """A change of a config that takes less device memory.

    Fields:
        aspect: what it changes; options with the same aspect exclude each other.
        saves: kind of tensors that take less: TRANSIENT, OPTIMIZER or PARAMETERS.
        changes: the new values.
        needs_dry_run: only a dry run can show that it is enough, or that less is not.
        same_numbers: whether the training computes the same as before.
    """

    aspect: str
    saves: str
    changes: Changes
    needs_dry_run: bool = False
    same_numbers: bool = True


def options(cfg: Any, world_size: int, on_gpu: bool) -> list[Option]:
    """The changes that save device memory in a run of `cfg`, the cheapest first.

    Sections that the config does not have give no options: a recipe without training has no
    section `activation`.
    """
    ways = [*_checkpointing(cfg), *_smaller_micro_batches(cfg), *_tiles(cfg)]
    if on_gpu and get_key(cfg, "activation.offload") is False:
        ways.append(Option("activation.offload", TRANSIENT, {"activation.offload": True}))
    strategy = get_key(cfg, "sharding.strategy")
    if world_size > 1 and strategy not in ("full_shard", None):
        ways.append(Option("strategy", PARAMETERS, strategy_over_all_ranks("full_shard")))
    optimizer = get_key(cfg, "optimizer")
    if optimizer is not None and not re.search("8bit|4bit|Fp8", str(optimizer)):
        smaller = {"optimizer._component_": "torchao.optim.AdamW8bit"}
        ways.append(Option("optimizer", OPTIMIZER, smaller, same_numbers=False))
    offload = _offload(cfg) if on_gpu and strategy is not None else []
    ways += offload[:1]
    if world_size > 1 and get_key(cfg, "sharding.wrap") == "decoder_layer":
        ways.append(Option("wrap", PARAMETERS, {"sharding.wrap": "linear"}))
    return ways + offload[1:]


def _checkpointing(cfg: Any) -> list[Option]:
    key = "activation.checkpointing"
    now = get_key(cfg, key)
    later = CHECKPOINTING[CHECKPOINTING.index(now) + 1 :] if now in CHECKPOINTING else ()
    return [Option(key, TRANSIENT, {key: v}, needs_dry_run=v != "full") for v in later]


def _tiles(cfg: Any) -> list[Option]:
    """Tiles of tokens, for long rows; only a dry run knows whether the model takes them."""
    key, checkpointing = "activation.tile_tokens", get_key(cfg, "activation.checkpointing")
    if checkpointing is None or get_key(cfg, key) is not None or not_with_tiles(cfg):
        return []
    whole: Changes = {"activation.checkpointing": "full", "activation.every_n_layers": 1}
    long = (get_key(cfg, "max_seq_len") or 0) >= LONG_ROWS
    return [Option(key, TRANSIENT, whole | {key: "auto"}, needs_dry_run=True)] * long


def _smaller_micro_batches(cfg: Any) -> list[Option]:
    """Half, a quarter, ... of the micro-batch, with as many samples in a step."""
    batch = get_key(cfg, "batch_size") or 1
    samples = batch * (get_key(cfg, "gradient_accumulation_steps") or 1)
    halves = (batch >> times for times in range(1, batch.bit_length()))
    sizes = [size for size in halves if samples % size == 0]
    return [
        Option("batch", TRANSIENT, micro_batches(size, samples), needs_dry_run=size != sizes[0])
        for size in sizes
    ]


def _offload(cfg: Any) -> list[Option]:
    names = list(OFFLOAD)
    now = next(name for name in names if not differing(cfg, OFFLOAD[name]))
    if not _is_quantized(get_key(cfg, "model.path")):
        names.remove("base_to_disk")
    later = names[names.index(now) + 1 :] if now in names else []
    # "ddp" has no shards to offload.
    sharded = get_key(cfg, "sharding.strategy") != "ddp"
    needed = {} if sharded else strategy_over_all_ranks("full_shard")
    found = {name: needed | OFFLOAD[name] for name in later}
    if "all_to_cpu" in found and get_key(cfg, "sharding.vocabulary") == "split":
        found["all_to_cpu"] = found["all_to_cpu"] | {"sharding.vocabulary": "auto"}
    return [Option("offload", PARAMETERS, changes) for changes in found.values()]


def _is_quantized(folder: str | None) -> bool:
    try:
        return folder is not None and bool(ModelWeights(folder).quantized)
    except UserError:
        return False


# ---- for a run that is out of memory ----------------------------------------------------------


def less_device_memory(
    cfg: Any, kinds: dict[str, int], world_size: int, on_gpu: bool, training: bool
) -> Iterator[str]:
    """Changes for a run that is out of device memory, the cheapest first, as words of a command.

    Args:
        kinds: bytes that are held, by kind of tensor.
        training: whether steps have begun; while a model is loaded there are no activations.
    """
    enough = SMALL_SHARE * sum(kinds.values())
    for option in options(cfg, world_size, on_gpu):
        if option.needs_dry_run or (option.saves == TRANSIENT and not training):
            continue
        if option.saves == PARAMETERS or kinds.get(option.saves, 0) > enough:
            without = _not_in_8_bits(cfg) if option.saves == OPTIMIZER else ""
            yield as_words(differing(cfg, option.changes)) + without
    if training:
        yield "a smaller max_seq_len"
    yield "more ranks"


def _not_in_8_bits(cfg: Any) -> str:
    """Words that remove the arguments which the optimizer with states in 8 bits does not have."""
    given = getattr(get_key(cfg, "optimizer"), "kwargs", {})
    return "".join(f" ~optimizer.{name}" for name in given if name not in OF_8_BITS)


def less_host_memory(cfg: Any) -> Iterator[str]:
    """Changes for a run on GPUs that is out of host memory, the cheapest first."""
    if get_key(cfg, "activation.offload"):
        yield "activation.offload=false"
    if get_key(cfg, "sharding.offload_base") == "cpu":
        yield "sharding.offload_base=disk"
    if get_key(cfg, "sharding.offload_base") == "disk":
        yield "a smaller sharding.ring_memory"
    if get_key(cfg, "sharding.cpu_offload"):
        yield "sharding.cpu_offload=false"
    yield "fewer ranks on this machine"
