"""Reads what a run has left in its folder: config, metrics, machine, evaluations and samples.

    config.yaml       every key of the run
    machine.json      the recipe, ranks, device, versions
    metrics.jsonl     a line per logged step
    *.json            of recipes/evaluate, here or in a folder `evaluation`, with their .jsonl files
    samples.jsonl     rows with "prompt", "before" and "after"

All but one of the first and the third may be missing. Damaged lines are left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from qfsdp.common.errors import UserError
from qfsdp.common.files import json_object, why
from qfsdp.common.messages import flat as flat
from qfsdp.common.printable import masked

CONFIG, METRICS, MACHINE, SAMPLES = "config.yaml", "metrics.jsonl", "machine.json", "samples.jsonl"
MOST_SAMPLES = 12  # of a page
Row = dict[str, Any]


@dataclass(frozen=True)
class Score:
    """A metric of an evaluation.

    Fields:
        name: "exact_match.arithmetic exact_match".
        value: of the metric.
        interval: its ends, or None.
        count: what it was measured on: "100 rows".
        level: of the interval, such as 0.95.
    """

    name: str
    value: float
    interval: tuple[float, float] | None
    count: str
    level: float


@dataclass(frozen=True)
class Evaluation:
    """A file of recipes/evaluate.

    Fields:
        name: of the file, without ".json".
        adapter: folder of the adapter; None: the base model was measured.
        scores: its metrics.
        answers: question -> answer and whether it was right, by the name of the set.
    """

    name: str
    adapter: str | None
    scores: list[Score]
    answers: dict[str, dict[str, tuple[str, bool]]]


@dataclass(frozen=True)
class RunFolder:
    """A run. `config` has its keys as "section.name"; `steps` the lines of metrics.jsonl."""

    folder: Path
    name: str
    config: dict[str, Any]
    steps: list[Row]
    machine: dict[str, Any] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)


def read_run(folder: Path) -> RunFolder:
    """Reads the folder of a run. Raises UserError: it does not exist, or has neither metrics nor a
    config."""
    if not folder.is_dir():
        raise UserError(f"runs: '{folder}' is no folder; expected the output_dir of a run")
    config, steps = read_config(folder / CONFIG), read_steps(folder / METRICS)
    if not config and not steps:
        expected = f"the output_dir of a run, with {METRICS} and {CONFIG}"
        raise UserError(f"runs: '{folder}' has no metrics; expected {expected}")
    samples = [row for row in read_lines(folder / SAMPLES) if {"prompt", "after"} <= row.keys()]
    return RunFolder(
        folder,
        folder.resolve().name,
        config,
        [row for row in steps if isinstance(row.get("step"), int)],
        json_object(folder / MACHINE),
        find_evaluations(folder),
        samples[:MOST_SAMPLES],
    )


def read_config(file: Path) -> dict[str, Any]:
    """The keys of a YAML file as "section.name", secrets masked; {} if it cannot be read."""
    try:
        return flat(masked(yaml.safe_load(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}


def read_lines(file: Path) -> list[Row]:
    """The objects in a .jsonl file, without damaged lines; [] if it cannot be read."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def read_steps(file: Path) -> list[Row]:
    """The rows of a file of metrics: those with a step, of which numbers and nulls."""
    numbers = [
        {k: v for k, v in row.items() if v is None or type(v) in (int, float)}
        for row in read_lines(file)
    ]
    return [row for row in numbers if type(row.get("step")) is int]


# ---- evaluations ---------------------------------------------------------------------------


def find_evaluations(folder: Path) -> list[Evaluation]:
    """The evaluations in a run's folder, those of a base model first."""
    files = sorted([*folder.glob("*.json"), *folder.glob("evaluation/*.json")])
    found = [read_evaluation(file) for file in files if _is_evaluation(json_object(file))]
    return sorted(found, key=lambda evaluation: evaluation.adapter is not None)


def _is_evaluation(content: dict[str, Any]) -> bool:
    return isinstance(content.get("results"), list) and "level" in content


def read_evaluation(file: Path) -> Evaluation:
    """An evaluation with its questions and answers. Raises UserError: the file is none of
    recipes/evaluate."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        rows = content["results"]
        scores = [
            Score(
                f"{row['section']}.{row['name']} {row['metric']}",
                float(row["value"]),
                tuple(row["interval"]) if row["interval"] else None,
                f"{row['count']:,} {row['unit']}",
                float(content["level"]),
            )
            for row in rows
            if row["value"] is not None
        ]
    except OSError as error:
        raise UserError(f"evaluations: '{file}' cannot be read: {why(error)}") from None
    except (ValueError, KeyError, TypeError):
        expected = "a .json file of recipes/evaluate"
        raise UserError(f"evaluations: '{file}' is not valid; expected {expected}") from None
    answers = {}
    for rows_file in sorted(file.parent.glob(f"{file.stem}.exact_match.*.jsonl")):
        name = rows_file.name.removeprefix(f"{file.stem}.").removesuffix(".jsonl")
        answers[name] = {
            str(row["question"]): (str(row["answer"]), bool(row["right"]))
            for row in read_lines(rows_file)
            if {"question", "answer", "right"} <= row.keys()
        }
    return Evaluation(file.stem, content.get("adapter"), scores, answers)
