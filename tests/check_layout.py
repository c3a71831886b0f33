"""Checks the limits that keep the code readable; `make lint` runs it.

    python tests/check_layout.py    prints one line per violation; status 1 if there is any

* `qfsdp/` has at most 15 entries, and every package's docstring has three to six lines.
* A file of `qfsdp/` has at most 400 lines, a recipe at most 260, a function at most 60.
* Tests name at most `PRIVATE_NAMES` private names of `qfsdp/`; the number only falls.
* Lines of YAML, Markdown and TOML have at most 100 columns (ruff checks Python); rows of tables
  may be longer.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENTRIES = 15
FILE_LINES = 400
RECIPE_LINES = 260
FUNCTION_LINES = 60
INIT_LINES = range(3, 7)
WIDTH = 100
LOOK_UP = ("attr", "patch", "patch.object")
PRIVATE_NAMES = 60  # behaviour stays when it is written in another way
TEXT = {".yaml", ".yml", ".md", ".toml"}


def main() -> int:
    files = tracked_files()
    problems = [*check_entries(files), *check_private_names(files)]
    for file in files:
        folder = file.relative_to(ROOT).parts[0]
        if file.suffix == ".py" and folder in ("qfsdp", "recipes", "examples", "benchmarks"):
            problems += check_python(file, folder)
        elif file.suffix in TEXT:
            problems += check_width(file)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def tracked_files() -> list[Path]:
    """Files that git tracks or would add; without git, all outside of hidden folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    paths = [ROOT / name for name in listed.stdout.splitlines()] or [
        path
        for path in ROOT.rglob("*")
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]
    return sorted(path for path in paths if path.is_file())


def check_entries(files: list[Path]) -> Iterator[str]:
    package = ROOT / "qfsdp"
    entries = {file.relative_to(package).parts[0] for file in files if package in file.parents}
    # Without the door of `python -m`, and the mark for type checkers.
    if len(entries - {"__main__.py", "py.typed"}) > ENTRIES:
        yield f"qfsdp: {len(entries)} entries; expected at most {ENTRIES}"


def check_python(file: Path, folder: str) -> Iterator[str]:
    name, text = file.relative_to(ROOT), file.read_text(encoding="utf-8")
    lines, tree = len(text.splitlines()), ast.parse(text)
    limit = {"qfsdp": FILE_LINES, "recipes": RECIPE_LINES}.get(folder)
    if limit is not None and lines > limit:
        yield f"{name}: {lines} lines; expected at most {limit}"
    if folder == "qfsdp" and file.name == "__init__.py":
        docstring = len((ast.get_docstring(tree) or "").splitlines())
        if docstring not in INIT_LINES:
            yield f"{name}: a docstring of {docstring} lines; expected 3 to 6"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > FUNCTION_LINES:
                place = f"{name}:{node.lineno}"
                yield f"{place}: {node.name} has {length} lines; expected at most {FUNCTION_LINES}"


def check_private_names(files: list[Path]) -> Iterator[str]:
    trees = {file: ast.parse(file.read_text("utf-8")) for file in files if file.suffix == ".py"}
    own = {
        name
        for file, tree in trees.items()
        if ROOT / "qfsdp" in file.parents
        for name in map(defined_name, ast.walk(tree))
        if name.startswith("_") and not name.endswith("_")
    }
    found = [
        (file.relative_to(ROOT), node.lineno, name)
        for file, tree in trees.items()
        if ROOT / "tests" in file.parents
        for node, name in used_names(tree)
        if name in own
    ]
    if len(found) > PRIVATE_NAMES:
        for file, line, name in found:
            yield f"{file}:{line}: {name}"
        yield f"tests/: {len(found)} private names of qfsdp/; expected at most {PRIVATE_NAMES}"


def defined_name(node: ast.AST) -> str:
    """The name that a statement or an assignment defines, or ""."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""


def used_names(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.alias, str]]:
    """The attributes of anything but `self`, imported names, and names in texts that are patched
    or looked up: `setattr(module, "name", ...)`, `patch("module.name")`."""
    mine = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr not in mine:
            yield node, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qfsdp"):
            yield from ((alias, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(LOOK_UP):
            for text in node.args:
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield text, text.value.rpartition(".")[2]


def check_width(file: Path) -> Iterator[str]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if len(line) > WIDTH and not line.startswith(("|", "<!-- table")):
            place = f"{file.relative_to(ROOT)}:{number}"
            yield f"{place}: {len(line)} columns; expected at most {WIDTH}"


if __name__ == "__main__":
    raise SystemExit(main())
