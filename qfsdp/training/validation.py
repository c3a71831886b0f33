"""Held-out losses during training: one curve per set, the best state, early stopping.

<output_dir>/best/
    ...          files of the recipe (adapters) from the step with the lowest loss
    best.json    that step, and the losses of all sets at it
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn
from torch.utils.data import Subset

from qfsdp.checkpoint.resume import sync_folder
from qfsdp.cli.component import Component
from qfsdp.cli.errors import InvalidField, UserError
from qfsdp.data import PackedDataset, build_dataset
from qfsdp.data.loader import MapDataset
from qfsdp.distributed.world import World
from qfsdp.evaluation.heldout_loss import held_out_batches, held_out_loss
from qfsdp.training.metrics import RunLog
from qfsdp.training.throughput import Meter

FOLDER = "best"
BEST_FILE = "best.json"
PARTIAL, REPLACED = "best.partial", "best.replaced"
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
        metric: name of the set whose loss decides; null: the first set.
        patience: end the run after this many evaluations without a lower loss; null: never.
    """

    sets: dict[str, Component] = field(default_factory=dict)
    eval_every: int = 100
    batch_size: int | None = None
    max_batches: int | None = None
    at_start: bool = False
    keep_best: bool = True
    metric: str | None = None
    patience: int | None = None

    def check(self) -> None:
        if self.eval_every < 1:
            raise InvalidField("eval_every", self.eval_every, "an integer of at least 1")
        for name in ("batch_size", "max_batches", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidField(name, value, "an integer of at least 1, or null")
        for name in self.sets:
            if not re.fullmatch(r"[\w.-]+", name):  # it is part of a metric's name
                raise InvalidField("sets", name, "names of letters, digits, '_', '-' and '.'")
        if self.metric is not None and self.metric not in self.sets:
            raise InvalidField("metric", self.metric, f"one of {', '.join(self.sets)}, or null")


class Validation:
    """Evaluates the held-out sets of one run. Every rank makes one and calls the same methods.

    The sets are read at once, so that mistakes in them are found before a model is loaded.

    Args:
        cfg: a recipe's config: section `validation`, and the keys that shape batches.
        output_dir: of the run.
        total_steps: of the run.

    Attributes:
        progress: state that a resumed run continues from (`TrainState.progress`): "step", the last
            evaluated step; "metric", the set that decides; "best", its lowest loss; "best_step" and
            "kept_in", the step and the folder of that loss; "waited", evaluations since then.
    """

    def __init__(self, cfg: Any, world: World, output_dir: Path, total_steps: int) -> None:
        self._config: ValidationConfig = cfg.validation
        self._world, self._output_dir = world, output_dir
        self._batch_size: int = self._config.batch_size or cfg.batch_size
        self._max_seq_len: int = cfg.max_seq_len
        self._fill_rows: bool = cfg.compile
        self._sets: dict[str, MapDataset] = {}
        self._total_steps = total_steps
        self.progress: dict[str, Any] = {"step": None} | _NO_EVALUATION
        if not self._config.sets:
            return
        tokenizer = cfg.tokenizer.build()
        self._pad_id: int = tokenizer.pad_id
        for name, component in self._config.sets.items():
            dataset = build_dataset(f"validation.sets.{name}", component, tokenizer)
            if self._config.max_batches is not None:
                size = min(len(dataset), self._config.max_batches * self._batch_size)
                dataset = Subset(dataset, range(size))
            if cfg.packed:
                dataset = PackedDataset(dataset, cfg.max_seq_len, cfg.seed)
            self._sets[name] = dataset
        if world.rank == 0:
            _recover(output_dir)

    @property
    def metric(self) -> str:
        """The name of the set that decides."""
        return self._config.metric or next(iter(self._sets))

    @property
    def is_over(self) -> bool:
        """Whether patience is used up, which ends the run."""
        patience, progress = self._config.patience, self.progress
        if patience is None or not self._sets or progress["metric"] != self.metric:
            return False
        return bool(progress["waited"] >= patience)

    def steps(self, first_step: int) -> Iterator[int]:
        """The numbers of the updates after `first_step`, up to `total_steps` or until `is_over`."""
        for step in range(first_step + 1, self._total_steps + 1):
            if self.is_over:
                return
            yield step

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after update `step`; 0 means before the first."""
        if not self._sets or step == self.progress["step"]:
            return False
        if step == 0:
            return self._config.at_start
        return step % self._config.eval_every == 0 or step == self._total_steps

    def run(
        self,
        step: int,
        model: nn.Module,
        log: RunLog,
        meter: Meter,
        save: Callable[[Path], None],
    ) -> None:
        """Evaluates all sets if an evaluation is due; keeps the state if its loss is the lowest.

        The model is not changed.

        Args:
            step: the last update.
            log: gets `validation/<set>/loss` (mean over target tokens, in nats) and `perplexity`.
            meter: leaves out the time of the evaluation.
            save: writes the model's state to a folder; every rank calls it.

        Raises:
            UserError: a set has no target tokens, or the state cannot be written.
        """
        if self.is_due(step):
            with meter.paused("validation"):
                self._run(step, model, log, save)

    def _run(self, step: int, model: nn.Module, log: RunLog, save: Callable[[Path], None]) -> None:
        losses = {name: self._loss(name, model) for name in self._sets}
        lower = self._update_progress(step, losses[self.metric])
        metrics = {}
        for name, loss in losses.items():
            metrics[f"validation/{name}/loss"] = loss
            metrics[f"validation/{name}/perplexity"] = _perplexity(loss)
        log.log_apart(step, metrics, self._sentence(step, losses))
        if lower and self._config.keep_best:
            self._keep(step, losses, save)
        elif self._config.keep_best and self._world.rank == 0:
            _copy_best(self.progress, self._output_dir)
        if self.is_over and step < self._total_steps:
            log.say(
                f"validation: {self.metric} has not improved in {self.progress['waited']} "
                f"evaluations; the run ends after step {step}"
            )

    def _loss(self, name: str, model: nn.Module) -> float:
        batches = held_out_batches(
            self._sets[name],
            self._batch_size,
            self._world,
            self._pad_id,
            self._max_seq_len,
            fill_rows=self._fill_rows,
        )
        total, targets = held_out_loss(model, batches, self._world)
        if targets == 0:
            raise UserError(
                f"validation.sets.{name}: no target token within max_seq_len {self._max_seq_len}; "
                "expected at least one"
            )
        return total / targets

    def _update_progress(self, step: int, loss: float) -> bool:
        """Updates `progress`; returns whether `loss` is the lowest so far, which NaN never is."""
        progress = self.progress
        if progress["metric"] != self.metric:  # a resumed run may use another set
            progress.update(_NO_EVALUATION, metric=self.metric)
        lower = loss < (math.inf if progress["best"] is None else progress["best"])
        if lower:
            progress.update(best=loss, best_step=step)
        progress.update(step=step, waited=0 if lower else progress["waited"] + 1)
        return lower

    def _sentence(self, step: int, losses: dict[str, float]) -> str:
        parts = (f"{n} loss {x:.4g} (perplexity {_perplexity(x):.4g})" for n, x in losses.items())
        best = self.progress["best_step"]
        which = "the best so far" if best == step else f"the best was step {best}"
        return f"validation at step {step}: {', '.join(parts)}; {which}"

    def _keep(self, step: int, losses: dict[str, float], save: Callable[[Path], None]) -> None:
        partial = self._output_dir / PARTIAL
        try:
            if self._world.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            self._world.sum(0)  # a barrier: any rank may write in `save`
            save(partial)
            self._world.sum(0)
            if self._world.rank == 0:
                best = {"step": step, "metric": self.metric, "loss": losses}
                (partial / BEST_FILE).write_text(json.dumps(best, indent=2) + "\n")
                _replace(partial, self._output_dir)
            self.progress["kept_in"] = str((self._output_dir / FOLDER).resolve())
        except (OSError, SafetensorError) as error:
            folder = self._output_dir / FOLDER
            raise UserError(f"validation: '{folder}' cannot be written: {error}") from None


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _replace(partial: Path, output_dir: Path) -> None:
    """Renames `partial` to `best`. At any time `best` or `best.replaced` is complete."""
    sync_folder(partial)
    best, replaced = output_dir / FOLDER, output_dir / REPLACED
    if best.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        best.rename(replaced)
    partial.rename(best)
    shutil.rmtree(replaced, ignore_errors=True)


def _copy_best(progress: dict[str, Any], output_dir: Path) -> None:
    """Copies the best state of the run that this one resumes, if it lies in another folder and
    still exists."""
    source = Path(progress["kept_in"] or "")
    if (output_dir / FOLDER).exists() or not (source / BEST_FILE).is_file():
        return
    if json.loads((source / BEST_FILE).read_text())["step"] == progress["best_step"]:
        partial = output_dir / PARTIAL
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial)
        _replace(partial, output_dir)


def _recover(output_dir: Path) -> None:
    """Repairs the folders after a run that was killed in `_replace`."""
    best, replaced = output_dir / FOLDER, output_dir / REPLACED
    if replaced.exists() and not best.exists():
        replaced.rename(best)
