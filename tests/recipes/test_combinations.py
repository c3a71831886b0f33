"""Features meet pairwise: every cell runs, with the right values, or is refused in one line."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.recipes.combinations import (
    ACTIONS,
    AXES,
    FAMILIES,
    Shop,
    covering,
    covering_cells,
    run_cell,
    table,
)

# One of each kind: two windows, merged projections, shared experts, sinks, dense first layers.
IN_CI = ("gemma3", "phi3", "qwen2-moe", "gpt-oss", "glm4-moe")


def test_every_two_values_stand_in_a_row() -> None:
    axes = AXES | {"action": list(ACTIONS)}
    rows = covering(axes)
    for one, other in itertools.combinations(axes, 2):
        expected = set(itertools.product(axes[one], axes[other]))
        assert {(row[one], row[other]) for row in rows} == expected
    assert rows == covering(axes)  # the same in every process of pytest
    assert len(rows) < 1.2 * len(FAMILIES) * len(ACTIONS)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.long if f in IN_CI else pytest.mark.slow) for f in FAMILIES],
)
def test_a_family_with_everything(family: str, tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    outcomes = [
        (case, action, run_cell(shop, case, action))
        for case, action in covering_cells()
        if case.family == family
    ]
    failed = [f"{a} {c}\n{o.said}" for c, a, o in outcomes if o.kind == "failed"]
    print(table(outcomes))
    assert not failed, "\n".join(failed)
    assert sum(o.kind == "ran" for *_, o in outcomes) > len(outcomes) / 3
