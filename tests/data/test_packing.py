"""Best-fit packing: every sample once, little padding, the same packs on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qfsdp.checkpoint.compatibility import data_settings
from qfsdp.data import StepLoader
from qfsdp.data.packing import PackedDataset, best_fit
from qfsdp.data.tokenized_dataset import TokenizedDataset

PAD = 0


def random_lengths(count: int, longest: int, seed: int = 0) -> torch.Tensor:
    """Log-normal lengths, with the median and spread of GSM8K in tokens of SmolLM2."""
    generator = torch.Generator().manual_seed(seed)
    return (204 * (0.3 * torch.randn(count, generator=generator)).exp()).long().clamp(2, longest)


class Counted:
    """Sample i is `lengths[i]` copies of the token i + 1. Records which samples are read."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self.sizes: list[int] = lengths.tolist()
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.asked.append(index)
        size = self.sizes[index]
        return {"tokens": [index + 1] * size, "mask": [True] + [False] * (size - 1)}


class WithLengths(Counted):
    @property
    def lengths(self) -> list[int]:
        return self.sizes


def quadratic_best_fit(lengths: list[int], space: int) -> list[int]:
    """Free spaces after best-fit decreasing, by the textbook algorithm."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [at for at, left in enumerate(free) if left >= length]
        if fitting:
            free[min(fitting, key=free.__getitem__)] -= length
        else:
            free.append(space - length)
    return sorted(free)


@pytest.mark.parametrize("space", [300, 1024])
@pytest.mark.parametrize("count", [0, 1, 700])
def test_is_best_fit_decreasing(space: int, count: int) -> None:
    lengths = random_lengths(count, space)
    packs = best_fit(lengths, space, seed=3)
    assert sorted(sample for pack in packs for sample in pack) == list(range(count))
    free = [space - int(lengths[pack].sum()) for pack in packs]
    assert min(free, default=0) >= 0
    assert sorted(free) == quadratic_best_fit(lengths.tolist(), space)


def test_ties_depend_on_the_seed_alone() -> None:
    lengths = random_lengths(500, 512)
    torch.manual_seed(5)
    first = best_fit(lengths, 512, seed=1)
    torch.manual_seed(6)
    assert best_fit(lengths, 512, seed=1) == first
    other = best_fit(lengths, 512, seed=2)
    assert other != first
    # The packs hold the same lengths.
    assert [lengths[pack].tolist() for pack in other] == [lengths[pack].tolist() for pack in first]


@pytest.mark.parametrize("max_seq_len", [1024, 2048])
def test_little_padding(max_seq_len: int) -> None:
    packed = PackedDataset(WithLengths(random_lengths(7473, max_seq_len)), max_seq_len, seed=0)
    assert 0.95 < packed.efficiency <= 1.0  # measured: 0.982 and 0.992
    sizes = [sum(packed.dataset.sizes[i] for i in packed.samples(n)) for n in range(len(packed))]
    assert packed.efficiency == pytest.approx(sum(sizes) / len(sizes) / max_seq_len)


def test_samples_are_read_when_their_pack_is() -> None:
    dataset = WithLengths(random_lengths(60, 1024))
    packed = PackedDataset(dataset, 1024, seed=0)
    assert dataset.asked == []
    pack = packed[4]
    assert dataset.asked == packed.samples(4)
    assert pack["lengths"] == [dataset.sizes[sample] for sample in dataset.asked]
    assert pack["tokens"].unique_consecutive().tolist() == [i + 1 for i in dataset.asked]
    starts = torch.tensor([0, *pack["lengths"][:-1]]).cumsum(0)
    assert (pack["labels"] == -100).nonzero().flatten().tolist() == starts.tolist()
    assert packed.samples(-1) == packed.samples(len(packed) - 1)
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_without_lengths_every_item_is_read_once() -> None:
    dataset = Counted(random_lengths(60, 1024))
    packed = PackedDataset(dataset, 1024, seed=0)
    assert dataset.asked == list(range(60))
    known = PackedDataset(WithLengths(random_lengths(60, 1024)), 1024, seed=0)
    assert all(packed.samples(n) == known.samples(n) for n in range(len(known)))


def test_long_samples_are_cut() -> None:
    packed = PackedDataset(WithLengths(torch.tensor([90, 10, 54, 64])), 64, seed=0)
    packs = {tuple(packed.samples(n)): packed[n]["lengths"] for n in range(len(packed))}
    assert packs == {(0,): [64], (3,): [64], (2, 1): [54, 10]}
    assert packed.efficiency == 1.0
    with pytest.raises(ValueError, match="max_seq_len is 0"):
        PackedDataset(packed.dataset, 0, seed=0)


def test_lengths_of_a_tokenized_dataset() -> None:
    dataset = TokenizedDataset()
    assert dataset.lengths == []
    for size in (3, 1, 5):
        dataset.append([7] * size, [7] * size)
    assert dataset.lengths == [3, 1, 5]


def loader(packed: PackedDataset, rank: int, **split: int) -> StepLoader:
    return StepLoader(packed, rank=rank, seed=1, pad_id=PAD, max_seq_len=1024, **split)


def test_a_step_of_packs_does_not_depend_on_the_split() -> None:
    dataset = WithLengths(random_lengths(75, 1024))
    packed = PackedDataset(dataset, 1024, seed=0)
    assert len(packed) % 4
    reference: list[list[int]] = []
    for world_size, batch_size, accumulation in [(1, 4, 1), (2, 2, 1), (4, 1, 1), (1, 1, 4)]:
        split = {
            "world_size": world_size,
            "batch_size": batch_size,
            "gradient_accumulation_steps": accumulation,
        }
        ranks = [loader(packed, rank, **split) for rank in range(world_size)]
        steps = []
        for step in range(ranks[0].steps_per_epoch):
            batches = [batch for rank in ranks for batch in rank.step(step)]
            assert {batch.tokens.shape for batch in batches} == {(batch_size, 1024)}
            assert all(batch.cu_seqlens is not None for batch in batches)
            assert sum(b.num_tokens for b in batches) == sum(
                int((b.tokens != PAD).sum()) for b in batches
            )
            tokens = torch.cat([batch.tokens.flatten() for batch in batches])
            steps.append(sorted(set(tokens.tolist()) - {PAD}))
        assert sorted(token - 1 for step in steps for token in step) == list(range(75))
        reference = reference or steps
        assert steps == reference


def test_a_resumed_run_needs_the_same_packs() -> None:
    split = {"world_size": 1, "batch_size": 2, "gradient_accumulation_steps": 1}
    facts = [
        data_settings(
            loader(PackedDataset(Counted(random_lengths(60, 1024)), 1024, seed), 0, **split)
        )
        for seed in (0, 0, 1)
    ]
    assert facts[0] == facts[1] != facts[2]
