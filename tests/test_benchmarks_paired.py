"""Paired comparisons of benchmarks/compare_methods.py, beside scipy, and its tables and page."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare_methods
from benchmarks.methods_page import Row, print_tables, write_study
from benchmarks.paired import holm, pairs, sign_test
from tests.waiting import LIMIT_S


@pytest.mark.parametrize(("more", "fewer"), [(0, 0), (3, 0), (4, 4), (11, 2), (2, 11), (90, 61)])
def test_the_sign_test_is_that_of_scipy(more: int, fewer: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(more, more + fewer).pvalue if more + fewer else 1.0
    assert sign_test(more, fewer) == pytest.approx(expected, abs=1e-12)


def test_holm_raises_and_keeps_the_order() -> None:
    # By hand: 0.01 * 4, 0.02 * 3, then never less than before.
    assert holm([0.02, 0.5, 0.01, 0.03]) == pytest.approx([0.06, 0.5, 0.04, 0.06])


def test_pairs_are_ordered_where_all_seeds_agree() -> None:
    good, same, poor = [[1.0] * 40] * 2, [[1.0] * 39 + [0.0]] * 2, [[0.0] * 40]
    found = {(pair.better, pair.worse): pair for pair in pairs({"b": same, "a": good, "c": poor})}
    assert found["a", "c"].ordered and found["b", "c"].ordered and not found["a", "b"].ordered
    assert found["a", "c"].difference == 1 and found["a", "c"].seeds == 2
    # One seed says the opposite: a tie, however small p is.
    mixed = [[1.0] * 40, [0.0] * 40]
    against = [[0.5] * 40, [0.4] * 40]
    (pair,) = pairs({"mixed": mixed, "against": against})
    assert pair.better == "mixed" and pair.p < 1e-6 and pair.seeds == 1 and not pair.ordered


def test_tables_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [(12.0, 10), (8.0, 10)]
    better = [(loss / 2, count) for loss, count in parts]
    untrained = Row("arithmetic", "zero_shot", [[0.0, 0.0, 1.0]], [parts], {}, [], [])
    about = {
        "lr": 1e-3,
        "search": {1e-4: 0.9, 1e-3: 0.5},
        "trained": 5_040_000,
        "peak_memory_gib": 1.5,
        "tokens_per_second": 100,
    }
    trained = Row("arithmetic", "qlora", [[1.0, 0, 1], [1, 1, 1]], [better] * 2, about, [], [])
    figures = json.loads(json.dumps(print_tables([untrained, trained])))
    assert figures["arithmetic/qlora/exact_match"] == pytest.approx(500 / 6)
    assert figures["arithmetic/qlora/loss"] == pytest.approx(0.5)
    assert figures["arithmetic/zero_shot/exact_match"] == pytest.approx(100 / 3)
    # Four times nothing right in two seeds: Wilson's interval, in per cent.
    none = Row("arithmetic", "none", [[0.0] * 4] * 2, [], {}, [], [])
    assert none.match == (0, (0, pytest.approx(48.99, abs=0.01)))
    printed = capsys.readouterr().out
    assert "qlora  0.0001: 0.9000  0.001: 0.5000 *" in printed
    assert "66.7 100.0" in printed and "5,040,000" in printed
    page = write_study(tmp_path / "report.html", [untrained, trained]).read_text()
    assert (
        "0.001: 0.5000 *" in page and "arithmetic: pairs by loss, nats" in page and ">tie<" in page
    )


def test_a_rate_that_ends_in_nan_is_left_out_of_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_methods, "prepare_model", lambda _: tmp_path / "model")
    study = compare_methods.Study(tmp_path, None, {}, (1.0, 3.0, 10.0, 30.0))
    ends: dict[float, float | None] = {1e-3: None, 3e-3: 0.5, 1e-2: 0.4}  # null stands for NaN

    def run(stem: str, cfg: Any, out: Path) -> None:
        if (rate := cfg.optimizer.lr) not in ends:
            raise compare_methods.NotFinite("step 3: loss nan")
        lines = [{"loss": 1.0, "tokens_per_second_per_rank": 1.0}] * 2
        lines += [{"validation/chosen_by/loss": ends[rate], "memory/parameters_trained_gib": 1.0}]
        out.mkdir(parents=True)
        (out / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines[::-1]))

    monkeypatch.setattr(compare_methods, "run_recipe", run)
    assert study._rate("qlora") == 1e-2
    ends |= dict.fromkeys(ends)
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    with pytest.raises(SystemExit, match="qlora: no finite loss at any rate"):
        study._rate("qlora")


def test_two_calls_of_one_study_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second removed what the first was writing, as it was not finished."""
    monkeypatch.setattr(compare_methods, "prepare_model", lambda _: tmp_path / "model")
    began, goes_on = threading.Event(), threading.Event()
    evaluations: list[Path] = []

    def run(stem: str, cfg: Any, out: Path) -> None:
        assert stem == "evaluate"
        evaluations.append(out)
        out.mkdir()
        began.set()
        assert goes_on.wait(LIMIT_S)
        (out / "results.exact_match.test.jsonl").write_text('{"row": 0, "right": true}\n')
        (out / "results.loss.test.jsonl").write_text('{"loss": 2.0, "targets": 1}\n')
        (out / "results.json").write_text("{}")

    monkeypatch.setattr(compare_methods, "run_recipe", run)
    studies = [compare_methods.Study(tmp_path, None, {}) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(studies[0].row, studies[0].tasks[0], "zero_shot")
        assert began.wait(LIMIT_S)
        second = pool.submit(studies[1].row, studies[1].tasks[0], "zero_shot")
        goes_on.set()
        assert first.result(LIMIT_S).loss == second.result(LIMIT_S).loss
    assert len(evaluations) == 1
