"""The tables of docs/internals/roofline.md are what docs/roofline.py writes today."""

from __future__ import annotations

import pytest

from docs import roofline


def test_the_page_has_every_table() -> None:
    found = [match[2] for match in roofline.TABLE.finditer(roofline.PAGE.read_text())]
    assert found == list(roofline.TABLES)


@pytest.mark.parametrize(
    "table",
    [
        pytest.param("check", marks=pytest.mark.long),
        pytest.param("strategies", marks=pytest.mark.slow),
        "exchange",
    ],
)
def test_tables_have_the_figures_of_today(table: str) -> None:
    assert roofline.PAGE.read_text() == roofline.with_tables([table])
