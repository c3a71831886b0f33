"""Writes a run's page and loss.png into its folder when the run ends."""

from __future__ import annotations

from pathlib import Path

from qfsdp.common.messages import first_line
from qfsdp.common.terminal import warn
from qfsdp.training.report.drawing import write_png
from qfsdp.training.report.page import write_page
from qfsdp.training.report.run_folder import read_run
from qfsdp.training.report.sections import loss_chart, run_sections

PAGE, LOSS = "report.html", "loss.png"


def report_at_end(output_dir: Path) -> None:
    """Writes `report.html` and `loss.png`. Whatever goes wrong is one warning on stderr: a trained
    model must not be lost for a picture."""
    try:
        run = read_run(output_dir)
        command = f"tune run recipes/report {output_dir}"
        subtitle = f"{output_dir}; `{command}` adds the memory over a step, and other runs"
        write_page(output_dir / PAGE, run.name, subtitle, run_sections([run]))
        if not (chart := loss_chart([run])).is_empty:
            write_png(chart, output_dir / LOSS)
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        warn(f"report: not written ({what})")
