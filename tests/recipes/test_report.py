"""`tune run recipes/report`: folders as words, one page for several runs, memory by a dry run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config, to_yaml
from qfsdp.launch.start import _typed_words
from qfsdp.planning.extrapolate import estimate_fast
from qfsdp.training.report.charts import number
from tests.tiny import ROOT, load_recipe, write_tiny_model
from tests.training.report.folders import write_evaluation, write_run
from tests.training.report.test_page import text_of

report = load_recipe("report")


def config(*words: str) -> Any:
    return load_config(report.Config, _typed_words(words, "runs"))


def test_words_without_equals_are_folders(tmp_path: Path) -> None:
    cfg = config("runs/a", "estimate=false", "runs/b c", "output=x.html")
    assert cfg == report.Config(["runs/a", "runs/b c"], output="x.html", estimate=False)
    assert config("runs=[a,b]") == report.Config(["a", "b"])
    with pytest.raises(UserError, match=r"^runs: \[\] is not valid; expected at least one folder"):
        config("estimate=false")
    cfg = config("runs/ü \U0001f600", "runs/1e3", "1e3", "long " * 50 + "x")
    assert cfg.runs == ["runs/ü \U0001f600", "runs/1e3", "1e3", "long " * 50 + "x"]
    with pytest.raises(UserError, match=r"^'runs/l.udcfcufe': not UTF-8; expected UTF-8 text$"):
        config("runs/l\udcfcufe")
    with pytest.raises(UserError, match=r"^unknown key 'outptu'; did you mean 'output'\?"):
        config("runs/a", "outptu=x.html")


def test_several_runs_and_evaluations_in_one_page(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "x/run"), write_run(tmp_path / "y/run", rank=64)
    base = write_evaluation(tmp_path / "base.json", None, [False, False])
    write_evaluation(two / "tuned.json", "adapter", [True, False])
    cfg = config(str(one), str(two), f"evaluations=[{base}]", f"output={tmp_path}/new/page.html")
    report.check(cfg)
    report.main(cfg)
    assert (tmp_path / "new/loss.png").is_file()
    text = text_of((tmp_path / "new/page.html").read_text())
    assert f"{one} 40" in text and f"{two} 40" in text  # of equal names: the whole path
    assert "exact_match.sums exact_match" in text and "adapter.rank 16 64" in text
    assert "not estimated" in text  # the model is not on this machine


def test_names_are_no_html(tmp_path: Path) -> None:
    name = "<img>"
    runs = [write_run(tmp_path / folder / name) for folder in ("x", "y")]
    (runs[0] / "machine.json").write_text(json.dumps({"recipe": name}))
    write_evaluation(runs[1] / f"{name}.json", f"runs/{name}", [True, False])
    report.main(config(*map(str, runs), f"output={tmp_path}/page.html"))
    page = (tmp_path / "page.html").read_text()
    assert "&lt;img&gt;" in page and "<img" not in page


@pytest.mark.long
def test_memory_beside_a_dry_run(tmp_path: Path) -> None:
    """The page has what `estimate_fast` says of the run's own config, ranks and device."""
    model = write_tiny_model(tmp_path / "model", max_position_embeddings=2048)
    run = write_run(tmp_path / "run")
    recipe = load_recipe()
    words = ["--config", str(ROOT / "configs/llama3_8b_qdora.yaml"), f"model.path={model}"]
    cfg = load_config(recipe.Config, [*words, "batch_size=3"])
    (run / "config.yaml").write_text(to_yaml(cfg))
    page = config(str(run))
    report.main(page)
    found = estimate_fast(recipe.build_model, recipe.train_step, cfg, 2, 2, "cuda")
    text = text_of((run / "report.html").read_text())
    assert f"peak {number(found.peak / 2**30)} 10.5" in text
    share = number(found.at_peak["parameters_quantized"] / 2**30)
    assert f"parameters quantized {share} 4" in text


def test_code_in_a_folder_does_not_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "recipe.py").write_text("raise SystemExit('recipe.py has run')")
    (run / "machine.json").write_text(json.dumps({"recipe": str(run / "recipe")}))
    with pytest.raises(UserError, match=r"^the run's recipe '.*' is not here$"):
        report.memory_of(report.read_run(run))


def test_a_sweep_in_the_page(tmp_path: Path) -> None:
    row = {"status": "fits", "mode": "estimate", "ranks": 2, "gpu": "rtx4090", "in_grid": True}
    row["tokens_per_second"] = 9
    rows = [
        row | {"key": f"k{at}", "point": {"batch_size": at}, "memory_gib": at} for at in (1, 2, 4)
    ]
    (tmp_path / "cells.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"^output: null; expected a file, as a sweep"):
        report.check(config(str(tmp_path)))
    cfg = config(str(tmp_path), str(write_run(tmp_path / "run")), f"output={tmp_path}/all.html")
    report.check(cfg)
    report.main(cfg)
    text = text_of((tmp_path / "all.html").read_text())
    assert f"Sweep {tmp_path.name}" in text and "GiB per GPU over batch_size" in text


@pytest.mark.long
def test_the_command_and_its_mistakes(tmp_path: Path) -> None:
    tune = [str(Path(sys.executable).with_name("tune")), "run", "recipes/report"]

    def ran(*words: str) -> tuple[int, str]:
        done = subprocess.run([*tune, *words], capture_output=True, text=True, cwd=ROOT)
        return done.returncode, (done.stdout if done.returncode == 0 else done.stderr).strip()

    run = write_run(tmp_path / "run")
    assert ran(str(run), "estimate=false") == (0, f"report: {run}/report.html")
    expected = f"error: runs: '{tmp_path}/no' is no folder; expected the output_dir of a run"
    assert ran(f"{tmp_path}/no") == (2, expected)
