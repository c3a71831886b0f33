"""The demo's progress lines."""

from __future__ import annotations

import sys

import pytest

from examples.demo import progress


def test_working_prints_until_the_block_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.01)
    lines = ""
    with progress.working("waiting"):
        while lines.count("\n") < 3:
            lines += capsys.readouterr().out
    assert lines.splitlines()[0] == "demo: waiting ..."
    assert lines.splitlines()[1] == "demo: waiting ... 0 s"


def test_run_command_passes_on_output_and_status(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('Żółć'); print('to stderr', file=sys.stderr); sys.exit(3)"
    assert progress.run_command("running", [sys.executable, "-X", "utf8", "-c", code]) == 3
    assert sorted(capsys.readouterr().out.splitlines()) == ["to stderr", "Żółć"]
