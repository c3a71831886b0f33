"""Hooks of mkdocs: the README is the first page, and links out of docs/ go to the repository.

The Markdown files are written for GitHub. `docs/check.py` checks their links there.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
FIRST = "index.md"
LINK = re.compile(r"(\]\()([^)\s:#]+)([^)\s:]*\))")  # without a scheme


def on_files(files: Files, config: Any) -> Files:
    """Adds the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, FIRST, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Gives each relative link its place on the site, or in the repository."""
    here = PurePosixPath("docs", page.file.src_uri)
    folder = PurePosixPath() if page.file.src_uri == FIRST else here.parent
    up = "../" * (len(here.parent.parts) - 1)

    def moved(link: re.Match[str]) -> str:
        target = (ROOT / folder / link[2]).resolve().relative_to(ROOT)
        if target.parts[:1] == ("docs",) and (ROOT / target).is_file() and target.suffix != ".py":
            return f"{link[1]}{up}{target.relative_to('docs').as_posix()}{link[3]}"
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{link[1]}{config['repo_url']}/{kind}/main/{target.as_posix()}{link[3]}"

    return LINK.sub(moved, markdown)
