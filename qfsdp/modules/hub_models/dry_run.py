"""What a dry run replaces in transformers, so that it computes as in a real run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qfsdp.modules.hub_models.decoder import HubDecoder


@contextmanager
def as_in_a_run(model: Any, packed: bool) -> Iterator[None]:
    """Makes masks as real rows have them, in a `with` block. Of fake tensors transformers thinks
    that a compiler traces them, and gives each row the mask of a packed one."""
    if not isinstance(model, HubDecoder):
        yield
        return
    import transformers.masking_utils

    masking: Any = transformers.masking_utils
    before = masking.is_tracing
    masking.is_tracing = lambda _=None: packed
    try:
        yield
    finally:
        masking.is_tracing = before
