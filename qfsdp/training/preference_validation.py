"""Held-out preferences during training: loss, rewards, and how often the better answer wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from qfsdp.common.errors import UserError
from qfsdp.common.progress import moved
from qfsdp.config.component import Component
from qfsdp.data.loader import MapDataset
from qfsdp.data.preferences.loader import PreferenceLoader
from qfsdp.data.preferences.tokenized import RowLimit, build_preferences, is_paired
from qfsdp.distributed.world import World
from qfsdp.evaluation.heldout_loss import in_order
from qfsdp.evaluation.inference_model import evaluating
from qfsdp.training.preference import Objective, sequence_logprobs, step_options
from qfsdp.training.reference_cache import reference_of_batch
from qfsdp.training.scores import last_scores
from qfsdp.training.validation import Validation
from qfsdp.training.validation import ValidationConfig as ValidationConfig


class PreferenceValidation(Validation):
    """`Validation` on sets of preferences. It logs what is logged of an update (`Update.metrics`).

    The reference's log-probabilities of the sets are computed once and kept in memory.
    """

    highest: tuple[str, ...] = ("rewards/accuracy", "rewards/margin")

    def __init__(self, cfg: Any, world: World, output_dir: Path, total_steps: int) -> None:
        (self._objective,) = step_options(cfg).values()
        self._loaders: dict[str, PreferenceLoader] = {}
        super().__init__(cfg, world, output_dir, total_steps)

    def _read(self, key: str, component: Component, tokenizer: Any, rows: int) -> MapDataset:
        first = self._config.max_batches and self._config.max_batches * self._batch_size
        limit = RowLimit.of(self._cfg)
        head = getattr(self._cfg, "head", None)
        dataset: MapDataset = build_preferences(
            key, component, tokenizer, rows, limit, first, head and head.classes
        )
        if head is not None:
            return dataset
        try:
            Objective(self._cfg.loss, self._cfg.reference, is_paired(dataset))
        except UserError as error:
            raise UserError(f"{key}: {error}") from None
        name = key.rpartition(".")[2]
        if not is_paired(dataset) and self.metric == f"{name}/rewards/accuracy":
            found = f"validation.metric: '{self.metric}', and {key} has labels, not pairs"
            raise UserError(f"{found}; expected {name}, {name}/rewards/margin or null")
        return dataset

    def _loader(self, name: str, model: nn.Module) -> PreferenceLoader:
        """The loader of a set, with what the reference says of this rank's batches."""
        if name in self._loaders:
            return self._loaders[name]
        self._loaders[name] = loader = PreferenceLoader(
            self.sets[name],
            batch_size=self._batch_size,
            pad_id=self._pad_id,
            max_seq_len=self._cfg.max_seq_len,
            fill_rows=self._cfg.compile,
            context_parallel=self._cfg.sharding.context_parallel,
            **in_order(self._world),
        )
        if getattr(self._cfg, "reference", "none") != "none":
            known = torch.full((len(loader.items), 2), torch.nan)
            for batch in loader.epoch():
                reference = reference_of_batch(model, self._objective, batch, self._world)
                known[loader.items_of(batch)] = reference
                moved()
            loader.reference = known
        return loader

    def _numbers(self, name: str, model: nn.Module) -> dict[str, float]:
        with evaluating(model):
            batches = list(self._loader(name, model).epoch())
            update = self._objective.begin(model, batches, self._world)
            for batch in (batch.to(self._world.device) for batch in batches):
                logprobs = sequence_logprobs(model, batch)
                update.loss(batch, self._objective.reference(model, batch), logprobs)
                moved()
            return update.metrics()

    def _words(self, numbers: dict[str, float]) -> str:
        known = {name: numbers.get(f"rewards/{name}") for name in ("accuracy", "margin")}
        words = [f"{name} {value:.4g}" for name, value in known.items() if value is not None]
        return f"loss {numbers['loss']:.4g}" + (f" ({', '.join(words)})" if words else "")


class ScoreValidation(PreferenceValidation):
    """`Validation` of a reward model or classifier; logs what is logged of an update."""

    highest = ("accuracy",)

    def _numbers(self, name: str, model: nn.Module) -> dict[str, float]:
        with evaluating(model):
            batches = list(self._loader(name, model).epoch())
            update = self._objective.begin(batches, self._world)
            for batch in (batch.to(self._world.device) for batch in batches):
                update.loss(batch, last_scores(model, batch))
                moved()
            return update.metrics()

    def _words(self, numbers: dict[str, float]) -> str:
        return f"loss {numbers['loss']:.4g} (accuracy {numbers['accuracy']:.4g})"
