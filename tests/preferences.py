"""Random preference batches, as data makes them: padded or packed, split over ranks in any way."""

from __future__ import annotations

from typing import Any

import torch

from qfsdp.data.loader import collate
from qfsdp.data.preferences.batch import PairBatch
from qfsdp.data.preferences.loader import collate_preferences
from qfsdp.data.preferences.rows import with_label
from qfsdp.data.preferences.tokenized import Preferences
from qfsdp.data.row_tokenizer import TokenizedDataset

Sample = tuple[torch.Tensor, int]  # tokens, and the length of the prompt


def random_samples(count: int, vocabulary: int = 577, seed: int = 0) -> list[Sample]:
    """Samples of 6 to 30 tokens; every two of them share a prompt."""
    generator = torch.Generator().manual_seed(seed)

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most, (1,), generator=generator))

    samples: list[Sample] = []
    for _ in range(-(-count // 2)):
        prompt = torch.randint(0, vocabulary, (draw(2, 10),), generator=generator)
        for _ in range(2):
            answer = torch.randint(0, vocabulary, (draw(4, 20),), generator=generator)
            samples.append((torch.cat([prompt, answer]), len(prompt)))
    return samples[:count]


def preference_batch(
    samples: list[Sample],
    labels: list[bool] | None = None,
    slots: int | None = None,
    mismatched: bool = True,
) -> PairBatch:
    """One micro-batch.

    Args:
        labels: of labelled answers; None: the samples are pairs.
        slots: pack the samples, two at a time, into rows of this length, where pairs share their
            prompt; None: pad them.
        mismatched: with labels, give each prompt the answer of the sample before it.
    """
    if slots is not None and labels is None:
        packs = [pack_of(*samples[at : at + 2]) for at in range(0, len(samples), 2)]
        empty: dict[str, Any] = {"tokens": [], "labels": [], "lengths": []}
        shape = {"pad_id": 0, "max_seq_len": slots}
        return collate_preferences(packs or [empty], paired=True, **shape)
    parts = []
    for tokens, prompt in samples:
        targets = tokens.clone()
        targets[:prompt] = -100
        parts.append((tokens, targets))
    items: list[dict[str, object]] = [{"tokens": t, "labels": y} for t, y in parts]
    if slots is not None:
        items = []
        for at in range(0, len(parts), 2):
            tokens, targets = (torch.cat(part) for part in zip(*parts[at : at + 2], strict=True))
            lengths = [len(part) for part, _ in parts[at : at + 2]]
            items.append({"tokens": tokens, "labels": targets, "lengths": lengths})
        items = items or [{"tokens": [], "labels": [], "lengths": []}]
    batch = collate(items, pad_id=0, max_seq_len=slots)
    ids = torch.zeros_like(batch.tokens)
    if slots is None:
        ids[: len(parts)] = torch.arange(len(parts)).unsqueeze(1)
    for row in range(len(items) if slots is not None else 0):
        at = 0
        for number, (tokens, _) in enumerate(parts[2 * row : 2 * row + 2], 2 * row):
            ids[row, at : at + len(tokens)] = number
            at += len(tokens)
    other = None
    if labels is not None and mismatched:
        answers = [tokens[prompt:] for tokens, prompt in samples]
        moved = [
            (torch.cat([tokens[:prompt], answers[at - 1]]), prompt)
            for at, (tokens, prompt) in enumerate(samples)
        ]
        other = preference_batch(moved, labels, slots, mismatched=False)
    return PairBatch(
        batch.tokens,
        batch.labels,
        batch.num_tokens,
        batch.positions,
        batch.cu_seqlens,
        sample_ids=ids,
        num_samples=len(samples),
        desirable=None if labels is None else torch.tensor(labels, dtype=torch.bool),
        mismatched=other,
    )


def pack_of(chosen: Sample, rejected: Sample) -> dict[str, Any]:
    """A row with one pair, whose prompt stands once but for its last token."""
    (first, prompt), (second, _) = chosen, rejected
    tokens = torch.cat([first, second[prompt - 1 :]])
    labels = tokens.clone()
    labels[:prompt] = labels[len(first)] = -100
    lengths = [len(first), len(second) - prompt + 1]
    return {"tokens": tokens, "labels": labels, "lengths": lengths, "shared": [0, prompt - 1]}


def preferences(tokenizer: Any, size: int = 11, labels: bool = False, seed: int = 0) -> Preferences:
    """A dataset of random pairs, or of random answers with a label; for configs of runs."""
    samples = TokenizedDataset()
    for at, (tokens, prompt) in enumerate(random_samples(size if labels else 2 * size, seed=seed)):
        targets = [-100] * prompt + tokens[prompt:].tolist()
        samples.append(tokens.tolist(), with_label(targets, at % 3 == 0) if labels else targets)
    return Preferences(samples, paired=not labels, source="random samples")
