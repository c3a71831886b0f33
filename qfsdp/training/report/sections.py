"""The parts of a run's page, as HTML: each is a heading and charts or tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from qfsdp.training.report.charts import COLOURS, Chart, Line, needs_log, number
from qfsdp.training.report.run_folder import Evaluation, RunFolder, Score
from qfsdp.training.report.svg import figure

SECONDS, MEMORY, VALIDATION = "seconds/", "memory/", "validation/"
MOST_VALUE = 80  # characters of a config's value


@dataclass(frozen=True)
class Section:
    """A part of a page: its heading and the HTML below it."""

    title: str
    body: str


def run_sections(runs: Sequence[RunFolder]) -> list[Section]:
    """All sections that the folders of the runs have something for."""
    found = [
        Section("Runs", overview(runs)),
        charts_section("Learning", learning_charts(runs)),
        charts_section("Speed", speed_charts(runs), where_time_goes(runs)),
        Section("Memory", memory_table(runs)),
        Section("Accuracy", scores_table(runs)),
        Section("Before and after", samples(runs)),
        Section("Config", config_table(runs)),
    ]
    return [section for section in found if section.body]


def charts_section(title: str, charts: Sequence[Chart], after: str = "") -> Section:
    drawn = "".join(figure(chart) for chart in charts if not chart.is_empty)
    return Section(title, (f'<div class="charts">{drawn}</div>' if drawn else "") + after)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table whose cells are HTML; numbers, all but the first `left` columns, are right-aligned.

    "" without rows.
    """

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = (' class="left"' if at < left else "" for at in range(len(cells)))
        both = zip(kinds, cells, strict=True)
        return f"<tr>{''.join(f'<{tag}{kind}>{cell}</{tag}>' for kind, cell in both)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    if not body:
        return ""
    top = line([escape(cell) for cell in head], "th")
    return f'<div class="scroll"><table><thead>{top}</thead><tbody>{body}</tbody></table></div>'


# ---- runs ----------------------------------------------------------------------------------


def overview(runs: Sequence[RunFolder]) -> str:
    """A row per run: how far it came, its losses, speed and peak."""
    head = ("run", "steps", "first loss", "last loss", "tokens/s", "peak GiB", "ranks", "device")
    rows = []
    for run in runs:
        trained = [row for row in run.steps if "loss" in row]
        ranks = run.machine.get("world_size")
        speeds = values(run, "tokens_per_second_per_rank")
        peaks = values(run, "peak_memory_gib")
        last = trained[-1] if trained else {}
        cells = [
            str(last.get("step", "")),
            shown(trained[0]["loss"]) if trained else "",
            shown(last.get("loss")),
            shown(median(speeds) * (ranks or 1) if speeds else None),
            shown(max(peaks, default=None)),
            str(ranks or ""),
            str(run.machine.get("device", "")),
        ]
        rows.append([escape(cell) for cell in (run.name, *cells)])
    return table(head, rows)


def values(run: RunFolder, name: str) -> list[float]:
    """All logged numbers of a metric."""
    found = (row.get(name) for row in run.steps)
    return [value for value in found if isinstance(value, int | float)]


def median(numbers: Sequence[float]) -> float:
    return sorted(numbers)[len(numbers) // 2]


def shown(value: Any) -> str:
    """A number in few characters; "" for None."""
    return "" if value is None else number(float(value))


# ---- curves --------------------------------------------------------------------------------


def curve(run: RunFolder, metric: str, name: str, times: float = 1.0) -> Line:
    points = [
        (row["step"], None if row[metric] is None else row[metric] * times)
        for row in run.steps
        if metric in row
    ]
    return Line(name, points, dots=len(points) <= 12)


def curves(
    runs: Sequence[RunFolder], title: str, y: str, metrics: Sequence[str], log: bool = True
) -> Chart:
    """One chart with a line for every run and metric that was logged.

    Args:
        log: take a logarithmic axis if the values need it.
    """
    lines = []
    for run in runs:
        for metric in metrics:
            parts = [run.name] if len(runs) > 1 else []
            parts += [words(metric)] if len(metrics) > 1 else []
            lines.append(curve(run, metric, " ".join(parts)))
    lines = [line for line in lines if line.points]
    return Chart(title, "step", y, lines, log_y=log and needs_log(lines))


def words(metric: str) -> str:
    """ "heldout loss" of "validation/heldout/loss"."""
    return metric.removeprefix(VALIDATION).replace("/", " ").replace("_", " ")


def logged(runs: Sequence[RunFolder], prefix: str, suffix: str = "") -> list[str]:
    """The names of metrics with a prefix and a suffix, in the order in which they were logged."""
    names = (name for run in runs for row in run.steps for name in row)
    kept = (name for name in names if name.startswith(prefix) and name.endswith(suffix))
    return list(dict.fromkeys(kept))


def loss_chart(runs: Sequence[RunFolder]) -> Chart:
    """The losses of training and of validation in one chart."""
    held_out = logged(runs, VALIDATION, "/loss")
    return curves(runs, "Loss", "nats per token", ["loss", *held_out])


def learning_charts(runs: Sequence[RunFolder]) -> list[Chart]:
    accuracies = logged(runs, VALIDATION, "/accuracy") + logged(runs, "rewards/", "accuracy")
    return [
        loss_chart(runs),
        curves(runs, "Learning rate", "learning rate", ["lr"], log=False),
        curves(runs, "Gradient norm", "norm before clipping", ["grad_norm"]),
        curves(runs, "Accuracy of rewards", "share", accuracies),
    ]


def speed_charts(runs: Sequence[RunFolder]) -> list[Chart]:
    lines = [
        curve(
            run,
            "tokens_per_second_per_rank",
            run.name if len(runs) > 1 else "",
            run.machine.get("world_size") or 1,
        )
        for run in runs
    ]
    speed = Chart("Speed", "step", "tokens/s of all ranks", lines)
    return [
        speed,
        curves(runs, "Share of the rate of matrix products", "share", ["model_flops_utilization"]),
        curves(runs, "Peak of memory", "GiB of a rank", ["peak_memory_gib"]),
    ]


def where_time_goes(runs: Sequence[RunFolder]) -> str:
    """Median seconds of each phase of a step, and the rest of the step."""
    phases = [name for name in logged(runs, SECONDS) if name != f"{SECONDS}validation"]
    head = ("run", *(words(name.removeprefix(SECONDS)) for name in phases), "whole step")
    rows = []
    for run in runs:
        parts = [values(run, name) for name in phases]
        whole = values(run, "seconds_per_step")
        cells = [shown(median(part)) if part else "" for part in parts]
        cells.append(shown(median(whole)) if whole else "")
        rows.append([escape(run.name), *cells])
    drawn = "".join(time_bar(run, phases) for run in runs)
    return (
        f"<h3>Where time goes</h3>{drawn}{key_of(phases)}{table(head, rows)}"
        '<p class="soft">median seconds of a step, without evaluations</p>'
        if phases
        else ""
    )


def time_bar(run: RunFolder, phases: Sequence[str]) -> str:
    """The phases of a run as shares of one bar."""
    spent = [median(values(run, name) or [0.0]) for name in phases]
    total, x, shapes = sum(spent) or 1.0, 0.0, []
    for at, seconds in enumerate(spent):
        width = 100 * seconds / total
        says = escape(f"{words(phases[at].removeprefix(SECONDS))}: {number(seconds)} s")
        shapes.append(
            f'<rect class="c{at % len(COLOURS)}" x="{x:.2f}" width="{width:.2f}" height="10">'
            f"<title>{says}</title></rect>"
        )
        x += width
    return (
        f'<p class="bar"><span>{escape(run.name)}</span><svg viewBox="0 0 100 10" '
        f'preserveAspectRatio="none" role="img" aria-label="where time goes">{"".join(shapes)}'
        "</svg></p>"
    )


def key_of(phases: Sequence[str]) -> str:
    entries = (
        f'<li><span class="swatch c{at % len(COLOURS)}"></span>'
        f"{escape(words(name.removeprefix(SECONDS)))}</li>"
        for at, name in enumerate(phases)
    )
    return f'<ul class="legend">{"".join(entries)}</ul>'


# ---- memory --------------------------------------------------------------------------------


def memory_table(runs: Sequence[RunFolder]) -> str:
    """What each run measured, by kind of tensor."""
    names = logged(runs, MEMORY, "_gib")
    rows = []
    for name in ("peak_memory_gib", *names):
        cells = [shown(max(values(run, name), default=None)) for run in runs]
        if any(cells):
            label = words(name.removeprefix(MEMORY).removesuffix("_gib"))
            rows.append([escape(label), *cells])
    body = table(("GiB of a rank", *(run.name for run in runs)), rows)
    note = "measured; tensors between steps on rank 0, gradients before the update"
    return f'{body}<p class="soft">{note}</p>' if body else ""


# ---- accuracy ------------------------------------------------------------------------------


def scores_table(runs: Sequence[RunFolder]) -> str:
    """A row per metric and evaluation, with its interval as a bar."""
    found = [
        (f"{run.name}: {evaluation.name}" if len(runs) > 1 else evaluation.name, evaluation, score)
        for run in runs
        for evaluation in run.evaluations
        for score in evaluation.scores
    ]
    found.sort(key=lambda entry: entry[2].name)
    if not found:
        return ""
    ends = dict[str, list[float]]()
    for _, _, score in found:
        ends.setdefault(score.name, []).extend([score.value, *(score.interval or ())])
    rows = [
        [
            escape(score.name),
            escape(label),
            "base" if evaluation.adapter is None else "adapter",
            number(score.value),
            " to ".join(map(number, score.interval)) if score.interval else "",
            interval_bar(score, min(ends[score.name]), max(ends[score.name])),
            escape(score.count),
        ]
        for label, evaluation, score in found
    ]
    level = f"{found[0][2].level:.0%} interval"
    return table(("metric", "evaluation", "of", "value", level, "", "over"), rows, left=3)


def interval_bar(score: Score, low: float, high: float) -> str:
    """The value and its interval between the ends that all evaluations of a metric share."""

    def at(value: float) -> float:
        return 4 + 112 * (value - low) / ((high - low) or 1.0)

    first, last = score.interval or (score.value, score.value)
    return (
        '<svg class="interval" viewBox="0 0 120 14" role="img" aria-label="interval">'
        f'<path class="line s0" d="M{at(first):.1f} 7H{at(last):.1f}"/>'
        f'<circle class="c1" cx="{at(score.value):.1f}" cy="7" r="3.5"/></svg>'
    )


def samples(runs: Sequence[RunFolder]) -> str:
    """The same prompts before and after training, from samples.jsonl or from evaluations."""
    head = ("prompt", "before", "after")
    parts = []
    for run in runs:
        rows = [
            [text_cell(row["prompt"]), text_cell(row.get("before", "")), text_cell(row["after"])]
            for row in run.samples
        ] or answers(run.evaluations)
        title = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 and rows else ""
        parts.append(title + table(head, rows, left=3))
    return "".join(parts)


def answers(evaluations: Sequence[Evaluation], most: int = 12) -> list[list[str]]:
    """Questions that both a base model and an adapter answered; changed ones first."""
    before = next((e for e in evaluations if e.adapter is None and e.answers), None)
    after = next((e for e in reversed(evaluations) if e.adapter is not None and e.answers), None)
    if before is None or after is None:
        return []
    rows = []
    for name in before.answers.keys() & after.answers.keys():
        for question, (old, was_right) in before.answers[name].items():
            if question in after.answers[name]:
                new, is_right = after.answers[name][question]
                cells = [text_cell(question), answer(old, was_right), answer(new, is_right)]
                rows.append((was_right == is_right, cells))
    return [cells for _, cells in sorted(rows, key=lambda row: row[0])][:most]


def answer(text: str, right: bool) -> str:
    return f'<b class="{"right" if right else "wrong"}">{"right" if right else "wrong"}</b><br>' + (
        text_cell(text)
    )


def text_cell(text: Any, most: int = 400) -> str:
    shortened = str(text) if len(str(text)) <= most else f"{str(text)[:most]} ..."
    return f'<span class="text">{escape(shortened)}</span>'


# ---- config --------------------------------------------------------------------------------


def config_table(runs: Sequence[RunFolder]) -> str:
    """Of several runs the keys that differ, of one run all keys, folded."""
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    if not keys:
        return ""
    head = ("key", *(run.name for run in runs))

    def row(key: str) -> list[str]:
        found = (run.config.get(key, "(not there)") for run in runs)
        return [f"<code>{escape(key)}</code>", *(escape(config_value(one)) for one in found)]

    whole = table(head, map(row, keys), left=1 + len(runs))
    folded = f"<details><summary>all {len(keys)} keys</summary>{whole}</details>"
    if len(runs) == 1:
        return folded
    differing = [key for key in keys if len({repr(run.config.get(key, ...)) for run in runs}) > 1]
    same = "" if differing else "<p>The configs are equal.</p>"
    return same + table(head, map(row, differing), left=1 + len(runs)) + folded


def config_value(value: Any) -> str:
    text = "null" if value is None else str(value)
    text = text.lower() if isinstance(value, bool) else text
    return text if len(text) <= MOST_VALUE else f"{text[:MOST_VALUE]} ..."
