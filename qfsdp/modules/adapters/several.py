"""Several LoRA or DoRA adapters over one base, each trained on its own rows of a micro-batch.

A linear holds its weight once, with the low-rank factors of every adapter beside it. So FSDP2
gathers the weight once, and it is dequantized once, for all of them. `AdapterRows` says which rows
of a micro-batch are whose. `alone` shows one adapter as if it were the only one of the model: what
starts, saves and updates an adapter takes that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor, nn

from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.config import AdapterConfig, check_rank
from qfsdp.modules.adapters.linears import ADAPTABLE
from qfsdp.modules.adapters.places import adapted_places
from qfsdp.modules.low_rank.linear import LowRankLinear
from qfsdp.modules.low_rank.several import Pair, several_adapters
from qfsdp.modules.quantized_linear import QuantizedLinear
from qfsdp.modules.targets import replace_module

BESIDE = "adapter_"
"""Begins the name of an adapter's module beside the weight: `q_proj.adapter_NAME`."""


@dataclass
class AdapterRows:
    """Whose the rows of the micro-batch are that the model computes; one object for all linears.

    Fields:
        names: of the adapters, in the order of their rows.
        counts: rows of each.
        linears: names of the linears that have some of them, in model order.
    """

    names: list[str]
    counts: Sequence[int] = field(default_factory=list)
    linears: list[str] = field(default_factory=list)


class OneOfSeveral(LowRankLinear):
    """One adapter of a `SeveralLinear`, which holds the weight and the bias."""

    multiplies_together = False

    def __init__(self, owner: SeveralLinear, config: AdapterConfig) -> None:
        super().__init__(owner, config)
        del self.weight  # it is the owner's parameter, and no second one
        self.bias = None
        self._owner = [owner]  # in a list, it is no submodule

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self._owner[0].weight

    @property
    def pair(self) -> Pair:
        """What is multiplied."""
        return Pair(self.lora_A, self.lora_B, self.scaling, self.magnitude, self.weight_norm)


class SeveralLinear(QuantizedLinear):
    """A frozen linear, quantized or plain, with some of a model's adapters.

    Fields:
        rows: of the model.
        adapter_NAME: an `OneOfSeveral` for each adapter that this linear has.
    """

    def __init__(
        self,
        base: nn.Linear | QuantizedLinear,
        configs: Mapping[str, AdapterConfig],
        rows: AdapterRows,
    ) -> None:
        super().__init__(base.weight.data, None if base.bias is None else base.bias.data)
        self.rows = rows
        for name, config in configs.items():
            self.add_module(BESIDE + name, OneOfSeveral(self, config))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`, the tokens of whole rows in their order."""
        each = x.shape[:-1].numel() // sum(self.rows.counts)
        tokens = [count * each for count in self.rows.counts]
        found = [self.part(name) for name in self.rows.names]
        pairs = [None if part is None else part.pair for part in found]
        y = several_adapters(x, self.weight, pairs, tokens)
        return y if self.bias is None else y + self.bias

    def part(self, name: str) -> OneOfSeveral | None:
        """The adapter `name`; None: it does not adapt this linear."""
        found: OneOfSeveral | None = getattr(self, BESIDE + name, None)
        return found


def add_several(model: nn.Module, configs: Mapping[str, AdapterConfig]) -> None:
    """Freezes `model` and adds unset adapters, by name. `model.adapter_rows` gets their rows.
    Raises UserError: an adapter's targets stand for nothing, for linears that it cannot adapt, or
    its rank is too large for one."""
    if getattr(model.config, "experts", None) is not None:
        raise UserError("adapters: this model is a mixture of experts; expected one without")
    model.requires_grad_(False)
    of_linears: dict[str, dict[str, AdapterConfig]] = {}
    for name, config in configs.items():
        with named(name):
            for linear, module in adapted_places(model, config, ADAPTABLE):
                if not isinstance(module, nn.Linear | QuantizedLinear) or linear == "lm_head":
                    expected = "expected linears of layers that are no experts or routers"
                    raise UserError(f"adapter.targets: {config.linears!r} has {linear}; {expected}")
                own, key = config.of(linear), "rank_pattern" if config.rank_pattern else "rank"
                check_rank(key, linear, own.rank, *cast(Tensor, module.weight).shape)
                of_linears.setdefault(linear, {})[name] = own
    linears = [name for name, _ in model.named_modules() if name in of_linears]
    rows = AdapterRows(list(configs), linears=linears)
    for linear, of_linear in of_linears.items():
        base = cast(nn.Linear | QuantizedLinear, model.get_submodule(linear))
        replace_module(model, linear, SeveralLinear(base, of_linear, rows))
    model.adapter_rows = rows  # type: ignore[assignment]


@contextmanager
def named(name: str) -> Iterator[None]:
    """Errors about `adapter.KEY` become those about `adapters.NAME.KEY`; paths stay as they are."""
    try:
        yield
    except UserError as error:
        text = re.sub(r"(?<![\w/.-])adapter\.", f"adapters.{name}.", str(error))
        raise UserError(text) from None


def alone(model: nn.Module, name: str) -> nn.Module:
    """The adapter `name` of a model as a tree of modules, in which its linears have the names that
    they would have in a model with this adapter alone. It shares the parameters."""
    tree = nn.Module()
    # Not all modules: every update asks for each of perhaps 300 adapters, which are modules too.
    for linear in cast(AdapterRows, model.adapter_rows).linears:
        module = cast(SeveralLinear, model.get_submodule(linear))
        if (part := module.part(name)) is not None:
            place, (*path, last) = tree, linear.split(".")
            for step in path:
                if not hasattr(place, step):
                    place.add_module(step, nn.Module())
                place = place.get_submodule(step)
            place.add_module(last, part)
    return tree
