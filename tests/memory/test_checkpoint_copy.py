"""The copy that checkpoints are written from, in estimates and in real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from qfsdp.checkpoint.resume import Checkpointer
from qfsdp.checkpoint.state import TrainState
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.planning.estimate import Estimate, estimate
from qfsdp.planning.report import lines
from qfsdp.planning.tracker import CHECKPOINT
from qfsdp.training.memory_usage import OPTIMIZER, TRAINED
from tests.memory import test_estimate, test_estimate_full_finetune
from tests.ranks import run_ranks
from tests.tiny import write_tiny_model

EIGHT_BITS = ("optimizer=torchao.optim.AdamW8bit", "~optimizer.fused")
WAITING = "checkpoint.asynchronous=false"
CASES = {
    "qdora": (test_estimate, ()),
    "qdora, 8 bits": (test_estimate, (*EIGHT_BITS, "adapter.rank=64")),
    "qdora, 8 bits, waiting": (test_estimate, (*EIGHT_BITS, "adapter.rank=64", WAITING)),
    "full": (test_estimate_full_finetune, ()),
    "full, 8 bits": (test_estimate_full_finetune, EIGHT_BITS),
    "full, in backward": (
        test_estimate_full_finetune,
        ("optimizer_in_backward=true", "clip_grad_norm=null"),
    ),
}

pytestmark = pytest.mark.usefixtures("eager")


def held(model: Path, output_dir: Path) -> dict[str, int]:
    """Name of a case -> bytes of host memory that a real save keeps during the next step."""
    torch.compiler.set_stance("force_eager")  # AdamW8bit compiles its update
    found = {}
    for name, (config, words) in CASES.items():
        recipe, cfg = config.read_config(model, *words)
        casts = {"casts": cfg.trainable.casts(cfg.model.dtype)} if "full" in name else {}
        world = recipe.init_world(cfg.sharding, **casts)
        net = recipe.load_model(cfg, world)
        in_backward = {"in_backward": True} if getattr(cfg, "optimizer_in_backward", 0) else {}
        trained = trainable_parameters(net)
        optimizer = recipe.build_optimizer(cfg.optimizer, trained, **in_backward)
        tokens = torch.zeros(cfg.batch_size, cfg.max_seq_len, dtype=torch.int64)
        batch, clock = recipe.Batch(tokens, tokens, tokens.numel()), recipe.StepClock(world.device)
        recipe.train_step(net, optimizer, None, [batch], cfg.clip_grad_norm, world, clock)
        found[name] = bytes_kept(cfg, net, optimizer, world, output_dir / name)
    return found


def bytes_kept(cfg: Any, net: Any, optimizer: Any, world: Any, output_dir: Path) -> int:
    checkpoints = Checkpointer(cfg.checkpoint, output_dir, world)
    staged = []
    copy = checkpoints.staging.copy
    checkpoints.staging.copy = lambda *given: staged.append(copy(*given)) or staged[-1]
    checkpoints.save(1, TrainState(net, optimizer, None))
    buffers = list(checkpoints.staging._buffers.values())
    more = staged[0][f"rank_{world.rank}"]["alone"] if cfg.checkpoint.asynchronous else {}
    checkpoints.close()
    tensors = [*buffers, *(t for t in tree_leaves(more) if isinstance(t, Tensor))]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_estimates_count_the_bytes_that_a_save_keeps(ranks: int, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", vocab_size=2048, intermediate_size=512)
    first = run_ranks(ranks, held, model, tmp_path / "runs")[0]
    for name, (config, words) in CASES.items():
        given = config.load(model, *words)
        on_cpu, on_gpu = (estimate(*given, ranks, target=target) for target in ("cpu", "cuda"))
        print(f"{name}: {on_cpu.at_peak[CHECKPOINT]} of {first[name]} bytes")
        assert on_cpu.at_peak[CHECKPOINT] == first[name] > 0, name
        # A GPU's sizes are counted in units of 512 bytes.
        assert on_gpu.host[CHECKPOINT] == pytest.approx(first[name], rel=0.2), name
        assert on_gpu.host[CHECKPOINT] >= first[name]
        assert CHECKPOINT not in on_gpu.at_peak
    tensors = on_cpu.at_peak[TRAINED] + on_cpu.at_peak[OPTIMIZER]
    assert first[name] == pytest.approx(tensors, rel=0.01)  # of full finetuning: all that it holds


def test_a_run_that_saves_only_at_its_end(tmp_path: Path) -> None:
    """Then the copy comes when a step's activations have gone."""
    model = write_tiny_model(tmp_path / "model", vocab_size=2048, intermediate_size=512)
    words = ("checkpoint.every_minutes=null", "max_seq_len=8", "batch_size=1")

    def found(*more: str) -> Estimate:
        given = test_estimate_full_finetune.load(model, *words, *more)
        return estimate(*given, 1, target="cpu")

    during, at_end = found("checkpoint.every_n_steps=2"), found()
    copied = during.at_peak[CHECKPOINT]
    assert during.where.phase != "checkpoint save" == at_end.where.phase
    assert at_end.peak == during.steady == at_end.steady + copied < during.peak


@pytest.mark.long
def test_it_is_a_row_of_its_own(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    given = test_estimate.load(model)
    table = lines(estimate(*given, 1, target="cpu"), None)
    assert any(line.startswith("  copy for checkpoints  ") for line in table), table
    of_gpu = lines(estimate(*given, 1), None)
    assert any(line.startswith("host memory per rank: copy for checkpoints ") for line in of_gpu)
