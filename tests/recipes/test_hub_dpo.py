"""Preference tuning of models of transformers and of hybrid ones of ours, against a plain loop
over transformers and PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qfsdp.checkpoint.adapter_files import save_adapter
from qfsdp.common.errors import UserError
from qfsdp.config.component import Component
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.training.optimizer import build_optimizer
from qfsdp.training.preference import Objective, check_packed
from qfsdp.training.steps import StepClock
from tests import hub_models
from tests.models import cpu_world
from tests.peft_oracle import dequantized_base
from tests.preferences import Sample, preference_batch, random_samples
from tests.tiny import load_recipe, recipe_config

PAIRS, STEPS, BETA = 3, 3, 0.1
ADAPTER = AdapterConfig("dora", rank=4, alpha=8)


def config(recipe: Any, folder: Path, implementation: Any = "transformers") -> Any:
    return recipe_config(recipe, folder, implementation=implementation, adapter=ADAPTER)


def logprobs(model: Any, samples: list[Sample]) -> Tensor:
    """The summed log-probability of each answer, each sample computed alone."""
    sums = []
    for tokens, prompt in samples:
        scores = model(tokens[None], use_cache=False).logits[0, prompt - 1 : -1]
        sums.append(-F.cross_entropy(scores, tokens[prompt:], reduction="sum"))
    return torch.stack(sums)


def plain_losses(peft: Any, batches: list[list[Sample]]) -> list[float]:
    trained = [param for param in peft.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=1e-6)
    losses = []
    for samples in batches:
        with torch.no_grad(), peft.disable_adapter():
            reference = logprobs(peft, samples)
        ratios = (logprobs(peft, samples) - reference).unflatten(0, (-1, 2))
        loss = -F.logsigmoid(BETA * (ratios[:, 0] - ratios[:, 1])).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pytest.param("qwen3_5", "transformers", marks=pytest.mark.long),
        pytest.param("qwen3_5", "native", marks=pytest.mark.long),
        pytest.param("gemma4", "transformers", marks=pytest.mark.slow),
    ],
)
def test_losses_equal_those_of_transformers_and_peft(
    name: str, implementation: str, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    hub_models.save_hub_model(name, tmp_path / "model")
    recipe, world = load_recipe("dpo_distributed"), cpu_world()
    cfg = config(recipe, tmp_path / "model", implementation)
    model = recipe.load_model(cfg, world)
    save_adapter(model, ADAPTER, str(tmp_path / "model"), tmp_path / "start", world)
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    reference.load_state_dict(dequantized_base(model), strict=False)
    peft = PeftModel.from_pretrained(reference, str(tmp_path / "start"), is_trainable=True).eval()

    samples = random_samples(2 * PAIRS * STEPS)
    batches = [samples[at : at + 2 * PAIRS] for at in range(0, len(samples), 2 * PAIRS)]
    optimizer = build_optimizer(
        Component("torch.optim.AdamW", {"lr": 1e-3, "eps": 1e-6}), trainable_parameters(model)
    )
    objective, clock = Objective(cfg.loss, cfg.reference), StepClock(world.device)
    found = [
        recipe.train_step(
            model, optimizer, None, [preference_batch(given)], 1.0, world, clock, objective
        )["loss"]
        for given in batches
    ]
    expected = plain_losses(peft, batches)
    assert found == pytest.approx(expected, abs=1e-5)
    assert expected[0] == pytest.approx(torch.tensor(2.0).log().item()) != expected[1]


def test_pairs_are_not_packed(tmp_path: Path) -> None:
    hub_models.save_hub_model("llama", tmp_path)
    cfg = config(load_recipe("dpo_distributed"), tmp_path)
    with pytest.raises(UserError, match=r"^packed: true; expected false for pairs: transformers'"):
        check_packed(True, 64, cfg.model.any_config())
