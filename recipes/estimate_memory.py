"""Estimate the memory of a training config, before there are GPUs or weights.

    tune run recipes/estimate_memory --config configs/llama3_70b_qdora.yaml \\
        world_size=8 device_memory=24GiB [key=value ...]

Runs the training recipe's own model, sharding, optimizer and train step dry, as one rank of
`world_size`, in seconds and in one process. Prints the peak of a step by kind of tensor, and draws
memory over the step. No weights are needed: `model.path` is the name of a known model, or a folder
with `config.json`. Keys that `Config` does not have change the training config.

`options=true` prints a table instead: every strategy, offload and checkpointing, with the memory of
a GPU and of the host, the bytes moved in a step, and what fits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from qfsdp.common.errors import InvalidField, UserError, check_bounds
from qfsdp.common.long_waits import SLOW_S, long_wait
from qfsdp.config.tool_config import Training, run_tool
from qfsdp.distributed.global_batch import split_batch
from qfsdp.planning.estimate import Estimate
from qfsdp.planning.extrapolate import estimate_fast
from qfsdp.planning.hardware import check_bf16, device_memory_of, known_gpu, known_name
from qfsdp.planning.options import option_lines
from qfsdp.planning.report import draw, lines
from qfsdp.training.learning_rate import any_lr
from qfsdp.training.optimizer import check_optimizer
from qfsdp.training.run_config import add_new_tokens


@dataclass
class Config:
    """Keys of this tool; all other keys go to the training config."""

    world_size: int = 1  # ranks
    local_world_size: int | None = None  # ranks per machine; null: all are on one machine
    target: Literal["cuda", "cpu"] = "cuda"  # device type that the estimate is for
    gpu: str | None = None  # a known GPU, such as rtx4090, whose memory is the limit
    options: bool = False  # a table of strategies, offload and checkpointing; no picture
    picture: str | None = None  # a PNG; null: memory.png in the training's output_dir

    def check(self) -> None:
        check_bounds(self, "world_size", least=1, most=2**16)
        local = self.local_world_size or self.world_size
        if local < 1 or self.world_size % local:
            raise InvalidField("local_world_size", local, f"a divisor of {self.world_size}")
        if self.gpu is not None:
            known_name(self.gpu)


def device_memory(cfg: Config, train: Any) -> int | None:
    """Bytes from the config, else of `gpu`, else of this machine's GPU; None without all three."""
    given = device_memory_of(train)
    if given is None and cfg.gpu is not None:
        return known_gpu(cfg.gpu).device_memory
    if given is None and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return given


def estimate(cfg: Config, training: Training, what: str = "the training step") -> Estimate:
    """The memory of a step; raises UserError if the training config is wrong. A line says every few
    seconds that `what` runs dry."""
    train = training.cfg
    split_batch(train, cfg.world_size)
    add_new_tokens(train)
    check_bf16(cfg.gpu, train.model.dtype)
    check_optimizer(any_lr(train.optimizer), train.lr_scheduler)
    functions = (training.recipe.build_model, training.recipe.train_step)
    with long_wait(f"memory: {what} runs dry", every=SLOW_S):
        return estimate_fast(*functions, train, cfg.world_size, cfg.local_world_size, cfg.target)


def show_options(cfg: Config, training: Training, limit: int | None) -> None:
    """Prints the table, line by line."""
    began, train = time.perf_counter(), training.cfg
    print(
        f"{Path(train.model.path).name}, {cfg.world_size} x {cfg.gpu or 'GPU'}, "
        f"{train.batch_size} x {train.max_seq_len} tokens per micro-batch"
    )

    def of(changed: Any, way: str) -> Estimate:
        return estimate(cfg, replace(training, cfg=changed), way)

    local = cfg.local_world_size or cfg.world_size
    for line in option_lines(train, of, cfg.world_size, local, limit):
        print(line, flush=True)
    print(f"estimated in {time.perf_counter() - began:.0f} s")


def main(cfg: Config, training: Training) -> None:
    began, train = time.perf_counter(), training.cfg
    limit = device_memory(cfg, train)
    if cfg.options:
        return show_options(cfg, training, limit)
    found = estimate(cfg, training)
    title = f"{Path(train.model.path).name}, {cfg.world_size} ranks"
    print(
        f"{title}, {train.batch_size} x {train.max_seq_len} tokens per micro-batch, "
        f"activation checkpointing: {train.activation.checkpointing}"
    )
    print("\n".join(lines(found, limit)))
    if train.compile:
        print("estimated without compile: compiled layers keep 0.54 to 0.93 of it")
    picture = Path(cfg.picture or Path(train.output_dir) / "memory.png").expanduser()
    try:
        draw(found, picture, title, limit)
    except (OSError, ValueError) as error:  # a folder that cannot be written, an unknown suffix
        raise UserError(f"picture: {error}") from None
    print(f"picture: {picture}\nestimated in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    run_tool(Config, main)
