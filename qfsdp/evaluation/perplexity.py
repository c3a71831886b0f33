"""Loss and perplexity of a held-out dataset or of plain text in windows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qfsdp.common.errors import InvalidField, UserError, check_bounds
from qfsdp.data.batch import IGNORE_INDEX
from qfsdp.data.encode import naming
from qfsdp.data.files.json_lines import check_regular
from qfsdp.data.loader import MapDataset
from qfsdp.distributed.world import World
from qfsdp.evaluation.batching import progress_bar
from qfsdp.evaluation.heldout_loss import batch_losses, held_out_batches, perplexity
from qfsdp.evaluation.intervals import Interval, loss_interval


@dataclass
class TextConfig:
    """One entry of section `text`: the perplexity of a text file.

    Fields:
        file: plain text, UTF-8.
        window: tokens per window. The first token of a window is not predicted.
        stride: distance between windows; null uses `window`. With a smaller stride each predicted
            token has at least `window - stride` tokens before it, but each token is computed
            `window / stride` times.
        max_tokens: use only the first `max_tokens` tokens; null uses all.
        add_bos: begin the text with the beginning-of-sequence token.
    """

    file: str
    window: int = 1024
    stride: int | None = None
    max_tokens: int | None = None
    add_bos: bool = False

    def check(self) -> None:
        check_bounds(self, "window", "max_tokens", least=2)
        if self.stride is not None and not 1 <= self.stride <= self.window:
            raise InvalidField("stride", self.stride, "an integer from 1 to window, or null")


class TextWindows:
    """A dataset of windows over one long text.

    Every token except the first of the text is a target once. Without overlap
    (`stride == window`) the first token of each window is not a target.

    Items are `{"tokens", "labels"}`, each int64 `[window]`. The last may be shorter.

    Attributes:
        tokens: int32, the whole text.
    """

    def __init__(self, tokens: list[int], window: int, stride: int) -> None:
        self.tokens = torch.tensor(tokens, dtype=torch.int32)
        self._window, self._stride = window, stride

    def __len__(self) -> int:
        return 1 + max(0, math.ceil((len(self.tokens) - self._window) / self._stride))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = range(len(self))[index] * self._stride  # negative indices, and IndexError
        tokens = self.tokens[start : start + self._window].long()
        labels = tokens.clone()
        if start:
            labels[: self._window - self._stride] = IGNORE_INDEX  # targets of the window before
        return {"tokens": tokens, "labels": labels}


def text_windows(key: str, config: TextConfig, tokenizer: Any) -> TextWindows:
    """Reads a text file and cuts it into windows.

    Args:
        key: the entry's place in the config, for messages.
        tokenizer: `hf_tokenizer(...)` or one of torchtune's.

    Raises:
        UserError: the file cannot be read, or has fewer than two tokens.
    """
    check_regular(f"{key}.file", Path(config.file).expanduser(), "expected a text file")
    try:
        text = Path(config.file).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(f"{key}.file: '{config.file}': {reason}; expected a text file") from None
    bos = [tokenizer.bos_id] if config.add_bos and tokenizer.bos_id is not None else []
    place = f"{key}.file: '{config.file}'"
    try:
        with naming(place):
            tokens = bos + list(tokenizer.encode(text, add_bos=False, add_eos=False))
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    tokens = tokens[: config.max_tokens]
    if len(tokens) < 2:
        raise UserError(
            f"{key}.file: '{config.file}' has {len(tokens)} tokens; expected at least two"
        )
    return TextWindows(tokens, config.window, config.stride or config.window)


@dataclass(frozen=True)
class MeanLoss:
    """The mean loss over target tokens (nats), its confidence interval and their number.

    `parts` are the summed loss and the number of targets of each batch, in the order of the data.
    """

    loss: float
    interval: Interval
    tokens: int
    parts: list[tuple[float, int]] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


def dataset_loss(
    model: nn.Module,
    dataset: MapDataset,
    batch_size: int,
    world: World,
    pad_id: int,
    max_seq_len: int | None,
    title: str = "loss",
) -> MeanLoss:
    """The mean loss over all target tokens of a dataset. The same on every rank.

    Args:
        dataset: a dataset for `StepLoader`, of samples or packs, or `TextWindows`.
        batch_size: samples per rank and forward pass. Each batch is a part for `loss_interval`.
        pad_id, max_seq_len: as in `collate`.
        title: title of the progress bar.

    Raises:
        UserError: no sample has a target.
    """
    batches = held_out_batches(dataset, batch_size, world, pad_id, max_seq_len)
    total = math.ceil(len(dataset) / (batch_size * world.size))
    mine = batch_losses(model, progress_bar(batches, title, world, total), world)
    of_ranks = world.gather(mine)  # batch n is number n // ranks of rank n % ranks
    parts = [part for turn in zip(*of_ranks, strict=True) for part in turn]
    tokens = sum(count for _, count in parts)
    if not tokens:
        raise UserError(
            f"{title}: no target token in {len(dataset)} samples; expected at least one"
        )
    mean = math.fsum(loss for loss, _ in parts) / tokens
    return MeanLoss(mean, loss_interval(parts), tokens, parts)
