"""`recipes/evaluate`: the shipped config on a small model, its files, and its messages."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from qfsdp.checkpoint.adapter_files import save_adapter
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.compute_dtype import has_bf16_products
from tests.json_lines import json_lines
from tests.models import adapted_model, cpu_world, randomize_adapters
from tests.ranks import run_ranks
from tests.tiny import ROOT, load_recipe, write_tiny_model_with_tokenizer

pytestmark = pytest.mark.usefixtures("eager")

HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None
ROW = {"question": "What is 2 + {n}?", "answer": "2 + {n} = {m}\n#### {m}"}
ARC = {
    "id": "1",
    "question": "Which is a number?",
    "choices": {"text": ["tree", "four"], "label": ["A", "B"]},
    "answerKey": "B",
}


@pytest.fixture(scope="module")
def model(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model_with_tokenizer(
        tmp_path_factory.mktemp("tiny") / "model",
        smollm2_dir,
        hidden_size=96,
        max_position_embeddings=512,
    )


@pytest.fixture
def words(model: Path, tmp_path: Path) -> list[str]:
    """The shipped config with a tiny model and a few rows of every set."""
    rows = [{k: v.format(n=n, m=n + 2) for k, v in ROW.items()} for n in range(10)]
    for name, part in (("test", rows[:5]), ("train", rows[5:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    (tmp_path / "text.txt").write_text("A game of many , many words . " * 20)
    (tmp_path / "arc_easy.validation.jsonl").write_text(json.dumps(ARC))
    return [
        "--config",
        str(ROOT / "configs/evaluate.yaml"),
        f"model.path={model}",
        f"output={tmp_path}/out/x.json",
        f"loss.arithmetic.source={tmp_path}/test.jsonl",
        f"text.wikitext2.file={tmp_path}/text.txt",
        "text.wikitext2.window=64",
        f"exact_match.arithmetic.source={tmp_path}/test.jsonl",
        f"exact_match.arithmetic.examples={tmp_path}/train.jsonl",
        "exact_match.arithmetic.max_new_tokens=4",
        "max_seq_len=128",
        f"lm_eval.tasks={'[arc_easy]' if HAS_LM_EVAL else '[]'}",
        f"lm_eval.local_data={tmp_path}",
    ]


def run(words: list[str]) -> str:
    """Returns the name of the results file; runs on every rank."""
    recipe = load_recipe("evaluate")
    cfg = load_config(recipe.Config, words)
    recipe.check(cfg)
    recipe.main(cfg)
    return cfg.output


def results_of(file: str) -> list[dict[str, Any]]:
    return json.loads(Path(file).read_text())["results"]


def test_all_sections_with_and_without_an_adapter(
    words: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = results_of(run(words))
    by_name = {(r["section"], r["name"], r["metric"]): r for r in results}
    loss = by_name["loss", "arithmetic", "loss"]
    assert loss["unit"] == "tokens" and 8 < loss["value"] < 14  # of a random model
    assert math.exp(loss["value"]) == pytest.approx(
        by_name["loss", "arithmetic", "perplexity"]["value"]
    )
    text = by_name["text", "wikitext2", "loss"]
    assert text["interval"] is None or text["interval"][0] < text["value"] < text["interval"][1]
    match = by_name["exact_match", "arithmetic", "exact_match"]
    assert match["count"] == 5 and match["interval"][0] <= match["value"] <= match["interval"][1]
    answers = json_lines(tmp_path / "out/x.exact_match.arithmetic.jsonl")
    assert sorted(line["row"] for line in answers) == list(range(5))
    parts = json_lines(tmp_path / "out/x.loss.arithmetic.jsonl")
    assert sum(part["targets"] for part in parts) == loss["count"] and len(parts) == 1
    mean = sum(part["loss"] for part in parts) / loss["count"]
    assert mean == pytest.approx(loss["value"])
    if HAS_LM_EVAL:
        assert by_name["lm_eval", "arc_easy", "acc"]["count"] == 1
        assert json.loads((tmp_path / "out/x.lm_eval.arc_easy.jsonl").read_text())["doc_id"] == 0
    printed = capsys.readouterr().out.splitlines()
    if not has_bf16_products():
        assert printed.pop(0).startswith("model.dtype: this CPU has no bf16 products")
    assert printed[0].split() == ["metric", "value", "95%", "interval", "over"]
    assert len(printed) == len(results) + 2 and printed[-1].endswith("x.json")

    config = AdapterConfig("dora", rank=2)
    adapted = adapted_model(model, config, dtype="bf16")
    randomize_adapters(adapted)
    save_adapter(adapted, config, str(model), tmp_path / "adapter", cpu_world())
    few = [*words, "lm_eval.tasks=[]", "~exact_match", "~text", f"output={tmp_path}/y.json"]
    results = results_of(run([*few, f"adapter={tmp_path}/adapter"]))
    assert len(results) == 2 and results[0]["value"] != loss["value"]


def test_two_ranks_of_a_sharded_model_as_one_process(words: list[str], tmp_path: Path) -> None:
    words = [*words, "sharding.strategy=full_shard", "batch_size=2", "model.dtype=fp32"]
    alone = results_of(run(words))
    found = results_of(run_ranks(2, run, [*words, f"output={tmp_path}/ranks.json"])[0])
    for one, two in zip(alone, found, strict=True):
        same = ("section", "name", "metric", "count", "unit")
        assert [one[key] for key in same] == [two[key] for key in same]
        assert two["value"] == pytest.approx(one["value"], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["~loss", "~text", "~exact_match", "~lm_eval"], r"all empty; expected at least one$"),
        (["output=x.txt"], r"^output: 'x.txt'; expected a file that ends in .json$"),
        (["output={folder}/text.txt"], r"text.txt' exists already; expected a new file$"),
        (
            ["loss.arithmetic.prompt_colum=x"],
            r"^loss.arithmetic.prompt_colum: .*did you mean 'prompt_column'",
        ),
        (
            ["loss.arithmetic.source=/nowhere.jsonl"],
            r"^loss.arithmetic.source: /nowhere.jsonl does not exist",
        ),
        (["loss.arithmetic.prompt_column=x"], r"^loss.arithmetic.prompt_column: no column 'x'"),
        (["text.wikitext2.file=/nowhere"], r"^text.wikitext2.file: '/nowhere': No such file"),
        (
            ["text.wikitext2.window=513"],
            r"^text.wikitext2.window: 513; expected at most 512, the model's positions",
        ),
        (["max_seq_len=600"], r"^max_seq_len: 600; expected at most 512, the model's positions$"),
        (
            ["exact_match.arithmetic.max_new_tokens=500"],
            r"^exact_match.arithmetic: .*500 after .* 512 pos",
        ),
        (["adapter=/nowhere"], r"/nowhere"),
        (["model.path=/nowhere"], r"/nowhere"),
    ],
)
def test_mistakes_are_one_line_before_loading(
    words: list[str], tmp_path: Path, changes: list[str], told: str
) -> None:
    recipe = load_recipe("evaluate")
    words = [*words, *(change.format(folder=tmp_path) for change in changes)]
    words = [
        word for word in words if not any(word.startswith(c[1:]) for c in changes if c[0] == "~")
    ]
    with pytest.raises(UserError, match=told) as error:
        recipe.check(load_config(recipe.Config, words))
    assert "\n" not in str(error.value)
