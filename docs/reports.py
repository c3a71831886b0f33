"""Writes docs/reference/reports.md from docs/reports.yaml: published reports beside our figures.

python docs/reports.py            writes it
python docs/reports.py --check    status 1 if it is not what would be written
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "reports.yaml"
PAGE = ROOT / "docs" / "reference" / "reports.md"
KINDS = ("measured", "estimated", "computed", "none")
COLUMNS = ("claim", "ours", "from", "published", "why they part")
WHOLE: Any = {"break_long_words": False, "break_on_hyphens": False}
HEAD = """# Published reports

Written by `python docs/reports.py` from `docs/reports.yaml`; do not edit. Each table has what a
report shows, our figure, and where it comes from: measured on a machine, estimated by a dry run and
a roofline, computed from shapes, or none. Commands stand below each table, by row.
"""


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="status 1 if it would write others")
    if parser.parse_args(words).check:
        return int(not PAGE.is_file() or PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


def page() -> str:
    return HEAD + "".join(map(section, yaml.safe_load(DATA.read_text(encoding="utf-8"))))


def section(report: dict[str, Any]) -> str:
    """A heading with the source, the table, the commands without repetition, and what follows.

    Raises:
        ValueError: a row has no known kind, or a figure where there is none.
    """
    lines = [f"\n## {report['report']}\n", f"[Source]({report['source']}).\n"]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    before = ""
    for row in report["rows"]:
        if row["kind"] not in KINDS or (row["kind"] == "none") != (row["ours"] is None):
            raise ValueError(f"{DATA}: {row['claim']}: kind '{row['kind']}' with {row['ours']}")
        whence = ", ".join(filter(None, (row["kind"], row["machine"])))
        why = "as above" if row["why"] == before != "" else row["why"]
        cells = [row["claim"], row["ours"] or "", whence, row["published"], why]
        lines.append(f"| {' | '.join(map(str, cells))} |")
        before = row["why"]
    after = f"\n{report['after']}" if "after" in report else ""
    return "\n".join([*lines, "", *commands(report["rows"])]) + f"\n{after}"


def commands(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for command in dict.fromkeys(row["command"] for row in rows):
        first, _, rest = command.partition(" --config ")
        config, _, keys = rest.partition(" ")
        lines = [f"{first} --config {config}", keys] if rest else wrap(command, 92, **WHOLE)
        yield "    " + " \\\n        ".join(filter(None, lines))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
