"""One micro-batch of a step."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

from qfsdp.data.cut_rows import IGNORE_INDEX, CutPrompts, CutRows, part_of_rows

ALL_POSITIONS = -1
"""`Batch.targets` for shapes that do not depend on labels: the output layer sees every position."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Fields:
        tokens: int64 `[batch, seq]`, padded on the right with the pad id.
        labels: int64 `[batch, seq]`, already shifted: `labels[b, t]` is the target of
            `tokens[b, t]`. It is token t + 1, or -100 (not trained, padding, last position).
        num_tokens: number of tokens without padding.
        positions: int64 `[batch, seq]`, counted from 0 in each sample of a pack. None if no row is
            a pack.
        cu_seqlens: int32 `[documents + 1]`, the borders of the documents among the `batch * seq`
            tokens. A document is a sample, or the padding of a row. The last border is repeated
            until the length is a multiple of 64, so compiled code sees few lengths. None if no row
            is a pack. `CutRows` if ranks share the rows.
        samples: for each row, the indices of its samples in the dataset, as `StepLoader` sets them;
            rows of padding are left out.
        targets: number of positions that are trained, if it is known; see `num_targets`.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    num_tokens: int
    positions: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | CutRows | None = None
    samples: tuple[tuple[int, ...], ...] = ()
    targets: int | None = None

    @property
    def documents(self) -> Any:
        """What `Decoder` takes as `cu_seqlens`."""
        return self.cu_seqlens

    @property
    def num_slots(self) -> int:
        """Number of tokens including padding."""
        return self.tokens.numel()

    @property
    def num_targets(self) -> int:
        """Number of positions that are trained."""
        if self.targets is not None:
            return self.targets
        return int((self.labels != IGNORE_INDEX).sum())

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`. Targets are counted here, where the batch is: the host waits
        neither for the copies nor, later, for a device to count them."""
        moved: dict[str, Any] = {
            field.name: to_device(value, device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        if isinstance(cut := self.cu_seqlens, CutRows):
            borders, lengths = to_device(cut.cu_seqlens, device), to_device(cut.lengths, device)
            prompts = cut.prompts and CutPrompts(*(to_device(t, device) for t in cut.prompts))
            found = cut._replace(cu_seqlens=borders, lengths=lengths, prompts=prompts)
            moved["cu_seqlens"] = found
        return replace(self, targets=self.num_targets, **moved)

    def cut(self, part: int, parts: int) -> Self:
        """One of `parts` equal parts of every row: `part_of_rows`."""
        return replace(self, **part_of_rows(self, part, parts))


def cut_rows(documents: Any, group: str, labels: torch.Tensor | None) -> CutRows | None:
    """The documents of a batch, if its rows are cut. Raises `ValueError`: they are not, and a model
    whose rows the ranks of `group` share gets labels with them."""
    cut = documents if isinstance(documents, CutRows) else None
    if group and labels is not None and cut is None:
        raise ValueError("sharding.context_parallel: whole rows; expected those of `Batch.cut`")
    return cut


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`tensor` on `device`; the host does not wait for the copy. PyTorch keeps the pinned memory
    until the copy has ended."""
    if tensor.device.type == "cpu" and torch.device(device).type not in ("cpu", "meta"):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
