"""The reference's log-probabilities, computed once, ahead of training.

    <folder>/<key>.safetensors    fp32 `[items, 2]`: chosen and rejected, or an answer with a label
                                  and its mismatch; NaN where no step has needed them yet

The key is a hash of what decides them: the base, its 4-bit format and dtype, the adapters if they
are part of the reference, and all tokens of the data. They are computed in the batches of the first
epoch. So a run that computes them and one that reads them have the same numbers, and before the
first update those of the policy, to the last bit. In other batches (later epochs, another number of
ranks) sums may be rounded differently.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from qfsdp.checkpoint.compatibility import config_settings
from qfsdp.checkpoint.tensor_file import save_tensors, tensors_digest
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.common.files import whole_file, why
from qfsdp.common.progress import moved
from qfsdp.common.terminal import warn
from qfsdp.data.preferences.batch import PairBatch
from qfsdp.data.preferences.loader import PreferenceLoader
from qfsdp.data.tokenized_dataset import RowProgress
from qfsdp.distributed.world import World
from qfsdp.evaluation.inference_model import evaluating
from qfsdp.training.preference import Objective

SAVE_EVERY_S = 60.0
FOLDER = "reference_logprobs"
TENSOR = "logprobs"


def cached_logprobs(
    cfg: Any,
    loader: PreferenceLoader,
    model: nn.Module,
    objective: Objective,
    world: World,
    steps: int,
) -> Tensor | None:
    """The reference's log-probabilities for `PreferenceLoader.reference`, read or computed.

    Every rank must call it. Rank 0 reads and writes; what is computed is written every minute, so
    that a run that is stopped meanwhile goes on from there. A file that is damaged, or that cannot
    be written, costs a warning. One line says how far it is.

    Args:
        cfg: of a recipe with the keys `reference` and `reference_logprobs`.
        objective: computes those of a batch.
        steps: of the run; what they need is computed.

    Returns:
        fp32 `[items, 2]`; None with `reference_logprobs: live` or without a reference.
    """
    if cfg.reference == "none" or cfg.reference_logprobs == "live":
        return None
    store = _Store(cfg, loader, world)
    known = store.read()
    steps = min(steps, loader.steps_per_epoch)
    if not known.isnan().any():
        return known
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        progress = RowProgress("reference log-probabilities", steps * loader.global_batch_size)
        if world.rank == 0:
            stack.enter_context(progress)
        for step in range(steps):
            batches = loader.step(step)
            items = [loader.items_of(batch) for batch in batches]
            missing = sum(int(known[part].isnan().any()) for part in items)
            found: list[tuple[list[int], Any]] = []
            if world.sum(missing):
                found = [
                    (part, reference_of_batch(model, objective, batch, world).tolist())
                    for part, batch in zip(items, batches, strict=True)
                ]
            for of_rank in world.gather(found):
                for part, values in of_rank:
                    known[part] = torch.tensor(values, dtype=torch.float32).view(-1, 2)
            if world.rank == 0:
                progress.advance(loader.global_batch_size)
            moved()
            store.write(known, last=step == steps - 1)
    return known


def reference_of_batch(
    model: nn.Module, objective: Objective, batch: PairBatch, world: World
) -> Tensor:
    """Both numbers of every item of a batch, fp32 `[items, 2]` on the CPU; see the module."""
    found = []
    for part in (batch, batch.mismatched):
        if part is not None:
            logprobs = objective.reference(model, part.to(world.device))
            assert logprobs is not None
            found.append(logprobs.cpu())
    return torch.stack(found, 1) if batch.mismatched is not None else found[0].view(-1, 2)


class _Store:
    """The file of one reference and dataset."""

    def __init__(self, cfg: Any, loader: PreferenceLoader, world: World) -> None:
        self._items, self._world = len(loader.items), world
        folder = cfg.reference_logprobs
        if folder == "cache":
            folder = Path(cfg.output_dir) / FOLDER
        self._folder = Path(folder).expanduser()
        self._key: str = world.broadcast(_key(cfg, loader) if world.rank == 0 else "")
        self._path = self._folder / f"{self._key[:32]}.safetensors"
        self._written = time.monotonic()

    def read(self) -> Tensor:
        """What the file has; NaN for the rest, on every rank."""
        known: list[list[float]] | None = None
        if self._world.rank == 0 and self._path.exists():
            try:
                known = self._read().tolist()
            except (OSError, SafetensorError, ValueError) as error:
                reason = why(error) if isinstance(error, OSError) else error
                text = f"cannot be used: {reason}; computing them again"
                _warn(f"'{self._path}' {text}")
        known = self._world.broadcast(known)
        if known is None:
            return torch.full((self._items, 2), torch.nan)
        return torch.tensor(known, dtype=torch.float32)

    def _read(self) -> Tensor:
        with safe_open(self._path, framework="pt") as file:
            kept, known = file.metadata() or {}, file.get_tensor(TENSOR)
        if kept.get("key") != self._key or known.shape != (self._items, 2):
            raise ValueError("it is of another reference or other data")
        if kept.get("sha256") != tensors_digest(known):
            raise ValueError("its content has changed (SHA-256)")
        found: Tensor = known
        return found

    def write(self, known: Tensor, last: bool) -> None:
        """Writes the file on rank 0, if it is time."""
        if self._world.rank or not (last or time.monotonic() - self._written > SAVE_EVERY_S):
            return
        self._written = time.monotonic()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with whole_file(self._path) as partial:
                metadata = {"key": self._key, "sha256": tensors_digest(known)}
                save_tensors({TENSOR: known}, partial, metadata)
        except (OSError, SafetensorError) as error:
            text = f"cannot be written: {why(error)}; they are computed again at the next start"
            _warn(f"'{self._path}' {text}")


def _warn(text: str) -> None:
    warn(f"reference_logprobs: {text}")


def _key(cfg: Any, loader: PreferenceLoader) -> str:
    """A hash of everything that decides the numbers, but rounding."""
    # With PiSSA and OLoRA the reference is what is left of the base, quantized, and the product.
    of_start = cfg.reference == "start" or cfg.adapter.changes_base
    sections = ["quantization", "model"] + ["adapter", "seed"] * of_start
    settings = {
        key: value
        for key, value in config_settings(cfg).items()
        if key.replace(" ", ".").partition(".")[0] in sections
    }
    formats = sorted(ModelWeights(cfg.model.folder).formats.items())
    parts = [cfg.reference, settings, formats, loader.items_digest]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
