"""Lines before step 1 about what small data and guessed numbers do to a run; none if all is usual.

The ranges of learning rates are the union of published ones: 1e-5 to 1e-2 in the sweeps of LoRA
("LoRA Without Regret", 2025), 1e-4 to 4e-4 in QLoRA (2023) and DoRA (2024), 3e-3 to 8e-3 for IA3
(2022, and PEFT's examples), 1e-6 to 1e-4 for full finetuning, 5e-7 to 5e-5 for preferences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from qfsdp.config.component import Component
from qfsdp.config.load import get_key
from qfsdp.data.loader import MapDataset
from qfsdp.data.preferences.tokenized import Preferences
from qfsdp.data.row_tokenizer import TokenizedDataset
from qfsdp.data.stream import Loader

FEW_STEPS, ENOUGH_STEPS = 20, 100
MOST_ROWS = 500_000  # that are compared
RATES = {"full": (1e-7, 1e-3), "ia3": (1e-5, 3e-2), "lora": (1e-6, 1e-2), "dora": (1e-6, 1e-2)}
RATES |= dict.fromkeys(("miss", "oft"), (1e-6, 1e-2))
PREFERENCES = (1e-8, 1e-3)


def advice(
    cfg: Any, loader: Loader, total: int, held_out: Mapping[str, MapDataset], positions: int
) -> str:
    """The lines as one text, each with the key to change.

    Args:
        cfg: a training recipe's config.
        total: steps of the whole run.
        held_out: name -> dataset of validation.
        positions: the largest length that the model knows, in tokens.
    """
    lines = [*_updates(cfg, loader, total), *_cut(cfg, loader, positions), *_rate(cfg)]
    lines += [*_reference(cfg), *_labels(cfg, loader)]
    trained = _tokenized(getattr(loader, "dataset", None), answers=True)
    what = "answers" if hasattr(cfg, "reference") else "rows"
    for name, dataset in held_out.items():
        held = _tokenized(dataset, answers=True)
        if trained is None or held is None or len(trained) + len(held) > MOST_ROWS:
            continue
        known = set(_rows(trained))
        if both := sum(row in known for row in _rows(held)):
            divide = "dataset.split=train[:95%] and train[95%:] divide a file"
            repeats = "a file that repeats rows has them in both parts; leave the repeats out"
            lines.append(
                f"{both:,} of {len(held):,} {what} of validation.sets.{name} are also trained on, "
                f"so its loss says little; {divide if both == len(held) else repeats}"
            )
    return "\n".join(lines)


def _updates(cfg: Any, loader: Loader, total: int) -> Iterator[str]:
    if total >= FEW_STEPS or get_key(cfg, "max_steps") is not None:
        return
    ways, size = [], loader.global_batch_size
    smaller = 2 ** int(math.log2(max(1, size * total / ENOUGH_STEPS)))
    if smaller < size:
        factor = "global_batch_size" if hasattr(cfg, "global_batch_size") else "batch_size"
        ways.append(f"{factor}={smaller}")
        total = total * size // smaller
    if total < ENOUGH_STEPS:
        ways.append(f"epochs={min(cfg.epochs * math.ceil(ENOUGH_STEPS / total), 5 + cfg.epochs)}")
    yield f"few updates for small data; {' '.join(ways)} makes more of them"


def _cut(cfg: Any, loader: Loader, positions: int) -> Iterator[str]:
    dataset = _tokenized(getattr(loader, "dataset", None))
    if dataset is None or not len(dataset):
        return
    lengths = np.asarray(dataset.lengths)
    long = int((lengths > cfg.max_seq_len).sum())
    if 2 * long > len(lengths) and cfg.max_seq_len < positions:
        fits = min(64 * math.ceil(np.percentile(lengths, 95) / 64), positions)
        yield (
            f"{long:,} of {len(lengths):,} rows lose their ends; max_seq_len={fits} keeps "
            f"{(lengths <= fits).mean():.0%} of them whole"
        )


def _rate(cfg: Any) -> Iterator[str]:
    optimizer, method = get_key(cfg, "optimizer"), get_key(cfg, "adapter.method") or "full"
    lr = None if optimizer is None else optimizer.kwargs.get("lr")
    if not isinstance(lr, int | float) or "Adam" not in optimizer.path:
        return
    of_pairs = hasattr(cfg, "reference_logprobs") or hasattr(cfg, "head")  # dpo, reward
    low, high = PREFERENCES if of_pairs else RATES[method]
    if not low <= lr <= high:
        side = "below" if lr < low else "above"
        words = "preference tuning" if of_pairs else f"method {method}"
        yield f"optimizer.lr {lr:g} is {side} all published rates of {words}, {low:g} to {high:g}"


def _reference(cfg: Any) -> Iterator[str]:
    if get_key(cfg, "reference") == "base" and get_key(cfg, "adapter.start_from") is not None:
        yield (
            "reference: base is the model without adapter.start_from; reference=start compares "
            "with that start, as after supervised tuning"
        )


def _labels(cfg: Any, loader: Loader) -> Iterator[str]:
    """KTO's authors let good and bad answers weigh 1 to 1 up to 4 to 3 (arXiv:2402.01306)."""
    labels = getattr(getattr(loader, "items", None), "desirable", None)
    loss = get_key(cfg, "loss")
    if labels is None or not isinstance(loss, Component) or loss.path.rpartition(".")[2] != "kto":
        return
    good, bad = int(labels.sum()), int((~labels).sum())
    given = [loss.kwargs.get(f"{kind}desirable_weight", 1.0) for kind in ("", "un")]
    share = good * given[0] / max(bad * given[1], 1e-9)
    if not 0.5 <= share <= 2:
        key, ratio = ("desirable", bad / good) if good < bad else ("undesirable", good / bad)
        yield (
            f"{good:,} good and {bad:,} bad answers weigh {share:.2g} to 1 in the loss; "
            f"loss.{key}_weight={ratio:.3g} evens them out"
        )


def _tokenized(dataset: Any, answers: bool = False) -> TokenizedDataset | None:
    """The samples under packs, subsets and, with `answers`, preferences, if they are tokens in
    memory."""
    while not isinstance(dataset, TokenizedDataset):
        if hasattr(dataset, "dataset"):
            dataset = dataset.dataset
        elif answers and isinstance(dataset, Preferences):
            dataset = dataset.samples
        else:
            return None
    return dataset


def _rows(dataset: TokenizedDataset) -> Iterator[int]:
    tokens = np.asarray(dataset.tokens)
    for start, end in pairwise([0, *np.asarray(dataset.ends).tolist()]):
        yield hash(tokens[start:end].tobytes())
