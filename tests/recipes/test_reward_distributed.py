"""Reward models: the same on any number of ranks and after a stop; mistakes in one line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qfsdp.checkpoint.adapter_files import save_adapter
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.distributed.world import World
from qfsdp.modules.adapters.config import AdapterConfig
from tests.json_lines import json_lines, metric_lines
from tests.models import adapted_model, cpu_world
from tests.ranks import run_ranks
from tests.tiny import (
    load_recipe,
    run_in_turn,
    write_tiny_model_with_tokenizer,
    write_tiny_run,
)
from tests.tiny import run_recipe as run_recipe_here
from tests.toy_data import TOY_PAIRS

CONFIG = """
output_dir: {folder}/run
adapter: {{method: dora, rank: 5, alpha: 7}}
head: {{center: 0.01}}
global_batch_size: 4
epochs: 2
max_steps: 4
checkpoint: {{every_n_steps: 2}}
validation:
  eval_every: 2
  metric: held/accuracy
  sets: {{held: {{_component_: tests.preferences.preferences, size: 5, seed: 3}}}}
"""


run_recipe = partial(run_in_turn, "reward_distributed")


def metrics(run: Path) -> dict[int, dict[str, float]]:
    lines = metric_lines(run)
    found: dict[int, dict[str, float]] = {}
    for line in lines:
        found.setdefault(line["step"], {}).update(line)
    return found


@pytest.mark.long
def test_the_same_on_two_ranks_and_after_a_stop(tmp_path: Path) -> None:
    write_tiny_run(tmp_path, TOY_PAIRS + CONFIG, hidden_size=96)
    one, two, part = (f"output_dir={tmp_path}/{name}" for name in ("one", "two", "part"))
    words = [part, "batch_size=2"]
    run_ranks(
        2,
        run_recipe,
        tmp_path,
        [two, "batch_size=2"],
        [*words, "max_steps=2"],
        [*words, "resume=auto"],
    )
    run_ranks(1, run_recipe, tmp_path, [one])
    first, other = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    for step in range(1, 5):
        for key in ("loss", "grad_norm", "accuracy", "rewards/margin"):
            assert other[step][key] == pytest.approx(first[step][key], abs=1e-5), (step, key)
    assert {"validation/held/loss", "validation/held/accuracy"} <= other[4].keys()
    adapters = [tmp_path / name / "adapter/adapter_model.safetensors" for name in ("two", "part")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
    assert load_file(adapters[0])["base_model.model.score.weight"].shape == (1, 96)
    (config,) = (json.loads((a.parent / "adapter_config.json").read_text()) for a in adapters[:1])
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]


OF_CLASSES = "dataset={_component_: qfsdp.data.class_dataset, source: ROWS, label_column: "
MISTAKES = {
    ("head.classes=0",): "head.classes: 0 is not valid; expected an integer of at least 1",
    ("head.center=-1",): "head.center: -1.0 is not valid; expected a number of at least 0",
    ("head.classes=3", "head.center=0.1"): "head.center: 0.1 is not valid; expected 0 with classes",
    ("adapter.targets=[all-linear,lm_head]",): "expected none with lm_head: a score head stands",
    ("sharding.context_parallel=2",): "sharding.context_parallel: 2 is not valid; expected 1 with",
    ("head.classes=2",): "dataset: pairs, and head.classes: 2; expected head.classes=1",
    ("dataset.margin_column=question",): "question: '2 + 3?'; expected a number",
    (OF_CLASSES + "number}",): "dataset: answers with labels; expected pairs, or head.classes=3",
    ("head.classes=2", OF_CLASSES + "number}"): "dataset: class 2; expected 0 to 1, as head",
    ("head.classes=2", OF_CLASSES + "answer, classes: [a, b]}"): "answer: 'c'; expected a | b",
}


@pytest.mark.parametrize("words", MISTAKES)
@pytest.mark.usefixtures("eager")
def test_a_mistake_is_one_line(words: tuple[str], smollm2_dir: Path, tmp_path: Path) -> None:
    model = write_tiny_model_with_tokenizer(tmp_path / "model", smollm2_dir, hidden_size=96)
    rows = tmp_path / "rows.jsonl"
    row = {"question": "2 + 3?", "chosen": "It is 5.", "rejected": "It is 6.", "text": "It is 5."}
    lines = [row | {"number": at, "answer": "abc"[at]} for at in range(3)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = load_recipe("reward_distributed")
    argv = ["--config", "configs/smollm2_135m_reward.yaml", f"model.path={model}"]
    argv += [f"dataset.source={rows}", f"output_dir={tmp_path}/run", "preflight=false"]
    with pytest.raises(UserError) as error:
        given = [word.replace("ROWS", str(rows)) for word in words]
        cfg = load_config(recipe.Config, [*argv, *given])
        recipe.check(cfg)
        recipe.build_loader(cfg, World(torch.device("cpu")))
    assert MISTAKES[words] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.long
@pytest.mark.usefixtures("eager")
def test_rows_are_scored(smollm2_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """By the trained adapter as in validation; one of another kind is refused."""
    model = write_tiny_model_with_tokenizer(tmp_path / "model", smollm2_dir, hidden_size=96)
    rows, output = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    texts = ["It is 5.", "It is 6, I think.", "Seven apples", "No answer at all"]
    lines = [{"text": text, "label": at % 3} for at, text in enumerate(texts)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = f"{{_component_: qfsdp.data.class_dataset, source: {rows}}}"
    argv = ["--config", "configs/smollm2_135m_reward.yaml", f"model.path={model}", "epochs=2"]
    argv += [f"dataset={source}", f"output_dir={tmp_path}/run", "head.classes=3", "report=false"]
    argv += [f"validation.sets.held={source}"]
    run_recipe_here("reward_distributed", argv)
    capfd.readouterr()
    argv = [
        "--config",
        "configs/score.yaml",
        f"dataset={source}",
        f"output={output}",
        "max_seq_len=64",
    ]
    run_recipe_here("score", [*argv, f"adapter={tmp_path}/run/adapter"])
    held = metrics(tmp_path / "run")[2]
    numbers = f"loss {held['validation/held/loss']:.4g}, "
    numbers += f"accuracy {held['validation/held/accuracy']:.4g}"
    assert f"4 rows: {numbers}" in capfd.readouterr().out
    scored = json_lines(output)
    assert [line["row"] for line in scored] == [0, 1, 2, 3]
    assert [line["label"] for line in scored] == [0, 1, 2, 0]
    assert all(len(line["scores"][0]) == 3 for line in scored)

    adapter = AdapterConfig("lora", rank=2)
    plain = adapted_model(model, adapter)
    save_adapter(plain, adapter, str(model), tmp_path / "plain", cpu_world())
    with pytest.raises(UserError, match="'.*plain' has no score head; expected an adapter of"):
        run_recipe_here("score", [*argv, f"adapter={tmp_path}/plain", f"output={tmp_path}/2.jsonl"])
