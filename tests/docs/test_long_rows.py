"""The table of docs/guide/long-rows.md is what docs/long_rows.py writes today."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from docs import long_rows


def test_a_cell_names_the_longest_row_and_the_first_way_that_takes_it() -> None:
    def takes(*sizes: int) -> long_rows.Estimated:
        return lambda length: SimpleNamespace(
            reserved=sizes[length > 8192] << 30, steady=sizes[0] << 30, host={"a": 2**30}
        )

    plain, held = (), (long_rows.HOST,)
    ways = {plain: takes(20, 30), held: takes(10, 22)}
    assert long_rows.cell(ways, 2, 24 << 30) == (
        "2,097,152 (22.0 GiB, host 8 GiB, base in the host)"
    )
    assert long_rows.cell(ways | {held: takes(10, 25)}, 1, 24 << 30) == (
        "8,192 (20.0 GiB, host 4 GiB)"
    )
    assert long_rows.cell(ways, 1, 4 << 30) == "none"


@pytest.mark.slow
def test_the_table_has_the_figures_of_today() -> None:
    assert long_rows.PAGE.read_text() == long_rows.with_table()
