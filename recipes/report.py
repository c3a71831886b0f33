"""Write one page about runs: curves, speed, memory, answers, configs and accuracy, side by side.

    tune run recipes/report runs/a runs/b [key=value ...]

Words without "=" are folders: the `output_dir` of a training run, or of a sweep. The page is one
HTML file that loads nothing else, so it can be mailed or kept; loss.png stands beside it. A run
writes such a page into its own folder when it ends (`report: true`); this one adds the memory of a
step, by a dry run of the config, several runs in one chart, and the keys in which they differ.

Evaluations are the .json files of recipes/evaluate in a run's folder or its folder `evaluation`;
`evaluations=[FILE,...]` adds others, such as that of the base model. Where both have answered the
same questions, the page shows answers before and after.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from qfsdp.common.errors import InvalidField, UserError
from qfsdp.common.files import writing
from qfsdp.common.long_waits import SLOW_S, long_wait
from qfsdp.common.messages import first_line
from qfsdp.config.load import load_config
from qfsdp.config.recipe_files import find_config, find_recipe, load_recipe
from qfsdp.launch.start import launch_alone
from qfsdp.planning.extrapolate import estimate_fast
from qfsdp.planning.report import chart_of, comparison_of
from qfsdp.sweep.output import finished_sections
from qfsdp.sweep.prices import read_prices
from qfsdp.sweep.results import FILE
from qfsdp.training.report.drawing import write_picture
from qfsdp.training.report.page import Section, figure, part, table, write_page
from qfsdp.training.report.run_folder import Evaluation, RunFolder, read_evaluation, read_run
from qfsdp.training.report.sections import LOSS, PAGE, loss_chart, run_sections

OF_A_CPU = "the measured peak is that of the process, with its libraries"


@dataclass
class Config:
    """Keys of the command line; this recipe needs no config file."""

    runs: list[str] = field(default_factory=list)  # folders; also words without "="
    evaluations: list[str] = field(default_factory=list)  # .json files, for the first run
    output: str | None = None  # an .html file; null: report.html in the first folder
    estimate: bool = True  # compare memory with a dry run of each config
    title: str | None = None  # of the page; null: the names of the runs

    def check(self) -> None:
        if not self.runs:
            raise InvalidField("runs", self.runs, "at least one folder of a run")
        if self.output is not None and not self.output.endswith((".html", ".htm")):
            raise InvalidField("output", self.output, "a file that ends in .html")


def folders_of(cfg: Config, sweeps: bool) -> list[Path]:
    """The folders of sweeps, or those of runs."""
    folders = [Path(folder).expanduser() for folder in cfg.runs]
    return [folder for folder in folders if (folder / FILE).is_file() == sweeps]


def read_runs(cfg: Config) -> list[RunFolder]:
    """The runs, with different names, the evaluations of the command line in the first. Raises
    UserError."""
    runs = [read_run(folder) for folder in folders_of(cfg, sweeps=False)]
    if not runs:
        return []
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        runs = [replace(run, name=str(run.folder)) for run in runs]
    further: list[Evaluation] = [read_evaluation(Path(f).expanduser()) for f in cfg.evaluations]
    found = sorted([*runs[0].evaluations, *further], key=lambda one: one.adapter is not None)
    return [replace(runs[0], evaluations=found), *runs[1:]]


def check(cfg: Config) -> None:
    """Finds folders that are none of runs, before anything is drawn."""
    read_runs(cfg)
    if cfg.output is None and (Path(cfg.runs[0]).expanduser() / FILE).is_file():
        raise UserError("output: null; expected a file, as a sweep's folder has a page of its own")


def memory_section(runs: list[RunFolder]) -> Section:
    """The memory of a step of every run, by a dry run of its own config, beside what it measured.

    A run whose config or model cannot be read gets a sentence.
    """
    parts = Markup()
    for run in runs:
        parts += part("heading", run.name) if len(runs) > 1 else ""
        try:
            with long_wait(f"memory: a step of {run.name} runs dry", every=SLOW_S):
                parts += memory_of(run)
        except Exception as error:  # an old config, or a model that is not on this machine
            parts += part("note", f"not estimated: {first_line(error)}")
    return Section("Memory over a step", parts)


def memory_of(run: RunFolder) -> Markup:
    """The chart and the table of one run. Raises UserError and what a dry run raises."""
    name = str(run.machine.get("recipe", ""))
    # Not the copy in the folder: a folder of somebody else must not run code.
    if (recipe_file := find_recipe(name)) is None:
        raise UserError(f"the run's recipe '{name}' is not here")
    recipe = load_recipe(recipe_file)
    cfg: Any = load_config(recipe.Config, ["--config", str(run.folder / "config.yaml")])
    ranks = int(run.machine.get("world_size", 1))
    local = int(run.machine.get("local_world_size", ranks))
    target: Any = "cpu" if run.machine.get("device", "cpu") == "cpu" else "cuda"
    found = estimate_fast(recipe.build_model, recipe.train_step, cfg, ranks, local, target)
    head, rows = comparison_of(found, run.steps)
    note = "" if target == "cuda" else part("note", OF_A_CPU)
    return part("charts", [figure(chart_of(found))]) + table(head, rows) + note


def main(cfg: Config) -> None:
    runs = read_runs(cfg)
    sections = run_sections(runs)
    if cfg.estimate and runs:
        at = next((i for i, one in enumerate(sections) if one.title == "Memory"), len(sections))
        sections.insert(at + 1, memory_section(runs))
    prices = find_config("configs/prices")
    known = read_prices(Path(prices)) if prices else {}
    for folder in folders_of(cfg, sweeps=True):
        sections += finished_sections(folder, known)
    output = Path(cfg.output or Path(cfg.runs[0]) / PAGE).expanduser()
    names = ", ".join(Path(folder).resolve().name for folder in cfg.runs)
    with writing("output", output):
        write_page(output, cfg.title or names, ", ".join(map(str, cfg.runs)), sections)
        if not (chart := loss_chart(runs)).is_empty:
            write_picture(chart, output.with_name(LOSS))
    print(f"report: {output}")


if __name__ == "__main__":
    launch_alone(__file__, Config, check, main, words="runs")
