"""Runs tasks of lm-eval (EleutherAI's LM evaluation harness) on our decoder.

Prompts, metrics and tokens are lm-eval's. With `local_data` the rows come from files in a folder.
These need the columns of the dataset on the hub.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import math
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from qfsdp.common.errors import UserError, check_bounds
from qfsdp.common.long_waits import long_wait
from qfsdp.common.messages import did_you_mean, first_line, nearest
from qfsdp.common.terminal import warn
from qfsdp.data.files.json_lines import read_rows
from qfsdp.distributed.world import World
from qfsdp.evaluation.intervals import Interval, mean_interval
from qfsdp.evaluation.truthfulqa import truthfulqa_rows
from qfsdp.modules.hub_models.decoder import AnyDecoder

# `task: NAME`, `group: NAME` or `tag: [NAME, NAME]` of a YAML file, also with one name per line.
_NAMES = re.compile(
    r"""^[ \t]*(?:- +)?["']?(?:task|group|tag)["']?:[ \t]*(.*(?:\n[ \t]*- .*)*)""", re.MULTILINE
)
SPLITS = ("train", "validation", "test", "dev")
TRUTHFULQA = "TruthfulQA.csv"
MMLU = "mmlu"  # the group of the 57 subjects, tasks mmlu_SUBJECT
FEWSHOT_SEED = 1234  # lm-eval's default, also for its draws with numpy
# Keys of a task's `generation_kwargs` that answers follow; others are told.
OF_ANSWERS = {"until", "do_sample", "temperature", "top_p", "max_gen_toks", "max_new_tokens"}
OF_ANSWERS |= {"max_tokens", "max_completion_tokens"}


@dataclass
class LMEvalConfig:
    """Section `lm_eval`: the tasks of lm-eval to run.

    Fields:
        tasks: task names, such as arc_easy, arc_challenge, hellaswag, truthfulqa_mc1, mmlu.
        limit: use only the first `limit` rows of each task; null uses all.
        num_fewshot: solved examples before each question; null uses the task's number. A task that
            sets 0 keeps 0.
        local_data: a folder to read rows from instead of the hub. Its files are TASK.SPLIT.jsonl
            or TASK.SPLIT.ANYTHING.jsonl, where SPLIT is train, validation, test or dev, and
            TruthfulQA.csv. mmlu.SPLIT.jsonl has the rows of all subjects, with a column `subject`;
            solved examples are those of `dev`.
        chat_template: ask each question as a turn of a chat.
    """

    tasks: list[str] = field(default_factory=list)
    limit: int | None = None
    num_fewshot: int | None = None
    local_data: str | None = None
    chat_template: bool = False

    def check(self) -> None:
        check_bounds(self, "limit", least=1)
        check_bounds(self, "num_fewshot", least=0)


@dataclass(frozen=True)
class TaskMetric:
    """One metric of one task. Where several filters read the answers, as of gsm8k, its name ends
    with the filter's. The interval is None if the metric is not a mean over rows."""

    task: str
    metric: str
    value: float
    interval: Interval | None
    rows: int


def load_tasks(config: LMEvalConfig) -> dict[str, Any]:
    """Loads lm-eval's task objects with their rows, by name.

    Recipes call it before they load the model. Raises UserError: the package lm-eval is missing, a
    task does not exist, its rows cannot be loaded, or they are too few for solved examples."""
    return _with_settings(_read_tasks(config), config)


def _read_tasks(config: LMEvalConfig) -> dict[str, Any]:
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "lm_eval.tasks: the package lm-eval is missing; expected pip install lm-eval"
        )
    check_tasks(config.tasks)
    names = _with_subjects(config)
    reading = long_wait("lm_eval.tasks: reading lm-eval's index and the rows of the tasks")
    with reading, _quiet(sys.stderr.isatty()):
        manager = _task_manager(tuple(names) if config.local_data else ())
        if not set(names) <= set(manager.all_tasks):
            manager = _task_manager()
        for name in names:
            if name not in manager.all_tasks:
                raise _unknown_task(name)
        specs: list[Any] = names
        if config.local_data is not None:
            folder = Path(config.local_data).expanduser()
            members = [_with_local_rows(name, folder) for name in names]
            # lm-eval replaces keys of a task only if the task is in a group.
            specs = [{"group": "local", "task": members}]
        try:
            return cast(dict[str, Any], manager.load(specs)["tasks"])
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"lm_eval.tasks: {', '.join(config.tasks)}: {first_line(error)}; expected access "
                "to the hub, or lm_eval.local_data"
            ) from error


def _with_settings(tasks: dict[str, Any], config: LMEvalConfig) -> dict[str, Any]:
    for task in tasks.values():
        _set_shots(task, config.num_fewshot)
        for key, value in (task.get_config("generation_kwargs") or {}).items():
            if key not in OF_ANSWERS and value not in (None, False, 0, 1, -1):
                warn(f"lm_eval.tasks: '{task.config.task}' asks for {key} {value}; it is not done")
    return tasks


def _set_shots(task: Any, shots: int | None) -> None:
    """Sets how many solved examples a task has; never the row that is asked. Raises UserError: it
    has fewer rows."""
    if shots is not None and task.get_config("num_fewshot") != 0:
        task.set_config(key="num_fewshot", value=shots)
    elif task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    of_asked = task.fewshot_cfg.samples is None  # not examples that the task brings
    if of_asked and not (task.has_training_docs() or task.has_validation_docs()):
        # lm-eval leaves out the row itself only where the split of the examples has a name.
        task.fewshot_cfg.split = task.fewshot_cfg.split or task.config.test_split
    asked = task.get_config("num_fewshot")
    own = of_asked and task.fewshot_cfg.split == task.config.test_split
    most = len(task.sampler.df) - own if hasattr(task, "sampler") else 0
    if asked > most:
        raise UserError(
            f"lm_eval.num_fewshot: '{task.config.task}' has {asked} solved examples before a "
            f"question; expected at most {most}, the rows that they are drawn from"
        )


def load_likelihood_tasks(key: str, config: LMEvalConfig) -> dict[str, Any]:
    """`load_tasks`, {} without tasks; refuses tasks that generate text, which training does not do.
    Raises UserError: as `load_tasks`, and for such a task, with `key` before it."""
    tasks = _read_tasks(config) if config.tasks else {}
    for name, task in tasks.items():
        if task.OUTPUT_TYPE == "generate_until":
            raise UserError(
                f"{key}.lm_eval.tasks: '{name}' generates text; expected tasks that compare "
                "log-likelihoods, such as mmlu"
            )
    return _with_settings(tasks, config)


def _with_subjects(config: LMEvalConfig) -> list[str]:
    """The names of the tasks; of local rows of MMLU those of its subjects."""
    if config.local_data is None or MMLU not in config.tasks:
        return list(config.tasks)
    folder = Path(config.local_data).expanduser()
    files = _files_of_splits(MMLU, folder)
    rows = (read_rows("lm_eval.local_data", file, "subject") for file in files.values())
    subjects = sorted({f"{MMLU}_{row['subject']}" for of_file in rows for row in of_file})
    if not subjects:
        raise UserError(
            f"lm_eval.local_data: {folder} has no rows of {MMLU}; expected {MMLU}.test.jsonl with "
            "a column subject"
        )
    return list(dict.fromkeys([*(name for name in config.tasks if name != MMLU), *subjects]))


def check_tasks(names: Sequence[str]) -> None:
    """Checks that lm-eval has tasks of these names, from the text of its 14,000 files.

    That takes a second; lm-eval's own index takes 5 s on a quiet machine, 34 s on a busy one. A few
    names, which lm-eval puts together, stand in no file as they are: they pass if the files have
    them in any place. Raises UserError with the nearest name."""
    unknown = sorted(set(names) - _task_names().keys())
    for name in unknown:
        if not any(name.encode() in file.read_bytes() for file in _task_files()):
            raise _unknown_task(name)


def _unknown_task(name: str) -> UserError:
    near = did_you_mean(nearest(name, _task_names()))
    return UserError(f"lm_eval.tasks: '{name}' is not a task of lm-eval{near}")


def _task_files() -> list[Path]:
    package = importlib.util.find_spec("lm_eval")
    assert package is not None and package.origin is not None
    found = os.walk(Path(package.origin).parent / "tasks")
    # Files without a suffix are included by others, and may name tags.
    return [
        Path(folder, file)
        for folder, _, files in found
        for file in files
        if "yaml" in file or "." not in file
    ]


@cache
def _task_names() -> dict[str, None]:
    """The names of tasks, groups and tags in lm-eval's files; a few other words are among them."""
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in _task_files())
    values = (value for text in texts for value in _NAMES.findall(text))
    return dict.fromkeys(name for value in values for name in re.findall(r"""[\w./-]+""", value))


@cache
def _task_manager(names: tuple[str, ...] = ()) -> Any:
    """lm-eval's index of tasks: of all, or only of the folders that have tasks of these names.

    The whole index reads 14,000 files and takes 5 s.
    """
    from lm_eval import tasks

    if not names:
        return tasks.TaskManager()
    lines = {f"task: {name}".encode() for name in names}
    lines |= {f'"task": "{name}"'.encode() for name in names}  # MMLU's files
    files = Path(tasks.__file__).parent.rglob("*.yaml")
    folders = {str(file.parent) for file in files if lines & set(file.read_bytes().splitlines())}
    return tasks.TaskManager(include_defaults=False, include_path=sorted(folders))


def _files_of_splits(name: str, folder: Path) -> dict[str, Path]:
    """The file of each split of a task. Splits without a file are absent."""
    found = {
        split: sorted(
            [*folder.glob(f"{name}.{split}.jsonl"), *folder.glob(f"{name}.{split}.*.jsonl")]
        )
        for split in SPLITS
    }
    return {split: files[0] for split, files in found.items() if files}


def _with_local_rows(name: str, folder: Path) -> dict[str, Any]:
    """The keys that make a task read its rows from `folder`."""
    of_split = _files_of_splits(name, folder)
    subject = name.removeprefix(f"{MMLU}_") if name.startswith(f"{MMLU}_") else None
    if subject and not of_split:
        of_split = _files_of_splits(MMLU, folder)
    if name in ("truthfulqa_mc1", "truthfulqa_mc2") and (folder / TRUTHFULQA).is_file():
        of_split.setdefault("validation", folder / TRUTHFULQA)
    if not of_split.keys() & {"validation", "test"}:
        raise UserError(
            f"lm_eval.local_data: {folder} has no rows of {name}; expected {name}.validation.jsonl"
        )

    def rows(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        found = {split: _read(file) for split, file in of_split.items()}
        if subject:
            found = {
                split: [row for row in of if row.get("subject", subject) == subject]
                for split, of in found.items()
            }
        return {split: Dataset.from_list(of) for split, of in found.items() if of}

    return {
        "task": name,
        "custom_dataset": rows,
        "training_split": "train" if "train" in of_split else None,
        "validation_split": "validation" if "validation" in of_split else None,
        "test_split": "test" if "test" in of_split else None,
        # null: from train, else from the other rows
        "fewshot_split": "dev" if "dev" in of_split else None,
    }


def _read(file: Path) -> list[dict[str, Any]]:
    if file.name == TRUTHFULQA:
        return truthfulqa_rows(file)
    return read_rows("lm_eval.local_data", file)


def run_tasks(
    config: LMEvalConfig,
    tasks: dict[str, Any],
    model: AnyDecoder,
    tokenizer: Any,
    stops: set[int],
    world: World,
    batch_size: int,
) -> tuple[list[TaskMetric], dict[str, list[dict[str, Any]]]]:
    """Runs the tasks. The results are the same on every rank.

    Args:
        tasks: from `load_tasks`.
        stops: tokens that end an answer.
        batch_size: contexts (with all their choices) or prompts per forward pass.

    Returns:
        All metrics of all tasks, and lm-eval's record of each row by task.
    """
    from qfsdp.evaluation.lm_harness_model import HarnessModel

    return evaluate(
        config, tasks, HarnessModel(model, tokenizer, stops, world, batch_size), world.rank
    )


def evaluate(
    config: LMEvalConfig, tasks: dict[str, Any], lm: Any, rank: int = 0
) -> tuple[list[TaskMetric], dict[str, list[dict[str, Any]]]]:
    """`run_tasks` for any of lm-eval's models."""
    import numpy
    from lm_eval import evaluator

    random.seed(0)
    numpy.random.seed(FEWSHOT_SEED)
    with _quiet(rank == 0 and sys.stderr.isatty()):
        found: Any = evaluator.evaluate(
            lm=lm,
            task_dict={"tasks": tasks, "groups": {}},
            limit=config.limit,
            bootstrap_iters=0,  # we compute the intervals
            log_samples=True,
            apply_chat_template=config.chat_template,
            fewshot_as_multiturn=config.chat_template,
        )
    samples: dict[str, list[dict[str, Any]]] = found["samples"]
    scores = []
    for task, metrics in found["results"].items():
        several = len({row["filter"] for row in samples[task]}) > 1
        for key, value in metrics.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, float):
                continue
            rows = [row for row in samples[task] if row["filter"] == filtered and metric in row]
            numbers = [row[metric] for row in rows if isinstance(row[metric], int | float)]
            # A perplexity has a log-likelihood of every row, and is not their mean.
            mean = fmean(numbers) if numbers and len(numbers) == len(rows) else math.nan
            whole = math.isclose(mean, value, rel_tol=1e-6, abs_tol=1e-9)
            interval = mean_interval([float(number) for number in numbers]) if whole else None
            name = key if several else metric
            scores.append(TaskMetric(task, name, float(value), interval, len(rows)))
    return scores + _over_subjects(config, samples), samples


def _over_subjects(
    config: LMEvalConfig, samples: dict[str, list[dict[str, Any]]]
) -> list[TaskMetric]:
    """MMLU's accuracy over the rows of all subjects, as lm-eval's group has it."""
    of_subjects = (rows for task, rows in samples.items() if task.startswith(f"{MMLU}_"))
    right = [float(row["acc"]) for rows in of_subjects for row in rows if "acc" in row]
    if MMLU not in config.tasks or not right:
        return []
    return [TaskMetric(MMLU, "acc", sum(right) / len(right), mean_interval(right), len(right))]


@contextmanager
def _quiet(bars: bool = True) -> Iterator[None]:
    """Context that hides lm-eval's messages below errors, and its progress bars unless `bars`."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with nullcontext() if bars else redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
