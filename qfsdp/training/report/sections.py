"""The parts of a run's page, each a heading and charts or tables, and the page at a run's end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from statistics import median_high as median
from typing import Any

from markupsafe import Markup

from qfsdp.common.messages import first_line
from qfsdp.common.terminal import warn
from qfsdp.training.report.charts import Chart, Line, needs_log, number
from qfsdp.training.report.drawing import write_picture
from qfsdp.training.report.page import Section, charts_section, part, table, write_page
from qfsdp.training.report.run_folder import Evaluation, RunFolder, Score, read_run

SECONDS, MEMORY, VALIDATION = "seconds/", "memory/", "validation/"
MOST_VALUE, MOST_TEXT = 80, 400  # characters of a config's value, of a prompt or an answer


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


def overview(runs: Sequence[RunFolder]) -> Markup:
    """A row per run: how far it came, its losses, speed and peak."""
    head = ("run", "steps", "first loss", "last loss", "tokens/s", "peak GiB", "ranks", "device")
    rows = []
    for run in runs:
        trained = [row for row in run.steps if "loss" in row] or [{}]
        ranks, last = run.machine.get("world_size"), trained[-1]
        losses = shown(trained[0].get("loss")), shown(last.get("loss"))
        speed = of_values(run, "tokens_per_second_per_rank", median, ranks or 1)
        peak = of_values(run, "peak_memory_gib", max)
        about = ranks or "", run.machine.get("device", "")
        rows.append([run.name, last.get("step", ""), *losses, speed, peak, *about])
    return table(head, rows)


def values(run: RunFolder, name: str) -> list[float]:
    """All logged numbers of a metric."""
    found = (row.get(name) for row in run.steps)
    return [value for value in found if isinstance(value, int | float)]


def of_values(
    run: RunFolder, name: str, measure: Callable[[list[float]], float], times: float = 1
) -> str:
    """The median or the highest of a metric, as a number in few characters; "" without any."""
    found = values(run, name)
    return number(measure(found) * times) if found else ""


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
    """ "heldout loss" of "validation/heldout/loss", "forward" of "seconds/forward"."""
    for prefix in (VALIDATION, SECONDS, MEMORY):
        metric = metric.removeprefix(prefix)
    return metric.removesuffix("_gib").replace("/", " ").replace("_", " ")


def logged(runs: Sequence[RunFolder], prefix: str, suffix: str = "") -> list[str]:
    """The names of metrics with a prefix and a suffix, in the order in which they were logged."""
    names = (name for run in runs for row in run.steps for name in row)
    kept = (name for name in names if name.startswith(prefix) and name.endswith(suffix))
    return list(dict.fromkeys(kept))


def loss_chart(runs: Sequence[RunFolder]) -> Chart:
    """The losses of training and of validation in one chart."""
    held_out = logged(runs, VALIDATION, "/loss")
    of_answers = logged(runs, "rewards/") or logged(runs, "accuracy")  # a mean over pairs or rows
    unit = "mean over samples" if of_answers else "nats per token"
    return curves(runs, "Loss", unit, ["loss", *held_out])


def learning_charts(runs: Sequence[RunFolder]) -> list[Chart]:
    accuracies = logged(runs, VALIDATION, "/accuracy") + logged(runs, "rewards/", "accuracy")
    accuracies += logged(runs, "accuracy")  # of a reward model or classifier
    return [
        loss_chart(runs),
        curves(runs, "Learning rate", "learning rate", ["lr"], log=False),
        curves(runs, "Gradient norm", "norm before clipping", ["grad_norm"]),
        curves(runs, "Accuracy of rewards", "share", accuracies),
    ]


def speed_charts(runs: Sequence[RunFolder]) -> list[Chart]:
    metric, several = "tokens_per_second_per_rank", len(runs) > 1
    lines = [
        curve(run, metric, run.name if several else "", run.machine.get("world_size") or 1)
        for run in runs
    ]
    return [
        Chart("Speed", "step", "tokens/s of all ranks", lines),
        curves(runs, "Share of the rate of matrix products", "share", ["model_flops_utilization"]),
        curves(runs, "Peak of memory", "GiB of a rank", ["peak_memory_gib"]),
    ]


def where_time_goes(runs: Sequence[RunFolder]) -> Markup:
    """Median seconds of each phase of a step, and the rest of the step."""
    phases = [name for name in logged(runs, SECONDS) if name != f"{SECONDS}validation"]
    if not phases:
        return Markup()
    names, bars, rows = list(map(words, phases)), Markup(), []
    for run in runs:
        cells = [of_values(run, name, median) for name in (*phases, "seconds_per_step")]
        rows.append([run.name, *cells])
        spent = [median(values(run, name) or [0.0]) for name in phases]
        shares = [(*part, f"{number(part[1])} s") for part in zip(names, spent, strict=True)]
        bars += part("bar", run.name, shares)
    drawn = part("heading", "Where time goes") + bars + part("legend", names)
    note = part("note", "median seconds of a step, without evaluations")
    return drawn + table(("run", *names, "whole step"), rows) + note


# ---- memory and accuracy -------------------------------------------------------------------


def memory_table(runs: Sequence[RunFolder]) -> Markup:
    """What each run measured, by kind of tensor."""
    rows = []
    for name in ("peak_memory_gib", *logged(runs, MEMORY, "_gib")):
        cells = [of_values(run, name, max) for run in runs]
        rows += [[words(name), *cells]] if any(cells) else []
    note = part("note", "measured; tensors between steps on rank 0, gradients before the update")
    found = table(("GiB of a rank", *(run.name for run in runs)), rows)
    return found + note if rows else found


def scores_table(runs: Sequence[RunFolder]) -> Markup:
    """A row per metric and evaluation, with its interval as a bar."""
    found = [
        (f"{run.name}: {evaluation.name}" if len(runs) > 1 else evaluation.name, evaluation, score)
        for run in runs
        for evaluation in run.evaluations
        for score in evaluation.scores
    ]
    found.sort(key=lambda entry: entry[2].name)
    rows = []
    for label, evaluation, score in found:
        of_metric = [one for _, _, one in found if one.name == score.name]
        all_ends = [end for one in of_metric for end in (one.value, *(one.interval or ()))]
        of = "base" if evaluation.adapter is None else "adapter"
        ends = " to ".join(map(number, score.interval or ()))
        drawn = interval_bar(score, min(all_ends), max(all_ends))
        rows.append([score.name, label, of, number(score.value), ends, drawn, score.count])
    level = f"{found[0][2].level:.0%} interval" if found else ""
    return table(("metric", "evaluation", "of", "value", level, "", "over"), rows, left=3)


def interval_bar(score: Score, low: float, high: float) -> Markup:
    """The value and its interval between the ends that all evaluations of a metric share."""
    first, last = score.interval or (score.value, score.value)
    return part("interval", score.value, first, last, low, high)


def samples(runs: Sequence[RunFolder]) -> Markup:
    """The same prompts before and after training, from samples.jsonl or from evaluations."""
    parts = Markup()
    for run in runs:
        rows = [
            [text_cell(row["prompt"]), text_cell(row.get("before", "")), text_cell(row["after"])]
            for row in run.samples
        ] or answers(run.evaluations)
        parts += part("heading", run.name) if len(runs) > 1 and rows else ""
        parts += table(("prompt", "before", "after"), rows, left=3)
    return parts


def answers(evaluations: Sequence[Evaluation], most: int = 12) -> list[list[Markup]]:
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
                cells = [text_cell(question), text_cell(old, was_right), text_cell(new, is_right)]
                rows.append((was_right == is_right, cells))
    return [cells for _, cells in sorted(rows, key=lambda row: row[0])][:most]


def text_cell(text: Any, right: bool | None = None) -> Markup:
    """A text, shortened; `right`: whether it is a right answer."""
    return part("text", shortened(str(text), MOST_TEXT), right)


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."


# ---- config --------------------------------------------------------------------------------


def config_table(runs: Sequence[RunFolder]) -> Markup:
    """Of several runs the keys that differ, of one run all keys, folded."""
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    if not keys:
        return Markup()

    def table_of(keys: Sequence[str]) -> Markup:
        rows = [
            [part("code", key), *(config_value(run.config.get(key, "(not there)")) for run in runs)]
            for key in keys
        ]
        return table(("key", *(run.name for run in runs)), rows, left=1 + len(runs))

    folded = part("folded", f"all {len(keys)} keys", table_of(keys))
    if len(runs) == 1:
        return folded
    differing = [key for key in keys if len({repr(run.config.get(key, ...)) for run in runs}) > 1]
    return (table_of(differing) or part("note", "The configs are equal.")) + folded


def config_value(value: Any) -> str:
    text = "null" if value is None else str(value)
    return shortened(text.lower() if isinstance(value, bool) else text, MOST_VALUE)


PAGE, LOSS = "report.html", "loss.png"


def report_at_end(output_dir: Path) -> None:
    """Writes `report.html` and `loss.png`. Whatever goes wrong is one warning on stderr: a trained
    model must not be lost for a picture."""
    try:
        run = read_run(output_dir)
        command = f"tune run recipes/report {quote(str(output_dir))}"
        subtitle = f"{output_dir}; `{command}` adds the memory over a step, and other runs"
        write_page(output_dir / PAGE, run.name, subtitle, run_sections([run]))
        if not (chart := loss_chart([run])).is_empty:
            write_picture(chart, output_dir / LOSS)
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        warn(f"report: not written ({what})")
