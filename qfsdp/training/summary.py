"""The lines before step 1: what is trained, on which data, in how many steps, and one sample.

model     SmolLM2-135M-Instruct (llama), 0.135B parameters: 79% nf4, 21% bf16
trained   5,087,232 parameters (3.64%), 20.3 MB in fp32
data      990 rows, 86,132 tokens; 12 rows reach max_seq_len 256, where longer ones are cut
steps     124 per epoch, 124 in all; global batch 8 = batch_size 8 x accumulation 1 x ranks 1
device    cpu: PyTorch sees no accelerator
memory    about 1.05 GiB of 7.60 GiB per rank
sample    <|im_start|>user\\nWhat is 2 + 2?<|im_end|>\\n [[4<|im_end|>]]
"""

from __future__ import annotations

import json
import os
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qfsdp.common.devices import device_words
from qfsdp.common.messages import first_line
from qfsdp.common.printable import in_one_line, printable
from qfsdp.common.terminal import columns, is_terminal
from qfsdp.config.component import Component
from qfsdp.data import PackedDataset
from qfsdp.data.batch import IGNORE_INDEX, Batch
from qfsdp.data.loader import MapDataset, StepLoader
from qfsdp.data.row_tokenizer import TokenizedDataset
from qfsdp.data.stream import Loader, StreamedDataset
from qfsdp.distributed.world import World
from qfsdp.launch.preflight_findings import estimated_memory, estimated_step_seconds
from qfsdp.tensor_subclasses.dtensor import local_part
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from qfsdp.training.advice import advice
from qfsdp.training.step_display import duration

MARGIN = 10  # columns of the names on the left
SAMPLE_LINES = 6
LEAST_PIECE, GAP = 60, " ... "  # characters that are left of a long piece; in its middle
COLOUR, PLAIN = "\x1b[32m", "\x1b[0m"  # of trained targets on a terminal: green
Piece = tuple[str, bool]
"""A part of a sample's text, and whether it is trained."""


def summary(
    cfg: Any,
    model: nn.Module,
    loader: Loader,
    world: World,
    first: int,
    total: int,
    held_out: Mapping[str, MapDataset] | None = None,
) -> str:
    """The lines as one text.

    Args:
        cfg: a training recipe's config.
        model: sharded and loaded.
        first: number of steps before a resumed run, 0 for a new one.
        total: number of steps of the whole run.
        held_out: the sets of validation, by name.
    """
    positions = cfg.model.any_config().max_position_embeddings
    lines = {
        "model": _model(cfg.model, model),
        "linears": getattr(model, "linears_in_words", ""),
        "trained": _trained(model),
        "data": _data(loader.dataset, cfg.max_seq_len),
        "steps": _steps(cfg, loader, world.size, first, total),
        "warm-up": _warm_up(getattr(cfg, "lr_scheduler", None), total),
        "advice": advice(cfg, loader, total, held_out or {}, positions),
        "device": device_words(),
        "memory": estimated_memory(),
        "time": _time(total - first),
        "sample": _sample(loader.example(min(first, total - 1)), cfg.tokenizer.build()),
    }
    return "\n".join(_beside(name, text) for name, text in lines.items() if text)


def _beside(name: str, text: str) -> str:
    """A name on the left, and its text beside it, in lines that fit a terminal."""
    lines = text.splitlines()
    if name != "sample":  # which is escaped and in lines already
        text = printable(text)
        lines = textwrap.wrap(text, columns() - MARGIN) if is_terminal() else text.splitlines()
    return f"{name:{MARGIN}}" + f"\n{' ' * MARGIN}".join(lines)


def _model(config: Any, model: nn.Module) -> str:
    formats = Counter[str]()
    for name, parameter in model.named_parameters():
        if name.endswith((".weight", ".bias")):  # of the model itself, not of adapters
            formats[_format(parameter)] += parameter.numel()
    size = formats.total()
    shares = ", ".join(f"{n / size:.0%} {kind}" for kind, n in formats.most_common())
    family = json.loads((Path(config.folder) / "config.json").read_text()).get("model_type", "?")
    return f"{Path(config.path).name} ({family}), {size / 1e9:.3g}B parameters: {shares}"


def trained_figures(model: nn.Module) -> dict[str, float]:
    """How many parameters are trained, which share of all, and the bytes that they take.

    Returns:
        "trained/parameters", "trained/percent" and "trained/mb" (10^6 bytes, of all ranks).
    """
    parameters = [p for n, p in model.named_parameters() if not n.endswith(".weight_norm")]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    size, whole = (sum(p.numel() for p in some) for some in (trained, parameters))
    megabytes = sum(p.numel() * p.element_size() for p in trained) / 1e6
    percent = 100 * size / whole
    return {"trained/parameters": size, "trained/percent": percent, "trained/mb": megabytes}


def _trained(model: nn.Module) -> str:
    size, percent, megabytes = trained_figures(model).values()
    kinds = " and ".join(sorted({_format(p) for p in model.parameters() if p.requires_grad}))
    return f"{size:,} parameters ({percent:.2f}%), {megabytes:,.1f} MB in {kinds}"


def _format(parameter: Tensor) -> str:
    part = local_part(parameter)
    if isinstance(part, QuantizedTensor):
        return part.format
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    return short.get(part.dtype, str(part.dtype))


def _data(dataset: MapDataset | StreamedDataset, max_seq_len: int) -> str:
    if isinstance(dataset, StreamedDataset):
        return dataset.words
    samples = dataset.dataset if isinstance(dataset, PackedDataset) else dataset
    parts = [f"{len(samples):,} rows"]
    lengths: Sequence[int] | None = getattr(samples, "lengths", None)
    if lengths is not None:  # else counting would tokenize all of them
        parts[0] += f", {sum(min(length, max_seq_len) for length in lengths):,} tokens"
        if full := sum(length >= max_seq_len for length in lengths):
            parts.append(f"{full:,} reach max_seq_len {max_seq_len:,}, where longer ones are cut")
    if isinstance(samples, TokenizedDataset):
        learned = sum(int(some.sum()) for some in samples.have_targets(max_seq_len))
        if none := len(samples) - learned:
            parts.append(f"{none:,} have no target within it: nothing is learned from these")
    if isinstance(dataset, PackedDataset):
        parts.append(f"{len(dataset):,} packs, {dataset.efficiency:.0%} full")
    return "; ".join(parts)


def _steps(cfg: Any, loader: Loader, ranks: int, first: int, total: int) -> str:
    size, parts = loader.global_batch_size, cfg.sharding.context_parallel
    micro_batches = size // (cfg.batch_size * ranks // parts)
    who = f"ranks {ranks}" if parts == 1 else f"groups {ranks // parts} of {parts} ranks"
    steps = f"{total:,} in all"
    if isinstance(loader, StepLoader):
        steps = f"{loader.steps_per_epoch:,} per epoch, {steps}"
        if total < (cfg.max_steps or 0):
            enough = -(-cfg.max_steps // loader.steps_per_epoch)
            steps += f" (epochs={enough} for max_steps {cfg.max_steps:,})"
    if first:
        steps += f", {first:,} of them done" if first <= total else f"; {first:,} are done already"
    split = f"batch_size {cfg.batch_size} x accumulation {micro_batches} x {who}"
    return f"{steps}; global batch {size:,} = {split}"


def _warm_up(scheduler: Component | None, total: int) -> str:
    """A line if the learning rate never reaches `optimizer.lr`, as with few data."""
    steps = None if scheduler is None else scheduler.kwargs.get("num_warmup_steps")
    ratio = None if scheduler is None else scheduler.kwargs.get("warmup_ratio")
    if not isinstance(steps, int) or steps <= total or ratio is not None:
        return ""
    share = f"about {total / steps:.2f} of optimizer.lr"
    ends = f"so the learning rate ends at {share}; lr_scheduler.warmup_ratio=0.1 makes it shorter"
    return f"{steps:,} steps (lr_scheduler.num_warmup_steps), {ends}"


def _time(steps: int) -> str:
    seconds = estimated_step_seconds()
    return "" if seconds is None else f"about {duration(steps * seconds)}, by the GPU's figures"


# ---- the sample ----------------------------------------------------------------------------


def _sample(batch: Batch, tokenizer: Any) -> str:
    """The first sample of a batch, trained parts in colour on a terminal, else in brackets."""
    coloured = is_terminal() and "NO_COLOR" not in os.environ
    try:
        pieces = sample_pieces(batch, tokenizer)
    except Exception as error:  # the tokenizer may be the user's; a run does not need `decode`
        return f"not shown: decoding failed ({type(error).__name__}: {first_line(error)})"
    pieces = shortened(pieces, SAMPLE_LINES * (columns() - MARGIN))
    if not coloured:
        pieces = [(f"[[{text}]]" if trained else text, False) for text, trained in pieces]
    lines = wrapped(pieces, columns() - MARGIN)
    return "\n".join(lines)


def sample_pieces(batch: Batch, tokenizer: Any) -> list[Piece]:
    """The text of the first sample of a batch up to its last target, in trained and other parts.

    Special tokens are shown; characters that cannot be printed are escaped.
    """
    tokens, labels = batch.tokens[0].tolist(), batch.labels[0].tolist()
    if batch.positions is not None:  # a pack: its first document
        starts = (batch.positions[0] == 0).nonzero().flatten().tolist()
        end = starts[1] if len(starts) > 1 else len(tokens)
        tokens, labels = tokens[:end], labels[:end]
    trained = [False, *(label != IGNORE_INDEX for label in labels[:-1])]  # labels are shifted
    last = max((at for at, one in enumerate(trained) if one), default=len(tokens) - 1)
    parts: list[tuple[list[int], bool]] = []
    for token, one in zip(tokens[: last + 1], trained, strict=False):
        if not parts or parts[-1][1] != one:
            parts.append(([], one))
        parts[-1][0].append(token)
    return [(in_one_line(_decode(tokenizer, ids)), one) for ids, one in parts]


def _decode(tokenizer: Any, ids: list[int]) -> str:
    try:
        return str(tokenizer.decode(ids, skip_special_tokens=False))
    except TypeError:  # some of torchtune's tokenizers decode without special tokens only
        return str(tokenizer.decode(ids))


def shortened(pieces: list[Piece], most: int) -> list[Piece]:
    """The pieces in about `most` characters: the longest lose their middle, then the last go."""
    kept = list(pieces)
    while (over := sum(len(text) for text, _ in kept) - most) > 0:
        at = max(range(len(kept)), key=lambda index: len(kept[index][0]))
        text, trained = kept[at]
        room = max(len(text) - over, LEAST_PIECE)
        if room >= len(text) - len(GAP):  # every piece is short
            return shortened([*kept[: len(kept) // 2], (GAP, False)], most)
        half = (room - len(GAP)) // 2
        kept[at] = (f"{text[:half]}{GAP}{text[-half:]}", trained)
    return kept


def wrapped(pieces: list[Piece], width: int) -> list[str]:
    """Lines of at most `width` columns, with the trained pieces in colour."""
    lines, line, used, colour = list[str](), "", 0, False
    for char, trained in ((char, one) for text, one in pieces for char in text):
        wide = 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if used + wide > width:
            lines.append(line + (PLAIN if colour else ""))
            line, used, colour = "", 0, False
        if trained != colour:
            line, colour = line + (COLOUR if trained else PLAIN), trained
        line, used = line + char, used + wide
    return [*lines, line + (PLAIN if colour else "")]
