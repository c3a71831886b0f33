"""`recipes/sweep`: its estimates are those of the other tools, it goes on, and mistakes are lines.

A tiny model stands for the shipped ones; shapes differ, the code is the same.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.planning.extrapolate import estimate_fast
from qfsdp.planning.hardware import HardwareConfig
from qfsdp.planning.predict import Predictor
from qfsdp.sweep.measure_cell import Runs, figures, lowest_validation, reason_in
from qfsdp.sweep.output import finished_sections, rows_of_table
from qfsdp.sweep.prices import costs
from qfsdp.sweep.results import best_of, ranked
from qfsdp.training.report.charts import number
from tests.json_lines import json_lines, metric_lines
from tests.tiny import ROOT, load_recipe, write_tiny_model, write_tiny_model_with_tokenizer
from tests.waiting import LIMIT_S

sweep = load_recipe("sweep")
GRID = {
    "method": {
        "LoRA": {"quantization.format": "none", "adapter.method": "lora"},
        "QDoRA": {"quantization.format": "nf4", "adapter.method": "dora"},
    },
    "batch_size": [1, 4],
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", max_position_embeddings=2048)


def config(tmp_path: Path, **keys: Any) -> Any:
    """The config of an estimate of the tiny model in `tmp_path`, on one RTX 4090."""
    tree = {
        "config": "configs/llama3_8b_qdora.yaml",
        "output_dir": str(tmp_path / "out"),
        "gpu": "rtx4090",
        "overrides": [f"model.path={tmp_path}/model", "max_seq_len=128", "packed=false"],
        "grid": GRID,
        "prices": str(tmp_path / "prices.yaml"),
    }
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(tree | keys, sort_keys=False))
    price = "rtx4090: {usd_per_hour: 0.36, date: 2026-01-31, source: here}\n"
    (tmp_path / "prices.yaml").write_text(price)
    return load_config(sweep.Config, ["--config", str(file)])


def run(cfg: Any) -> list[dict[str, Any]]:
    sweep.check(cfg)
    sweep.main(cfg)
    return json_lines(Path(cfg.output_dir) / "cells.jsonl")


# ---- estimates -----------------------------------------------------------------------------


@pytest.mark.long
def test_cells_are_the_estimates_of_the_other_tools(model: Path, tmp_path: Path) -> None:
    rows = run(config(tmp_path, samples=500))
    points = [(row["point"]["method"], row["point"]["batch_size"]) for row in rows]
    assert points == [("LoRA", 1), ("LoRA", 4), ("QDoRA", 1), ("QDoRA", 4)]
    recipe = load_recipe()
    words = ["--config", str(ROOT / "configs/llama3_8b_qdora.yaml"), f"model.path={model}"]
    words += ["max_seq_len=128", "packed=false", "batch_size=4"]
    words += ["quantization.format=none", "adapter.method=lora"]
    cfg = load_config(recipe.Config, words)
    found = estimate_fast(recipe.build_model, recipe.train_step, cfg, 1)
    assert rows[1]["allocated_gib"] == found.peak / 2**30
    assert rows[1]["memory_gib"] == found.reserved / 2**30 and rows[1]["status"] == "fits"
    hardware = HardwareConfig(gpu="rtx4090").build()
    predict = Predictor(recipe.build_model, recipe.train_step, cfg, 1, 1, hardware)
    seconds = predict({}).time.seconds
    samples = 4 * cfg.gradient_accumulation_steps
    assert rows[1]["samples_per_second"] == pytest.approx(samples / seconds)
    assert rows[1]["tokens_per_second"] == pytest.approx(128 * samples / seconds)

    out = tmp_path / "out"
    table = (out / "table.md").read_text()
    dollars = 0.36 / 3600 * seconds / samples  # of one sample
    assert f"| {number(1000 * dollars)} | {number(500 * dollars)} | fits |" in table
    assert "| rtx4090 | 0.36 | 2026-01-31 | here |" in table
    pictures = {file.name for file in (out / "figures").iterdir()}
    assert {"memory_gib_over_batch_size.png", "usd_per_run_over_method.png"} <= pictures
    page = (out / "report.html").read_text()
    assert "tokens/s over batch_size" in page and "4 cells of 4" in page


@pytest.mark.long
def test_what_does_not_fit_or_fails_is_a_result(model: Path, tmp_path: Path) -> None:
    grid = {"sharding.strategy": ["full_shard", "ddp"], "sharding.offload_base": ["none", "cpu"]}
    points = [{"max_seq_len": 4096}]
    cfg = config(tmp_path, grid=grid, points=points, device_memory="800MiB", world_size=2)
    found = {tuple(row["point"].values()): row for row in run(cfg)}
    large = found["ddp", "none"]
    assert large["status"] == "does not fit" and large["reason"].startswith("needs ")
    assert "800.00 MiB" in large["reason"] and large["memory_gib"] > 0.78
    assert "samples_per_second" not in large
    refused, long = found["ddp", "cpu"], found[4096,]
    assert refused["status"] == long["status"] == "failed"  # together, each alone is valid
    assert refused["reason"].startswith("sharding.strategy: 'ddp' is not valid; expected full_sha")
    too_long = "max_seq_len: 4096; expected at most 2048, the model's positions; model.max_positio"
    assert long["reason"].startswith(too_long)
    table = (tmp_path / "out/table.md").read_text()
    assert "does not fit: needs" in table and "failed: max_seq_len: 4096" in table


@pytest.mark.long
def test_the_same_command_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[dict[str, Any]] = []
    fill_in = sweep.fill_in

    def counted(cfg: Any, whole: Any, cell: Any, devices: list[str]) -> dict[str, Any]:
        if len(filled) == 2:
            raise KeyboardInterrupt
        filled.append(cell.point)
        return dict(fill_in(cfg, whole, cell, devices))

    monkeypatch.setattr(sweep, "fill_in", counted)
    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path))
    file = tmp_path / "out/cells.jsonl"
    first = file.read_text()
    assert "2 cells of 4" in (tmp_path / "out/report.html").read_text()
    with file.open("a") as damaged:
        damaged.write('{"key": "cut')
    filled.clear()
    with pytest.raises(KeyboardInterrupt):  # two more, then one too many: none is left
        run(config(tmp_path, grid=GRID | {"adapter.rank": [16, 8]}))
    monkeypatch.setattr(sweep, "fill_in", fill_in)
    rows = run(config(tmp_path))
    assert file.read_text().startswith(first) and len({row["key"] for row in rows}) == len(rows)
    assert "4 cells of 4" in (tmp_path / "out/report.html").read_text()
    monkeypatch.setattr(sweep, "fill_in", None)
    assert run(config(tmp_path)) == rows  # all are done
    monkeypatch.setattr(sweep, "fill_in", counted)
    filled.clear()
    with pytest.raises(KeyboardInterrupt):  # another GPU: other cells
        run(config(tmp_path, gpu="l4"))
    assert len(filled) == 2


def test_points_and_nested_keys(model: Path, tmp_path: Path) -> None:
    points = [{"method": "QDoRA", "batch_size": 2}, {"adapter": {"rank": 4}, "gpu": "l4"}]
    cfg = config(tmp_path, points=points)
    cfg.grid = {"adapter": {"rank": [8, 16]}} | {"method": GRID["method"]}
    whole = sweep.read_sweep(cfg)
    assert [cell.point for cell in whole.cells][:1] == [{"adapter.rank": 8, "method": "LoRA"}]
    two, last = whole.cells[-2:]
    assert (two.cfg.batch_size, two.cfg.adapter.method) == (2, "dora") and not two.in_grid
    assert last.own == {"gpu": "l4"} and last.cfg.adapter.rank == 4
    assert sweep.hardware_of(cfg, last).device_memory < 23 * 2**30


# ---- mistakes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"grid": {}}, r"grid: \{\}; expected at least one axis with values, or points"),
        ({"grid": {"batch_size": []}}, r"grid.batch_size: \[\] is not valid; expected a list of"),
        ({"grid": {"batch_size": 4}}, r"grid.batch_size: 4 is not valid; expected a list of"),
        ({"grid": {"batch_size": [1, 1]}}, r"grid.batch_size: .* has a value twice; expected"),
        ({"grid": {"adapter.rnak": [4]}}, r"grid: unknown key 'adapter.rnak'; did you mean"),
        ({"grid": {"batch_size": [1, "x"]}}, r"grid: batch_size: 'x' is not valid; expected an"),
        ({"grid": {"gpu": ["rtx4096"]}}, r"grid: gpu: 'rtx4096' is unknown; did you mean"),
        (
            {"grid": {"seed": [*range(101)], "epochs": [*range(1, 101)]}},
            r"grid: 10,100 cells; expected at most 10,000",
        ),
        ({"points": [{"method": "Lora"}]}, r"points\[0\].method: 'Lora' .* LoRA, QDoRA$"),
        ({"points": [{}]}, r"points\[0\]: \{\}; expected at least one key"),
        ({"gpu": "rtx4096"}, r"gpu: 'rtx4096' is unknown; did you mean 'rtx4090'"),
        ({"gpu": None}, r"gpu: null; expected gpu=rtx4090"),
        ({"config": "configs/none"}, r"config: 'configs/none' is no config; expected one that"),
        ({"config": "configs/merge"}, r"config: .*: it belongs to recipes/merge, which trai"),
        ({"overrides": ["batch_sise=1"]}, r"config: unknown key 'batch_sise'; did you mean"),
        ({"prices": "none.yaml"}, r"prices: 'none.yaml' is no config; expected"),
        ({"published": "none.yaml"}, r"published: 'none.yaml' is no config; expected"),
        ({"mode": "steps", "grid": {"world_size": [1, 2]}}, r"grid.world_size: an axis of mode="),
        ({"grid": {"world_size": [100_000]}}, r"grid: world_size: 100000 .* from 1 to 65,536"),
        (
            {"mode": "run", "evaluation": "evaluate", "evaluation_overrides": ["batch_sise=1"]},
            r"evaluation: unknown key 'batch_sise'; did you mean",
        ),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(
    keys: dict[str, Any], expected: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"^{expected}"):
        sweep.check(config(tmp_path, **keys))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rtx4096: {usd_per_hour: 1, date: 2026-01-31, source: x}", "gpu: 'rtx4096' is unknown"),
        ("rtx4090: 0.4", "usd_per_hour, date and source"),
        ("rtx4090: {usd_per_hour: 0.4, source: x}", "usd_per_hour, date and source"),
        ("rtx4090: {usd_per_hour: 0, date: 2026-01-31, source: x}", "US dollars above 0"),
        ("rtx4090: {usd_per_hour: 0.4, date: today, source: x}", "a day as 2026-09-20"),
        ("[rtx4090", "expected YAML"),
    ],
)
def test_mistakes_in_prices(line: str, expected: str, model: Path, tmp_path: Path) -> None:
    cfg = config(tmp_path)
    (tmp_path / "prices.yaml").write_text(line)
    with pytest.raises(UserError, match=f"^prices: .*{expected}"):
        sweep.check(cfg)


# ---- published figures ---------------------------------------------------------------------


def published(memory: str, figure: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"source": "a paper", "date": "2024-03", "memory": memory, "figures": [figure]}]


@pytest.mark.parametrize(
    ("memory", "factor"), [("allocated", 1), pytest.param("reserved", 1.04, marks=pytest.mark.long)]
)
def test_ours_beside_theirs(memory: str, factor: float, model: Path, tmp_path: Path) -> None:
    point = {"method": "QDoRA", "batch_size": 1}
    file = tmp_path / "published.yaml"
    file.write_text(yaml.safe_dump(published(memory, {"point": point, "memory_gib": 0.5})))
    rows = run(config(tmp_path, grid=GRID | {"batch_size": [1]}, published=str(file)))
    ours = next(row for row in rows if row["point"] == point)["allocated_gib"] * factor
    text = (tmp_path / "out/table.md").read_text()
    assert f"| {ours:.4g} | 0.5 | {ours / 0.5:.2f} |\n" in text
    assert "Theirs: a paper (2024-03).\n" in text  # once, where all rows have one source


def test_seconds_and_dollars_of_a_run_beside_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dollars may be a range, which has no ratio. Without a price there are seconds."""
    row = {"status": "fits", "samples_per_second": 2.0, "ranks": 2}
    monkeypatch.setattr(sweep, "fill_in", lambda *_: row)
    file, point = tmp_path / "published.yaml", {"batch_size": 1}
    figure = {"point": point, "seconds_per_run": 400, "usd_per_run": [0.2, 0.4]}
    file.write_text(yaml.safe_dump(published("allocated", figure)))
    keys = {"samples": 1000, "gpu": "rtx4090", "published": str(file)}
    cfg = config(tmp_path, grid={"batch_size": [1]}, **keys)
    sweep.main(cfg)
    text = (tmp_path / "out/table.md").read_text()
    assert text.startswith("# out: model by estimate\n")  # not the base config's name
    assert "| s per run | 500 | 400 | 1.25 |" in text
    assert "| US$ per run | 0.1 | 0.2 to 0.4 |  |" in text  # of the test's price, 0.36
    assert costs(row, None, 1000) == {"seconds_per_run": 500} and costs(row, None, None) == {}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (published("allocated", {"point": {"batch_size": 3}, "memory_gib": 1}), "of 0 cells"),
        (published("allocated", {"point": {"batch_size": 1}, "memory_gib": 1}), "of 2 cells"),
        (published("guessed", {"point": {}, "memory_gib": 1}), "memory: one of allocated"),
        ([{"figures": []}], "'memory'"),
    ],
)
def test_mistakes_in_published_figures(
    content: Any, expected: str, model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "published.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=f"^published: .*{expected}"):
        sweep.check(config(tmp_path, published=str(file)))


# ---- measured ------------------------------------------------------------------------------


def test_measured_cells_share_the_devices(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five devices run two cells of two ranks at once, each on devices of its own."""
    together, used = threading.Barrier(2, timeout=LIMIT_S), list[tuple[str, ...]]()

    def fill_in(cfg: Any, whole: Any, cell: Any, devices: list[str]) -> dict[str, Any]:
        together.wait()  # breaks if cells run one after another
        used.append(tuple(devices))
        return {"status": "measured", "memory_gib": 1.0}

    monkeypatch.setattr(sweep, "visible_devices", lambda: list("01234"))
    monkeypatch.setattr(sweep, "fill_in", fill_in)
    rows = run(config(tmp_path, mode="steps", world_size=2))
    assert len(rows) == 4 and set(used) == {("0", "1"), ("2", "3")}
    with pytest.raises(UserError, match="^world_size: 8; expected at most the 5 visible devices"):
        sweep.check(config(tmp_path, mode="steps", world_size=8))
    monkeypatch.setattr(sweep, "visible_devices", lambda: [])
    with pytest.raises(UserError, match="^world_size: 1000; expected at most .* ranks without acc"):
        sweep.check(config(tmp_path, mode="steps", world_size=1000))


def test_failed_and_deleted_cells_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Failed ones with retry_failed=true, and those whose lines someone has deleted."""
    ran: list[int] = []

    def fill_in(cfg: Any, sweep: Any, cell: Any, devices: Any) -> dict[str, Any]:
        ran.append(cell.point["seed"])
        ends = {"status": "failed", "reason": "killed"} if len(ran) == 2 else {"status": "fits"}
        return ends | {"memory_gib": 1.0}

    monkeypatch.setattr(sweep, "fill_in", fill_in)
    keys = {"grid": {"seed": [0, 1, 2]}}
    sweep.main(config(tmp_path, **keys))
    sweep.main(config(tmp_path, **keys))
    assert ran == [0, 1, 2]
    sweep.main(config(tmp_path, **keys, retry_failed=True))
    assert ran == [0, 1, 2, 1]
    lines = (tmp_path / "out/cells.jsonl").read_text().splitlines()
    (tmp_path / "out/cells.jsonl").write_text("".join(f"{line}\n" for line in lines[:2]))
    sweep.main(config(tmp_path, **keys))
    assert ran == [0, 1, 2, 1, 2]
    assert "3 cells by estimate, 2 of them done\n" in capsys.readouterr().out
    sweep.main(config(tmp_path, grid={"seed": [0, 5]}))
    said = "2 cells by estimate, 1 of them done; cells.jsonl has 2 of another config or version\n"
    assert said in capsys.readouterr().out


def test_a_point_of_the_grid_stays_in_its_place(model: Path, tmp_path: Path) -> None:
    """A line of a chart went back to it from the last value of its axis."""
    cfg = config(tmp_path, grid={"seed": [0, 1, 2]}, points=[{"seed": 1}, {"seed": 3}])
    cells = sweep.read_sweep(cfg).cells
    assert [(cell.point["seed"], cell.in_grid) for cell in cells] == [
        *((seed, True) for seed in range(3)),
        (3, False),
    ]


def test_a_last_update_that_was_left_out_has_no_loss(tmp_path: Path) -> None:
    """With on_nonfinite=skip; null stands for NaN. One cell took the tables of all away."""
    each: dict[str, Any] = {"seconds_per_step": 2.0, "tokens_per_second_per_rank": 8.0}
    each |= {"peak_memory_gib": 1.0}
    losses = [2.5, 1.5, None]
    lines = [json.dumps(each | {"step": at, "loss": loss}) for at, loss in enumerate(losses, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    [cell] = sweep.read_sweep(config(tmp_path, grid={"seed": [0]})).cells
    found = figures(cell, tmp_path, 1, warmup=1)
    assert found["loss"] == 1.5 and found["steps"] == 2
    (tmp_path / "metrics.jsonl").write_text(lines[-1])
    none = figures(cell, tmp_path, 1, warmup=1)
    for left in ({}, {"loss": None}):  # null: of a line that an earlier version has written
        head, rows = rows_of_table([cell], {cell.key: none | left})
        assert "loss" not in head and rows[0][-1] == "measured"


def test_a_last_update_of_an_adapter_that_was_left_out_has_no_loss(tmp_path: Path) -> None:
    """Of a cell that was trained with others; the last loss took the tables of all away too."""
    [cell] = sweep.read_sweep(config(tmp_path, grid={"adapter.rank": [2]})).cells
    each: dict[str, Any] = {"seconds_per_step": 2.0, "tokens_per_second_per_rank": 8.0}
    each |= {"peak_memory_gib": 1.0, "loss": None}
    for at, losses in enumerate(([2.5, None], [None, None])):
        folder = tmp_path / str(at)
        folder.mkdir()
        lines = [json.dumps(each | {f"{cell.key}/loss": loss}) for loss in losses]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        runs = Runs(sweep.read_sweep(config(tmp_path)).training, tmp_path, 1)
        found = runs.finished(cell, folder, [], folder / "x.json", of_several=2)
        assert found.get("loss") == losses[0] and found["run_seconds"] == 2.0


def test_cells_of_two_grids_are_one_page(tmp_path: Path) -> None:
    """A folder keeps the cells of an earlier config. That may have had other axes."""
    points = [{"batch_size": 1}, {"batch_size": 2}, {"seed": 5}, {"seed": 6, "batch_size": 1}]
    about = {"status": "fits", "ranks": 1, "memory_gib": 1.0}
    rows = [about | {"key": str(at), "point": point} for at, point in enumerate(points)]
    (tmp_path / "cells.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [section.title for section in finished_sections(tmp_path, {})] == [
        f"Sweep {tmp_path.name}: Grid"
    ]


def test_cells_are_ranked_by_validation(model: Path, tmp_path: Path) -> None:
    cells = sweep.read_sweep(config(tmp_path, grid={"seed": [0, 1, 2]})).cells
    losses: dict[str, Any] = {cell.key: [3.0 - n, None, 2.0] for n, cell in enumerate(cells)}
    section = SimpleNamespace(sets={"a": None, "v": None}, metric="v")
    rows = {}
    for key, values in list(losses.items())[:2]:
        lines = [{"step": s, "validation/v/loss": loss} for s, loss in enumerate(values)]
        (tmp_path / key).mkdir()
        (tmp_path / key / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        rows[key] = lowest_validation(section, tmp_path / key)
    (tmp_path / cells[2].key).mkdir()
    rows[cells[2].key] = lowest_validation(section, tmp_path / cells[2].key)
    assert [rows[cell.key] for cell in cells] == [
        {"validation_loss": 2.0, "best_step": 2},
        {"validation_loss": 2.0, "best_step": 0},
        {},
    ]
    rows[cells[1].key]["validation_loss"] = 1.5
    assert ranked(cells, rows) == [cells[1], cells[0], cells[2]]
    best = f"best: seed=1: validation loss 1.5 at step 0; {tmp_path}/cells/{cells[1].key}"
    assert best_of(cells, rows, tmp_path) == best
    assert best_of(cells[2:], rows, tmp_path) is None


def test_the_reason_of_a_failure(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("step 1\rstep 2\nerror: memory: a step needs 9 GiB\nTraceback\n")
    assert reason_in(log) == "memory: a step needs 9 GiB"
    log.write_text("Traceback\nValueError: x\n\n")
    assert reason_in(log) == "ValueError: x"


@pytest.fixture
def measured(tmp_path: Path, smollm2_dir: Path) -> dict[str, Any]:
    """Keys of a sweep that runs the tiny model on this machine."""
    write_tiny_model_with_tokenizer(tmp_path / "model", smollm2_dir, hidden_size=96)
    rows = [{"question": f"{at} + 1?", "answer": f"It is {at + 1}"} for at in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"model.path={tmp_path}/model", f"dataset.source={tmp_path}/rows.jsonl"]
    words += ["max_seq_len=64", "lr_scheduler.num_warmup_steps=0", "metric_logger=null"]
    return {
        "config": "configs/smollm2_135m_qdora.yaml",
        "overrides": [*words, "optimizer.fused=false", "epochs=1"],
        "gpu": None,
    }


@pytest.mark.long
@pytest.mark.usefixtures("eager")
def test_measured_steps(measured: dict[str, Any], tmp_path: Path) -> None:
    grid = {"batch_size": [2, 1_000_000], "optimizer.lr": [0.01]}
    rows = run(config(tmp_path, **measured, mode="steps", grid=grid, steps=2, warmup=1))
    good, large = rows
    assert good["status"] == "measured" and good["steps"] == 2 and 1 < good["loss"] < 20
    assert good["samples_per_second"] == pytest.approx(2 / good["seconds_per_step"])
    assert good["memory_gib"] > 0.2
    assert large["status"] == "does not fit" and "per rank" in large["reason"]
    folder = tmp_path / "out/cells" / good["key"]
    assert not (folder / "adapter").exists() and not (folder / "checkpoints").exists()
    assert len(metric_lines(folder)) == 3


@pytest.mark.long
@pytest.mark.usefixtures("eager")
def test_a_whole_run_and_its_evaluation(
    measured: dict[str, Any], tmp_path: Path, smollm2_dir: Path
) -> None:
    rows_file = tmp_path / "rows.jsonl"
    words = ["~loss.arithmetic", f"exact_match.arithmetic.source={rows_file}", "max_seq_len=128"]
    words += ["exact_match.arithmetic.shots=0", "exact_match.arithmetic.examples=null"]
    words += ["exact_match.arithmetic.max_new_tokens=2", "exact_match.arithmetic.max_rows=4"]
    rows = run(
        config(
            tmp_path,
            **measured | {"gpu": "rtx4090"},
            mode="run",
            grid={"batch_size": [8]},
            evaluation="configs/evaluate.yaml",
            evaluation_overrides=words,
        )
    )
    (row,) = rows
    assert row["status"] == "measured", row
    value, low, high = row["scores"]["exact_match.arithmetic exact_match"]
    assert 0 <= low <= value <= high <= 1
    folder = tmp_path / "out/cells" / row["key"]
    steps = metric_lines(folder)
    assert row["run_seconds"] == pytest.approx(sum(step["seconds_per_step"] for step in steps))
    dollars = 0.36 / 3600 * row["run_seconds"]
    assert f"| {number(dollars)} |" in (tmp_path / "out/table.md").read_text()
    assert (folder / "adapter").is_dir()


@pytest.mark.long
@pytest.mark.usefixtures("eager")
def test_cells_in_one_run(measured: dict[str, Any], tmp_path: Path) -> None:
    """Each cell is an adapter of it; their losses are those of runs of their own, as
    `test_each_trains_as_in_a_run_of_its_own` shows."""
    words = ["model.dtype=fp32", "max_steps=2", "validation.eval_every=2"]
    held = f"{{_component_: qfsdp.data.instruct_dataset, source: {tmp_path}/rows.jsonl}}"
    words += [f"validation.sets={{held: {held}}}", "validation.sets.held.prompt_column=question"]
    words += ["validation.sets.held.answer_column=answer"]
    given = measured | {"overrides": [*measured["overrides"], *words], "mode": "run"}
    cfg = config(tmp_path, **given, grid={"adapter.rank": [2, 4], "optimizer.lr": [0.01]})
    whole = sweep.read_sweep(cfg)
    assert sweep.can_be_together(whole.training, whole.cells)
    cfg.together = True
    rows = run(cfg)
    (folder,) = (tmp_path / "out/cells").glob("together-*")
    lines = metric_lines(folder)
    last = {name: value for line in lines for name, value in line.items()}
    for row, rank in zip(rows, (2, 4), strict=True):
        assert (row["status"], row["steps"], row["point"]["adapter.rank"]) == ("measured", 2, rank)
        assert row["loss"] != row["validation_loss"] > 0 and row["run_seconds"] > 0
        assert last[f"{row['key']}/validation/held/loss"] == row["validation_loss"]
        adapter = json.loads((folder / "adapters" / row["key"] / "adapter_config.json").read_text())
        assert adapter["r"] == rank
    assert run(cfg) == rows


@pytest.mark.parametrize(
    ("grid", "words", "expected"),
    [
        (
            {"batch_size": [1, 2]},
            [],
            "together: true, and the grid has batch_size; expected the sa",
        ),
        (
            {"adapter.rank": [1, 2]},
            ["compile=true"],
            "compile: True is not valid; expected false w",
        ),
        ({"adapter.dropout": [0.1]}, [], ".dropout: 0.1 is not valid; expected 0.0 beside other"),
        ({"adapter.method": ["oft"]}, [], ".method: 'oft' is not valid; expected lora or dora bes"),
        ({"seed": [1]}, ["push_to_hub=a/b"], 'push_to_hub is "a/b"; expected null, as recipes/sev'),
    ],
)
def test_what_one_run_cannot_train(
    grid: dict[str, Any], words: list[str], expected: str, model: Path, tmp_path: Path
) -> None:
    words = [f"model.path={model}", "max_seq_len=128", "packed=false", "compile=false", *words]
    cfg = config(tmp_path, grid=grid, overrides=words, mode="run", gpu=None, together=True)
    with pytest.raises(UserError, match=re.escape(expected)):
        sweep.read_sweep(cfg)


@pytest.mark.long
@pytest.mark.usefixtures("eager")
def test_a_killed_sweep_takes_its_run_along_and_goes_on(
    measured: dict[str, Any], tmp_path: Path
) -> None:
    cfg = config(tmp_path, **measured, mode="steps", grid={"batch_size": [1, 2]}, steps=1, warmup=0)
    command = [str(Path(sys.executable).with_name("tune")), "run", "recipes/sweep"]
    command += ["--config", str(tmp_path / "sweep.yaml")]
    cells, file = tmp_path / "out/cells", tmp_path / "out/cells.jsonl"
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while not file.exists() or len(list(cells.iterdir())) < 2:
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    first = file.read_text()
    key = next(folder.name for folder in cells.iterdir() if folder.name not in first)
    while any(key in words for words in command_lines()):  # ends by an event: the kernel's signal
        time.sleep(0.05)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 cells by steps, 1 of them done" in done.stdout
    assert file.read_text().startswith(first) and len(file.read_text().splitlines()) == 2
    assert '"failed"' not in file.read_text() and cfg.mode == "steps"


def command_lines() -> list[str]:
    """The command lines of all processes."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_text())
        except OSError:
            continue
    return found
