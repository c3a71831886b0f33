"""Run one config at many points: what each takes, how fast it is, what it costs.

    tune run recipes/sweep --config configs/sweep_7b.yaml [key=value ...]
    tune run recipes/sweep --config configs/sweep_smollm2_135m.yaml mode=run \\
        'grid.adapter.rank=[4,16]'

Names a training config and a grid over any of its keys. `mode` says what is done at each point:

    estimate   memory by a dry run, time by a roofline: no GPU and no weights
    steps      a few measured steps, in a process of its own
    run        the whole run, and an evaluation after it if `evaluation` names its config

Cells run one after another, or at once on the devices that are free. A cell that fails or does not
fit is a result with its reason. Killed, the same command goes on. Writes cells.jsonl, table.md,
figures/*.png and report.html to `output_dir`. Costs come from a file of prices that you edit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from qfsdp.checkpoint.lock import FolderLock
from qfsdp.common.errors import InvalidField, UserError, check_bounds
from qfsdp.config.tool_config import Training, read_training
from qfsdp.launch.start import launch_alone
from qfsdp.planning.hardware import Hardware, HardwareConfig, device_memory_of, known_name
from qfsdp.sweep.cells import Cell, config_file, make_cells
from qfsdp.sweep.devices import check_devices, groups_of, on_free_groups, visible_devices
from qfsdp.sweep.estimate_cell import estimate_cell
from qfsdp.sweep.measure_cell import Runs, check_evaluation
from qfsdp.sweep.output import write_output
from qfsdp.sweep.prices import Price, costs, read_prices
from qfsdp.sweep.published import beside, read_published
from qfsdp.sweep.results import DONE, FAILED, Results, best_of
from qfsdp.sweep.together import HINT, can_be_together, one_config, train_together


@dataclass(kw_only=True)
class Config(HardwareConfig):
    """The sweep, and the hardware of estimates: the fields of `HardwareConfig`."""

    config: str  # a training config: configs/NAME or a YAML file
    output_dir: str  # for results, table, figures and page
    mode: Literal["estimate", "steps", "run"] = "estimate"  # what is done at each point
    overrides: list[str] = field(default_factory=list)  # key=value words for every cell
    grid: dict[str, Any] = field(default_factory=dict)  # axis: values, or choices with changes
    points: list[dict[str, Any]] = field(default_factory=list)  # single cells besides the grid
    world_size: int = 1  # GPUs of a cell, in one machine
    steps: int = 5  # measured steps of mode steps
    warmup: int = 2  # steps before them
    samples: int | None = None  # of a whole run, for its cost; null: only mode run knows it
    evaluation: str | None = None  # mode run: a config of recipes/evaluate
    evaluation_overrides: list[str] = field(default_factory=list)  # key=value words for it
    prices: str | None = "configs/prices.yaml"  # US dollars per hour and GPU; null: no costs
    published: str | None = None  # a YAML file with figures of others, to stand beside ours
    together: bool = False  # mode run: one run of recipes/several_adapters for all cells
    retry_failed: bool = False  # run cells again that have failed or did not fit

    def check(self) -> None:
        super().check()
        check_bounds(self, "world_size", least=1, most=2**16)
        check_bounds(self, "steps", "samples", least=1)
        check_bounds(self, "warmup", least=0)
        if self.evaluation is not None and self.mode != "run":
            raise InvalidField("evaluation", self.evaluation, "null, or mode=run")
        if self.together and self.mode != "run":
            raise InvalidField("together", True, "false, or mode=run")


@dataclass(frozen=True)
class Sweep:
    """A checked sweep: its base config, its cells, and the figures that it is compared with."""

    training: Training
    cells: list[Cell]
    prices: dict[str, Price]
    published: list[Any]


def read_sweep(cfg: Config) -> Sweep:
    """Reads everything that the sweep names, and checks every cell's config. Raises UserError for
    the first mistake."""
    words = ["--config", config_file("config", cfg.config), *cfg.overrides]
    try:
        training = read_training(words)
    except UserError as error:
        raise UserError(f"config: {error}") from None
    about: list[Any] = [cfg.mode, cfg.world_size]
    if cfg.mode == "estimate":
        about += [{name: getattr(cfg, name) for name in HardwareConfig.__dataclass_fields__}]
    elif cfg.mode == "steps":
        about += [cfg.steps, cfg.warmup]
    else:
        about += [cfg.evaluation, cfg.evaluation_overrides]
    cells = make_cells(training, cfg.grid, cfg.points, about)
    if cfg.mode != "estimate" and (own := {name for cell in cells for name in cell.own}):
        raise UserError(f"grid.{min(own)}: an axis of mode=estimate; expected none in {cfg.mode}")
    for cell in cells if cfg.mode == "estimate" else ():
        if not cell.error:
            hardware_of(cfg, cell)
    if cfg.together:
        one_config(training, cells)
    prices = {} if cfg.prices is None else read_prices(Path(config_file("prices", cfg.prices)))
    if cfg.gpu is not None:
        known_name(cfg.gpu)
    published = []
    if cfg.published is not None:
        published = read_published(Path(config_file("published", cfg.published)), cells)
    return Sweep(training, cells, prices, published)


def hardware_of(cfg: Config, cell: Cell) -> Hardware:
    """The hardware of a cell's estimate; raises UserError."""
    gpu = cell.own.get("gpu", cfg.gpu)
    described = HardwareConfig(
        **{name: getattr(cfg, name) for name in HardwareConfig.__dataclass_fields__} | {"gpu": gpu}
    )
    return described.build(device_memory_of(cell.cfg))


def check(cfg: Config) -> None:
    """Finds every mistake in the sweep and in its cells, before the first cell runs."""
    sweep = read_sweep(cfg)
    if cfg.mode != "estimate":
        check_devices(visible_devices(), cfg.world_size)
    if evaluation := evaluation_of(cfg):
        folder = Path(cfg.output_dir).expanduser()
        check_evaluation(evaluation, sweep.training.cfg, folder)


def evaluation_of(cfg: Config) -> list[str] | None:
    """The config of the evaluation and words for it; None without one."""
    if cfg.evaluation is None:
        return None
    return [config_file("evaluation", cfg.evaluation), *cfg.evaluation_overrides]


def ranks_of(cfg: Config, cell: Cell) -> int:
    return int(cell.own.get("world_size", cfg.world_size))


def fill_in(cfg: Config, sweep: Sweep, cell: Cell, devices: list[str]) -> dict[str, Any]:
    """The result of one cell."""
    if cell.error:
        return {"status": FAILED, "reason": cell.error}
    if cfg.mode == "estimate":
        hardware = hardware_of(cfg, cell)
        return estimate_cell(sweep.training, cell, hardware, ranks_of(cfg, cell))
    runs = runs_on(cfg, sweep, devices)
    return runs.steps(cell, cfg.steps, cfg.warmup) if cfg.mode == "steps" else runs.whole(cell)


def runs_on(cfg: Config, sweep: Sweep, devices: list[str]) -> Runs:
    """What runs cells on some devices."""
    folder = Path(cfg.output_dir).expanduser() / "cells"
    return Runs(sweep.training, folder, cfg.world_size, evaluation_of(cfg), devices)


def run_cells(cfg: Config, sweep: Sweep, results: Results, show: Callable[[Cell], None]) -> None:
    """Runs the cells that have no result yet, as many at once as there are groups of devices."""
    groups = groups_of([] if cfg.mode == "estimate" else visible_devices(), cfg.world_size)

    def run(cell: Cell, group: list[str]) -> None:
        add(cell, fill_in(cfg, sweep, cell, group))

    def add(cell: Cell, row: dict[str, Any]) -> None:
        about: dict[str, Any] = {"key": cell.key, "point": cell.point, "in_grid": cell.in_grid}
        about |= {"mode": cfg.mode, "ranks": ranks_of(cfg, cell)}
        about |= {"gpu": cell.own.get("gpu", cfg.gpu)}
        results.add(about | row)
        show(cell)

    open_cells = []
    for cell in sweep.cells:
        known = results.get(cell.key)
        if known is None or (cfg.retry_failed and known["status"] not in DONE):
            open_cells.append(cell)
    open_cells.sort(key=lambda cell: cell.in_grid)  # points first: others compare with them
    if cfg.together and open_cells:
        rows = train_together(runs_on(cfg, sweep, groups[0]), open_cells)
        for cell, row in zip(open_cells, rows, strict=True):
            add(cell, row)
    else:
        on_free_groups(run, open_cells, groups)


def write(cfg: Config, sweep: Sweep, results: Results) -> list[Path]:
    """Writes table, figures and page of the cells that are finished, with their costs of today."""
    rows: dict[str, dict[str, Any]] = {}
    used: dict[str, Price] = {}
    for cell in sweep.cells:
        if (row := results.get(cell.key)) is not None:
            gpu = known_name(row["gpu"]) if row.get("gpu") else None
            price = sweep.prices.get(gpu or "")
            rows[cell.key] = row | costs(row, price, cfg.samples)
            used |= {gpu: price} if gpu and price else {}
    whole = sweep.cells if cfg.mode == "estimate" else []
    grid = [cell for cell in whole if cell.in_grid and not cell.error]
    sizes = {hardware_of(cfg, cell).device_memory / 2**30 for cell in grid}
    device_gib = sizes.pop() if len(sizes) == 1 else None
    folder = Path(cfg.output_dir).expanduser()
    if (best := best_of(sweep.cells, rows, folder)) is not None:
        print(best)
    return write_output(
        folder, cfg.mode, sweep.cells, rows, beside(sweep.published, rows), used, device_gib
    )


def main(cfg: Config) -> None:
    began, sweep = time.perf_counter(), read_sweep(cfg)
    folder = Path(cfg.output_dir).expanduser()
    with FolderLock(folder, "output_dir"):
        results = Results(folder)
        print(f"{len(sweep.cells)} cells by {cfg.mode}, {results.done(sweep.cells)}", flush=True)
        if cfg.mode == "run" and not cfg.together and can_be_together(sweep.training, sweep.cells):
            print(HINT, flush=True)

        def show(cell: Cell) -> None:
            row = results.get(cell.key) or {}
            memory = f", {row['memory_gib']:.2f} GiB" if "memory_gib" in row else ""
            reason = f": {row['reason']}" if "reason" in row else ""
            print(f"  {cell.name}: {row.get('status', FAILED)}{memory}{reason}", flush=True)

        try:
            run_cells(cfg, sweep, results, show)
        finally:  # also after Ctrl-C: what is finished can be looked at
            for path in write(cfg, sweep, results):
                print(path)
    print(f"finished in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    launch_alone(__file__, Config, check, main)
