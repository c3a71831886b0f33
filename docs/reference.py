"""Writes two pages of docs/reference/: configuration.md, every key of every recipe, from the
recipes' source; and other-projects.md, every key of other projects and what a run answers to it.

    python docs/reference.py            writes them
    python docs/reference.py --check    status 1 if they are not what would be written

A key that several recipes have with the same type, default and sentence is printed once.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qfsdp.config.reference import Key

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "configuration.md"
OTHERS = PAGE.with_name("other-projects.md")
OTHERS_HEAD = """# Keys of other projects

Written by `python docs/reference.py` from `qfsdp/config/foreign_keys.yaml`; do not edit. A run that
is given one of these keys of torchtune, Axolotl, LLaMA-Factory, Unsloth, HF Trainer, TRL or PEFT
answers so, in one line and before anything is loaded. The guides from
[torchtune](../guide/from-torchtune.md) and from [the others](../guide/from-axolotl-and-trl.md) have
the most used ones side by side.
"""
MOST_IN_HEADING = 3  # recipes
HEAD = """# Configuration

Written by `python docs/reference.py`; do not edit. The sentences stand at the dataclass fields of
the recipes and of `qfsdp/`.

`tune run RECIPE --help` prints the keys of one recipe, with `--config FILE` also the values there
and the arguments of its components. A key is set in the YAML file or as `key=value`; `~key` takes
one back to its default. A component is a mapping with `_component_`, the import path of a class or
function, and its arguments.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="status 1 if it would write others")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if args.check:
        return 0 if is_up_to_date() else 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    OTHERS.write_text(others())
    return 0


def is_up_to_date() -> bool:
    written = {file: file.read_text() for file in (PAGE, OTHERS) if file.is_file()}
    return written == {PAGE: page(), OTHERS: others()}


def page() -> str:
    """Keys outside of sections first, by the recipes that have them; then every section once."""
    places = read_places()
    lines: list[str] = []
    groups: dict[tuple[str, ...], list[Key]] = {}
    for key, names in places.pop("").items():
        groups.setdefault(tuple(names), []).append(key)
    for recipes, keys in groups.items():
        if len(recipes) <= MOST_IN_HEADING:
            lines += [f"\n## {' and '.join(recipes)}\n"]
        else:
            lines += [f"\n## {recipes[0]} and {len(recipes) - 1} others\n"]
            lines += [*wrapped(f"Recipes: {', '.join(recipes)}."), ""]
        lines += [line for key in keys for line in entry(key)]
    for place, known in places.items():
        everywhere = sorted({name for names in known.values() for name in names})
        lines += [f"\n## `{place}`\n"]
        for key, names in known.items():
            if key.type == "section":
                lines += [*wrapped(key.sentence), ""]
            else:
                lines += entry(key, names if sorted(names) != everywhere else [])
        lines += ["", *wrapped(f"Recipes: {', '.join(everywhere)}.")]
    return HEAD + "\n".join(lines) + "\n"


def others() -> str:
    """A table of the keys that have one here, and the others by what is said of them."""
    from qfsdp.config.foreign_keys import foreign_keys

    table, said = ["| key | here |", "|---|---|"], dict[str, list[str]]()
    for key, answer in sorted(foreign_keys().answers.items()):
        if isinstance(answer, str) and " " in answer:
            said.setdefault(answer, []).append(f"`{key}`")
            continue
        choices = answer if isinstance(answer, dict) else {"": answer}
        values: dict[str, list[str]] = {}
        for value, ours in choices.items():
            values.setdefault(ours if " " in ours else f"`{ours}`", []).append(value)
        cells = [f"{ours}{given_as(names)}" for ours, names in values.items()]
        table.append(f"| `{key}` | {'; '.join(cells)} |")
    lines = [OTHERS_HEAD, *table, "", "## Without a key here", ""]
    for sentence, keys in sorted(said.items()):
        lines += wrapped(f"* {sentence}: {', '.join(keys)}.", "  ")
    return "\n".join(lines) + "\n"


def given_as(values: list[str]) -> str:
    """The values for which an answer holds; "" stands for all others."""
    words = ["other values" if value == "" else f"`{value}`" for value in values]
    return "" if words == ["other values"] else f" for {', '.join(words)}"


def read_places() -> dict[str, dict[Key, list[str]]]:
    """A section, or "" for keys outside of them -> its keys -> the names of their recipes."""
    from qfsdp.config.recipe_files import load_recipe
    from qfsdp.config.reference import keys_of

    files = sorted(
        (ROOT / "recipes").glob("*.py"), key=lambda file: (file.stem[:4] != "qdor", file)
    )
    places: dict[str, dict[Key, list[str]]] = {"": {}}
    same: dict[str, Key] = {}  # defaults may be lists, which cannot be compared by hash
    for file in files:
        for key in keys_of(load_recipe(file).Config):
            top, _, rest = key.name.partition(".")
            known = places.setdefault(top if rest or key.type == "section" else "", {})
            known.setdefault(same.setdefault(repr(key), key), []).append(file.stem)
    return places


def entry(key: Key, recipes: list[str] | None = None) -> list[str]:
    """One key in at most 100 columns; `recipes` if not all recipes with its section have it so."""
    from qfsdp.config.reference import REQUIRED, shown

    default = "required" if key.default is REQUIRED else f"default `{shown(key.default)}`"
    only = f" [{', '.join(recipes)}]" if recipes else ""
    return wrapped(f"* `{key.name}` ({key.type}, {default}){only}: {key.sentence}", "  ")


def wrapped(text: str, indent: str = "") -> list[str]:
    text = text.replace("<", "\\<")
    return textwrap.wrap(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    sys.exit(main())
