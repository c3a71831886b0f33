"""Flipped bytes in what a run reads beside its checkpoints: weights, caches, an adapter, tokens.

A flip must be noticed (one line refuses it, or says that a cache is made again), or change no loss.
Plain weights have no digest of their own: there a run that goes on must notice it.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.faults.damage import interrupted
from tests.faults.runs import Outcome, Setup, Trial, Workshop, losses
from tests.flips import flip
from tests.toy_data import TOY_PAIRS

SETUP = Setup(ranks=1)
PREFERENCES = Setup("dpo_distributed", ranks=1)
SHORT = ("max_steps=2", "checkpoint.every_n_steps=null")
LETTERS = f"tokenizer._component_={__name__}.Letters"
SAVED = 5  # the step from which a run goes on


class Letters:
    """A tokenizer with one id per character of ASCII."""

    pad_id, stop_tokens, fingerprint = 0, (), "letters"

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


@dataclass
class Input:
    """What is damaged, and the run that reads it.

    Fields:
        folder: with the files.
        words: keys of the run's command line.
        losses, text: of the run with undamaged files.
        resumed: the run goes on from a checkpoint.
    """

    folder: Path
    words: Sequence[str]
    setup: Setup = SETUP
    resumed: bool = False
    losses: dict[int, float] | None = None
    text: str = ""

    @property
    def good(self) -> Path:
        """A copy of the undamaged files."""
        return self.folder.with_name(f"{self.folder.name}.good")

    def run(self, shop: Workshop) -> tuple[list[int], str, dict[int, float]]:
        """Statuses, output, and losses of a new run."""
        run, words = shop.fresh(), list(self.words)
        if self.resumed:
            interrupted(shop.reference(SETUP), run, SAVED)
            words += ["resume=auto"]
        ranks = shop.start(self.setup, run, *words)
        return ranks.finish(), ranks.text(), losses(run)


def weights(shop: Workshop, folder: Path) -> Input:
    shutil.copytree(shop.folder / "model", folder)
    return Input(folder, [f"model.path={folder}"], resumed=True)


def quantized(shop: Workshop, folder: Path) -> Input:
    cache(shop, folder)
    (made,) = folder.iterdir()
    for file in made.iterdir():
        file.rename(folder / file.name)
    made.rmdir()
    return Input(folder, [*SHORT, f"model.path={folder}"])


def cache(shop: Workshop, folder: Path) -> Input:
    found = Input(folder, [*SHORT, f"model.quantize_cache={folder}"])
    assert not any(found.run(shop)[0])
    return found


def adapter(shop: Workshop, folder: Path) -> Input:
    shutil.copytree(shop.reference(SETUP).run / "adapter", folder)
    return Input(folder, [*SHORT, f"adapter.start_from={folder}"])


def tokens(shop: Workshop, folder: Path) -> Input:
    rows = write_rows(shop)
    dataset = "{_component_: qfsdp.data.text_dataset, source: %s, window: 32, tokenized_cache: %s}"
    words = [*SHORT, LETTERS, f"dataset={dataset % (rows, folder)}"]
    found = Input(folder, words)
    statuses, text, _ = found.run(shop)
    assert not any(statuses), text
    return found


def logprobs(shop: Workshop, folder: Path) -> Input:
    write_preferences_config(shop)
    found = Input(folder, [*SHORT, f"reference_logprobs={folder}"], PREFERENCES)
    statuses, text, _ = found.run(shop)
    assert not any(statuses), text
    return found


def write_rows(shop: Workshop) -> Path:
    """Writes 60 short texts."""
    rows = shop.folder / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "row {i} of{" many" * (i % 9)}"}}\n' for i in range(60)))
    return rows


def write_preferences_config(shop: Workshop) -> None:
    config = (TOY_PAIRS + "adapter: {{rank: 5, alpha: 7}}\n").format(folder=shop.folder)
    for recipe in (PREFERENCES.recipe, "reward_distributed"):
        (shop.folder / f"{recipe}.yaml").write_text(config)


Make = Callable[[Workshop, Path], Input]


def trial(make: Make, chance: random.Random, shop: Workshop) -> Outcome:
    """One run with a damaged file."""
    given = shop.inputs.get(make.__name__) or undamaged(make, shop)
    shutil.rmtree(given.folder)
    shutil.copytree(given.good, given.folder)
    files = [f for f in sorted(given.folder.rglob("*")) if f.is_file() and is_read(f)]
    file = chance.choice(files)
    note = f"{file.relative_to(given.folder)}: {chance.choice([flip, flip_bit])(chance, file)}"
    statuses, text, found = given.run(shop)
    assert "Traceback" not in text, f"{note}: {text[-3000:]}"
    known = set(given.text.splitlines())
    told = [line for line in text.splitlines() if line not in known and is_told(line)]
    if any(statuses):
        assert statuses == [2] and len(told) == 1, f"{note}: {statuses}\n{text[-3000:]}"
    else:
        # Settings may have been edited on purpose: a line says so, and the run goes on with them.
        edited = any("not as it was written" in line for line in told)
        same = found == given.losses
        assert same or edited, f"{note}: SILENT or not repaired: {found}\n{text[-3000:]}"
    what = "refused" if any(statuses) else "the same losses" if found == given.losses else "told"
    return Outcome(1, int(bool(told)), 1, [0], [f"{note}: {what}; {' / '.join(told)}"])


def undamaged(make: Make, shop: Workshop) -> Input:
    """Makes the files, and runs with them."""
    given = make(shop, shop.folder / f"input_{make.__name__}")
    statuses, given.text, given.losses = given.run(shop)
    assert not any(statuses), given.text[-3000:]
    shutil.copytree(given.folder, given.good)
    shop.inputs[make.__name__] = given
    return given


def flip_bit(chance: random.Random, file: Path) -> str:
    """Changes one bit: text often stays valid."""
    data = bytearray(file.read_bytes())
    at, bit = chance.randrange(len(data)), chance.randrange(8)
    data[at] ^= 1 << bit
    file.write_bytes(data)
    return f"bit {bit} changed at {at} of {len(data)}"


def is_read(file: Path) -> bool:
    return file.stat().st_size > 0 and file.name != ".lock" and file.suffix != ".md"


def is_told(line: str) -> bool:
    return any(word in line for word in ("error:", "warning:", "damaged"))


KINDS: dict[str, Trial] = {
    f"flip_{make.__name__}": partial(trial, make)
    for make in (weights, quantized, cache, adapter, tokens, logprobs)
}
