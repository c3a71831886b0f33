"""Runs on streamed data: the same bits after a break, the same losses on any number of ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from qfsdp.common.errors import UserError
from tests.ranks import run_ranks
from tests.recipes.test_resume import losses, run_recipe
from tests.tiny import write_tiny_run
from tests.toy_data import TOY_CONFIG

CONFIG = (
    TOY_CONFIG.replace("dataset: {{_component_: tests.toy_data.Samples}}\n", "")
    + """\
output_dir: {folder}/run
dataset:
  _component_: qfsdp.data.pretokenized_dataset
  source: {folder}/rows.jsonl
  streaming: true
  shuffle_buffer: 20
adapter: {{rank: 5, alpha: 7}}
batch_size: 12
max_steps: 9
checkpoint: {{every_n_steps: 5, keep_last: 99}}
"""
)
STEPS = 9  # 108 samples: more than an epoch of 70


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    write_tiny_run(folder, CONFIG)
    numbers = random.Random(0)
    rows = [
        {"input_ids": [numbers.randrange(1, 500) for _ in range(numbers.randint(5, 30))]}
        for _ in range(70)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text)
    return folder


def whole_and_rest(folder: Path, ranks: int, packed: bool) -> dict[int, float]:
    """The losses of a run, after a check that its second part, resumed, has the same."""
    name = f"{ranks}_{packed}"
    whole, rest = folder / f"whole_{name}", folder / f"rest_{name}"
    batch = (6 if packed else 12) // ranks
    words = [f"packed={packed}", f"batch_size={batch}", f"output_dir={whole}"]
    resumed = [*words, f"output_dir={rest}", f"resume={whole}/checkpoints/step_00000005"]
    run_ranks(ranks, run_recipe, folder, words, resumed)
    expected = losses(whole)
    assert len(expected) == STEPS
    assert losses(rest) == {step: expected[step] for step in range(6, STEPS + 1)}
    return expected


@pytest.mark.long
def test_resumed(folder: Path) -> None:
    whole_and_rest(folder, ranks=1, packed=True)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_resumed_on_several_ranks(folder: Path, packed: bool) -> None:
    one, two, three = (whole_and_rest(folder, ranks, packed) for ranks in (1, 2, 3))
    assert two == pytest.approx(one, abs=1e-5)
    assert three == pytest.approx(one, abs=1e-5)


def test_max_steps_is_required(folder: Path) -> None:
    with pytest.raises(UserError, match="^max_steps: None is not valid; expected an integer: the"):
        run_recipe(folder, ["max_steps=null"])
