"""What a teacher says, written once: its most likely tokens at every target of the rows.

    <folder>/facts.json             of which teacher, rows and number of tokens they are
    <folder>/NUMBER_RANK.safetensors
        items   int64 `[samples]`, indices of samples in the dataset
        counts  int64 `[samples]`, targets of each
        ids     int32 `[targets, top_k]`, the teacher's most likely tokens, the first one first
        logprobs  fp32 `[targets, top_k]`, their log-probabilities among all tokens

Every rank writes the samples of its own micro-batches, some megabytes or a minute at a time, and
reads any: ranks and batches may be others later, and a run that is stopped goes on from there. Of a
file only the rows of a micro-batch are read. A folder holds one teacher's words on one dataset; a
run with others is refused. Fewer tokens than were kept can be asked for.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qfsdp.checkpoint.compatibility import config_settings
from qfsdp.checkpoint.tensor_file import save_tensors, tensors_digest
from qfsdp.common.errors import UserError
from qfsdp.common.files import whole_file, why, write_text, writing
from qfsdp.common.progress import moved
from qfsdp.common.sealed import Damaged, read_sealed, sealed_json
from qfsdp.common.terminal import warn
from qfsdp.data.batch import IGNORE_INDEX, Batch, to_device
from qfsdp.data.loader import StepLoader, tokens_and_labels
from qfsdp.data.tokenized_dataset import RowProgress
from qfsdp.distributed.world import World

KEY, FOLDER, FACTS = "teacher.logprobs", "teacher_logprobs", "facts.json"
NAMES = ("items", "counts", "ids", "logprobs")
PART_BYTES, SAVE_EVERY_S = 1 << 26, 60.0

MostLikely = Callable[[Batch], tuple[Tensor, Tensor]]
"""A micro-batch -> ids int32 and log-probabilities fp32 of its targets, `[n, top_k]`."""


def folder_of(cfg: Any) -> Path:
    """Where a config's log-probabilities are kept."""
    where = cfg.teacher.logprobs
    return Path(Path(cfg.output_dir) / FOLDER if where == "cache" else where).expanduser()


def shared_tokens(cfg: Any) -> int:
    """Rows of the vocabulary that student and teacher both have."""
    return min(model.any_config().vocab_size for model in (cfg.model, cfg.teacher.model))


def check_cache(cfg: Any) -> None:
    """Checks `teacher.logprobs` of a config. Raises UserError: it cannot be had, or the folder has
    those of another teacher, or too few tokens."""
    if (where := cfg.teacher.logprobs) == "live":
        return
    if cfg.distillation.top_k is None:
        raise UserError(f"{KEY}: {where}; expected live, as distillation.top_k is null")
    if cfg.dataset.kwargs.get("streaming") is True:
        raise UserError(f"{KEY}: {where}; expected live with dataset.streaming: true")
    if (folder_of(cfg) / FACTS).exists():
        _compare(folder_of(cfg), _facts(cfg))


def _facts(cfg: Any) -> dict[str, Any]:
    """What decides the numbers, but the rows."""
    settings = config_settings(cfg)
    teacher = {key: str(value) for key, value in settings.items() if key.startswith("teacher.")}
    return {"teacher": teacher, "tokens": shared_tokens(cfg), "top_k": cfg.distillation.top_k}


def _compare(folder: Path, mine: dict[str, Any]) -> None:
    """Compares the facts of a folder with those of a run. Raises UserError: others."""
    try:
        kept = read_sealed(folder / FACTS)
    except Damaged as error:
        raise UserError(f"{KEY}: '{folder}' is damaged: {error}; expected another folder") from None
    other = "expected the same, or another folder"
    for key in sorted(mine["teacher"].keys() | kept["teacher"].keys()):
        was, now = (of["teacher"].get(key, "null") for of in (kept, mine))
        if was != now:
            found = f"is of another teacher ({key}: was {was}, is {now})"
            raise UserError(f"{KEY}: '{folder}' {found}; {other}")
    if kept["tokens"] != mine["tokens"]:
        found = f"is of {kept['tokens']} tokens of the vocabulary, not {mine['tokens']}"
        raise UserError(f"{KEY}: '{folder}' {found}; {other}")
    if kept["top_k"] < mine["top_k"]:
        found = f"distillation.top_k: {mine['top_k']}; expected at most {kept['top_k']}"
        raise UserError(f"{found}, as many as {KEY} '{folder}' has, or another folder")
    if kept["rows"] != mine.get("rows", kept["rows"]):
        found = "is of other rows (dataset, tokenizer or max_seq_len)"
        raise UserError(f"{KEY}: '{folder}' {found}; {other}")


class TeacherCache:
    """The files of one teacher and dataset.

    Args:
        cfg: of a recipe with a teacher; checked.
        loader: of the run.

    Raises:
        UserError: the folder has those of other rows, or cannot be written.
    """

    def __init__(self, cfg: Any, loader: StepLoader, world: World) -> None:
        self._folder, self._top_k = folder_of(cfg), cfg.distillation.top_k
        self._loader, self._world, self._max_seq_len = loader, world, cfg.max_seq_len
        with world.same_error():
            if world.rank == 0:
                self._agree(_facts(cfg) | {"rows": _digest_of_rows(loader, cfg.max_seq_len)})
        kept = world.broadcast(read_sealed(self._folder / FACTS) if world.rank == 0 else {})
        self.top_k, self.tokens = kept["top_k"], kept["tokens"]  # of what is written
        self._index()

    def _agree(self, facts: dict[str, Any]) -> None:
        """Compares the folder's facts with those of this run, or writes them."""
        if (self._folder / FACTS).exists():
            _compare(self._folder, facts)
            return
        with writing(KEY, self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_text(self._folder / FACTS, sealed_json(facts))

    def _index(self) -> None:
        """Finds out which file has which sample, on every rank. A damaged one costs a warning."""
        names = self._world.broadcast(sorted(path.name for path in self._folder.glob("*_*.safe*")))
        mine = names[self._world.rank :: self._world.size]
        bad = sum(self._world.gather([name for name in mine if not self._is_whole(name)]), [])
        self._number = max((int(name.partition("_")[0]) + 1 for name in names), default=0)
        with self._world.same_error():
            self._files = [self._opened(name) for name in names if name not in bad]
        for name in bad if self._world.rank == 0 else ():
            with suppress(OSError):
                (self._folder / name).unlink()
        count = len(_unpacked(self._loader))
        self._file = np.full(count, -1, np.int32)
        self._begin, self._count = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for number, file in enumerate(self._files):
            items, counts = (file.get_tensor(name).numpy() for name in ("items", "counts"))
            self._file[items], self._count[items] = number, counts
            self._begin[items] = np.cumsum(counts) - counts

    def _opened(self, name: str) -> Any:
        try:
            return safe_open(self._folder / name, framework="pt")
        except (OSError, SafetensorError) as error:
            found = f"'{self._folder / name}' cannot be read: {why(error)}"
            raise UserError(f"{KEY}: {found}; expected a folder that all machines see") from None

    def _is_whole(self, name: str) -> bool:
        path = self._folder / name
        try:
            with safe_open(path, framework="pt") as file:
                digest = (file.metadata() or {}).get("sha256")
                if digest == tensors_digest(*(file.get_tensor(name) for name in NAMES)):
                    return True
            reason: Any = "its content has changed (SHA-256)"
        except (OSError, SafetensorError) as error:
            reason = why(error) if isinstance(error, OSError) else error
        warn(f"{KEY}: '{path}' cannot be used: {reason}; computing them again")
        return False

    def lacks(self, steps: int) -> bool:
        """Whether samples of the first `steps` steps are not written yet. Every rank must call
        it."""
        if self._file.min(initial=0) >= 0:
            return False
        steps = min(steps, self._loader.steps_per_epoch)
        return any(self._missing(self._loader.step(step)) for step in range(steps))

    def _missing(self, batches: list[Batch]) -> bool:
        return bool(self._world.sum(sum(self._file[_items(b)].min(initial=0) < 0 for b in batches)))

    def fill(self, say: MostLikely, steps: int) -> None:
        """Computes and writes what the first `steps` steps need. Every rank must call it."""
        steps = min(steps, self._loader.steps_per_epoch)
        rows = self._loader.global_batch_size
        progress = RowProgress("teacher's log-probabilities", steps * rows)
        part, since = _Part(), time.monotonic()
        with progress if self._world.rank == 0 else nullcontext():
            for step in range(steps):
                batches = self._loader.step(step)
                for batch in batches if self._missing(batches) else ():
                    items = _items(batch)
                    said = (of.cpu() for of in say(batch.to(self._world.device)))
                    part.add(items, list(map(self._targets, items)), self._file, *said)
                with self._world.same_error():
                    is_due = part.bytes > PART_BYTES or time.monotonic() - since > SAVE_EVERY_S
                    if part.items and (is_due or step == steps - 1):
                        self._write(part)
                        part, since = _Part(), time.monotonic()
                if self._world.rank == 0:
                    progress.advance(rows)
                moved()
        self._index()

    def _targets(self, item: int) -> int:
        """The number of targets of a sample."""
        _, labels = tokens_and_labels(_unpacked(self._loader)[item], self._max_seq_len)
        return int((labels[1:] != IGNORE_INDEX).sum())

    def _write(self, part: _Part) -> None:
        path = self._folder / f"{self._number:06d}_{self._world.rank:05d}.safetensors"
        self._number += 1
        tensors = part.tensors()
        with writing(KEY, path), whole_file(path) as unfinished:
            metadata = {"sha256": tensors_digest(*(tensors[name] for name in NAMES))}
            save_tensors(tensors, unfinished, metadata)

    def of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Ids int32 and log-probabilities fp32 of a micro-batch's targets, `[n, top_k]`, on its
        device."""
        ids = [torch.empty(0, self._top_k, dtype=torch.int32)]
        logprobs = [torch.empty(0, self._top_k)]
        for item in _items(batch):
            file, begin = self._files[self._file[item]], int(self._begin[item])
            rows = slice(begin, begin + int(self._count[item]))
            for name, into in (("ids", ids), ("logprobs", logprobs)):
                into.append(file.get_slice(name)[rows, : self._top_k])
        device = batch.tokens.device
        return to_device(torch.cat(ids), device), to_device(torch.cat(logprobs), device)


class _Part:
    """What is to be written as one file."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.bytes = 0
        self._counts: list[int] = []
        self._ids: list[Tensor] = []
        self._logprobs: list[Tensor] = []

    def add(
        self, items: list[int], counts: list[int], known: Any, ids: Tensor, logprobs: Tensor
    ) -> None:
        """The samples of a micro-batch that are not written yet, with the targets of each."""
        parts = zip(items, counts, ids.split(counts), logprobs.split(counts), strict=True)
        for item, count, of_ids, of_logprobs in parts:
            if known[item] < 0:
                self.items.append(item)
                self._counts.append(count)
                self._ids.append(of_ids)
                self._logprobs.append(of_logprobs)
                self.bytes += of_ids.nbytes + of_logprobs.nbytes

    def tensors(self) -> dict[str, Tensor]:
        numbers = torch.tensor(self.items), torch.tensor(self._counts)
        return dict(zip(NAMES, (*numbers, torch.cat(self._ids), torch.cat(self._logprobs)),
                        strict=True))  # fmt: skip


def _items(batch: Batch) -> list[int]:
    """The samples of a micro-batch, in the order of its tokens."""
    return [item for row in batch.samples for item in row]


def _unpacked(loader: StepLoader) -> Any:
    dataset: Any = loader.dataset
    return dataset.dataset if hasattr(dataset, "empty_pack") else dataset


def _digest_of_rows(loader: StepLoader, max_seq_len: int) -> str:
    """A hash of the tokens and labels of all samples, as they are trained."""
    found, dataset = hashlib.sha256(), _unpacked(loader)
    for index in range(len(dataset)):
        for tensor in tokens_and_labels(dataset[index], max_seq_len):
            found.update(f"{len(tensor)} ".encode())
            found.update(tensor.numpy().tobytes())
        moved()
    return found.hexdigest()
