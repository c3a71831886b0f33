"""Writes the table of docs/guide/models.md: names on the hub that people know, and what works.

    python docs/models.py

The names and classes stand in docs/models.json. What works comes from the library: its own
families, and the classes that benchmarks/any_model.py found equal to transformers.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guide" / "models.md"
NAMES = ROOT / "docs" / "models.json"
TABLE = re.compile(r"(<!-- table of docs/models.py -->\n).*?(?=<!-- end -->)", re.DOTALL)


def with_table() -> str:
    """The page with its table as the library is now."""
    from qfsdp.checkpoint.export.gguf_metadata import ARCHITECTURES
    from qfsdp.modules.families import FAMILIES
    from qfsdp.modules.hub_models.config import CHECKED

    checked = json.loads(CHECKED.read_text())
    lines = ["| name on the hub | class | built by | packed rows | GGUF |", "| --- " * 5 + "|"]
    for name, kind in json.loads(NAMES.read_text()).items():
        by, packed = "nobody: refused", ""
        if kind in FAMILIES:
            by, packed = "qfsdp", "yes"
        elif kind in checked["equal"]:
            part = "" if kind.endswith(("CausalLM", "LMHeadModel")) else ", text part"
            by, packed = f"transformers{part}", "yes" if kind in checked["packed"] else "no"
        lines.append(
            f"| {name} | `{kind}` | {by} | {packed} | {'yes' if kind in ARCHITECTURES else ''} |"
        )
    return TABLE.sub(lambda found: found[1] + "\n".join(lines) + "\n", PAGE.read_text())


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(with_table())
