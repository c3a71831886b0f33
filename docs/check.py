"""Checks the Markdown files of the project, and the commands of docstrings; `make lint` runs it.

    python docs/check.py            prints one line per mistake; status 1 if there is any

* Relative links lead to a file, and to a heading of it.
* Files in backticks exist.
* Commands exist: `tune` and `qfsdp` with their recipe, config and keys, `make` with its target,
  `python` with its script. A command that is followed by "error: ..." must give that error.
* Commands mean the same in bash and zsh: `~key` and brackets are quoted.
* Config keys in backticks exist, such as `adapter.rank` or `sharding.wrap: linear`.
* Lines are at most 100 columns, but for those of tables. README.md, CHANGELOG.md and the files of
  docs/ have line limits, beside their tables; a version of CHANGELOG.md and log.md has at most 60
  lines.
* The tables of architecture.md have the lines of their files; `docs/traced.py` writes them.
* results.md is what `benchmarks/results.py` writes, reference/configuration.md what
  `docs/reference.py` writes, and the table of guide/models.md what `docs/models.py` writes.

Keys are checked by the recipe's own schema. Neither models nor data are read.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 100
LIMITS = {
    "README.md": 150,
    "docs/architecture.md": 190,
    "docs/log.md": 150,
    "docs/results.md": 100,
    "docs/internals/*.md": 100,
    "docs/guide/*.md": 150,
}
ARCHITECTURE = ROOT / "docs" / "architecture.md"
# A table of architecture.md is introduced by its sum, e.g. "31 files / 6,438 lines; the aim is".
SUM = re.compile(r"^(\d+) files / ([\d,]+) lines; the aim is", re.MULTILINE)
ROW = re.compile(r"\| `([\w/.]+\.py)` \| +(\d+) \|")
DRIFT = 20  # lines by which a count in architecture.md may be off
SUBCOMMANDS = (
    *("run", "finetune", "chat", "serve", "doctor", "ls", "cp", "cat", "validate", "download"),
)
FOLDERS = ("qfsdp", "recipes", "configs", "benchmarks", "docs", "tests", "examples")
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    problems = [problem for file in markdown_files() for problem in check_file(file)]
    problems += check_docstrings()
    problems += check_counts()
    problems += check_results()
    problems += [*check_reference(), *check_models()]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def markdown_files() -> list[Path]:
    patterns = ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/**/*.md")
    return sorted(file for pattern in patterns for file in ROOT.glob(pattern))


def check_docstrings() -> Iterator[str]:
    """The commands above recipes and examples, which `--help` prints."""
    for file in sorted([*ROOT.glob("recipes/*.py"), *ROOT.glob("examples/**/*.py")]):
        text = ast.get_docstring(ast.parse(file.read_text())) or ""
        yield from (f"{file.relative_to(ROOT)}: {found}" for found in check_commands(text))


def check_file(file: Path) -> Iterator[str]:
    name = str(file.relative_to(ROOT))
    text = file.read_text()
    lines = text.splitlines()
    for pattern, limit in LIMITS.items():
        written = sum(not line.startswith("|") for line in lines)
        if file.relative_to(ROOT).match(pattern) and written > limit:
            yield f"{name}: {written} lines beside tables; expected at most {limit}"
    for at, line in enumerate(lines, 1):
        if len(line) > WIDTH and not line.startswith(("|", "<!-- table")):  # these cannot be broken
            yield f"{name}:{at}: {len(line)} columns; expected at most {WIDTH}"
    if name in ("CHANGELOG.md", "docs/log.md"):
        for part in re.split("^## ", text, flags=re.MULTILINE)[1:]:
            title, *body = part.rstrip().splitlines()
            if len(body) >= 60:
                yield f"{name}: '{title}' has {len(body) + 1} lines; expected at most 60"
    yield from (f"{name}: {problem}" for problem in check_links(file, text))
    if name != "docs/log.md" and name != "CHANGELOG.md":  # these speak of the past
        yield from (f"{name}: {problem}" for problem in check_paths(text))
    if name != "docs/results.md":
        yield from (f"{name}: {problem}" for problem in check_commands(text))
        if name != "docs/reference/other-projects.md":  # which has keys that are not ours
            yield from (f"{name}: {problem}" for problem in check_keys(text))


# Links and paths


def check_links(file: Path, text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        goal = (file.parent / path) if path else file
        if not goal.exists():
            yield f"link to {target}: no such file"
        elif anchor and goal.suffix == ".md" and anchor not in anchors(goal):
            yield f"link to {target}: no such heading"


@cache
def anchors(file: Path) -> set[str]:
    """The link targets that GitHub makes of the headings of a file."""
    titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def check_paths(text: str) -> Iterator[str]:
    """Files and folders of the project that are named in backticks, such as `qfsdp/cli`,
    `recipes/merge` or `nf4.py`."""
    for word in INLINE.findall(text):
        if re.fullmatch(r"[\w/]+\.py", word) and word.partition("/")[0] not in FOLDERS:
            if not any(path.endswith(f"/{word}") for path in python_files()):
                yield f"`{word}`: no such file"
            continue
        if not re.fullmatch(r"[\w./-]+", word) or word.partition("/")[0] not in FOLDERS:
            continue
        candidates = [ROOT / word, ROOT / f"{word}.py", ROOT / f"{word}.yaml"]
        if "/" in word and "..." not in word and not any(path.exists() for path in candidates):
            yield f"`{word}`: no such file"


@cache
def python_files() -> list[str]:
    return [f"/{file.relative_to(ROOT)}" for top in FOLDERS for file in ROOT.glob(f"{top}/**/*.py")]


# Commands


def check_commands(text: str) -> Iterator[str]:
    copies: dict[str, str] = {}  # what `tune cp` has made in this document
    for command, expected in commands(text):
        problem = check_command(command, copies)
        if problem != expected:
            told = problem or f"no error; expected '{expected}'"
            yield f"`{command}`: {told}"


def commands(text: str) -> Iterator[tuple[str, str | None]]:
    """Commands of code blocks and of inline code, each with the error that it is to give."""
    lines = re.sub(r" *\\\n\s*", " ", text).splitlines()
    for at, line in enumerate(lines):
        if line.startswith("    "):
            command = line.strip().removeprefix("$ ")
            after = lines[at + 1].strip() if at + 1 < len(lines) else ""
            error = after.removeprefix("error: ") if after.startswith("error: ") else None
            yield re.split(r"\s{2,}#?", command)[0], error
    prose = "\n".join(line for line in lines if not line.startswith("    "))
    for code in INLINE.findall(prose):
        yield " ".join(code.split()), None


def check_command(command: str, copies: dict[str, str]) -> str | None:
    """What is wrong with a command; None if nothing is, or if it is none of ours."""
    try:
        words = shlex.split(re.sub(r"\[[^\]]*\.\.\.\]", "", command), comments=True)
    except ValueError:
        return None
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)  # environment variables
    words = [word for word in words if word not in ("...", "…")]
    if len(words) < 2:
        return None
    if words[0] in ("tune", "qfsdp", "pip") and (word := unquoted(command)) is not None:
        return f"zsh takes {word} as its own; expected quotes"
    if words[0] == "make":
        return check_make(words[1:])
    if words[0] in ("python", "python3"):
        return None if script_exists(words[1:]) else "no such script"
    if words[0] in ("tune", "qfsdp"):
        return check_tune(words[1:], copies)
    return None


def unquoted(command: str) -> str | None:
    """The first word that zsh would expand, or refuse as a pattern; None without one."""
    bare = re.sub(r"""'[^']*'|"[^"]*"|\\.|\[[^\]]*\.\.\.\]""", "", command)
    return next((word for word in bare.split() if re.search(r"^~\w|[][*?]|\{.*,", word)), None)


def check_make(words: list[str]) -> str | None:
    text = (ROOT / "Makefile").read_text()
    for word in words:
        if "=" not in word and not re.search(rf"^{re.escape(word)}:", text, re.MULTILINE):
            return f"the Makefile has no target '{word}'"
    return None


def script_exists(words: list[str]) -> bool:
    if words[0] == "-m":
        module = ROOT / words[1].replace("qfsdp.examples.", "examples.").replace(".", "/")
        return words[1].partition(".")[0] not in FOLDERS or module.with_suffix(".py").is_file()
    return words[0].startswith("-") or "<" in words[0] or (ROOT / words[0]).is_file()


def check_tune(words: list[str], copies: dict[str, str]) -> str | None:
    subcommand, *rest = words
    if subcommand not in SUBCOMMANDS:
        return f"no command '{subcommand}'"
    names = [word for word in rest if not word.startswith("-")]
    if subcommand == "run":
        return check_run(rest, copies)
    if subcommand in ("cp", "cat", "validate") and names:
        source = copies.get(names[0], names[0])
        if find(source) is None and not is_placeholder(source):
            return f"no recipe or config '{source}'"
        if subcommand == "cp" and len(names) > 1:
            copies[names[1]] = copies[names[1].partition(".")[0]] = source
    return None


def check_run(words: list[str], copies: dict[str, str]) -> str | None:
    at = next((i for i, word in enumerate(words) if word == "--config"), len(words))
    recipe = words[at - 1] if at else ""
    if at + 1 >= len(words) or is_placeholder(recipe) or is_placeholder(words[at + 1]):
        return None  # part of a command
    recipe, config = copies.get(recipe, recipe), copies.get(words[at + 1], words[at + 1])
    if find(recipe) is None:
        return f"no recipe '{recipe}'"
    if find(config) is None:
        return f"no config '{config}'"
    overrides = [word for word in words[at + 2 :] if not is_placeholder(word)]
    return config_error(str(find(recipe)), str(find(config)), overrides)


def config_error(recipe: str, config: str, overrides: list[str]) -> str | None:
    """What `tune run` says about the keys and values, without looking at any file they name."""
    from qfsdp.common.errors import UserError
    from qfsdp.config.load import load_config

    module = recipe_module(recipe)
    trained = re.search(r"# tune run (recipes/\w+)", Path(config).read_text())
    try:
        if trained and str(find(trained[1])) != recipe:  # a tool, with a training config
            own = set(module.Config.__dataclass_fields__)
            mine = [word for word in overrides if word.partition("=")[0] in own]
            load_config(module.Config, ["--config", os.devnull, *mine])
            overrides = [word for word in overrides if word not in mine]
            module = recipe_module(str(find(trained[1])))
        load_config(module.Config, ["--config", config, *overrides])
    except UserError as error:
        return str(error)
    return None


@cache
def recipe_module(file: str) -> ModuleType:
    from qfsdp.config.recipe_files import load_recipe

    module: Any = load_recipe(file)
    return module


def find(name: str) -> Path | None:
    """The file of a recipe or config; its folder and its suffix may be missing."""
    names = [name, f"{name}.py", f"{name}.yaml", f"recipes/{name}.py", f"configs/{name}.yaml"]
    for path in (ROOT / name for name in names):
        if path.is_file():
            return path
    return None


def is_placeholder(word: str) -> bool:
    """Whether a word stands for something else: `...`, `recipes/...`, CONFIG, NAME.yaml."""
    return "..." in word or re.fullmatch(r"(\w+/)?[A-Z]+(\.\w+)?", word) is not None


def check_keys(text: str) -> Iterator[str]:
    """Dotted keys in inline code that begin like a key of a recipe."""
    keys, open_sections = config_keys()
    for code in INLINE.findall(text):
        match = re.match(r"~?([a-z_]+(?:\.\w+)+)(?=[=:]|$)", code)
        if match is None or match[1].rpartition(".")[2] in ("json", "py", "safetensors", "md"):
            continue
        parents = ["".join(match[1][: dot.start()]) for dot in re.finditer(r"\.", match[1])]
        known = match[1] in keys or any(parent in open_sections for parent in parents)
        if parents[0] in keys and not known:
            yield f"`{code}`: no recipe has the key '{match[1]}'"


@cache
def config_keys() -> tuple[set[str], set[str]]:
    """All keys of all recipes, and those below which any name may stand (components, dicts)."""
    from qfsdp.config.convert import schema_keys

    keys: set[str] = set()
    for file in (ROOT / "recipes").glob("*.py"):
        keys |= set(schema_keys(recipe_module(str(file)).Config))
    sections = {key.rpartition(".")[0] for key in keys}
    return keys, keys - sections


# Line counts of architecture.md


def check_counts() -> Iterator[str]:
    """The files of each table have about the lines that it says, and its sum is theirs."""
    name = ARCHITECTURE.relative_to(ROOT)
    parts = SUM.split(ARCHITECTURE.read_text())
    for files, lines, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        rows = [(path, int(count)) for path, count in ROW.findall(body)]
        for path, listed in rows:
            count = count_lines(path)
            if count is None or abs(count - listed) > DRIFT:
                yield f"{name}: {path} has {count} lines; expected {listed} (python docs/traced.py)"
        total = sum(count for _, count in rows)
        if (len(rows), total) != (int(files), int(lines.replace(",", ""))):
            yield f"{name}: {len(rows)} files with {total} lines; expected {files} with {lines}"


def count_lines(path: str) -> Any:
    file = ROOT / path
    return len(file.read_text().splitlines()) if file.is_file() else None


def check_results() -> Iterator[str]:
    from benchmarks.results import is_up_to_date

    if not is_up_to_date():
        yield "docs/results.md: not up to date; run `python benchmarks/results.py`"


def check_reference() -> Iterator[str]:
    from docs.reference import is_up_to_date

    if not is_up_to_date():
        yield "docs/reference: not up to date; run `python docs/reference.py`"


def check_models() -> Iterator[str]:
    from docs.models import PAGE, with_table

    if PAGE.read_text() != with_table():
        yield "docs/guide/models.md: not up to date; run `python docs/models.py`"


if __name__ == "__main__":
    sys.exit(main())
