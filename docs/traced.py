"""Lists the files of ours in which a line runs during one update, and while weights are loaded.

    python docs/traced.py     writes the lists to docs/architecture.md

A tiny QDoRA run, eager, on one rank of a CPU, and on two: `train_step` of the recipe is traced in
its second update, `load_base` in its second load, so that no import counts. The tests compare the
page with what they trace, so nobody chooses the files.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
LIST = re.compile(r"(<!-- traced: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
ROW = re.compile(r"^\| `(\S+)` \| +\d+ \| (.*) \|$", re.MULTILINE)
AIMS = {
    "step": "the aim is 16 files / 2,800 lines",
    "sharded": "the aim is the same, with those above",
    "load": "the aim is 9 files / 1,900 lines",
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    os.environ["QFSDP_EAGER_KERNELS"] = "1"
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page(PAGE.read_text(), traced()))


def page(text: str, files: dict[str, list[str]]) -> str:
    """A text with these lists in their places; a file keeps the words that its row has."""
    words = dict(ROW.findall(text))

    def table(match: re.Match[str]) -> str:
        names = files[match[2]]
        counts = [len((ROOT / file).read_text().splitlines()) for file in names]
        rows = [
            f"| `{file}` | {count} | {words.get(file, '')} |\n"
            for file, count in zip(names, counts, strict=True)
        ]
        head = f"{len(names)} files / {sum(counts):,} lines; {AIMS[match[2]]}:\n\n"
        return (
            f"{match[1]}{head}| file | lines | read for |\n|---|---|---|\n{''.join(rows)}{match[3]}"
        )

    return LIST.sub(table, text)


def listed(text: str) -> dict[str, set[str]]:
    """The files that a text lists."""
    return {part[2]: {file for file, _ in ROW.findall(part[0])} for part in LIST.finditer(text)}


def files_of(call: Callable[[], Any]) -> list[str]:
    """The files of `qfsdp` and `recipes` of which a function runs within a call, in order."""
    found: dict[str, None] = {}

    def note(frame: FrameType, event: str, _argument: object) -> None:
        found.setdefault(frame.f_code.co_filename)

    before = sys.gettrace()
    sys.settrace(note)  # backward on a CPU runs in this thread
    try:
        call()
    finally:
        sys.settrace(before)
    folders = tuple(f"{ROOT / name}{os.sep}" for name in ("qfsdp", "recipes"))
    return [str(Path(file).relative_to(ROOT)) for file in found if file.startswith(folders)]


def config_of(recipe: Any, folder: str) -> Any:
    """The config of a tiny QDoRA run in a folder, which gets its model."""
    from qfsdp.config.load import load_config
    from tests.tiny import write_tiny_model

    path = write_tiny_model(Path(folder) / "model")
    # A CPU without bf16 products computes in fp32 anyway.
    words = [f"model.path={path}", f"output_dir={folder}/run", "model.dtype=fp32"]
    return load_config(
        recipe.Config, ["--config", f"{ROOT}/configs/smollm2_135m_qdora.yaml", *words]
    )


def step_of(_: None = None) -> list[str]:
    """The files of an update, on any number of ranks."""
    import torch
    from torch.optim.lr_scheduler import ConstantLR

    from qfsdp.data.loader import collate
    from qfsdp.distributed.world import init_world
    from qfsdp.modules.adapters.linears import parameter_groups
    from qfsdp.training.optimizer import build_optimizer
    from qfsdp.training.steps import StepClock
    from tests.tiny import load_recipe

    recipe = load_recipe()
    with tempfile.TemporaryDirectory() as folder:
        cfg = config_of(recipe, folder)
        world = init_world(cfg.sharding, cfg.distributed)
        model = recipe.load_model(cfg, world)
        optimizer = build_optimizer(cfg.optimizer, parameter_groups(model, cfg.adapter))
        tokens = torch.arange(40)
        batch = collate([{"tokens": tokens, "labels": tokens}], pad_id=0)
        schedule = ConstantLR(optimizer)
        for _again in range(2):
            found = files_of(
                lambda: recipe.train_step(
                    model, optimizer, schedule, [batch], 1.0, world, StepClock(world.device)
                )
            )
    return found


def load_files() -> list[str]:
    """The files of loading."""
    from qfsdp.checkpoint.weights.load import load_base
    from qfsdp.checkpoint.weights.quantize import open_weights
    from qfsdp.distributed.sharding import shard_model
    from qfsdp.distributed.world import init_world
    from tests.tiny import load_recipe

    recipe = load_recipe()
    with tempfile.TemporaryDirectory() as folder:
        cfg = config_of(recipe, folder)
        world = init_world(cfg.sharding, cfg.distributed)
        for _ in range(2):
            weights = open_weights(cfg.model, cfg.quantization, world)
            model = recipe.build_model(cfg, weights)
            shard_model(model, cfg.sharding, world, 64)
            found = files_of(partial(load_base, model, weights, world.device, cfg.sharding))
    return found


def traced() -> dict[str, list[str]]:
    """The files of an update, `step`, those that it enters besides on two ranks, `sharded`, and
    those of loading, `load`."""
    from docs.traced import step_of as on_a_rank  # by a name that a rank can import
    from tests.ranks import run_ranks

    # In processes of their own: what ran before may have left hooks, such as on optimizers.
    step, more = (run_ranks(ranks, on_a_rank, None)[0] for ranks in (1, 2))
    sharded = [file for file in more if file not in step]
    return {"step": step, "sharded": sharded, "load": load_files()}


if __name__ == "__main__":
    main()
