"""The page of a run: what it shows, and that nothing stops a run from ending."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from qfsdp.common.errors import UserError
from qfsdp.data.files.json_lines import to_lines
from qfsdp.training.report.page import html
from qfsdp.training.report.run_folder import flat, read_run
from qfsdp.training.report.sections import report_at_end, run_sections
from tests.browser import browser, needs_browser
from tests.training.report.folders import write_evaluation, write_run


def page_of(*folders: Path) -> str:
    return html("title", "", run_sections([read_run(folder) for folder in folders]))


def text_of(page: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page.partition("<body>")[2]).split())


def test_a_run_has_all_sections(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "one"))
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == ["Runs", "Learning", "Speed", "Memory", "Config"]
    charts = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert charts[:3] == ["Loss", "Learning rate", "Gradient norm"] and "Speed" in charts
    text = text_of(page)
    assert "heldout loss" in text and "NVIDIA L4" in text
    assert "one 40 2.062 0.4307 2,006 10.5 2 NVIDIA L4" in text  # of two ranks
    assert "forward backward optimizer whole step one 0.125 0.25 0.0625 0.5" in text
    assert "parameters quantized 4 gradients 0.25" in text


def test_nothing_is_loaded(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "one"))
    assert "default-src 'none'" in page
    assert not re.search(r"<script|<link(?! rel=\"icon\" href=\"data:,\")|<img|@import|url\(", page)
    assert not re.search(r"https?://", page)


def test_two_runs_show_the_keys_that_differ(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "one"), write_run(tmp_path / "two", rank=64))
    before, _, folded = page.partition("<details>")
    rows = re.findall(r"<tr><td class=\"left\"><code>(.*?)</code>.*?</tr>", before)
    assert rows == ["output_dir", "adapter.rank"] and "model.dtype" in folded
    same = page_of(tmp_path / "one", write_run(tmp_path / "x", name="one"))
    assert "The configs are equal." in same


def test_scores_and_answers_before_and_after(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    write_evaluation(run / "evaluation/base.json", None, [False, True, False, False])
    write_evaluation(run / "after.json", "runs/one/adapter", [True, True, False, True])
    (run / "best.json").write_text(json.dumps({"step": 3, "loss": {}}))  # no evaluation
    text = text_of(page_of(run))
    assert "base base 0.25 0.125 to 0.375 4 rows" in text
    assert "after adapter 0.75 0.625 to 0.875 4 rows" in text and "95% interval" in text
    changed = text.index("0 + 1? wrong it is 0False right it is 0True")
    assert changed < text.index("1 + 1? right it is 1True right it is 1True")


def test_samples_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    rows = [{"prompt": "2 + 3?", "before": "<b>6</b>", "after": "5"}, {"prompt": "no answer"}]
    rows += [{"prompt": "ends of lines of Unicode", "after": "\u2028, \x85 and \x0c"}]
    (run / "samples.jsonl").write_text(to_lines(rows))
    page = page_of(run)
    assert "&lt;b&gt;6&lt;/b&gt;" in page and "no answer" not in page and "ends of lines" in page


def test_losses_of_pairs_are_not_of_tokens(tmp_path: Path) -> None:
    """And a reward model's accuracy in training has a curve."""
    assert "nats per token" in page_of(write_run(tmp_path / "one"))
    for name, metric in (("reward", "accuracy"), ("dpo", "rewards/accuracy")):
        run = write_run(tmp_path / name)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        (run / "metrics.jsonl").write_text(to_lines(row | {metric: 0.5} for row in rows))
        page = page_of(run)
        assert "nats per token" not in page and "mean over samples" in page
        assert "Accuracy of rewards" in page


def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", steps=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": null}\n{"step": "5"}\n[1]\n{"step": 6, "lo')
    (run / "machine.json").write_text("{")
    (run / "samples.jsonl").write_bytes(b"\xff\xfe\n")
    found = read_run(run)
    assert [row["step"] for row in found.steps] == [1, 2, 3, 4] and found.machine == {}
    assert "Loss" in page_of(run)


@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_what_is_no_run_is_named(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "no run"
    if kind == "empty":
        folder.mkdir()
    if kind == "file":
        folder.write_text("")
    with pytest.raises(UserError, match=r"^runs: '.*no run' (is no folder|has no metrics); expec"):
        read_run(folder)


def test_flat_keys() -> None:
    assert flat({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}


def test_at_the_end_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "one")
    report_at_end(run)
    assert "Gradient norm" in (run / "report.html").read_text()
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr() == ("", "")
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    (run / "report.html/full").touch()
    report_at_end(run)
    report_at_end(tmp_path / "missing")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("warning: report: not") for line in lines)


@needs_browser
@pytest.mark.long
def test_in_a_browser(tmp_path: Path) -> None:
    """Two runs with everything, at two widths, light and dark: readable, and nothing is asked."""
    runs = [write_run(tmp_path / f"a_long_name_of_a_run_{at}", rank=at) for at in (8, 64)]
    write_evaluation(runs[0] / "base.json", None, [False, True])
    write_evaluation(runs[0] / "tuned.json", "adapter", [True, True])
    page = tmp_path / "page.html"
    page.write_text(page_of(*runs))
    with browser() as chromium:
        for width in (400, 1200):
            for dark in (False, True):
                look = chromium.look(page, width, dark)
                assert look.overflow <= 0 and look.small >= 9, (width, look)
                assert look.errors == [] and look.requests == [page.as_uri()]
                assert "Where time goes" in look.text
        broken = tmp_path / "broken.html"
        wide = "<p style='width: 900px'>wide</p><img src='https://example.com/a.png'>"
        broken.write_text(page.read_text().replace("</body>", f"{wide}</body>"))
        look = chromium.look(broken, 400)
        assert look.overflow > 300 and len(look.errors) == 1  # the test sees what it looks for
