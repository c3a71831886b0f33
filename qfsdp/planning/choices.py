"""What `qfsdp finetune` chooses by the rows, the model and the machine.

* A tenth of the rows, 200 at most, is held out, by a shuffle that is always the same.
* `max_seq_len` is the length of the longest of the first 1,000 rows, rounded up to a power of two,
  and at most 2,048 tokens. Prompts and documents are packed if they fill 3,000 rows of this length.
* Fewer than 3,000 rows are trained on three times.
* An update has 2 to 16 rows. Within these limits, a run has about 100 updates.
* The learning rate is the number that `optimizer.lr: auto` gives. Where `auto` is not known for the
  model, it is QLoRA's.
* Weights keep 16 bits if a step fits without offload. Else they have 4 bits, and the run takes the
  first way of `qfsdp.planning.search` that fits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.common.messages import first_line
from qfsdp.common.sizes import format_size
from qfsdp.config.component import Component
from qfsdp.config.load import config_of, over_defaults
from qfsdp.data import build_dataset
from qfsdp.data.files.data_files import is_saved
from qfsdp.data.files.rows import load_rows
from qfsdp.data.preferences.tokenized import RowLimit, build_preferences
from qfsdp.launch.ranks import planned_ranks
from qfsdp.modules.adapters.config import NAMES
from qfsdp.modules.compute_dtype import has_bf16_gpus
from qfsdp.modules.hub_models.config import HubConfig
from qfsdp.planning.changes import Changes, changed, micro_batches
from qfsdp.planning.predict import Prediction, Predictor
from qfsdp.planning.preflight import this_machine
from qfsdp.planning.search import candidates, search
from qfsdp.training.learning_rate import choose_lr
from qfsdp.training.optimizer import check_optimizer

LEAST_TO_DIVIDE, MOST_HELD_OUT = 20, 200  # rows
MEASURED, LEAST_LENGTH, MOST_LENGTH = 1000, 256, 2048  # rows; tokens
FEW, EPOCHS = 3000, 3
ENOUGH_STEPS, LEAST_BATCH, MOST_BATCH = 100, 2, 16
EVALUATIONS = 6
UNCUT = 2**20  # tokens
PAPERS_LR, PAIRS_LR = 2e-4, 1e-5  # QLoRA's for 7B and 13B; amid published ones of DPO
IA3_LR = 5e-3  # amid published ones


class Choices:
    """Fills in the keys of a config that are not given.

    Args:
        recipe: the training recipe.
        tree: the keys of its config, changed in place.
        given: keys that stay, with their values as typed.
        say: is told what was chosen and why: a name and a line.
    """

    def __init__(
        self,
        recipe: ModuleType,
        tree: dict[str, Any],
        given: Mapping[str, str],
        say: Callable[[str, str], None],
    ) -> None:
        self.recipe, self.tree, self.given, self.say = recipe, tree, given, say
        self.of_pairs = hasattr(recipe, "PairBatch")

    def config(self) -> Any:
        """The config as it is now, with the recipe's defaults; raises UserError."""
        tree = {"optimizer": {}} | self.tree
        return config_of(self.recipe.Config, "finetune", over_defaults(self.recipe.Config, tree))

    def keep(self, key: str, value: Any) -> None:
        """Sets a key, unless it or its section is given."""
        if not self._is_given(key):
            *sections, name = key.split(".")
            node = self.tree
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = value

    def _is_given(self, key: str) -> bool:
        node = self.tree
        for section in key.split(".")[:-1]:
            node = node.get(section, {})
            if node is None:  # null is given for it
                return True
        whole = (name for name, value in self.given.items() if value.lstrip().startswith("{"))
        return key in self.given or any(key.startswith(f"{name}.") for name in whole)

    def make(self) -> None:
        """Makes all choices. Raises UserError: the rows or a key are wrong."""
        cfg = self.config()
        rows = self._hold_out(cfg.dataset)
        self._sizes(cfg, rows)
        self._rate(cfg)
        self._way()

    def _hold_out(self, dataset: Component) -> int:
        """Makes some rows a validation set; returns the number of the others. Files are often
        sorted, so they are not the last ones."""
        keys = dataset.kwargs
        if "source" not in keys or keys.get("streaming"):
            return FEW
        where = {name: keys.get(name) for name in ("subset", "data_files", "max_rows")}
        count = len(load_rows(keys["source"], keys.get("split", "train"), **where))
        folder, held = Path(keys["source"]).expanduser(), min(count // 10, MOST_HELD_OUT)
        told = any(key.startswith("validation.sets") for key in self.given)
        told |= self._is_given("validation.sets") or is_saved(folder)
        if count < LEAST_TO_DIVIDE or told or {"split", "max_rows"} & {*keys}:
            self.say("data", f"{count:,} rows")
            return count
        held_out = copy.deepcopy(self.tree["dataset"]) | {"split": f"train[-{held}:] shuffled"}
        self.tree["dataset"]["split"] = f"train[:-{held}] shuffled"
        self.keep("validation.sets", {"held_out": held_out})
        self.say("data", f"{count:,} rows, of which {held:,} are held out, by a shuffle")
        return count - held

    def _sizes(self, cfg: Any, rows: int) -> None:
        """Length, packing, epochs and batch."""
        lengths, model = self._lengths(cfg), cfg.model.any_config()
        longest = 2 ** math.ceil(math.log2(max(lengths)))
        longest = min(max(LEAST_LENGTH, longest), MOST_LENGTH, model.max_position_embeddings)
        self.keep("max_seq_len", longest)
        length = self.config().max_seq_len
        packs = math.ceil(rows * sum(min(n, length) for n in lengths) / len(lengths) / length)
        self.keep("packed", packs >= FEW and not self.of_pairs and not isinstance(model, HubConfig))
        samples = packs if self.config().packed else rows
        self.keep("epochs", EPOCHS if samples < FEW else 1)
        cfg, ranks = self.config(), planned_ranks()[0]
        seen = samples * cfg.epochs
        if not {"batch_size", "gradient_accumulation_steps"} & {*self.given}:
            size = max(LEAST_BATCH, min(MOST_BATCH, seen / ENOUGH_STEPS))
            self.keep("global_batch_size", math.ceil(2 ** int(math.log2(size)) / ranks) * ranks)
        size = _samples(self.config(), ranks) * ranks
        updates = cfg.epochs * math.ceil(samples / size)
        updates = min(updates, cfg.max_steps or updates)
        if "validation" in self.tree:
            self.keep("validation.eval_every", max(1, updates // EVALUATIONS))
        what = "packed rows" if cfg.packed else "pairs" if self.of_pairs else "rows"
        text = f"{size} {what} each, of up to {length:,} tokens; epochs: {cfg.epochs}"
        self.say("updates", f"about {updates:,}, {text}")

    def _lengths(self, cfg: Any) -> list[int]:
        """Tokens of the first rows."""
        tokenizer = with_keys(cfg.tokenizer, max_seq_len=UNCUT).build()
        dataset = with_keys(cfg.dataset, streaming=None, processes=None)
        if "source" in dataset.kwargs:
            dataset = with_keys(dataset, max_rows=MEASURED)
        if self.of_pairs:
            pairs = build_preferences("dataset", dataset, tokenizer, None, RowLimit(UNCUT))
            return [max(pairs[at]["parts"]) for at in range(len(pairs))]
        built = build_dataset("dataset", dataset, tokenizer)
        return [len(built[at]["tokens"]) for at in range(min(len(built), MEASURED))]

    def _rate(self, cfg: Any) -> None:
        """The learning rate as a number."""
        if self._is_given("optimizer.lr"):
            return
        lr, why = PAIRS_LR, "amid published rates of preference tuning"
        if not self.of_pairs:
            cfg.optimizer.kwargs["lr"] = "auto"
            try:
                choose_lr(cfg)  # prints the formula
                lr, why = cfg.optimizer.kwargs["lr"], "of published sweeps, as above"
            except UserError:
                lr, why = PAPERS_LR, "of QLoRA's paper; no sweep has this model and adapter"
                if cfg.adapter.method == "ia3":
                    lr, why = IA3_LR, "amid published rates of IA3"
        self.keep("optimizer.lr", lr)
        self.say("rate", f"{lr:g}, {why}")

    def _way(self) -> None:
        """Bits of the weights, micro-batch, checkpointing, offload."""
        cfg, ranks = self.config(), planned_ranks()[0]
        if this_machine(cfg, 1)[1] == "cuda" and not has_bf16_gpus():
            self.keep("model.dtype", "fp16")
            cfg = self.config()
        stored = {name.partition("_")[0] for name in cfg.model.weights().formats.values()}
        check_optimizer(cfg.optimizer, cfg.lr_scheduler)
        formats = [min(stored - {"mxfp4", "none"}, default="nf4")] if stored else ["none", "nf4"]
        if self._is_given("quantization.format"):
            formats = [cfg.quantization.format]
        changes, why = first_fit(self.recipe, cfg, formats, _samples(cfg, ranks))
        for key, value in changes.items():
            if key != "gradient_accumulation_steps" or cfg.global_batch_size is None:
                self.keep(key, value)
        cfg = self.config()
        bits = f"{cfg.quantization.format} weights".replace("none", "unquantized")
        method = NAMES.get(cfg.adapter.method, cfg.adapter.method)
        self.say("method", f"{method} of rank {cfg.adapter.rank} over {bits}: {why}")


def with_keys(component: Component, **keys: Any) -> Component:
    """A component with other arguments; None takes one away."""
    kept = {name: value for name, value in component.kwargs.items() if name not in keys}
    kwargs = kept | {name: value for name, value in keys.items() if value is not None}
    return replace(component, kwargs=kwargs)


def _samples(cfg: Any, ranks: int) -> int:
    """Samples of one rank in one update."""
    accumulated: int = cfg.batch_size * cfg.gradient_accumulation_steps
    return accumulated if cfg.global_batch_size is None else cfg.global_batch_size // ranks


def first_fit(
    recipe: ModuleType, cfg: Any, formats: Sequence[str], samples: int
) -> tuple[Changes, str]:
    """The first way that fits this machine, with the first format that has one.

    Weights leave the accelerator only with the last format. If nothing fits, it is the way that
    takes the least; the recipe's own check then refuses it, and says what is needed.

    Args:
        recipe: with `build_model` and `train_step`.
        formats: of `quantization`; the first is the best.
        samples: of one rank in one update.

    Returns:
        Changes of `cfg`, and why, in words.
    """
    world, local = planned_ranks()
    hardware, target = this_machine(cfg, local)
    least: Changes = {"activation.checkpointing": "full"} | micro_batches(1, samples)
    available = format_size(hardware.device_memory)
    for format in formats:
        functions = (recipe.build_model, recipe.train_step)
        base = changed(cfg, {"quantization.format": format})
        predict = Predictor(*functions, base, world, local, hardware, target)
        stays = target == "cpu" or format != formats[-1]
        ways = [way for way in candidates(world) if not stays or way.offload == "none"]
        try:
            found: Prediction | None = predict(ways[0].changes | micro_batches(samples, samples))
            if found is not None and not found.fits(hardware):
                tried = search(ways, predict, samples, hardware)
                found = next((trial.prediction for trial in tried if trial.fits), None)
        except UserError:
            raise
        except Exception as error:  # as in `check_memory`: of what the user has replaced
            why = f"memory is not estimated ({type(error).__name__}: {first_line(error)})"
            return {"quantization.format": format} | least, why
        if found is not None:
            why = f"a step takes about {format_size(found.device_bytes)} of {available} per rank"
            return {"quantization.format": format} | found.changes, why
    return {"quantization.format": formats[-1]} | least, f"nothing that was tried fits {available}"
