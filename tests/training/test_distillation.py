"""Distillation: the losses of a plain loop over whole logits, and TRL's; mistakes in one line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qfsdp.checkpoint.adapter_files import save_adapter
from qfsdp.config.component import Component
from qfsdp.data.loader import StepLoader
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.distillation import DistillationConfig, divergence, of_most_likely
from qfsdp.training.distillation import TeacherConfig, load_teacher
from qfsdp.training.optimizer import build_optimizer
from qfsdp.training.steps import StepClock
from tests.models import cpu_world
from tests.tiny import load_recipe, recipe_config, write_tiny_model
from tests.toy_data import Samples, tokenizer

pytestmark = pytest.mark.usefixtures("eager")

UPDATES, LR, EPS = 10, 1e-3, 1e-6
PYTHON = os.environ.get("QFSDP_TRL_PYTHON")
KINDS = [
    DistillationConfig("forward_kl", temperature=2.0),
    DistillationConfig("forward_kl", top_k=5, weight=0.25),
    DistillationConfig("reverse_kl", weight=0.5),
    DistillationConfig("jsd", beta=0.1, temperature=0.5),
]


def plain(ours: Tensor, theirs: Tensor, config: DistillationConfig) -> Tensor:
    """The divergence of each row of logits, by its definition."""
    if config.top_k is not None:
        kept = theirs >= theirs.topk(config.top_k).values[..., -1:]
        theirs = theirs.masked_fill(~kept, -torch.inf)
    q, p = ((logits / config.temperature).softmax(-1) for logits in (ours, theirs))

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (torch.xlogy(one, one) - one * other.log()).sum(-1)

    if config.divergence == "forward_kl":
        return kl(p, q)
    if config.divergence == "reverse_kl":
        return kl(q, p)
    middle = config.beta * p + (1 - config.beta) * q
    return config.beta * kl(p, middle) + (1 - config.beta) * kl(q, middle)


def of_logits(ours: Tensor, theirs: Tensor, config: DistillationConfig) -> tuple[Tensor, Tensor]:
    if config.top_k is None:
        return divergence(ours, theirs, config)
    logprobs, ids = theirs.log_softmax(1).topk(config.top_k, 1)
    return of_most_likely(ours, ids, logprobs, config)


@pytest.mark.parametrize("config", KINDS, ids=lambda config: config.divergence)
def test_values_and_gradients(config: DistillationConfig) -> None:
    ours, theirs = 3 * torch.randn(2, 7, 50, generator=torch.Generator().manual_seed(0))
    wide = ours.double().requires_grad_()
    expected = plain(wide, theirs.double(), config)
    (grad,) = torch.autograd.grad(expected.sum(), wide)
    losses, found = of_logits(ours, theirs, config)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.double(), grad, rtol=1e-5, atol=1e-6)
    far = of_logits(1e3 * ours, 1e3 * theirs, config)  # probabilities that round to 0
    assert all(each.isfinite().all() for each in far)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, and a wider teacher whose vocabulary is padded further."""
    folder = tmp_path_factory.mktemp("models")
    tied = {"tie_word_embeddings": True}
    student = write_tiny_model(folder / "student", hidden_size=96, **tied)
    wide = write_tiny_model(folder / "teacher", hidden_size=192, vocab_size=580, seed=1)
    return student, wide


def config_of(
    models: tuple[Path, Path], distillation: DistillationConfig, logprobs: str = "live"
) -> Any:
    recipe = load_recipe("distill_distributed")
    plain = recipe.QuantizationConfig("none")
    return recipe_config(
        recipe,
        models[0],
        teacher=TeacherConfig(
            recipe.ModelConfig(str(models[1]), dtype="fp32"), plain, logprobs=logprobs
        ),
        tokenizer=Component("tests.toy_data.tokenizer", {}),
        distillation=distillation,
        quantization=plain,
        adapter=AdapterConfig("lora", rank=4, alpha=8.0),
    )


def loader() -> StepLoader:
    """Updates of two micro-batches, the second without a target in one of its rows."""
    rows = [dict(Samples(tokenizer(), seed=at // 4)[at % 4]) for at in range(4 * UPDATES)]
    for row in rows[3::4]:
        row["labels"] = torch.full_like(row["labels"], -100)
    one = {"rank": 0, "world_size": 1, "seed": 0, "pad_id": 0, "shuffle": False}
    return StepLoader(rows, batch_size=2, gradient_accumulation_steps=2, max_seq_len=64, **one)


def train(cfg: Any, model: Any) -> list[dict[str, float]]:
    recipe, world, rows = load_recipe("distill_distributed"), cpu_world(), loader()
    adamw = Component("torch.optim.AdamW", {"lr": LR, "eps": EPS, "weight_decay": 0.0})
    optimizer = build_optimizer(adamw, trainable_parameters(model))
    given = (1.0, world, StepClock(world.device), load_teacher(cfg, world, rows, UPDATES))
    return [
        recipe.train_step(model, optimizer, None, rows.step(update), *given)
        for update in range(UPDATES)
    ]


def their_losses(student: Any, teacher: Any, config: DistillationConfig) -> list[float]:
    """A plain loop over whole logits of models of transformers, one of them PEFT's."""
    trained = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, eps=EPS, weight_decay=0.0)
    losses = []
    for update in range(UPDATES):
        batches, loss = loader().step(update), torch.zeros(())
        targets = sum(batch.num_targets for batch in batches)
        for batch in batches:
            counts = batch.labels != -100
            ours = student(batch.tokens).logits[counts]
            with torch.no_grad():
                theirs = teacher(batch.tokens).logits[counts][:, : ours.size(1)]
            apart = plain(ours, theirs, config).sum()
            labelled = F.cross_entropy(ours, batch.labels[counts], reduction="sum")
            loss = loss + (config.weight * apart + (1 - config.weight) * labelled) / targets
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


CASES = [(config, "live") for config in KINDS] + [(KINDS[1], "cache")]


@pytest.mark.long
@pytest.mark.parametrize(("config", "where"), CASES, ids=lambda of: getattr(of, "divergence", of))
def test_ten_updates_as_a_plain_loop(
    config: DistillationConfig, where: str, models: tuple[Path, Path], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    recipe, world = load_recipe("distill_distributed"), cpu_world()
    cfg = config_of(models, config, where.replace("cache", f"{tmp_path}/said"))
    model = recipe.load_model(cfg, world)
    save_adapter(model, cfg.adapter, str(models[0]), tmp_path, world)
    base, teacher = (AutoModelForCausalLM.from_pretrained(m, dtype=torch.float32) for m in models)
    theirs = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    mine, expected = train(cfg, model), their_losses(theirs, teacher.eval(), config)
    assert [m["loss"] for m in mine] == pytest.approx(expected, abs=1e-6)
    assert ("labels_loss" in mine[0]) == (config.weight < 1)
    assert expected[-1] != pytest.approx(expected[0], abs=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="no $QFSDP_TRL_PYTHON, a Python that has TRL")
def test_values_of_trl(tmp_path: Path) -> None:
    ours, theirs = 3 * torch.randn(2, 7, 50, generator=torch.Generator().manual_seed(0))
    cases = [(DistillationConfig("forward_kl", temperature=2.0), 0.0)]
    cases += [(DistillationConfig("reverse_kl"), 1.0)]
    cases += [(DistillationConfig("jsd", beta=b, temperature=0.7), b) for b in (0.1, 0.5, 0.9)]
    torch.save([(ours, theirs, beta, c.temperature) for c, beta in cases], tmp_path / "cases.pt")
    script = """if True:
        import sys, torch
        from trl.experimental.gkd import GKDTrainer
        found = []
        for ours, theirs, beta, temperature in torch.load(f"{sys.argv[1]}/cases.pt"):
            ours = ours.requires_grad_()
            given = {"beta": beta, "temperature": temperature, "reduction": "sum"}
            loss = GKDTrainer.generalized_jsd_loss(ours[None], theirs[None], **given)
            found.append((loss.detach(), torch.autograd.grad(loss, ours)[0]))
        torch.save(found, f"{sys.argv[1]}/found.pt")
    """
    assert PYTHON is not None
    subprocess.run([PYTHON, "-c", script, str(tmp_path)], check=True, capture_output=True)
    for (config, _), (loss, grad) in zip(cases, torch.load(tmp_path / "found.pt"), strict=True):
        losses, found = divergence(ours, theirs, config)
        torch.testing.assert_close(losses.sum(), loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found, grad, rtol=1e-5, atol=1e-6)
