"""Tokenized preferences, cut to the length of a row, and how they are packed.

A prompt and its answer that are longer than `max_seq_len` lose the beginning of the prompt, down to
half of `max_seq_len`, and then the end of the answer. Both samples of an item keep the same prompt.
Packed, the two samples of a pair stand in one row, with one prompt for both (`shared_prompts`).
If they do not fit, both answers together are cut in that way, each to half of what is left.
The tokens on disk (`qfsdp.data.token_files`) are not cut.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from qfsdp.common.errors import UserError, speaks_for_all
from qfsdp.data.batch import IGNORE_INDEX
from qfsdp.data.components import build_dataset
from qfsdp.data.packing import PackedDataset
from qfsdp.data.reading import current
from qfsdp.data.row_tokenizer import TokenizedDataset

if TYPE_CHECKING:
    from qfsdp.config.component import Component

SAMPLES_AT_ONCE = 8192  # whose labels are looked at together

Integers = np.ndarray[Any, np.dtype[np.int64]]
Number = Literal["class", "margin"]

log = logging.getLogger("qfsdp")


@dataclass(frozen=True)
class RowLimit:
    """How long an item may be.

    Fields:
        max_seq_len: tokens of a row.
        packed: several items stand in a row, and both samples of a pair in the same one.
        seed: of the packs.
    """

    max_seq_len: int
    packed: bool = False
    seed: int = 0

    @classmethod
    def of(cls, cfg: Any) -> RowLimit:
        """That of a recipe's config."""
        return cls(cfg.max_seq_len, cfg.packed, cfg.seed)


class Preferences:
    """Pairs of samples with the same prompt, or samples with a label; a map-style dataset.

    Items have `tokens` and `labels`, lists of int, the two samples of a pair one after the other,
    `parts`, the length of each, and `shared`: so many tokens at the beginning of the second are
    those of the first, and a packed row leaves them out. Labels are -100 in the prompt, and not
    shifted. An item with a label has one part, `desirable` (bool) and `mismatched`, a sample of the
    same prompt with the answer of the next item, or of a later one if rows of one prompt are
    neighbours. KTO estimates the KL divergence with it (arXiv:2402.01306).

    Args:
        samples: of `PreferenceRows`: two for each pair, or one with a label for each row.
        paired: which of both.
        source: of the rows, for messages.
        number: what the first label of a sample is, besides the bool of an answer: the class of a
            text, or the bits of a pair's margin; None: neither.

    Attributes:
        samples, paired: as given.
        lengths: slots that each item takes in a row.
        desirable: the labels, bool, or of classes int; None: pairs.
        margins: of pairs that have one, fp32; None: none have.
        limit: to which items were cut; None outside of `build_preferences`.

    Raises:
        UserError: no item is left after the cuts, or a row is too short for any.
    """

    def __init__(
        self, samples: TokenizedDataset, paired: bool, source: str, number: Number | None = None
    ) -> None:
        self.samples, self.paired = samples, paired
        self.tokens, self.id_range = samples.tokens, samples.id_range
        ends = np.asarray(samples.ends, dtype=np.int64)
        begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        prompts = _prompt_lengths(samples, begins, ends)
        answers, places = ends - begins - prompts, begins + prompts
        self.desirable = self.margins = None
        numbers = np.ascontiguousarray(np.asarray(samples.labels)[begins])
        if number == "margin":
            self.margins = numbers[::2].view(np.float32)
        if not paired:
            self.desirable = numbers if number == "class" else numbers == 1
            # Of the same prompt, the answer of a later item: after the last comes the first.
            on = 1 if number == "class" else _to_another_prompt(self.tokens, begins, places)
            prompts, begins = np.stack([prompts, prompts], 1), np.stack([begins, begins], 1)
            answers = np.stack([answers, np.roll(answers, -on)], 1)
            places = np.stack([places, np.roll(places, -on)], 1)
        # Each int64 `[items, 2]`: where the prompt and the answer of both samples begin, and how
        # long they are.
        self._begins, self._prompts = begins.reshape(-1, 2), prompts.reshape(-1, 2)
        self._places, self._answers = places.reshape(-1, 2), answers.reshape(-1, 2)
        self.limit: RowLimit | None = current().limit
        self._one_prompt = np.zeros(len(self), dtype=bool)  # both samples have the same one
        if paired and self.limit is not None and self.limit.packed:
            self._one_prompt[:] = self._have_one_prompt()
        if self.limit is not None:
            self._cut(self.limit, source)
        both = self._prompts + self._answers
        self._shared = np.where(self._one_prompt, self._prompts[:, 0] - 1, 0)
        self.lengths = (both.sum(1) - self._shared if paired else both.max(1)).tolist()

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]  # negative indices, and IndexError
        first, second = self._sample(index, 0), self._sample(index, 1)
        if self.desirable is not None:
            mismatched = {"tokens": second[0], "labels": second[1]}
            rest = {"desirable": self.desirable[index].item(), "mismatched": mismatched}
            return {"tokens": first[0], "labels": first[1], "parts": [len(first[0])]} | rest
        parts = [len(first[0]), len(second[0])]
        both = {"tokens": first[0] + second[0], "labels": first[1] + second[1], "parts": parts}
        margin = {} if self.margins is None else {"margin": self.margins[index].item()}
        return both | {"shared": int(self._shared[index])} | margin

    @property
    def digest(self) -> str:
        """A hash of the tokens and labels of all items, in their order."""
        found = hashlib.sha256(str(self.paired).encode())
        for array_ in (self.tokens, self.samples.labels):
            found.update(memoryview(array_).cast("B"))
        for place in (self._begins, self._prompts, self._places, self._answers):
            found.update(np.ascontiguousarray(place).tobytes())
        return found.hexdigest()

    def _sample(self, index: int, part: int) -> tuple[list[int], list[int]]:
        at = (index, part)
        prompt, answer = int(self._prompts[at]), int(self._answers[at])
        begin, place = int(self._begins[at]), int(self._places[at])
        asked: list[int] = self.tokens[begin : begin + prompt].tolist()
        said: list[int] = self.tokens[place : place + answer].tolist()
        labels: list[int] = self.samples.labels[place : place + answer].tolist()
        return asked + said, [IGNORE_INDEX] * prompt + labels

    def _cut(self, limit: RowLimit, source: str) -> None:
        """Cuts the items that are too long, and says how many; the class says how."""
        prompts, answers = self._prompts.max(1), self._answers.max(1)
        shared, one = limit.packed and self.paired, self._one_prompt
        if limit.max_seq_len < (4 if shared else 2):
            raise UserError(
                f"max_seq_len: {limit.max_seq_len}; expected at least {4 if shared else 2}"
            )
        # Slots for a prompt and its answer, or for one prompt and both answers. Its last token
        # stands twice.
        space = np.where(one, limit.max_seq_len - 1, limit.max_seq_len // (2 if shared else 1))
        answers = np.where(one, self._answers.sum(1), answers)
        total = (self._prompts + self._answers).sum(1)
        apart = total > limit.max_seq_len if shared else prompts + answers > space
        long = np.where(one, prompts + answers > space, apart)
        kept = np.where(long, np.minimum(prompts, np.maximum(space - answers, space // 2)), prompts)
        removed = np.minimum((prompts - kept)[:, None], self._prompts)
        most = np.maximum((space - kept) // np.where(one, 2, 1), 1)
        cut = (long & (answers > space - kept))[:, None] & (self._answers > most[:, None])
        self._begins, self._prompts = self._begins + removed, self._prompts - removed
        self._answers = np.where(cut, most[:, None], self._answers)
        changed = np.flatnonzero(cut.any(1)).tolist() if self.paired else []
        same = [i for i in changed if self._sample(i, 0) == self._sample(i, 1)]
        self._leave_out(same)
        if long.any():
            counts = (int(long.sum()), int((removed > 0).any(1).sum()), int(cut.any(1).sum()))
            self._tell(limit, source, counts, len(same))

    def _have_one_prompt(self) -> list[bool]:
        """Whether both prompts of each pair are the same. A million pairs take some 2 s."""
        ends, tokens = (self._begins + self._prompts).tolist(), self.tokens
        return [
            tokens[a:b].tobytes() == tokens[c:d].tobytes()
            for (a, c), (b, d) in zip(self._begins.tolist(), ends, strict=True)
        ]

    def _leave_out(self, items: list[int]) -> None:
        for name in ("_begins", "_prompts", "_places", "_answers", "_one_prompt", "margins"):
            if (values := getattr(self, name)) is not None:
                setattr(self, name, np.delete(values, items, axis=0))

    def _tell(self, limit: RowLimit, source: str, counts: tuple[int, int, int], same: int) -> None:
        """Logs what was cut; raises UserError if nothing is left."""
        items = "pairs" if self.paired else "samples"
        text = (
            f"{source}: {counts[0]} of {len(self) + same} {items} are longer than max_seq_len "
            f"{limit.max_seq_len}{' for both' * (limit.packed and self.paired)}: {counts[1]} "
            f"prompts lose their beginning, {counts[2]} {items} the end of an answer"
        )
        text += f"; {same} left out: their answers differ only after the cut" if same else ""
        if not len(self):
            raise UserError(f"dataset.source: {text}; expected a larger max_seq_len")
        if speaks_for_all():
            log.warning("%s", text)


class FirstItems:
    """The first `count` items of a dataset of `build_preferences`."""

    def __init__(self, dataset: Any, count: int) -> None:
        self._dataset, self._count = dataset, min(count, len(dataset))
        self.paired: bool = is_paired(dataset)
        self.lengths: list[int] = dataset.lengths[:count]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        item: Mapping[str, Any] = self._dataset[range(self._count)[index]]
        return item


class PackedPreferences(PackedDataset):
    """A dataset of packs of `Preferences`, the samples of an item in one row.

    Items are those of `PackedDataset`; of answers with a label with the keys `desirable`, a list of
    bool, and `mismatched`, a pack of the same items.
    """

    def __getitem__(self, index: int) -> dict[str, Any]:
        items = [self.dataset[item] for item in self.samples(index)]
        pack = _joined(items)
        if "desirable" in items[0]:
            pack["desirable"] = [item["desirable"] for item in items]
            pack["mismatched"] = _joined([item["mismatched"] for item in items])
        if any("margin" in item for item in items):
            pack["margin"] = [item.get("margin", 0.0) for item in items]
        return pack


def build_preferences(
    key: str,
    dataset: Component,
    tokenizer: Any,
    rows: int | None,
    limit: RowLimit,
    first: int | None = None,
    classes: int | None = None,
) -> Any:
    """Builds a dataset of preferences: `Preferences`, a mixture of them, or packs of either.

    Args:
        key, dataset, tokenizer, rows: as in `build_dataset`.
        limit: of its items.
        first: take only so many items.
        classes: of the head that is trained: 1 takes pairs, more take labels; None: no head is.

    Raises:
        UserError: the builder does, the dataset or a part of it has no preferences, some parts are
            pairs and others are not, all labels are equal, or the head needs other data.
    """
    most = min(limit.max_seq_len, getattr(tokenizer, "max_seq_len", None) or limit.max_seq_len)
    limited = replace(limit, max_seq_len=most)
    built = build_dataset(key, dataset, tokenizer, rows, limited)
    parts = getattr(built, "parts", {"": built})
    for name, part in parts.items():
        if not isinstance(part, Preferences):
            place = f"{key}.sets.{name}" if name else key
            raise UserError(
                f"{place}: {dataset.path if not name else 'a dataset'} without preferences; "
                "expected qfsdp.data.preference_dataset, kto_dataset or another of preferences"
            )
    kinds = {part.paired for part in parts.values()}
    if len(kinds) > 1:
        raise UserError(f"{key}.sets: pairs and answers with a label; expected only one of them")
    labelled = [part.desirable for part in parts.values() if not part.paired]
    labels = {label.item() for part in labelled for label in np.unique(part)}
    if len(labels) == 1 and not key.startswith("validation."):  # a few held-out rows may be alike
        only = str(labels.pop()).lower()
        expected = "true and false" if only in ("true", "false") else "several"
        raise UserError(f"{key}: the label of every row is {only}; expected {expected}")
    _check_classes(key, labels, classes)
    if first is not None:
        built = FirstItems(built, first)
    return PackedPreferences(built, limit.max_seq_len, limit.seed) if limit.packed else built


def _check_classes(key: str, labels: set[Any], classes: int | None) -> None:
    """Checks that the labels of a dataset are what a head, or no head, is trained on."""
    most = max((int(label) for label in labels), default=0)
    if classes is None and any(type(label) is int for label in labels):
        raise UserError(f"{key}: classes of texts; expected recipes/reward_distributed")
    if classes == 1 and labels:
        raise UserError(f"{key}: answers with labels; expected pairs, or head.classes={most + 1}")
    if classes is not None and classes > 1 and not labels:
        raise UserError(f"{key}: pairs, and head.classes: {classes}; expected head.classes=1")
    if classes is not None and most >= classes:
        raise UserError(f"{key}: class {most}; expected 0 to {classes - 1}, as head.classes says")


def is_paired(dataset: Any) -> bool:
    """Whether a dataset of `build_preferences` has pairs."""
    if isinstance(dataset, PackedPreferences):
        dataset = dataset.dataset
    dataset = next(iter(getattr(dataset, "parts", {"": dataset}).values()))
    return bool(dataset.paired)


def digest(dataset: Any) -> str:
    """A hash of the tokens and labels of all items of a dataset of `build_preferences`, in their
    order. Reads at 1 GB/s or more."""
    if isinstance(dataset, Preferences):
        return dataset.digest
    found = hashlib.sha256(dataset.chosen.tobytes())
    for part in dataset.parts.values():
        found.update(digest(part).encode())
    return found.hexdigest()


def _joined(items: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Samples one after the other, as `collate` reads a pack. `shared` says of each how many of its
    tokens stand in the one before and are left out."""
    pack: dict[str, Any] = {"tokens": [], "labels": [], "lengths": [], "shared": []}
    for item in items:
        first, *second = item.get("parts", [len(item["tokens"])])
        shared = item.get("shared", 0)
        for key in ("tokens", "labels"):
            pack[key] += item[key][:first] + item[key][first + shared :]
        pack["lengths"] += [first, *(n - shared for n in second)]
        pack["shared"] += [0, *(shared for _ in second)]
    return pack


def _to_another_prompt(tokens: Any, begins: Integers, ends: Integers) -> int:
    """By how many items answers are moved, so that each meets another prompt: the length of the
    longest run of one prompt. All are moved alike, so each is used once. 1: all prompts are one."""
    most = run = 1
    for (a, b), (c, d) in pairwise(zip(begins.tolist(), ends.tolist(), strict=True)):
        run = run + 1 if tokens[a:b].tobytes() == tokens[c:d].tobytes() else 1
        most = max(most, run)
    return most % len(begins) or 1


def _prompt_lengths(samples: TokenizedDataset, begins: Integers, ends: Integers) -> Integers:
    """Tokens of each sample before the first target. Its first label counts as none."""
    found = array("q")
    for start in range(0, len(ends), SAMPLES_AT_ONCE):
        part = slice(start, start + SAMPLES_AT_ONCE)
        first, last = int(begins[part][0]), int(ends[part][-1])
        trained = np.asarray(samples.labels[first:last]) != IGNORE_INDEX
        trained[begins[part] - first] = False
        targets = np.flatnonzero(trained)
        at = targets[np.searchsorted(targets, begins[part] - first)]
        found.extend((at + first - begins[part]).tolist())
    return np.asarray(found, dtype=np.int64)
