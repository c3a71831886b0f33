"""What a dry run replaces in transformers, so that it computes as in a real run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from qfsdp.modules.hub_models.decoder import HubDecoder


def as_in_a_run(model: Any, packed: bool) -> AbstractContextManager[Any]:
    """Makes masks as real rows have them, in a `with` block. Of fake tensors transformers thinks
    that a compiler traces them, and gives each row the mask of a packed one."""
    if not isinstance(model, HubDecoder):
        return nullcontext()
    from transformers import masking_utils

    return patch.object(masking_utils, "is_tracing", lambda _=None: packed)
