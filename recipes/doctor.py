"""Tell within a minute what works on this machine: one table, one line of advice per red row.

    qfsdp doctor
    qfsdp doctor output=doctor.json ranks=2 seconds=300

Versions, cards, links with their measured rates, caches, compiled kernels against plain functions,
a tiny QDoRA on one rank, an all-gather of all ranks (NCCL, or gloo without cards), and the same
QDoRA on all ranks, whose losses must be those of one rank. Checks run in child processes,
which may crash or hang: that is one red row. Nothing is downloaded.

The status is 1 if a row is red. The file of `output` holds the table and all figures, without
secrets and without names of users, hosts and folders: attach it to an issue.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from qfsdp.cli.doctor.run import CHECKS, Row, anonymous, rows
from qfsdp.common.errors import InvalidField, UserError, check_bounds
from qfsdp.common.files import write_json, writing
from qfsdp.common.long_waits import long_wait
from qfsdp.common.printable import printable
from qfsdp.launch.start import launch_alone

MOST_RANKS = 64


@dataclass
class Config:
    """Keys of the command line; this recipe needs no config file."""

    ranks: int | None = None  # processes of the last checks; null: one per card, 2 without cards
    output: str | None = None  # a .json file to attach to an issue; null: none
    seconds: int = 60  # for all checks together; one may take a third of it

    def check(self) -> None:
        if self.ranks is not None:
            check_bounds(self, "ranks", least=1, most=MOST_RANKS)
        check_bounds(self, "seconds", least=10, most=3600)
        if self.output is not None and not self.output.endswith(".json"):
            raise InvalidField("output", self.output, "a file that ends in .json")


def check(cfg: Config) -> None:
    """Finds an output file that cannot be written, before anything runs."""
    if cfg.output is not None:
        write_output(cfg.output, [])


def write_output(output: str, found: list[Row]) -> None:
    path = Path(output).expanduser()
    with writing("output", path):
        write_json(path, {"rows": [asdict(row) for row in found]})


def show(row: Row) -> None:
    line = f"{CHECKS[row.name].title:<18} {row.state:<8} {row.seconds:>5.1f} s  {row.text}"
    print(printable(line), flush=True)
    if row.state == "red":
        print(printable(f"{'':<18} advice:  {row.advice}"), flush=True)


def main(cfg: Config) -> None:
    found: list[Row] = []
    try:
        temporary = tempfile.TemporaryDirectory(prefix="qfsdp_doctor_", ignore_cleanup_errors=True)
    except OSError as error:
        raise UserError(f"TMPDIR: no temporary folder: {error}; expected one to write to") from None
    with temporary as folder, long_wait("doctor: checking"):
        for row in rows(Path(folder), cfg.ranks, cfg.seconds):
            row.text = anonymous(row.text.replace(folder, "FOLDER"))
            if row.state == "red":
                row.advice = anonymous(row.advice or CHECKS[row.name].advice)
            show(row)
            found.append(row)
    if cfg.output is not None:
        write_output(cfg.output, found)
        print(f"output: {cfg.output}")
    red = sum(row.state == "red" for row in found)
    print(f"{red} of {len(found)} red" if red else "nothing is red")
    if red:
        sys.exit(1)


if __name__ == "__main__":
    launch_alone(__file__, Config, check, main)
