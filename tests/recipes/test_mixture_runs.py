"""Runs on a mixture by their recipes: resumed, started from an adapter, merged, and generated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import tiny
from tests.json_lines import json_lines
from tests.ranks import run_ranks
from tests.recipes.test_resume import adapter_bytes, losses, run_recipe
from tests.recipes.test_sharded_mixtures import MIXTURE
from tests.tiny import ROOT, write_tiny_model_with_tokenizer, write_tiny_run
from tests.toy_data import TOY_CONFIG

pytestmark = pytest.mark.slow
CONFIG = (
    TOY_CONFIG
    + """\
output_dir: {folder}/run
adapter: {{rank: 4, alpha: 8, method: dora}}
batch_size: 12
epochs: 3
checkpoint: {{every_n_steps: 5, keep_last: 99}}
"""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("mixture_runs"), CONFIG, **MIXTURE)


DIVIDED, WHOLE = (4, 2), (2, 1)  # ranks, parts of experts


@pytest.mark.parametrize(("before", "after"), [(DIVIDED, WHOLE), (WHOLE, DIVIDED)])
def test_resumed_with_experts_divided_otherwise(
    folder: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """A checkpoint has parameters of all ranks, however they gather and exchange."""

    def words(ranks: int, parts: int, run: Path) -> list[str]:
        divided = [f"batch_size={12 // ranks}", f"sharding.expert_parallel={parts}"]
        return [*divided, f"output_dir={run}"]

    run, rest = folder / f"from_{before[0]}", folder / f"to_{after[0]}"
    run_ranks(before[0], run_recipe, folder, words(*before, run))
    resume = f"resume={run}/checkpoints/step_00000005"
    run_ranks(after[0], run_recipe, folder, [*words(*after, rest), resume])
    expected = losses(run)
    assert losses(rest) == pytest.approx({s: expected[s] for s in range(6, 10)}, abs=1e-5)
    trained, resumed = (load_file(r / "adapter/adapter_model.safetensors") for r in (run, rest))
    for name, value in trained.items():
        assert (resumed[name] - value).abs().max() < 1e-5, name


def test_resumed_and_started_from_an_adapter(folder: Path) -> None:
    """On one rank: the same bits after a break, and a start that is where another run ended."""
    whole, rest, start = folder / "whole", folder / "rest", folder / "start"
    runs = [[f"output_dir={whole}", "adapter.dropout=0.1"]]
    resume = f"resume={whole}/checkpoints/step_00000005"
    runs.append([f"output_dir={rest}", "adapter.dropout=0.1", resume])
    runs.append(
        [f"output_dir={start}", f"adapter.start_from={whole}/adapter", "max_steps=1"]
        + ["optimizer.lr=1e-12", "sharding.offload_base=cpu"]
    )
    run_ranks(1, run_recipe, folder, *runs)
    expected = losses(whole)
    assert losses(rest) == {step: expected[step] for step in range(6, 10)}
    assert adapter_bytes(rest) == adapter_bytes(whole)
    ended, started = (load_file(r / "adapter/adapter_model.safetensors") for r in (whole, start))
    assert ended.keys() == started.keys()
    for name, value in ended.items():
        assert (started[name] - value).abs().max() < 1e-9, name


def by_recipe(name: str, words: list[str]) -> None:
    tiny.run_recipe(name, words)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_greedy_answers_before_and_after_a_merge(
    method: str, smollm2_dir: Path, tmp_path: Path
) -> None:
    """Trained with the base in host memory; experts have adapters."""
    model = write_tiny_model_with_tokenizer(tmp_path / "model", smollm2_dir, **MIXTURE)
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    run, merged = tmp_path / "run", tmp_path / "merged"
    words = [f"adapter.method={method}", "max_steps=4", "optimizer.lr=1e-2"]
    run_ranks(1, run_recipe, tmp_path, [*words, "sharding.offload_base=cpu"])
    base = [f"model.path={model}", "model.dtype=fp32"]
    into = [f"adapter={run}/adapter", f"output_dir={merged}", "dtype=fp32"]
    by_recipe("merge", ["--config", str(ROOT / "configs/merge.yaml"), *base, *into])

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"q": "Why? " * n}) + "\n" for n in (1, 7, 3)))
    asked = [f"prompts={prompts}", "prompt_column=q", "sampling.max_new_tokens=12"]
    config = ["--config", str(ROOT / "configs/generate.yaml"), *asked]
    ways = {
        "adapter": [*base, f"adapter={run}/adapter"],
        "merged": [f"model.path={merged}", "model.dtype=fp32", "quantization.format=none"],
        "base": base,
    }
    theirs = ["tokenizer._component_=qfsdp.data.hf_tokenizer", f"tokenizer.path={model}"]
    answers = {}
    for name, way in ways.items():
        output = tmp_path / f"{name}.jsonl"
        by_recipe("generate", [*config, *way, *theirs, f"output={output}"])
        answers[name] = [line["completion"] for line in json_lines(output)]
    assert answers["adapter"] == answers["merged"]
    assert answers["adapter"] != answers["base"], "the adapter changed nothing"
