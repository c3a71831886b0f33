"""Models of transformers with fewer layers, from which an estimate goes on to all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from qfsdp.common.errors import UserError
from qfsdp.modules.hub_models.config import HubConfig, hub_config

NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx")
"""Fields of modules that hold their layer's number."""


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """A parsed `config.json` for the first `layers` layers: lists with a value for each layer are
    cut, also those of a text model in a whole one."""
    if "num_hidden_layers" not in config and isinstance(config.get("text_config"), dict):
        return config | {"text_config": with_layers(config["text_config"], layers)}
    depth = config.get("num_hidden_layers")
    cut = {
        key: value[:layers]
        for key, value in config.items()
        if isinstance(value, list) and len(value) == depth
    }
    return config | cut | {"num_hidden_layers": layers}


def layer_kinds(config: HubConfig) -> list[Any]:
    """What is in each layer: modules, their fields and the shapes of their parameters. Two layers
    of one kind compute the same. Empty if the layers were not found, or have another name."""
    depth, text = config.num_hidden_layers, config.hf.get_text_config()
    lists = [
        module
        for name, module in config.meta.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth and name.endswith("layers")
    ]
    types = getattr(text, "layer_types", None) or [None] * depth
    if not lists or len(types) != depth:
        return []
    return [[kind, *_content(layer)] for kind, layer in zip(types, lists[0], strict=True)]


def _content(layer: nn.Module) -> Iterator[Any]:
    for name, module in layer.named_modules():
        fields = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, int | float | str | None) and key not in NUMBERS
        }
        shapes = [(n, p.shape) for n, p in module.named_parameters(recurse=False)]
        yield name, type(module).__name__, fields, shapes


def pattern_of(kinds: list[Any]) -> tuple[int, int]:
    """(first, every): after the first layers, kinds repeat with this period, as they do in
    `DecoderConfig.pattern`."""
    found = []
    for every in range(1, len(kinds) // 2 + 1):
        pairs = zip(kinds, kinds[every:], strict=False)
        different = [at for at, (one, other) in enumerate(pairs) if one != other]
        found.append((max(different, default=-1) + 1, every))
    return min(found, key=lambda pair: 2 * pair[0] + 3 * pair[1], default=(0, 1))


def begins_alike(config: HubConfig, content: dict[str, Any], layers: int) -> bool:
    """Whether `with_layers(content, layers)` is a model of the first layers of `config`'s."""
    try:
        shallow = hub_config(with_layers(content, layers), config.source)
        return 0 < layers == len(kinds := layer_kinds(shallow)) and (
            kinds == layer_kinds(config)[:layers]
        )
    except UserError:
        return False
