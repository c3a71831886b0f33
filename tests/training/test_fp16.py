"""fp16 with a loss scale: overflows are left out on all ranks, and losses are those of fp32.

A CPU computes fp16 here, with PyTorch's own kernels; nothing is emulated.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.modules import compute_dtype as dtypes
from qfsdp.training import loss_scale
from qfsdp.training.loss_scale import start_loss_scale, update_loss_scale
from qfsdp.training.steps import clip_grad_norm
from tests.json_lines import metric_lines
from tests.ranks import run_ranks
from tests.tiny import load_recipe, needs_compiler, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")
QDORA, FULL = "qdora_distributed", "full_finetune_distributed"
CONFIG = """
output_dir: {folder}/run
model: {{path: {folder}/model, dtype: fp16}}
tokenizer: {{_component_: tests.toy_data.tokenizer}}
dataset: {{_component_: tests.toy_data.Samples}}
optimizer: {{_component_: torch.optim.AdamW, lr: 1e-3, eps: 1e-6, fused: true}}
lr_scheduler: {{_component_: qfsdp.training.cosine_with_warmup, num_warmup_steps: 3}}
batch_size: 3
gradient_accumulation_steps: 2
max_seq_len: 64
epochs: 99
report: false
max_steps: 12
preflight: false
checkpoint: {{keep_last: 99}}
"""
ADAPTER = "adapter: {rank: 5, alpha: 7, dropout: 0.1}\n"
# Of losses from 7 to 1. Rounding to fp16 changes a number by at most 2^-11 = 5e-4 of it; a loss is
# a mean of a hundred tokens. In 50 steps losses were at most 1.1e-3 apart.
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp16")
    write_tiny_model(folder / "model")
    (folder / f"{FULL}.yaml").write_text(CONFIG.format(folder=folder))
    (folder / f"{QDORA}.yaml").write_text(CONFIG.format(folder=folder) + ADAPTER)
    return folder


# ---- runs --------------------------------------------------------------------------------------


def run(
    folder: Path,
    name: str,
    words: list[str],
    poison: Sequence[int] = (),
    scale: float = loss_scale.INITIAL,
    steps_before: int = 0,
) -> list[Tensor] | str:
    """Runs a recipe on every rank. Returns the trained tensors, whole, or the message.

    Args:
        poison: steps in whose last micro-batch the last rank has an infinite gradient.
        scale: the first loss scale.
        steps_before: of a resumed run.
    """
    loss_scale.INITIAL = scale
    recipe, made = load_recipe(name), []
    load, train_step = recipe.load_model, recipe.train_step
    steps = itertools.count(steps_before + 1)

    def loaded(cfg: Any, world: Any, *rest: Any, **named: Any) -> nn.Module:
        made.append(load(cfg, world, *rest, **named))
        return made[0]

    def step(model: nn.Module, optimizer: Any, scheduler: Any, batches: Any, *rest: Any) -> Any:
        world = rest[1]
        hit = next(steps) in poison and world.rank == world.size - 1
        with spoiled(model, call=len(batches)) if hit else nullcontext():
            return train_step(model, optimizer, scheduler, batches, *rest)

    recipe.load_model, recipe.train_step = loaded, step
    cfg = load_config(recipe.Config, ["--config", f"{folder}/{name}.yaml", *words])
    try:
        recipe.main(cfg)
    except UserError as error:
        return str(error)
    trained = (p.detach() for p in made[0].parameters() if p.requires_grad)
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in trained]


@contextmanager
def spoiled(model: nn.Module, call: int) -> Iterator[None]:
    """Within it, the gradient of one linear's output is infinite in its n-th call."""
    linear, calls = model.get_submodule("model.layers.1.mlp.up_proj"), itertools.count(1)

    def spoil(module: nn.Module, args: Any, out: Tensor) -> None:
        if next(calls) == call:
            out.register_hook(lambda grad: grad * math.inf)

    hook = linear.register_forward_hook(spoil)
    yield
    hook.remove()


def numbers(of_run: list[dict[str, Any]]) -> list[Any]:
    names = ("step", "loss", "grad_norm", "lr", "loss_scale", "skipped_steps")
    return [[line.get(name) for name in names] for line in of_run]


def left_out(of_run: list[dict[str, Any]]) -> list[int]:
    """The steps whose update was left out."""
    counts = [0, *(line.get("skipped_steps", 0) for line in of_run)]
    return [line["step"] for line, a, b in zip(of_run, counts, counts[1:], strict=False) if b > a]


# ---- overflows ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "steps", "scale"),
    [
        (QDORA, 5, 2.0**22),
        pytest.param(QDORA, 50, 2.0**24, marks=pytest.mark.long),
        pytest.param(FULL, 50, 2.0**20, marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_fp32(
    folder: Path, tmp_path: Path, name: str, steps: int, scale: float
) -> None:
    """Two ranks; a scale that is too large at first, and an infinite gradient on one rank later.
    fp32 leaves out the same updates."""
    fp16, fp32 = tmp_path / "fp16", tmp_path / "fp32"
    words = [f"max_steps={steps}", "optimizer.lr=2e-4"]
    at = [f"output_dir={fp16}"]
    first, second = run_ranks(2, run, folder, name, [*words, *at], [4], scale)
    assert not isinstance(first, str), first
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    of_fp16 = metric_lines(fp16)
    skipped = left_out(of_fp16)
    assert {1, 4} <= {*skipped} and len(skipped) <= 8
    assert of_fp16[-1]["loss_scale"] == scale / 2 ** len(skipped)
    words += ["model.dtype=fp32", "on_nonfinite=skip", f"output_dir={fp32}"]
    (_, _) = run_ranks(2, run, folder, name, words, skipped)
    of_fp32 = metric_lines(fp32)
    assert left_out(of_fp32) == skipped
    apart = [abs(a["loss"] - b["loss"]) for a, b in zip(of_fp16, of_fp32, strict=True)]
    print(f"{steps} steps, {len(skipped)} left out: losses at most {max(apart):.1e} apart")
    assert max(apart) < TOLERANCE


VARIANTS = {
    "lora, packed": (QDORA, ["adapter.method=lora", "packed=true", "batch_size=1"]),
    "ia3": (QDORA, ["adapter.method=ia3", "adapter.dropout=0"]),
    "hqq, checkpointing": (QDORA, ["quantization.format=hqq", "activation.checkpointing=full"]),
    "base on the host": (QDORA, ["sharding.offload_base=cpu", "quantization.format=none"]),
    "all on the host": (QDORA, ["sharding.cpu_offload=true"]),
    "8 bits": (QDORA, ["optimizer=torchao.optim.AdamW8bit", "~optimizer.fused"]),
    "some layers": (FULL, ["trainable.layers=[1]", "quantization.format=nf4"]),
    "compiled": (QDORA, ["compile=true"]),
}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_part_computes_in_fp16(folder: Path, tmp_path: Path, variant: str) -> None:
    """Its losses are those of fp32; step 2 has an overflow on one rank of two."""
    name, words = VARIANTS[variant]
    # The hook that makes it does not reach into compiled code, nor into layers that run again.
    hit = [] if "compile=true" in words or "activation.checkpointing=full" in words else [2]
    words = ["max_steps=4", "on_nonfinite=skip", "lr_scheduler=null", *words]
    found = []
    for dtype in ("fp16", "fp32"):
        more = [f"model.dtype={dtype}", f"output_dir={tmp_path}/{dtype}"]
        trained = run_ranks(2, run, folder, name, words + more, hit)
        assert not isinstance(trained[0], str), trained[0]
        assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))
        found.append(metric_lines(tmp_path / dtype))
    assert [left_out(of_run) for of_run in found] == [hit, hit]
    for half, whole in zip(*found, strict=True):
        assert half["loss"] == pytest.approx(whole["loss"], abs=TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize("name", [QDORA, pytest.param(FULL, marks=pytest.mark.long)])
def test_a_resumed_run_has_the_same_bits(folder: Path, tmp_path: Path, name: str) -> None:
    """With overflows before and after the checkpoint."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    poison, scale = [2, 5], 2.0**22
    words = ["max_steps=6", "checkpoint.every_n_steps=4", f"output_dir={whole}"]
    ((*expected,),) = run_ranks(1, run, folder, name, words, poison, scale)
    shutil.copytree(whole / "checkpoints/step_00000004", again / "checkpoints/step_00000004")
    words = ["max_steps=6", "resume=auto", f"output_dir={again}"]
    ((*found,),) = run_ranks(1, run, folder, name, words, poison, 1.0, 4)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert numbers(metric_lines(again)) == numbers(metric_lines(whole))[4:]
    assert {2, 5} <= {*left_out(metric_lines(whole))}


@pytest.mark.long
def test_gradients_that_no_scale_helps(folder: Path, tmp_path: Path) -> None:
    words = [f"output_dir={tmp_path}/run", "max_steps=40", "batch_size=1"]
    (message,) = run_ranks(1, run, folder, QDORA, words, range(1, 99), 2.0**6)
    assert message.startswith("step 7: grad_norm nan at loss scale 1; ")
    assert "fp16 holds numbers up to 65,504" in message and "model.dtype=fp32" in message
    assert [line["loss_scale"] for line in metric_lines(tmp_path / "run")] == [
        2.0**n for n in range(6, 0, -1)
    ]


def test_the_scale_follows_the_rules_of_grad_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    start_loss_scale(optimizer, "fp16")
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    draw = random.Random(0)
    for _ in range(60):
        overflow = draw.random() < 0.25
        parameter.grad = torch.full((2,), math.inf if overflow else 1.0)
        theirs.scale(torch.ones(()))
        theirs.step(torch.optim.SGD([parameter], lr=0.0))
        theirs.update()
        update_loss_scale(optimizer, overflow)
        assert loss_scale.loss_scale(optimizer) == theirs.get_scale()


def test_gradients_are_divided_before_they_are_clipped() -> None:
    torch.manual_seed(0)
    grads = [torch.randn(5), torch.randn(2, 3)]
    for most in (None, 0.5, 100.0):
        plain, scaled = ([nn.Parameter(torch.zeros_like(g)) for g in grads] for _ in range(2))
        for a, b, grad in zip(plain, scaled, grads, strict=True):
            a.grad, b.grad = grad.clone(), grad * 2.0**9
        assert torch.equal(clip_grad_norm(plain, most), clip_grad_norm(scaled, most, 2.0**9))
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain, scaled, strict=True))


# ---- config ------------------------------------------------------------------------------------


def test_mistakes(folder: Path) -> None:
    recipe = load_recipe(FULL)
    words = ["gradient_accumulation_steps=1", "clip_grad_norm=null", "optimizer_in_backward=true"]
    for changes, message in (
        (["trainable.dtype=bf16"], "'bf16' is coarser than model.dtype, fp16; expected fp32"),
        (words, "optimizer_in_backward: "),
        (["model.dtype=half"], "model.dtype: 'half'"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            load_config(recipe.Config, ["--config", f"{folder}/{FULL}.yaml", *changes])


def test_a_gpu_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "device_kind", lambda: "cuda")
    monkeypatch.setattr(dtypes, "has_bf16_gpus", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(
        UserError, match="^model.dtype: 'bf16', which a Tesla T4 .*; expected fp16$"
    ):
        dtypes.compute_dtype("bf16")
    assert dtypes.compute_dtype("fp16") == torch.float16
    with dtypes.planned_for("cuda"):
        assert dtypes.compute_dtype("bf16") == torch.bfloat16
