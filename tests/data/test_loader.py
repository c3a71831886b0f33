"""`StepLoader`: a step's samples for any split over ranks. `collate`: shifting and padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.demo.arithmetic import write_splits
from qfsdp.common.errors import UserError
from qfsdp.data.batch import IGNORE_INDEX, Batch
from qfsdp.data.conversations import instruct_dataset
from qfsdp.data.loader import StepLoader, collate, tokens_and_labels
from qfsdp.data.row_tokenizer import TokenizedDataset
from qfsdp.data.stream import check_targets, step_loader
from qfsdp.data.tokenizer import hf_tokenizer

PAD = 0


def numbered(size: int) -> list[dict[str, list[int]]]:
    """Samples identified by their first token. Sample i has i % 5 + 1 targets."""
    return [
        {"tokens": [i + 1, *[7] * (i % 5 + 2)], "labels": [IGNORE_INDEX] * 2 + [7] * (i % 5 + 1)}
        for i in range(size)
    ]


def loader(dataset: Any, rank: int = 0, **changes: Any) -> StepLoader:
    options = {
        "batch_size": 2,
        "gradient_accumulation_steps": 3,
        "world_size": 2,
        "seed": 11,
        "pad_id": PAD,
        "max_seq_len": 32,
    }
    return StepLoader(dataset, rank=rank, **{**options, **changes})


def samples_of(batches: list[Batch]) -> list[int]:
    """Indices of the samples in these batches. Rows of padding are skipped."""
    firsts = [int(row[0]) for batch in batches for row in batch.tokens]
    return [first - 1 for first in firsts if first != PAD]


def splits(product: int) -> list[dict[str, int]]:
    """All ways to split a global batch."""
    return [
        {"world_size": w, "batch_size": b, "gradient_accumulation_steps": product // w // b}
        for w in range(1, product + 1)
        for b in range(1, product + 1)
        if product % (w * b) == 0
    ]


@pytest.mark.parametrize("global_batch", [8, 12])
def test_a_step_does_not_depend_on_the_split(global_batch: int) -> None:
    dataset = numbered(3 * global_batch + 5)
    targets = sum(i % 5 + 1 for i in range(len(dataset)))
    reference: list[list[int]] | None = None
    for split in splits(global_batch):
        ranks = [loader(dataset, rank, **split) for rank in range(split["world_size"])]
        assert all(rank.steps_per_epoch == 4 for rank in ranks)
        steps = []
        for step in range(12):
            parts = [rank.step(step) for rank in ranks]
            counts = {len(part) for part in parts}
            assert len(counts) == 1 and 1 <= counts.pop() <= split["gradient_accumulation_steps"]
            batches = [batch for part in parts for batch in part]
            assert all(1 <= len(batch.tokens) <= split["batch_size"] for batch in batches)
            steps.append((sorted(samples_of(batches)), sum(b.num_targets for b in batches)))
        for epoch in range(3):
            mine = steps[4 * epoch : 4 * epoch + 4]
            assert sorted(i for chosen, _ in mine for i in chosen) == list(range(len(dataset)))
            assert sum(count for _, count in mine) == targets
        orders = [chosen for chosen, _ in steps]
        reference = reference or orders
        assert orders == reference
    assert reference is not None
    assert len({str(reference[4 * epoch : 4 * epoch + 4]) for epoch in range(3)}) == 3


def test_short_last_step_gives_every_rank_a_batch() -> None:
    dataset = numbered(13)
    last = [loader(dataset, rank).step(1) for rank in range(2)]
    assert [len(part) for part in last] == [1, 1]
    empty = next(part[0] for part in last if not samples_of(part))
    assert empty.num_targets == 0
    assert empty.tokens.shape == (1, 8)
    assert bool((empty.tokens == PAD).all()) and bool((empty.labels == IGNORE_INDEX).all())


def test_a_step_does_not_need_the_steps_before_it() -> None:
    dataset = numbered(29)
    running = loader(dataset)
    sequence = [running.step(step) for step in range(9)]
    for step in (8, 0, 5):
        for ours, theirs in zip(loader(dataset).step(step), sequence[step], strict=True):
            assert torch.equal(ours.tokens, theirs.tokens)
            assert torch.equal(ours.labels, theirs.labels)


def test_seeds_and_shuffle() -> None:
    dataset = numbered(24)

    def epoch(number: int, **options: Any) -> list[int]:
        one = loader(dataset, world_size=1, **options)
        steps = range(number * one.steps_per_epoch, (number + 1) * one.steps_per_epoch)
        return [i for step in steps for i in samples_of(one.step(step))]

    assert epoch(0, shuffle=False) == epoch(1, shuffle=False) == list(range(24))
    orders = [epoch(e, seed=s) for s in (0, 1, 2**32, 2**32 + 1) for e in (0, 1)]
    assert len({str(order) for order in orders}) == len(orders)


def test_faulty_counts() -> None:
    for changes in ({"world_size": 0}, {"batch_size": 0}, {"gradient_accumulation_steps": 0}):
        with pytest.raises(ValueError, match="expected at least 1"):
            loader(numbered(3), **changes)
    with pytest.raises(ValueError, match="expected at least 1"):
        loader([])
    with pytest.raises(ValueError, match="rank 2; expected 0 to 1"):
        loader(numbered(3), rank=2)


def test_collate_shifts_pads_and_cuts() -> None:
    samples = [
        {"tokens": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]},
        {"tokens": torch.tensor([5, 6]).numpy(), "mask": [True, False]},
        {"tokens": [7] * 9, "labels": [7] * 9},
    ]
    batch = collate(samples, pad_id=PAD, max_seq_len=6)
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 0, 0], [5, 6, 0, 0, 0, 0], [7] * 6]
    no = IGNORE_INDEX
    assert batch.labels.tolist() == [[no, 3, 4, no, no, no], [6] + [no] * 5, [7] * 5 + [no]]
    assert batch.num_targets == 8
    assert collate(samples, pad_id=PAD).tokens.shape == (3, 16)
    assert collate(samples[:2], pad_id=PAD, pad_to_multiple_of=1).tokens.shape == (2, 4)
    moved = batch.to("meta")
    assert moved.tokens.device.type == moved.labels.device.type == "meta"
    with pytest.raises(ValueError, match="3 tokens but 2 labels"):
        collate([{"tokens": [1, 2, 3], "labels": [1, 2]}], pad_id=PAD)


def test_collate_shifts_within_each_sample_of_a_pack() -> None:
    packs = [
        {"tokens": [1, 2, 3, 4, 5], "labels": [-100, 2, 3, 4, 5], "lengths": [3, 2]},
        {"tokens": torch.arange(6, 14), "labels": torch.arange(6, 14), "lengths": [1, 7]},
    ]
    batch = collate(packs, pad_id=PAD, max_seq_len=8, min_rows=3)
    no = IGNORE_INDEX
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], list(range(6, 14)), [0] * 8]
    assert batch.labels.tolist() == [
        [2, 3, no, 5, no, no, no, no],
        [no, 8, 9, 10, 11, 12, 13, no],
        [no] * 8,
    ]
    assert batch.positions is not None and batch.cu_seqlens is not None
    assert batch.positions.tolist() == [
        [0, 1, 2, 0, 1, 0, 1, 2],
        [0, 0, 1, 2, 3, 4, 5, 6],
        list(range(8)),
    ]
    assert batch.positions.dtype == torch.int64 and batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8, 9, 16, 16, 24] + [24] * 56
    assert (batch.num_tokens, batch.num_slots, batch.num_targets) == (13, 24, 9)
    moved = batch.to("meta")
    assert moved.num_tokens == 13
    for tensor in (moved.tokens, moved.labels, moved.positions, moved.cu_seqlens):
        assert tensor is not None and tensor.device.type == "meta"
    many = collate(
        [{"tokens": [1] * 70, "labels": [1] * 70, "lengths": [1] * 70}], pad_id=PAD, max_seq_len=70
    )
    assert many.cu_seqlens is not None and len(many.cu_seqlens) == 128
    assert many.num_targets == 0


def test_faulty_packs() -> None:
    pack = {"tokens": [1, 2, 3], "labels": [1, 2, 3], "lengths": [3]}
    for items, max_seq_len, words in [
        ([pack, numbered(1)[0]], 8, "1 of 2 items are packs"),
        ([pack], 2, "a pack has 3 tokens; max_seq_len is 2"),
        ([pack], None, "max_seq_len is None"),
        ([{**pack, "lengths": [1, 1]}], 8, "3 tokens but lengths of 2"),
    ]:
        with pytest.raises(ValueError, match=words):
            collate(items, pad_id=PAD, max_seq_len=max_seq_len)


def test_fill_rows_and_pad_to_multiple_of() -> None:
    dataset, options = numbered(13), {"world_size": 1, "batch_size": 5, "fill_rows": True}
    batches = loader(dataset, pad_to_multiple_of=16, **options).step(0)
    assert [batch.tokens.shape for batch in batches] == [(5, 16)] * 3
    assert all(batch.positions is None and batch.cu_seqlens is None for batch in batches)
    plain = loader(dataset, **{**options, "fill_rows": False}).step(0)
    assert [batch.tokens.shape for batch in plain] == [(5, 8), (5, 8), (3, 8)]
    for filled, batch in zip(batches, plain, strict=True):
        assert samples_of([filled]) == samples_of([batch])
        assert (filled.num_tokens, filled.num_targets) == (batch.num_tokens, batch.num_targets)
        assert filled.num_slots == 80


def test_torchtune_builders(smollm2_dir: Path, tmp_path: Path) -> None:
    from torchtune.datasets import chat_dataset
    from torchtune.datasets import instruct_dataset as torchtunes_instruct_dataset

    tokenizer = hf_tokenizer(str(smollm2_dir))
    file, _ = write_splits(tmp_path, train=7, heldout=1)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        "".join(
            json.dumps(
                {
                    "conversations": [
                        {"from": "human", "value": row["question"]},
                        {"from": "gpt", "value": row["answer"]},
                    ]
                }
            )
            + "\n"
            for row in rows
        ),
        encoding="utf-8",
    )
    ours = instruct_dataset(tokenizer, source=str(file), prompt_column="question")
    instruct = torchtunes_instruct_dataset(
        tokenizer,
        source="json",
        data_files=str(file),
        split="train",
        column_map={"input": "question", "output": "answer"},
    )
    chat = chat_dataset(
        tokenizer,
        source="json",
        data_files=str(chats),
        split="train",
        conversation_column="conversations",
        conversation_style="sharegpt",
    )
    expected = loader(ours, max_seq_len=None)
    for theirs in (loader(instruct, max_seq_len=None), loader(chat, max_seq_len=None)):
        for want, got in zip(expected.step(0), theirs.step(0), strict=True):
            assert torch.equal(got.tokens, want.tokens)
            assert torch.equal(got.labels, want.labels)


def test_rows_whose_prompt_leaves_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all are such rows, every loss was 0 until the end of the run."""
    monkeypatch.setattr("qfsdp.data.row_tokenizer.SAMPLES_AT_ONCE", 2)
    dataset = TokenizedDataset()
    for prompt, length in ((3, 6), (4, 6), (5, 6), (0, 1), (0, 2)):
        dataset.append(range(length), [-100] * prompt + [7] * (length - prompt))

    def learned(max_seq_len: int) -> list[bool]:
        return np.concatenate(list(dataset.have_targets(max_seq_len))).tolist()

    assert learned(6) == learned(100) == [True, True, True, False, True]
    assert learned(4) == [True, False, False, False, True]
    for limit in (1, 2, 3, 4, 5, 6):
        rows = [tokens_and_labels(dataset[at], limit)[1][1:] for at in range(len(dataset))]
        assert learned(limit) == [any(label != -100 for label in row) for row in rows]
    options = {"batch_size": 1, "gradient_accumulation_steps": 1, "rank": 0, "world_size": 1}
    options |= {"seed": 0, "pad_id": 0}
    assert step_loader(dataset, max_seq_len=2, **options).steps_per_epoch == 5
    with pytest.raises(UserError, match="^validation.sets.x: none of 5 rows has a target within"):
        check_targets("validation.sets.x", dataset, 1)
    with pytest.raises(UserError, match="none of 5 rows has a target within max_seq_len 1; expect"):
        step_loader(dataset, max_seq_len=1, **options)
