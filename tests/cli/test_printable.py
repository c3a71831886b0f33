"""What a terminal would obey is shown as escapes, in answers and in errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qfsdp.common.errors import UserError, user_errors
from qfsdp.common.printable import printable, printable_json
from qfsdp.common.terminal import warn
from qfsdp.data.files.json_lines import to_lines
from tests.tiny import ROOT

ODD = "a\x1b]0;title\x07 \x9b2J\r\u202e\ud800 \u00e9\u3000\U0001f469\u200d\U0001f680\n\tb"


def test_escapes() -> None:
    shown = printable(ODD)
    assert shown == (
        "a\\x1b]0;title\\x07 \\x9b2J\\r\\u202e\\ud800 \u00e9\u3000\U0001f469\u200d\U0001f680\n\tb"
    )
    assert printable(shown) == shown


def test_json_keeps_its_values() -> None:
    line = printable_json(to_lines([{"text": ODD}]))
    assert json.loads(line) == {"text": ODD} and "\x9b" not in line and "\u202e" not in line


def test_errors(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit), user_errors():
        raise UserError("data\x1b[2J.jsonl: not UTF-8")
    assert capsys.readouterr().err == "error: data\\x1b[2J.jsonl: not UTF-8\n"


def test_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    warn("'run\x1b]0;x\x07' cannot be written")
    assert capsys.readouterr().err == "warning: 'run\\x1b]0;x\\x07' cannot be written\n"


def test_every_warning_is_printed_by_one_function() -> None:
    """And so has escapes; `MISSING` of output.py is bytes for a full disk."""
    files = [*(ROOT / "qfsdp").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]
    own = [f.name for f in files if re.search(r'(?<!b)"warning: ', f.read_text())]
    assert own == ["terminal.py"]


@pytest.mark.parametrize("place", ["word", "file"])
def test_a_locale_without_utf_8(place: str, tmp_path: Path) -> None:
    """A folder's name that ASCII does not have costs one line, which says what to set."""
    config = tmp_path / "c.yaml"
    config.write_text(f"output_dir: {'ü' if place == 'file' else 'u'}\nmodel: {{path: x}}\n")
    script = "from qfsdp.common.errors import user_errors\nfrom pathlib import Path\nimport sys\n"
    script += "from qfsdp.config.load import load_config\nfrom dataclasses import dataclass\n"
    script += "@dataclass\nclass Config:\n    output_dir: str = ''\n    model: dict | None = None\n"
    script += "with user_errors():\n    config = load_config(Config, sys.argv[1:])\n"
    script += "    Path(config.output_dir).mkdir()\n"
    words = ["output_dir=ü"] if place == "word" else []
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", script, "--config", str(config), *words],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.endswith("expected a locale with UTF-8, or PYTHONUTF8=1\n")
