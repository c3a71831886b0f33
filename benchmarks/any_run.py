"""A few updates of one model of transformers, for `any_model.py`: two ranks as one, and a resume.

QLoRA in fp32, experts too, with SGD and momentum: Adam's first updates are signs, which rounding
near zero turns around.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qfsdp.checkpoint.adapter_files import adapter_parameters
from qfsdp.checkpoint.resume import CheckpointConfig, Checkpointer, TrainState
from qfsdp.checkpoint.weights.load import ModelConfig, load_base
from qfsdp.data.batch import Batch
from qfsdp.distributed.sharding import shard_model
from qfsdp.distributed.world import ShardingConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.training.steps import forward_backward, optim_step
from tests.models import cpu_world

UPDATES, SAVED = 3, 2  # the checkpoint that is resumed from
RATE, MOMENTUM, LARGEST = 0.3, 0.9, 1.0  # the largest norm of the gradients


def one_rank(folder: Path, tokens: Tensor) -> dict[str, Any]:
    """The losses of each update, of both rows."""
    return {"losses": _updates(folder, tokens, folder / "one")[0]}


def two_ranks(folder: Path, tokens: Tensor) -> dict[str, Any]:
    """The losses of each update, of a row on each rank; and how far the adapter is from that of
    a run that was resumed."""
    losses, whole = _updates(folder, tokens, folder / "two", save=SAVED)
    again, resumed = _updates(folder, tokens, folder / "two", resume="auto")
    apart = [abs(a - b) for a, b in zip(losses[SAVED:], again, strict=True)]
    apart += [float((a - b).abs().max()) for a, b in zip(whole, resumed, strict=True)]
    return {"losses": losses, "resume": max(apart)}


def _updates(
    folder: Path, tokens: Tensor, output: Path, save: int = 0, resume: str | None = None
) -> tuple[list[float], list[Tensor]]:
    """Losses, and this rank's part of the adapter."""
    world = cpu_world()
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    labels[0, :5] = -100  # ranks have other numbers of targets
    own = slice(None) if world.size == 1 else slice(world.rank, world.rank + 1)
    batch = Batch(tokens[own], labels[own], tokens[own].numel())
    targets = (labels != -100).sum()
    state = _state(folder)

    def loss_of(given: Any) -> Tensor:
        summed: Tensor = state.model(given.tokens, labels=given.labels)
        return summed / targets

    checkpoints = Checkpointer(CheckpointConfig(asynchronous=False), output, world)
    first = checkpoints.load(checkpoints.find(resume, dict), state)
    losses = []
    for step in range(first + 1, UPDATES + 1):
        loss = forward_backward(loss_of, [batch], state.optimizer, world)
        found = optim_step(state.model, state.optimizer, loss, world, clip=LARGEST)
        losses.append(found["loss"])
        if step == save:
            checkpoints.save(step, state)
    checkpoints.close()
    adapter = adapter_parameters(state.model).values()
    return losses, [p.to_local() if hasattr(p, "to_local") else p for p in adapter]


def _state(folder: Path) -> TrainState:
    config = ModelConfig(str(folder), dtype="fp32", implementation="transformers")
    model: Any = config.build()
    experts = sorted({".".join(name.split(".")[-2:]) for name in model.expert_linears})
    adapter = AdapterConfig("lora", rank=4, alpha=8, targets=["all-linear", *experts])
    quantize_linears(model, QuantizationConfig())
    add_adapters(model, adapter)
    shard_model(model, ShardingConfig(), cpu_world())
    load_base(model, config.weights(), torch.device("cpu"), ShardingConfig())
    init_adapters(model, seed=0)
    trained = list(adapter_parameters(model.train()).values())
    return TrainState(model, torch.optim.SGD(trained, lr=RATE, momentum=MOMENTUM), None)
