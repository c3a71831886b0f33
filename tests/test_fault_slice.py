"""A slice of `make test-faults`: one random fault or more of most kinds.

The tests import it late, and stand outside its folder: it sets variables for its runs, which other
files would see.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import ROOT


def test_every_recipe_that_writes_is_killed() -> None:
    from tests.faults.commands import COMMANDS, NOTHING_WRITTEN

    killed = {command.recipe for command in COMMANDS.values()}
    assert not killed & set(NOTHING_WRITTEN)
    assert killed | set(NOTHING_WRITTEN) == {path.stem for path in (ROOT / "recipes").glob("*.py")}


@pytest.mark.long
def test_every_killed_command_succeeds_when_nothing_kills_it(tmp_path: Path) -> None:
    """`kill_any` draws one of them at random, so a key that no longer exists could stay unseen."""
    from tests.faults.commands import COMMANDS, prepare, run
    from tests.faults.runs import Workshop

    shop = Workshop(tmp_path)
    prepare(shop)
    for name, command in COMMANDS.items():
        status, text, operations = run(shop, command, shop.fresh())
        assert status == 0 and operations > 0, f"{name}: status {status}\n{text[-3000:]}"


@pytest.mark.long
def test_a_fault_of_each_kind() -> None:
    from tests.faults.__main__ import KINDS

    kinds = [kind for kind in KINDS if kind not in ("agent", "disk")]
    command = [sys.executable, "-m", "tests.faults", "--kind", ",".join(kinds), "--count", "1"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-9000:] + found.stderr[-3000:]
    lines = [line.split() for line in found.stdout.splitlines()]
    head = next(n for n, words in enumerate(lines) if words[:1] == ["kind"])
    done = {words[0]: words for words in lines[head + 1 :][: len(kinds)]}
    assert list(done) == kinds
    for kind, (_, faults, _, recovered, failed, *_) in done.items():
        assert int(faults) >= 1 and recovered == faults and failed == "0", kind
