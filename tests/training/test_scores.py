"""Reward models and classifiers: the same losses and scores as a loop over PEFT's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from qfsdp.checkpoint.adapter_files import check_adapter, load_adapter, save_adapter
from qfsdp.common.errors import UserError
from qfsdp.config.component import Component
from qfsdp.data.preferences.batch import PairBatch
from qfsdp.data.preferences.loader import collate_preferences
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.low_rank.linear import refresh_dora_norms
from qfsdp.modules.score_head import HeadConfig
from qfsdp.training.optimizer import build_optimizer
from qfsdp.training.scores import ScoreObjective, last_scores
from qfsdp.training.steps import StepClock
from tests.models import adapted_model, cpu_world
from tests.preferences import pack_of, random_samples
from tests.tiny import load_recipe, recipe_config, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")

UPDATES, UNITS, LR, EPS = 10, 4, 1e-3, 1e-6  # UNITS: pairs, or labelled rows, of an update
PAIRS, CLASSES = HeadConfig(center=0.01), HeadConfig(classes=3)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tied = {"tie_word_embeddings": True, "pad_token_id": 0}
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=96, **tied)


def scored_model(folder: Path, head: HeadConfig, method: str = "lora", **quantized: Any) -> Any:
    """A model as the recipe builds it."""
    recipe = load_recipe("reward_distributed")
    cfg = recipe_config(
        recipe,
        folder,
        head=head,
        quantization=recipe.QuantizationConfig(**quantized or {"format": "none"}),
        adapter=AdapterConfig(method, rank=4, alpha=8.0),
    )
    return recipe.load_model(cfg, cpu_world()), cfg.adapter


def items_of(head: HeadConfig, update: int) -> list[dict[str, Any]]:
    """What datasets give of an update."""
    per_item = 1 if head.classes > 1 else 2
    samples = [(t.clamp(min=1), n) for t, n in random_samples(per_item * UNITS, seed=update)]
    items = []
    for at in range(UNITS):
        own = samples[per_item * at : per_item * (at + 1)]
        tokens = torch.cat([t for t, _ in own]).tolist()
        item = {"tokens": tokens, "labels": tokens, "parts": [len(t) for t, _ in own]}
        more = {"margin": 0.25 * at} if per_item == 2 else {"desirable": (at + update) % 3}
        items.append(item | more)
    return items


def batch_of(head: HeadConfig, update: int) -> PairBatch:
    return collate_preferences(items_of(head, update), paired=head.classes == 1, pad_id=0)


def train(model: Any, head: HeadConfig) -> list[dict[str, float]]:
    recipe, world = load_recipe("reward_distributed"), cpu_world()
    adamw = Component("torch.optim.AdamW", {"lr": LR, "eps": EPS, "weight_decay": 0.0})
    optimizer = build_optimizer(adamw, trainable_parameters(model))
    given = (None, world, StepClock(world.device), ScoreObjective(head))
    return [
        recipe.train_step(model, optimizer, None, [batch_of(head, update)], *given)
        for update in range(UPDATES)
    ]


def of_peft(folder: Path, adapter: Path, head: HeadConfig, trained: bool) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    options = {"num_labels": head.classes, "dtype": torch.float32}
    base = AutoModelForSequenceClassification.from_pretrained(folder, **options)
    return PeftModel.from_pretrained(base, adapter, is_trainable=trained)


def their_losses(model: Any, head: HeadConfig) -> list[float]:
    """The losses of a loop over PEFT's model."""
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=LR, eps=EPS, weight_decay=0.0
    )
    losses = []
    for update in range(UPDATES):
        batch = batch_of(head, update)
        scores = model(batch.tokens, attention_mask=(batch.tokens != 0).long()).logits
        if head.classes > 1:
            loss = F.cross_entropy(scores, batch.desirable)
        else:
            chosen, rejected = scores.view(-1, 2).unbind(1)
            loss = -F.logsigmoid(chosen - rejected - batch.margins).mean()
            loss = loss + head.center * ((chosen + rejected) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.long
@pytest.mark.parametrize(("head", "method"), [(PAIRS, "lora"), (CLASSES, "dora")])
def test_ten_updates_as_peft(
    head: HeadConfig, method: str, model_dir: Path, tmp_path: Path
) -> None:
    model, adapter = scored_model(model_dir, head, method)
    world, base = cpu_world(), str(model_dir)
    save_adapter(model, adapter, base, tmp_path / "start", world)
    theirs = of_peft(model_dir, tmp_path / "start", head, trained=True)
    mine = train(model, head)
    expected = their_losses(theirs, head)
    assert [m["loss"] for m in mine] == pytest.approx(expected, abs=1e-5)
    assert expected[-1] != pytest.approx(expected[0], abs=1e-3)

    save_adapter(model, adapter, base, tmp_path / "end", world)
    loaded = of_peft(model_dir, tmp_path / "end", head, trained=False)
    without = adapted_model(model_dir, adapter, format="none")
    with pytest.raises(UserError, match="is the head of a reward model or classifier; expected"):
        check_adapter(adapter, tmp_path / "end", without)
    batch = batch_of(head, 0)
    with torch.no_grad():
        scores = last_scores(model, batch)
        by_peft = loaded(batch.tokens, attention_mask=(batch.tokens != 0).long()).logits
        torch.testing.assert_close(by_peft, scores, rtol=0, atol=1e-5)
        theirs.save_pretrained(tmp_path / "theirs")
        load_adapter(model, tmp_path / "theirs")  # PEFT's file
        by_them = theirs.eval()(batch.tokens, attention_mask=(batch.tokens != 0).long()).logits
        refresh_dora_norms(model)
        torch.testing.assert_close(last_scores(model, batch), by_them, rtol=0, atol=1e-5)


def test_a_start_without_a_head_is_told(model_dir: Path, tmp_path: Path) -> None:
    """As after supervised tuning."""
    model, config = scored_model(model_dir, PAIRS)
    plain = adapted_model(model_dir, config, format="none")
    save_adapter(plain, config, str(model_dir), tmp_path, cpu_world())
    with pytest.raises(UserError, match="score.weight' is missing; .* recipes/merge makes a base"):
        check_adapter(config, tmp_path, model)


def test_packed_rows_have_the_same_scores(model_dir: Path) -> None:
    model, _ = scored_model(model_dir, PAIRS)
    samples = random_samples(4)
    packs = [pack_of(*samples[at : at + 2]) for at in (0, 2)]
    packed = collate_preferences(packs, paired=True, pad_id=0, max_seq_len=64)
    items = []
    for at in (0, 2):
        tokens = torch.cat([t for t, _ in samples[at : at + 2]]).tolist()
        parts = [len(t) for t, _ in samples[at : at + 2]]
        items.append({"tokens": tokens, "labels": tokens, "parts": parts})
    padded = collate_preferences(items, paired=True, pad_id=0)
    with torch.no_grad():
        one, other = last_scores(model, packed), last_scores(model, padded)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
