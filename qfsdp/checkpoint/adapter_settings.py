"""What differs between a run's section `adapter` and an adapter that it is to load, in one line."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from qfsdp.checkpoint.adapter_config_file import SHARED_FIELDS
from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import LowRankExpertLinear
from qfsdp.modules.adapters.trained_rows import FIELD, trained_rows
from qfsdp.modules.adapters.whole import WHOLE
from qfsdp.modules.low_rank.adapted import adapted_linears
from qfsdp.modules.low_rank.linear import low_rank_linears
from qfsdp.modules.targets import ALL_LINEAR, FEW_ROWS, LINEAR_NAMES, linears_of

# Fields that must be the same, besides the method; of other methods `SHARED_FIELDS`.
OF_KIND = {"ia3": [], "miss": ["rank"], "oft": ["block_size"]}


def check_settings(
    config: AdapterConfig, theirs: AdapterConfig, folder: str | Path, model: nn.Module
) -> None:
    """Checks that an adapter's settings are the run's.

    Args:
        theirs: of the adapter in `folder`.
        model: adapted as `config` says; may be on the meta device.

    Raises:
        UserError: method, rank, alpha, linears or whole modules differ.
    """
    fields = OF_KIND.get(theirs.method, list(SHARED_FIELDS))
    if config.method != theirs.method and not (config.is_low_rank and theirs.is_low_rank):
        fields = ["method"]
    differing = [field for field in fields if getattr(config, field) != getattr(theirs, field)]
    if differing:
        mine = ", ".join(f"adapter.{field}: {_as_yaml(config, field)}" for field in differing)
        trained = ", ".join(_as_peft(theirs, field) for field in differing)
        fix = " ".join(f"adapter.{field}={_as_yaml(theirs, field)}" for field in differing)
        raise UserError(f"{mine}, but {folder} was trained with {trained}; expected {fix}")

    def differs(key: str, mine: object, its: str, how: str = "was trained with") -> UserError:
        expected = f"expected adapter.{key}={its}"
        return UserError(f"adapter.{key}: {mine}, but {folder} {how} {its}; {expected}")

    whole = [sorted(c.modules_to_save or ()) for c in (config, theirs)]
    if whole[0] != whole[1]:
        mine, its = (f"[{','.join(names)}]" if names else "null" for names in whole)
        raise differs("modules_to_save", mine, its)
    rows = {name: rows.ids for name, rows in trained_rows(model)}
    if rows != {place: ids for name, place in WHOLE.items() if (ids := theirs.rows_of(name))}:
        its = json.dumps(theirs.trainable_token_indices, separators=(",", ":"))
        raise differs(FIELD, config.trainable_token_indices, its)
    adapted = {name.rpartition(".")[2] for name, _ in adapted_linears(model)}
    found, known = {name.rpartition(".")[2] for name in theirs.linears}, linears_of(model)
    if found != adapted and found <= {*LINEAR_NAMES, *FEW_ROWS}:
        mine, its = (_as_targets(names, known) for names in (adapted, found))
        raise differs("targets", mine, its, "adapts")
    _check_ranks(theirs, folder, model)


def _check_ranks(theirs: AdapterConfig, folder: str | Path, model: nn.Module) -> None:
    """Checks the rank and the scaling of every linear that may have its own."""
    linears = list(low_rank_linears(model))
    of_experts = {name for name, m in linears if isinstance(m, LowRankExpertLinear)}
    for name, module in linears:
        own, rank = theirs.of(name), module.lora_B.size(1)
        one_rank = len({theirs.of(n).rank for n in of_experts}) == 1
        if rank != own.rank and name in of_experts and one_rank:
            raise UserError(
                f"adapter.expert_rank: experts get rank {rank}, but those of {folder} have "
                f"{own.rank}; expected adapter.expert_rank={own.rank}"
            )
        if rank != own.rank:
            mine, key, its = f"rank {rank}", "rank_pattern", f"{own.rank}"
        elif name not in of_experts and module.scaling != own.scaling:
            mine, key, its = f"a scaling of {module.scaling:g}", "alpha_pattern", f"{own.scaling:g}"
        else:
            continue
        expected = f"expected adapter.{key}={json.dumps(getattr(theirs, key))}"
        raise UserError(
            f"adapter.{key}: {name} gets {mine}, but in {folder} it has {its}; {expected}"
        )


def _as_yaml(config: AdapterConfig, field: str) -> str:
    """A field's value as written in YAML and on the command line."""
    value = getattr(config, field)
    return str(value).lower() if isinstance(value, bool) else f"{value}".removesuffix(".0")


def _as_peft(config: AdapterConfig, field: str) -> str:
    """A field's key and value as written in `adapter_config.json`."""
    if field == "method" and not config.is_low_rank:
        return f"peft_type {config.method.upper()}"
    if field == "block_size":
        return f"oft_block_size {config.block_size}"
    value = str(config.method == "dora").lower() if field == "method" else _as_yaml(config, field)
    return f"{SHARED_FIELDS[field]} {value}"


def _as_targets(names: set[str], known: list[str]) -> str:
    """The shortest `adapter.targets` for these linears of a model that has `known` ones."""
    rest = [name for name in LINEAR_NAMES if name in names]
    if set(known) - {"lm_head"} <= names:
        rest = [ALL_LINEAR, *(["lm_head"] if "lm_head" in names else [])]
    rest += [name for name in FEW_ROWS if name in names]
    return rest[0] if rest == [ALL_LINEAR] else f"[{','.join(rest)}]"
