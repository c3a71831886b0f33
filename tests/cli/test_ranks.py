"""torchrun's flags: the numbers of machines and ranks that they mean, and mistakes in them."""

from __future__ import annotations

import pytest

from qfsdp.cli.command import run
from qfsdp.common.errors import UserError
from qfsdp.launch import ranks
from qfsdp.launch.ranks import (
    number_of_ranks,
    numbers_of_nodes,
    planned_ranks,
    possible_numbers_of_ranks,
    torchrun_flags,
)


@pytest.mark.parametrize("word", ["0", "-1", "two", "", "1.5", "+1", "99999999", "9" * 5000, "²"])
def test_nproc_per_node(word: str) -> None:
    with pytest.raises(UserError, match=r"--nproc_per_node: .* is not valid; expected a number"):
        number_of_ranks(word)


@pytest.mark.parametrize(
    "word", ["0", "-1", "x", "2:1", "0:2", "1:", ":2", "1:2:3", "1:x", "9" * 5000]
)
def test_nnodes(word: str) -> None:
    with pytest.raises(UserError, match=r"--nnodes: .* is not valid; expected a number of machine"):
        numbers_of_nodes(word)


def test_restarts() -> None:
    words = ["--max-restarts", "-1", "recipes/generate", "--config", "configs/generate.yaml"]
    with pytest.raises(UserError, match=r"--max-restarts: -1 is not valid; expected 0 or more"):
        run("qfsdp", words)


def test_planned_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ranks, "local_world_size", lambda: 3)
    assert possible_numbers_of_ranks() == [3]
    with torchrun_flags("2:4", "2"):
        assert planned_ranks() == (4, 2)
        assert possible_numbers_of_ranks() == [4, 6, 8]
    with torchrun_flags("2", "gpu"):
        assert planned_ranks() == (6, 3)
        assert possible_numbers_of_ranks() == [6]
    assert planned_ranks() == (3, 3)
