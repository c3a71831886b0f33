"""Tables of `compare_methods.py`: figures of each method and which pairs differ; as a page too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.paired import Pair, pairs
from benchmarks.timing import table as print_table
from qfsdp.evaluation.intervals import CONFIDENCE_LEVEL, Interval, loss_interval, mean_interval
from qfsdp.training.report.charts import Chart, Line
from qfsdp.training.report.drawing import write_picture
from qfsdp.training.report.page import Section, charts_section, part, table, write_page
from qfsdp.training.report.run_folder import Score, read_evaluation, read_run
from qfsdp.training.report.sections import answers, interval_bar, learning_charts, values

HEAD = ("", "exact match, %", "of seeds", "loss", "lr", "trained", "GiB", "tokens/s")
PAIRS = ("better", "worse", "difference (95 %)", "p", "seeds", "")
NOTE = "p: sign test over problems, corrected by Holm for all pairs. Ordered: p < 0.05 in all seeds"


@dataclass(frozen=True)
class Row:
    """The figures of a method on a task, by seed and by problem (losses: by part of ten).

    Fields:
        right: 0 or 1 for each problem.
        losses: summed loss and number of targets of each part; [] for few_shot.
        about: learning rate, parameters, memory, speed, and "search", the loss that chose by rate;
            {} for untrained models.
        runs: folders of the training runs, by seed.
        evaluations: their files of results.
    """

    task: str
    name: str
    right: list[list[float]]
    losses: list[list[tuple[float, int]]]
    about: dict[str, Any]
    runs: list[Path]
    evaluations: list[Path]

    @property
    def match(self) -> tuple[float, Interval]:
        """The share of right answers, %, and its interval over problems."""
        shares = [fmean(of) for of in zip(*self.right, strict=True)]
        low, high = mean_interval(shares)
        return 100 * fmean(shares), (100 * low, 100 * high)

    @property
    def loss(self) -> tuple[float, Interval] | None:
        """The mean loss per target (nats) over seeds, and its interval over parts."""
        if not self.losses:
            return None
        parts = [(fmean(s for s, _ in of), of[0][1]) for of in zip(*self.losses, strict=True)]
        mean = sum(loss for loss, _ in parts) / sum(targets for _, targets in parts)
        return mean, loss_interval(parts)


def cells(row: Row) -> list[str]:
    """One line of the table of methods."""
    share, (low, high) = row.match
    by_seed = [100 * fmean(seed) for seed in row.right]
    spread = " ".join(f"{value:.1f}" for value in by_seed) if len(by_seed) > 1 else ""
    forms = {"lr": "g", "trained": ",.0f", "peak_memory_gib": ".2f", "tokens_per_second": ".0f"}
    about = [format(row.about[k], form) if k in row.about else "" for k, form in forms.items()]
    loss = "" if row.loss is None else f"{row.loss[0]:.4f} ({shown(row.loss[1], '.3f')})"
    return [row.name, f"{share:.1f} ({shown((low, high), '.1f')})", spread, loss, *about]


SEARCH = "loss of the set that chooses, by learning rate; * is taken"


def search_cells(rows: Sequence[Row]) -> list[list[str]]:
    """Head and a line "rate: loss" for each method that has tried several rates; [] without."""
    found = []
    for row in rows:
        if losses := row.about.get("search"):
            taken = {row.about["lr"]: " *"}
            tried = (f"{rate:g}: {loss:.4f}{taken.get(rate, '')}" for rate, loss in losses.items())
            found.append([row.name, *tried])
    most = max(map(len, found), default=0)
    lines = [line + [""] * (most - len(line)) for line in found]
    return [[""] * most, *lines] if lines else []


def shown(interval: Interval, form: str) -> str:
    return " to ".join(format(end, form) for end in interval)


def compared(rows: Sequence[Row]) -> dict[str, list[Pair]]:
    """The pairs by exact match, and by loss (less is better) where it was measured."""
    matches = {row.name: [[100 * x for x in seed] for seed in row.right] for row in rows}
    losses = {
        row.name: [[-loss / targets for loss, targets in seed] for seed in row.losses]
        for row in rows
        if row.losses
    }
    return {"exact match, percentage points": pairs(matches), "loss, nats": pairs(losses)}


def pair_cells(pair: Pair) -> list[str]:
    most = 3 if abs(pair.difference) < 1 else 1
    difference = f"{pair.difference:.{most}f} ({shown(pair.interval, f'.{most}f')})"
    p = "< 0.0001" if pair.p < 1e-4 else f"{pair.p:.4f}"
    said = "ordered" if pair.ordered else "tie"
    return [pair.better, pair.worse, difference, p, str(pair.seeds), said]


def by_task(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found = dict[str, list[Row]]()
    for row in rows:
        found.setdefault(row.task, []).append(row)
    return found


def print_tables(rows: Sequence[Row]) -> dict[str, Any]:
    """Prints everything; returns the figures with keys TASK/ROW/FIGURE."""
    figures: dict[str, Any] = {}
    for task, of_task in by_task(rows).items():
        print(f"\n{task}: {len(of_task[0].right[0])} problems\n")
        print_table([list(HEAD), *map(cells, of_task)])
        if tried := search_cells(of_task):
            print(f"{task}, {SEARCH}\n")
            print_table(tried)
        for kind, found in compared(of_task).items():
            print(f"{task}, {kind}. {NOTE}.\n")
            print_table([list(PAIRS), *map(pair_cells, found)])
            for pair in found:
                figures[f"{task}/{kind}/{pair.better}/{pair.worse}"] = vars(pair)
        for row in of_task:
            key = f"{task}/{row.name}"
            figures[f"{key}/exact_match"], figures[f"{key}/exact_match_interval"] = row.match
            figures[f"{key}/exact_match_of_seeds"] = [100 * fmean(seed) for seed in row.right]
            if row.loss is not None:
                figures[f"{key}/loss"], figures[f"{key}/loss_interval"] = row.loss
                seeds = [sum(s for s, _ in x) / sum(n for _, n in x) for x in row.losses]
                figures[f"{key}/loss_of_seeds"] = seeds
                figures[f"{key}/loss_sd_of_seeds"] = stdev(seeds) if len(seeds) > 1 else None
            figures |= {f"{key}/{name}": value for name, value in row.about.items()}
    return figures


def write_study(path: Path, rows: Sequence[Row]) -> Path:
    """Writes the page of the study; returns its path."""
    sections: list[Section] = []
    for task, of_task in by_task(rows).items():
        sections += task_sections(task, of_task)
    count = len(rows[0].right[0])
    write_page(path, "Finetuning methods", f"SmolLM2-135M-Instruct; {count} problems", sections)
    return path


def draw_curves(path: Path, rows: Sequence[Row]) -> None:
    """Draws the loss of each method's updates, the mean of its seeds, as .svg or .png."""
    lines = []
    for row in rows:
        if row.runs and row.name != "full_nf4":
            seeds = [values(read_run(run), "loss") for run in row.runs]
            means = map(fmean, zip(*seeds, strict=True))
            name = f"{row.name}, rate {row.about['lr']:g}"
            lines.append(Line(name, [*enumerate(means, start=1)]))
    count = max(len(row.runs) for row in rows)
    title = f"{rows[0].task}, mean of {count} seeds"
    write_picture(Chart(title, "update", "loss, nats per target", lines, log_y=True), path)


def task_sections(task: str, rows: Sequence[Row]) -> list[Section]:
    shares = [row.match for row in rows]
    low, high = min(ends[0] for _, ends in shares), max(ends[1] for _, ends in shares)
    lines = []
    for row, (share, ends) in zip(rows, shares, strict=True):
        score = Score("exact match", share, ends, "", CONFIDENCE_LEVEL)
        name, *rest = cells(row)
        lines.append([name, rest[0], interval_bar(score, low, high), *rest[1:]])
    found = [Section(f"{task}: methods", table((*HEAD[:2], "", *HEAD[2:]), lines))]
    if tried := search_cells(rows):
        found.append(Section(f"{task}: {SEARCH}", table(tried[0], tried[1:])))
    for kind, of_kind in compared(rows).items():
        if of_kind:
            body = part("note", f"{NOTE}.") + table(PAIRS, map(pair_cells, of_kind), left=2)
            found.append(Section(f"{task}: pairs by {kind}", body))
    runs = [read_run(row.runs[0]) for row in rows if row.runs and row.name != "full_nf4"]
    if runs:
        found.append(charts_section(f"{task}: learning, first seed", learning_charts(runs)))
    tuned = next((row for row in rows if row.name == "qdora"), None)
    base = next((row for row in rows if row.name == "zero_shot"), None)
    if tuned is not None and base is not None:
        both = [read_evaluation(row.evaluations[0]) for row in (base, tuned)]
        body = table(("prompt", "before", "after QDoRA"), answers(both), left=3)
        found.append(Section(f"{task}: answers", body))
    return found
