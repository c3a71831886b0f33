"""Held-out losses and tasks of lm-eval during training: curves, the best state, early stopping.

<output_dir>/best/
    ...          files of the recipe (adapters) from the step with the lowest loss
    best.json    that step, and the losses of all sets at it
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.utils.data import Subset

from qfsdp.checkpoint.compatibility import sampled_tokens
from qfsdp.common.errors import InvalidField, UserError, check_bounds
from qfsdp.common.files import (
    PARTIAL,
    json_object,
    not_written,
    recover_folder,
    replace_folder,
    why,
    write_json,
)
from qfsdp.common.progress import at_step
from qfsdp.common.terminal import warn
from qfsdp.config.component import Component
from qfsdp.data import PackedDataset, build_dataset
from qfsdp.data.loader import MapDataset
from qfsdp.data.stream import check_targets
from qfsdp.distributed.world import World
from qfsdp.evaluation.heldout_loss import held_out_batches, held_out_loss, perplexity
from qfsdp.evaluation.lm_harness import LMEvalConfig, load_likelihood_tasks, run_tasks
from qfsdp.modules.hub_models.decoder import AnyDecoder
from qfsdp.training.metrics import RunLog
from qfsdp.training.schedule import check_length
from qfsdp.training.throughput import Meter

FOLDER = "best"
BEST_FILE = "best.json"
_NO_EVALUATION = {"metric": None, "best": None, "best_step": None, "kept_in": None, "waited": 0}


@dataclass
class ValidationConfig:
    """Section `validation`: the loss on held-out sets. Without sets: off.

    Fields:
        sets: name -> dataset, written like section `dataset`; each set has its own curve.
        eval_every: updates between evaluations; the last update is always evaluated.
        batch_size: samples per rank; null: that of training.
        max_batches: evaluate only the first batches of each set, counted over all ranks; null: all.
        at_start: also evaluate before the first update.
        keep_best: keep the state with the lowest loss in `output_dir/best`.
        metric: name of the set whose loss decides; null: the first set. Of preference tuning also
            `SET/rewards/accuracy` or `SET/rewards/margin`, where the highest is the best.
        patience: end the run after this many evaluations without a lower loss; null: never.
        lm_eval: tasks of lm-eval at every evaluation, such as mmlu; those that compare
            log-likelihoods. They decide nothing.
    """

    sets: dict[str, Component] = field(default_factory=dict)
    eval_every: int = 100
    batch_size: int | None = None
    max_batches: int | None = None
    at_start: bool = False
    keep_best: bool = True
    metric: str | None = None
    patience: int | None = None
    lm_eval: LMEvalConfig = field(default_factory=LMEvalConfig)

    def check(self) -> None:
        check_bounds(self, "eval_every", "batch_size", "max_batches", "patience", least=1)
        for name in self.sets:
            if not re.fullmatch(r"[\w.-]+", name):  # it is part of a metric's name
                raise InvalidField("sets", name, "names of letters, digits, '_', '-' and '.'")
        if self.lm_eval.tasks and not self.sets:
            raise InvalidField("sets", {}, "at least one set beside lm_eval.tasks")
        if self.metric is not None and self.metric.partition("/")[0] not in self.sets:
            names = ", ".join(self.sets)
            expected = f"one of {names}, or null" if self.sets else "null without sets"
            raise InvalidField("metric", self.metric, expected)


class Validation:
    """Evaluates the held-out sets of one run. Every rank makes one and calls the same methods.

    The sets are read at once, so that mistakes in them are found before a model is loaded.

    Args:
        cfg: a recipe's config: section `validation`, and the keys that shape batches.
        output_dir: of the run.
        total_steps: of the run; a learning rate schedule is compared with it (`check_length`), as
            this is the first that knows it.

    Attributes:
        sets: name -> samples, or packs.
        progress: state that a resumed run continues from (`TrainState.progress`): "step", the last
            evaluated step; "metric", the set that decides; "data", a hash of it; "best", its lowest
            loss; "best_step" and "kept_in", its step and folder; "waited", evaluations since then.
    """

    highest: tuple[str, ...] = ()
    """Further numbers of a set that `validation.metric` may name; their highest is the best."""

    def __init__(self, cfg: Any, world: World, output_dir: Path, total_steps: int) -> None:
        self._config: ValidationConfig = cfg.validation
        self._world, self._output_dir = world, output_dir
        self._batch_size: int = self._config.batch_size or cfg.batch_size
        self._cfg, self._total_steps = cfg, total_steps
        self.sets: dict[str, MapDataset] = {}
        check_length(getattr(cfg, "lr_scheduler", None), total_steps)
        self.progress: dict[str, Any] = {"step": None, "data": None} | _NO_EVALUATION
        if not self._config.sets:
            return
        if "/" in self.metric and self.metric.partition("/")[2] not in self.highest:
            expected = [*self._config.sets, *(f"SET/{number}" for number in self.highest)]
            raise UserError(
                f"validation.metric: '{self.metric}'; expected {', '.join(expected)} or null"
            )
        self._tokenizer = tokenizer = cfg.tokenizer.build()
        rows = cfg.model.any_config().vocab_size
        self._pad_id: int = tokenizer.pad_id
        self._tasks = load_likelihood_tasks("validation", self._config.lm_eval)
        for name, component in self._config.sets.items():
            self.sets[name] = self._read(f"validation.sets.{name}", component, tokenizer, rows)
        if world.rank == 0:
            recover_folder(output_dir / FOLDER)

    def _read(self, key: str, component: Component, tokenizer: Any, rows: int) -> MapDataset:
        """A held-out set; samples, or packs."""
        dataset = build_dataset(key, component, tokenizer, rows)
        check_targets(key, dataset, self._cfg.max_seq_len)
        dataset = self._first(dataset)
        if self._cfg.packed:
            return PackedDataset(dataset, self._cfg.max_seq_len, self._cfg.seed)
        return dataset

    def _first(self, dataset: MapDataset) -> MapDataset:
        """The samples of the first `max_batches` batches."""
        if self._config.max_batches is None:
            return dataset
        size = min(len(dataset), self._config.max_batches * self._batch_size)
        return Subset(dataset, range(size))  # type: ignore[arg-type,return-value]

    @property
    def metric(self) -> str:
        """The name of the set that decides, and of one of its numbers: "SET/NUMBER"; "SET": its
        loss."""
        return self._config.metric or next(iter(self._config.sets))

    @property
    def is_over(self) -> bool:
        """Whether patience is used up, which ends the run."""
        patience, progress = self._config.patience, self.progress
        if patience is None or not self.sets or progress["metric"] != self.metric:
            return False
        return bool(progress["waited"] >= patience)

    def result(self, save: Callable[[Path], None]) -> tuple[Callable[[Path], None], str]:
        """How to write what a run has trained, and words for it. Every rank must call it.

        A run that patience has ended gives its best state, a copy of `best`; any other run, or one
        without a best state, its last state by `save`.
        """
        best, progress = self._output_dir / FOLDER, self.progress
        kept = json_object(best / BEST_FILE).get("step", -1)  # an earlier run may have written it
        found = self._config.keep_best and kept == progress["best_step"]
        if not self._world.broadcast(self.is_over and found):
            return save, ""

        def copy(folder: Path) -> None:
            with self._world.same_error():
                if self._world.rank == 0:
                    try:
                        _copy(best, folder)
                    except OSError as error:
                        raise UserError(not_written(folder, error)) from None

        at = f"{progress['best']:.4g} at step {progress['best_step']}"
        return copy, f", the best: {self.metric} {at}"

    def steps(self, first_step: int) -> Iterator[int]:
        """The numbers of the updates after `first_step`, up to `total_steps` or until `is_over`;
        tells the watchdog of each."""
        for step in range(first_step + 1, self._total_steps + 1):
            if self.is_over:
                return
            at_step(step)
            yield step

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after update `step`; 0 means before the first."""
        if not self.sets or step == self.progress["step"]:
            return False
        if step == 0:
            return self._config.at_start
        return step % self._config.eval_every == 0 or step == self._total_steps

    def run(
        self, step: int, model: nn.Module, log: RunLog, meter: Meter, save: Callable[[Path], None]
    ) -> None:
        """Evaluates all sets if an evaluation is due; keeps the state if its loss is the lowest.

        The model is not changed. If the state cannot be written (a full disk), a warning is
        printed, and the best is the earlier one.

        Args:
            step: the last update.
            log: gets `validation/<set>/<number>` of every set; see `_numbers`.
            meter: leaves out the time of the evaluation.
            save: writes the model's state to a folder; every rank calls it. It raises UserError
                on every rank or on none.

        Raises:
            UserError: a set has no target tokens.
        """
        if self.is_due(step):
            with meter.paused("validation"):
                self._run(step, model, log, save)
        if self.is_over and step < self._total_steps:
            log.say(
                f"validation: {self.metric} has not improved in {self.progress['waited']} "
                f"evaluations; the run ends after step {step}"
            )

    def _run(self, step: int, model: nn.Module, log: RunLog, save: Callable[[Path], None]) -> None:
        numbers = {name: self._numbers(name, model) for name in self.sets}
        name, _, number = self.metric.partition("/")
        known = self.progress["data"] in (None, self._data)  # None: of an earlier version
        if self.progress["metric"] != self.metric or not known:  # a resumed run may use another set
            if self.progress["best_step"] is not None:
                log.say(f"validation: '{self.metric}' is not what decided before; no best is known")
            self.progress.update(_NO_EVALUATION, metric=self.metric)
        self.progress["data"] = self._data
        earlier = {key: self.progress[key] for key in ("best", "best_step")}
        value = numbers[name].get(number or "loss", math.nan)  # no margin of good answers alone
        better = self._update_progress(step, value, -1 if number else 1)
        metrics = {
            f"validation/{name}/{number}": value
            for name, of_set in numbers.items()
            for number, value in of_set.items()
        }
        metrics |= self._scores(model)
        log.log_apart(step, metrics, self._sentence(step, numbers, value))
        if better and self._config.keep_best:
            self._keep(step, numbers, save, earlier)
        elif self._config.keep_best and self._world.rank == 0:
            _copy_best(self.progress, self._output_dir)

    @cached_property
    def _data(self) -> str:
        """What tells the samples of the set that decides from others."""
        decides = self.sets[self.metric.partition("/")[0]]
        return f"{len(decides)} {sampled_tokens(decides)}"

    def _numbers(self, name: str, model: nn.Module) -> dict[str, float]:
        """What is logged of a set: `loss`, the mean over target tokens in nats, and `perplexity`.

        Every rank must call it.
        """
        batches = held_out_batches(
            self.sets[name],
            self._batch_size,
            self._world,
            self._pad_id,
            self._cfg.max_seq_len,
            fill_rows=self._cfg.compile,
            context_parallel=self._cfg.sharding.context_parallel,
        )
        total, targets = held_out_loss(model, batches, self._world)
        if targets == 0:
            raise UserError(
                f"validation.sets.{name}: no target token within max_seq_len "
                f"{self._cfg.max_seq_len}; expected at least one"
            )
        loss = total / targets
        return {"loss": loss, "perplexity": perplexity(loss)}

    def _scores(self, model: nn.Module) -> dict[str, float]:
        """What the tasks of lm-eval give: `validation/<task>/<metric>`. Every rank must call it."""
        if not self._tasks:
            return {}
        scores, _ = run_tasks(
            self._config.lm_eval,
            self._tasks,
            cast(AnyDecoder, model),
            self._tokenizer,
            set(),
            self._world,
            self._batch_size,
        )
        return {f"validation/{score.task}/{score.metric}": score.value for score in scores}

    def _update_progress(self, step: int, value: float, sign: int) -> bool:
        """Updates `progress`; returns whether `value` is the best so far, which NaN never is.

        Args:
            sign: 1 if the lowest value is the best, -1 if the highest is.
        """
        progress = self.progress
        best = math.inf if progress["best"] is None else sign * progress["best"]
        better = sign * value < best
        if better:
            progress.update(best=value, best_step=step)
        progress.update(step=step, waited=0 if better else progress["waited"] + 1)
        return better

    def _words(self, numbers: dict[str, float]) -> str:
        """The numbers of a set in a line."""
        return f"loss {numbers['loss']:.4g} (perplexity {numbers['perplexity']:.4g})"

    def _sentence(self, step: int, numbers: dict[str, dict[str, float]], value: float) -> str:
        parts = (f"{name} {self._words(of_set)}" for name, of_set in numbers.items())
        best = self.progress["best_step"]
        which = "the best so far" if best == step else f"the best was step {best}"
        if not math.isfinite(value):
            before = "there is no best yet" if best is None else which
            which = f"{self.metric} is not finite and never the best; {before}"
        return f"validation at step {step}: {', '.join(parts)}; {which}"

    def _keep(
        self,
        step: int,
        numbers: dict[str, dict[str, float]],
        save: Callable[[Path], None],
        earlier: dict[str, Any],
    ) -> None:
        """Keeps the state in `best`, or goes back to the `earlier` best if it cannot be written."""
        partial, failed = self._output_dir / f"{FOLDER}{PARTIAL}", None
        if self._world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        self._world.sum(0)  # a barrier: any rank may write in `save`
        try:
            save(partial)
            if self._world.rank == 0:
                losses = {name: of_set["loss"] for name, of_set in numbers.items()}
                best = {"step": step, "metric": self.metric, "loss": losses}
                write_json(partial / BEST_FILE, best)
                replace_folder(partial, self._output_dir / FOLDER)
        except (UserError, OSError) as error:
            failed = str(error) if isinstance(error, UserError) else not_written(partial, error)
        failed = self._world.broadcast(failed)
        if failed is None:
            self.progress["kept_in"] = str((self._output_dir / FOLDER).resolve())
            return
        self.progress.update(earlier)
        if self._world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            recover_folder(self._output_dir / FOLDER)
            kept = f"the best is still step {earlier['best_step']}"
            kept = "no best state is kept" if earlier["best_step"] is None else kept
            _warn(f"{failed}; training goes on, and {kept}")


def _warn(text: str) -> None:
    warn(f"validation: {text}")


def _copy(source: Path, folder: Path) -> None:
    """Puts a copy of a folder in the place of `folder`; links where the disk has them. Raises
    OSError; nothing of the copy is left then."""
    partial = folder.with_name(folder.name + PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial, copy_function=_link)
        replace_folder(partial, folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _copy_best(progress: dict[str, Any], output_dir: Path) -> None:
    """Copies the best state of the run that this one resumes, if it lies in another folder and
    still exists."""
    source = Path(progress["kept_in"] or "")
    if (output_dir / FOLDER).exists() or not (source / BEST_FILE).is_file():
        return
    try:
        if json.loads((source / BEST_FILE).read_bytes())["step"] == progress["best_step"]:
            _copy(source, output_dir / FOLDER)
    except (OSError, ValueError, KeyError, TypeError) as error:  # a full disk, a damaged file
        _warn(f"'{source}' cannot be copied to '{output_dir / FOLDER}': {why(error)}")
