"""docs/architecture.md lists the files in which a line runs, as they are traced."""

from __future__ import annotations

import pytest
import torch

from docs import traced


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the page lists what runs on a CPU")
@pytest.mark.usefixtures("eager")
def test_lists_are_what_runs() -> None:
    runs = {name: set(files) for name, files in traced.traced().items()}
    assert traced.listed(traced.PAGE.read_text()) == runs, "run: python docs/traced.py"
