"""The modules of any decoder by what they are; their names differ between implementations."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn


class ModelParts(NamedTuple):
    """What sharding and measuring ask of a model.

    Fields:
        body: all up to the last hidden state.
        layers: of the body, in order.
        embedding: of tokens.
        output: the output layer.
    """

    body: nn.Module
    layers: nn.ModuleList
    embedding: Any
    output: Any
