"""Losses, gradient norms and rewards of 50 updates against TRL's trainers.

Skipped without $QFSDP_TRL_PYTHON, the Python of an environment with TRL (`pip install trl peft`).
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qfsdp.checkpoint.adapter_files import save_adapter
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import load_base
from qfsdp.config.component import Component
from qfsdp.data.preferences.loader import collate_preferences
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import init_adapters
from qfsdp.modules.adapters.reference import keep_start, set_start
from qfsdp.modules.score_head import HeadConfig, add_score_head
from qfsdp.training.optimizer import build_optimizer
from qfsdp.training.preference import Objective
from qfsdp.training.scores import ScoreObjective
from qfsdp.training.steps import StepClock
from tests.models import adapted_model, cpu_world, randomize_adapters
from tests.preferences import Sample, preference_batch, random_samples
from tests.tiny import ROOT, load_recipe, write_tiny_model

PYTHON = os.environ.get("QFSDP_TRL_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="no $QFSDP_TRL_PYTHON, a Python that has TRL"),
    pytest.mark.usefixtures("eager"),
]

UPDATES, BATCH, LR, EPS = 50, 4, 1e-3, 1e-6  # BATCH: pairs, or answers with a label
ADAPTER = AdapterConfig("lora", rank=4, alpha=8.0)
# TRL's trainer and its options, our loss, and TRL's names of our metrics besides loss and norm.
REWARDS = {f"rewards/{name}": f"rewards/{name}" for name in ("chosen", "rejected")}
PAIRS = REWARDS | {"rewards/margin": "rewards/margins", "rewards/accuracy": "rewards/accuracies"}
SUMS = PAIRS | {"logps/chosen": "logps/chosen", "logps/rejected": "logps/rejected"}
SIMPO = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0}
JOBS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "sigmoid": ("DPO", {"loss_type": "sigmoid"}, {}, SUMS),
    "robust": (
        "DPO",
        {"loss_type": "robust", "label_smoothing": 0.1},
        {"label_smoothing": 0.1},
        SUMS,
    ),
    "ipo": ("DPO", {"loss_type": "ipo"}, {}, SUMS),
    "hinge": ("DPO", {"loss_type": "hinge"}, {}, SUMS),
    "sft": ("DPO", {"loss_type": "sft"}, {}, {}),
    "kto": ("KTO", {}, {}, REWARDS),
    "simpo": ("CPO", SIMPO, {"beta": 2.0, "gamma": 1.0}, PAIRS),
    "orpo": ("ORPO", {}, {}, PAIRS),
}


def samples_of(name: str) -> list[Sample]:
    """Samples whose answers end with token 1. ORPO's in TRL also counts the prompt's tokens in its
    cross entropy (`concatenated_forward`: "orpo chosen nll loss is computed over the full prompt
    and response"), so here its prompts are one token, which is never a target."""
    found = []
    for at, (tokens, prompt) in enumerate(random_samples(2 * UPDATES * BATCH)):
        if name == "orpo":
            tokens, prompt = torch.cat([torch.tensor([5 + at // 2]), tokens[prompt:]]), 1
        tokens = tokens.clamp(min=2)
        tokens[-1] = 1
        found.append((tokens, prompt))
    return found[: UPDATES * BATCH] if name == "kto" else found


def rows_of(name: str, samples: list[Sample]) -> list[dict[str, Any]]:
    parts = [(tokens[:prompt].tolist(), tokens[prompt:].tolist()) for tokens, prompt in samples]
    if name == "kto":
        return [
            {"prompt": prompt, "completion": answer, "label": at % 3 != 0}
            for at, (prompt, answer) in enumerate(parts)
        ]
    pairs = zip(parts[0::2], parts[1::2], strict=True)
    return [{"prompt": p, "chosen": one, "rejected": two} for (p, one), (_, two) in pairs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 and a start for its adapter."""
    folder = tmp_path_factory.mktemp("trl")
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    write_tiny_model(folder / "model", hidden_size=96, **qwen2)
    model = adapted_model(folder / "model", ADAPTER, format="none")
    randomize_adapters(model)
    save_adapter(model, ADAPTER, str(folder / "model"), folder / "adapter", cpu_world())
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """TRL's metrics of every loss that is asked for, from one process: its imports take longest."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    asked = {call.params.get("name") for call in calls if call is not None}
    jobs = {
        name: {
            "trainer": trainer,
            "options": options,
            "rows": rows_of(name, samples_of(name)),
            "batch_size": BATCH,
            "lr": LR,
            "eps": EPS,
        }
        for name, (trainer, options, _, _) in JOBS.items()
        if name in asked
    }
    return run_oracle(folder, jobs)


def run_oracle(folder: Path, jobs: dict[str, Any]) -> dict[str, Any]:
    """TRL's metrics of every update of every job."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = ROOT / "tests/trl_oracle.py"
    done = subprocess.run(
        [str(PYTHON), str(script), str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def ours(folder: Path, name: str) -> list[dict[str, float]]:
    from qfsdp.checkpoint.adapter_files import load_adapter

    recipe = load_recipe("dpo_distributed")
    config = replace(ADAPTER, start_from=str(folder / "adapter"))
    model = adapted_model(folder / "model", config, format="none")
    reference = "none" if name in ("simpo", "orpo") else "start"
    keep_start(model, reference, config)
    load_adapter(model, folder / "adapter")
    set_start(model)
    model.train()
    objective = Objective([{"name": name, **JOBS[name][2]}], reference)
    objective.check()
    adamw = Component("torch.optim.AdamW", {"lr": LR, "eps": EPS, "weight_decay": 0.0})
    optimizer = build_optimizer(adamw, trainable_parameters(model))
    samples, world = samples_of(name), cpu_world()
    labels = [row["label"] for row in rows_of(name, samples)] if name == "kto" else None
    size, history = BATCH * (1 if labels else 2), []
    for at in range(0, len(samples), size):
        part = slice(at, at + size)
        batch = preference_batch(samples[part], labels and labels[part])
        given = (model, optimizer, None, [batch], 1.0, world, StepClock(world.device), objective)
        history.append(recipe.train_step(*given))
    return history


REWARD = HeadConfig(center=0.01)


def reward_items() -> list[dict[str, Any]]:
    """Pairs with a margin, as datasets give them."""
    samples, items = samples_of("reward")[: 2 * 10 * BATCH], []
    for at in range(0, len(samples), 2):
        tokens = [tokens.tolist() for tokens, _ in samples[at : at + 2]]
        both = tokens[0] + tokens[1]
        parts = [len(one) for one in tokens]
        items.append({"tokens": both, "labels": both, "parts": parts, "margin": 0.5 * (at % 3)})
    return items


def test_ten_updates_of_a_reward_model_as_trl(folder: Path) -> None:
    """`RewardTrainer`, with margins and `center_rewards_coefficient`."""
    recipe, world = load_recipe("reward_distributed"), cpu_world()
    model = adapted_model(folder / "model", ADAPTER, format="none")
    add_score_head(model, REWARD)
    model.to_empty(device="cpu")
    load_base(model, ModelWeights(folder / "model"), torch.device("cpu"))
    init_adapters(model, seed=0)
    save_adapter(model, ADAPTER, str(folder / "model"), folder / "head", world)
    items = reward_items()
    rows = [
        {
            "chosen_ids": item["tokens"][: item["parts"][0]],
            "rejected_ids": item["tokens"][item["parts"][0] :],
            "margin": item["margin"],
        }
        for item in items
    ]
    options = {"center_rewards_coefficient": REWARD.center}
    job = {"trainer": "Reward", "options": options, "rows": rows, "batch_size": BATCH}
    theirs = run_oracle(folder, {"reward": job | {"lr": LR, "eps": EPS}})["reward"]
    adamw = Component("torch.optim.AdamW", {"lr": LR, "eps": EPS, "weight_decay": 0.0})
    optimizer = build_optimizer(adamw, trainable_parameters(model))
    assert len(theirs) == 10
    for at, expected in enumerate(theirs):
        part = items[at * BATCH : (at + 1) * BATCH]
        batch = collate_preferences(part, paired=True, pad_id=0)
        given = (model.train(), optimizer, None, [batch], 1.0, world, StepClock(world.device))
        mine = recipe.train_step(*given, ScoreObjective(REWARD))
        names = {"loss": "loss", "grad_norm": "grad_norm", "rewards/margin": "margin"}
        for key, other in (names | {"accuracy": "accuracy"}).items():
            assert mine[key] == pytest.approx(expected[other], abs=1e-5), key


@pytest.mark.parametrize("name", JOBS)
def test_fifty_updates_as_trl(name: str, folder: Path, theirs: dict[str, Any]) -> None:
    mine, names = ours(folder, name), JOBS[name][3] | {"loss": "loss", "grad_norm": "grad_norm"}
    assert len(mine) == len(theirs[name]) == UPDATES
    largest = {
        key: max(abs(a[key] - b[other]) for a, b in zip(mine, theirs[name], strict=True))
        for key, other in names.items()
    }
    print(name, {key: f"{value:.1e}" for key, value in largest.items()})
    for a, b in zip(mine, theirs[name], strict=True):
        for key, other in names.items():
            assert a[key] == pytest.approx(b[other], rel=1e-5, abs=1e-5), key
