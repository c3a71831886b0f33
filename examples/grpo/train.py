"""GRPO without a critic on arithmetic problems: a training loop of your own in one file.

    python -m qfsdp.examples.demo.prepare
    tune run examples/grpo/train.py --config examples/grpo/smollm2_135m.yaml [key=value ...]

Each update draws `k` answers to each of some problems and scores them: 1 for the right number, else
0. An answer's advantage is its score over the mean of its group, in standard deviations
(arXiv:2402.03300). The loss is minus the advantage times the log-probability, per token. Every
answer is trained on once: there is no ratio to clip. Groups of equal scores are left out.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from torch import Tensor

from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.common.errors import InvalidField, check_bounds
from qfsdp.config.component import Component
from qfsdp.config.recipe_files import find_file, load_recipe
from qfsdp.data import Batch
from qfsdp.distributed.gradients import trainable_parameters
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import init_world
from qfsdp.evaluation.generation import SamplingConfig
from qfsdp.evaluation.intervals import wilson
from qfsdp.launch.start import launch
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.modules.transformer import ActivationConfig
from qfsdp.training.optimizer import build_optimizer, check_optimizer
from qfsdp.training.rollouts import Answer, micro_batches, per_row, sample, token_logprobs
from qfsdp.training.steps import forward_backward, optim_step, save

QDORA: Any = load_recipe(find_file("recipes/qdora_distributed") or "")  # builds and loads a model
Problem = tuple[str, int]  # a prompt and its answer


@dataclass
class Config:
    """Keys of the YAML file and the command line."""

    output_dir: str  # for the adapter
    model: ModelConfig
    tokenizer: Component
    optimizer: Component
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    activation: ActivationConfig = field(default_factory=ActivationConfig)
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(6, temperature=1.0))
    updates: int = 30
    problems: int = 10  # per update
    k: int = 8  # answers per problem
    heldout: int = 150  # problems for the accuracy before and after
    largest: int = 20  # number in a problem
    batch_size: int = 64  # samples per rank and pass
    compile: bool = False
    seed: int = 0

    def check(self) -> None:
        check_bounds(self, "updates", "problems", "k", "heldout", "batch_size", least=1)
        if (parts := self.sharding.context_parallel) > 1:
            raise InvalidField("sharding.context_parallel", parts, "1: samples are short")


def check(cfg: Config) -> None:
    """Finds mistakes before any weight is loaded."""
    cfg.tokenizer.check("tokenizer")
    check_optimizer(cfg.optimizer, None)
    weights = ModelWeights(cfg.model.path)
    weights.check(QDORA.build_model(cfg, weights))


def make_problems(cfg: Config) -> list[Problem]:
    """All products up to `largest`, in random order, after two that show the form of an answer."""
    solved, numbers = "3 * 7 = 21\n11 * 4 = 44\n", range(2, cfg.largest + 1)
    asked = {f"{a} * {b} =": a * b for a in numbers for b in numbers}
    problems = [(solved + text, right) for text, right in asked.items() if text not in solved]
    random.Random(cfg.seed).shuffle(problems)
    return problems


def advantages_of(scores: list[float]) -> list[float]:
    spread = pstdev(scores) or 1.0
    return [(score - fmean(scores)) / spread for score in scores]


def main(cfg: Config) -> None:
    started, world = time.perf_counter(), init_world(cfg.sharding)
    tokenizer, problems = cfg.tokenizer.build(), make_problems(cfg)
    stops = {tokenizer.eos_id, tokenizer.encode("\n", add_bos=False, add_eos=False)[0]}
    model = QDORA.load_model(cfg, world)
    optimizer = build_optimizer(cfg.optimizer, trainable_parameters(model))

    def say(text: str) -> None:
        if world.rank == 0:
            print(f"{time.perf_counter() - started:5.0f} s  {text}", flush=True)

    def draw(asked: list[Problem], k: int, **changes: Any) -> list[list[tuple[Answer, float]]]:
        prompts = [tokenizer.encode(text, add_bos=True, add_eos=False) for text, _ in asked]
        given, drawn = (model, tokenizer, prompts, stops, world), replace(cfg.sampling, **changes)
        groups = sample(*given, k=k, sampling=drawn, batch_size=cfg.batch_size)
        return [
            [(answer, float(answer.text.strip() == str(right))) for answer in group]
            for group, (_, right) in zip(groups, asked, strict=True)
        ]

    def measure(when: str) -> None:
        for name, temperature in (("greedy", 0.0), ("sampled", cfg.sampling.temperature)):
            hits = int(sum(score for ((_, score),) in draw(heldout, 1, temperature=temperature)))
            low, high = wilson(hits, len(heldout))
            say(f"{when}, {name}: {hits / len(heldout):.1%} right ({low:.1%} to {high:.1%})")

    def update(answers: list[Answer], advantages: list[float]) -> dict[str, float]:
        tokens = sum(len(answer.tokens) for answer in answers)

        def loss_of(batch: Batch) -> Tensor:
            logprobs = token_logprobs(model, batch).sum(1)
            return -(per_row(advantages, batch) * logprobs).sum() / tokens

        rows = [answer.row() for answer in answers]
        batches = micro_batches(rows, world, batch_size=cfg.batch_size, pad_id=tokenizer.pad_id)
        loss = forward_backward(loss_of, batches, optimizer, world, model=model)
        return optim_step(model, optimizer, loss, world, clip=1.0)

    heldout, train = problems[: cfg.heldout], problems[cfg.heldout :]
    measure("before")
    for step in range(1, cfg.updates + 1):
        chosen = random.Random(f"{cfg.seed}/{step}").sample(train, cfg.problems)
        groups = draw(chosen, cfg.k, seed=cfg.seed + step)
        text = f"step {step}: score {fmean(score for group in groups for _, score in group):.3f}"
        advantages = [v for group in groups for v in advantages_of([score for _, score in group])]
        answers = [answer for group in groups for answer, _ in group]
        if kept := [at for at, advantage in enumerate(advantages) if advantage]:
            metrics = update([answers[at] for at in kept], [advantages[at] for at in kept])
            text += f", {len(kept)} answers, gradient norm {metrics['grad_norm']:.2f}"
        say(text)
    measure("after")
    save(model, cfg.adapter, cfg.model.path, Path(cfg.output_dir) / "adapter", world)


if __name__ == "__main__":
    launch(__file__, Config, check, main)
