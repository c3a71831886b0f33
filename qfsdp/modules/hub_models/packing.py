"""Which models of transformers keep the samples of a packed row apart.

transformers' masks let a token see those of its own sample only: they find samples by positions
that do not follow each other. Layers with functions of `documents.py` know samples by themselves.
Other recurrent layers, and those that make their own mask, do not. So `benchmarks/any_model.py`
compares a pack's logits with those of its samples alone. A model may be packed if its architecture
was equal there, and if it has only modules that were compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from torch import nn

from qfsdp.common.errors import UserError
from qfsdp.modules.hub_models.config import HubConfig, checked
from qfsdp.modules.hub_models.text_part import used_classes

OF_A_ROW = ("dynamic", "longrope")
"""Kinds of rotary embedding whose angles depend on the longest position in the batch."""


def check_packed(config: HubConfig, refused: str = "packed: true; expected false") -> None:
    """Raises `UserError` unless the samples of a row do not see each other in `config`'s model.

    Args:
        refused: what the error says of the setting that needs it.
    """
    why = next(_why_not(config), None)
    if why is not None:
        raise UserError(
            f"{refused}: in transformers' {config.architecture} the samples of a row are not known "
            f"to be apart ({why})"
        )


def _why_not(config: HubConfig) -> Iterator[str]:
    compared = packed_modules().get(config.architecture)
    if compared is None:
        yield "see docs/reference/models.md"
        return
    more = sorted(used_classes(config) - compared)
    if more:
        yield f"{more[0]} was not compared"
    text = config.hf.get_text_config()
    kinds = {str(rope.get("rope_type")) for rope in config.ropes}
    yield from (f"rope of the kind {kind}" for kind in OF_A_ROW if kind in kinds)
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        yield "chunked attention"


@cache
def packed_modules() -> dict[str, frozenset[str]]:
    """Architecture -> the modules with which a pack was compared with its samples."""
    return {name: frozenset(modules.split()) for name, modules in checked()["packed"].items()}


def module_names(model: nn.Module) -> set[str]:
    """The names of the classes of a model's modules."""
    return {type(module).__name__ for module in model.modules()}
