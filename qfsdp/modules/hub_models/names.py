"""Which tensors of a folder hold a parameter, by transformers' own table of conversions.

Files keep the names and forms of their first release. transformers renames tensors, stacks those of
experts, joins or splits linears, as `conversion_mapping.py` says for each kind of model. Only names
are computed here; rows are read by `qfsdp.checkpoint.weights`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from qfsdp.common.errors import UserError


class Source(NamedTuple):
    """The tensors that hold a parameter's rows, one after another.

    Fields:
        names: in the order of the rows.
        part, parts: the parameter is this one of so many equal parts of the one tensor.
        transposed: matrices of another shape than the parameter's are transposed.
    """

    names: tuple[str, ...]
    part: int = 0
    parts: int = 1
    transposed: bool = False


def parameter_sources(
    hf: Any, stored: Iterable[str], where: str, used: Collection[str]
) -> dict[str, Source]:
    """Parameter name -> what holds it; a tensor that belongs to no parameter keeps its name.

    Left out are tensors that transformers ignores, such as layers that predict further tokens, and
    those of parameters that are not used.

    Args:
        hf: transformers' module, as it was built.
        used: names of the parameters that are trained or frozen here.
        stored: names of a folder's tensors.
        where: the folder, for errors.

    Raises:
        UserError: tensors are stored in a form that is not read by rows.
    """
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    renamings, converters = _table(hf)
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known, prefix = hf.state_dict(), hf.base_model_prefix
    unread = _ignored(hf)
    groups: dict[str, dict[Any, list[str]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        unknown = name not in known and not any(ignored.search(name) for ignored in unread)
        if name in used or unknown:
            groups.setdefault(name, {}).setdefault(pattern, []).append(key)
    found: dict[str, Source] = {}
    for name, of_pattern in groups.items():
        if None in of_pattern:
            found[name] = Source((of_pattern[None][0],))
            continue
        converter = by_pattern[next(iter(of_pattern))]
        found |= _converted(name, converter, of_pattern, where)
    for module, field, first in shared_names(hf):
        if (name := f"{module}.{field}") in found and first not in found:  # only the other name
            found[first] = found.pop(name)
    return found


def names_of_experts(hf: Any) -> set[str]:
    """Last names of the linears that a mixture's experts have in files ("gate_proj").

    PEFT takes them for the stacked experts, also where they name a dense feed-forward.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    patterns = [
        pattern
        for entry in get_model_conversion_mapping(hf)
        for pattern in entry.source_patterns
        if any(type(op).__name__ == "MergeModulelist" for op in getattr(entry, "operations", ()))
    ]
    return {pattern.removesuffix(".weight").rpartition(".")[2] for pattern in patterns}


def renamed_modules(hf: Any, modules: Iterable[str]) -> list[str]:
    """Those of `modules` whose own names the table turns into others, which no module has.

    PEFT looks for adapters under the names that the table makes of those in its file. Of Mistral
    Large 4 it makes "mlp.mlp.shared_experts" of "mlp.shared_experts".
    """
    from transformers.core_model_loading import rename_source_key

    renamings, _ = _table(hf)
    known, prefix = hf.state_dict(), hf.base_model_prefix
    made = {name: rename_source_key(name, renamings, [], prefix, known)[0] for name in modules}
    return [name for name, other in made.items() if other != name and other not in made]


def _table(hf: Any) -> tuple[list[Any], list[Any]]:
    """transformers' table for a model: entries that rename, and entries that convert."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    table = get_model_conversion_mapping(hf)
    kinds = (WeightRenaming, WeightConverter)
    renamings, converters = ([one for one in table if isinstance(one, kind)] for kind in kinds)
    return renamings, converters


def _ignored(hf: Any) -> list[re.Pattern[str]]:
    """Patterns of the names in files that are not read: those of transformers, and the layers that
    predict further tokens. transformers' patterns have the numbers of these layers in the released
    sizes of a model only."""
    patterns = {r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
    text = hf.config.get_text_config()
    more = getattr(text, "num_mtp_layers", 0) or getattr(text, "num_nextn_predict_layers", 0) or 0
    patterns |= {rf"\.layers\.{text.num_hidden_layers + at}\." for at in range(more)}
    for module in hf.modules():
        patterns |= set(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())
    return [re.compile(pattern) for pattern in patterns]


def _converted(
    name: str, converter: Any, keys: dict[Any, list[str]], where: str
) -> dict[str, Source]:
    """The sources of what one conversion makes."""
    steps = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    groups = [keys.get(pattern, []) for pattern in converter.source_patterns]
    if steps == [("MergeModulelist", 0)] and len(groups) == 1:
        return {name: Source(tuple(groups[0]))}
    whole = groups and all(len(group) == len(groups[0]) for group in groups)
    if whole and steps == [("MergeModulelist", 0), ("Concatenate", 1)]:
        of_experts = zip(*groups, strict=True)
        return {name: Source(tuple(key for expert in of_experts for key in expert))}
    if whole and steps == [("Concatenate", 0)]:
        return {name: Source(tuple(key for group in groups for key in group))}
    if steps == [("Transpose", None)] and len(groups) == 1 and len(groups[0]) == 1:
        (op,) = converter.operations
        if op.check_dims and (op.dim0, op.dim1) == (1, 2):
            return {name: Source((groups[0][0],), transposed=True)}
    if steps == [("Chunk", 0)] and len(groups) == 1 and len(groups[0]) == 1:
        first, *others = converter.target_patterns
        names = [name, *(name.replace(first, other, 1) for other in others)]
        return {one: Source((groups[0][0],), at, len(names)) for at, one in enumerate(names)}
    words = " and ".join(kind for kind, _ in steps)
    raise UserError(
        f"{where}: {name!r} is made of tensors by {words}, which is not done by rows; expected a "
        "folder that transformers saved"
    )


def shared_names(hf: nn.Module) -> Iterator[tuple[str, str, str]]:
    """(module, field, name of the parameter that it shares) of every further use of a weight."""
    first: dict[int, str] = {}
    for name, param in hf.named_parameters(remove_duplicate=False):
        usual = first.setdefault(id(param), name)
        if usual != name:
            module, _, field = name.rpartition(".")
            yield module, field, usual
