"""What a terminal would obey is shown as escapes, in answers and in errors."""

from __future__ import annotations

import json

import pytest

from qfsdp.cli.errors import UserError, user_errors
from qfsdp.cli.printable import printable, printable_json
from qfsdp.data.json_lines import to_lines

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
