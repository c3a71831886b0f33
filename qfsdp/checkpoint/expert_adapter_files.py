"""Adapters of experts in PEFT's format, where the experts of a layer are parameters of one module.

PEFT adapts a 3-D parameter by `target_parameters` (`ParamWrapper` of its tuners/lora/layer.py). A
second parameter of the same module is a wrapper around the first, so the names in the file are not
those of the parameters. With both adapted:

    ...mlp.experts.base_layer.lora_A.weight    gate_up_proj  [experts * rank, in]
    ...mlp.experts.base_layer.lora_B.weight                  [out, rank * experts]
    ...mlp.experts.lora_A.weight               down_proj     [experts * rank, in]
    ...mlp.experts.lora_B.weight                             [out, rank * experts]

With one of them adapted, it has the names without `base_layer`. Columns of B lie rank by rank, in
each the experts. vLLM reads the same tensors (`_stack_moe_lora_weights` of its
lora/model_manager.py), but not `rank_pattern` and `alpha_pattern`. So B is written for the factor
of all other linears, and `alpha_pattern` gives PEFT that factor for the rank of the experts.

Routers are `target_parameters`, as transformers has no linear there. So are other feed-forwards of
the model (dense layers, shared experts): for mixtures PEFT takes gate_proj, up_proj and down_proj
among `target_modules` for experts, as they were named before transformers 5, and leaves out the
linears (`_convert_peft_config_moe` of its utils/transformers_weight_conversion.py, 0.21).

PEFT refuses `use_dora` and `lora_dropout` for parameters. Dropout matters in training only and is
written as 0. With DoRA, `lora_magnitude_vector` `[experts * out]` lies beside A and B: qfsdp reads
it, PEFT cannot.

PEFT has no factors that experts share (`adapter.expert_sharing`). They are written once for every
expert, and a run that shares them reads the first expert's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.targets import ROUTER_NAMES

OURS = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)\.(lora_.+)")
THEIRS = re.compile(r"(.+\.experts)(\.base_layer)?\.(lora_(?:A\.weight|B\.weight|magnitude.*))")
INNER, OUTER = "gate_up_proj", "down_proj"
B = "lora_B.weight"
TAKEN_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj")


class StoredTensor(NamedTuple):
    """A tensor of an adapter's file.

    Fields:
        name: in the file.
        shape: as a model has it.
        experts: A or B of that many experts; 0: any other tensor.
        columns: whether it is B, in PEFT's order of columns.
    """

    name: str
    shape: tuple[int, ...]
    experts: int = 0
    columns: bool = False

    def rows(self, file: Any, rows: slice = slice(None)) -> Tensor:
        """Some rows, as a model has them, from an opened safetensors file."""
        stored = file.get_slice(self.name)
        if not self.columns:
            some: Tensor = stored[rows]
            return some
        whole: Tensor = stored[:]
        b = whole.view(len(whole), -1, self.experts).permute(2, 0, 1)
        return b.reshape(self.shape)[rows]


def is_of_experts(key: str) -> bool:
    """Whether one of our keys belongs to an adapter of experts."""
    return OURS.fullmatch(key) is not None


def to_peft(tensors: Mapping[str, Tensor], config: AdapterConfig) -> dict[str, Tensor]:
    """Our key -> tensor becomes PEFT's key -> tensor; see the head of this file."""
    if config.expert_sharing is not None:
        tensors = _with_all_rows(tensors)
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if (match := OURS.fullmatch(key)) is None:
            found[key] = tensor
            continue
        stem, linear, field = match.groups()
        wrapped = linear == INNER and f"{stem}.{OUTER}.{B}" in tensors
        if field == B:
            rank = tensor.size(1)
            experts = len(tensors[f"{stem}.{linear}.lora_A.weight"]) // rank
            factor = replace(config.of(module_of(key)), rank=rank).scaling / config.scaling
            b = tensor.view(experts, -1, rank) * factor
            tensor = b.permute(1, 2, 0).reshape(b.size(1), -1).contiguous()
        found[f"{stem}{'.base_layer' if wrapped else ''}.{field}"] = tensor
    return found


def _with_all_rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Factors that experts share, repeated for each."""
    found = dict(tensors)
    for key, b in tensors.items():
        if (match := OURS.fullmatch(key)) is None or match[3] != B:
            continue
        stem, linear = match[1], match[2]
        of_each = tensors[f"{stem}.{OUTER}.lora_A.weight"]
        shared = f"{stem}.{INNER}.lora_A.weight" if linear == INNER else key
        found[shared] = tensors[shared].repeat(len(of_each) // b.size(1), 1)
    return found


def module_of(key: str) -> str:
    """The name of the linear that one of our keys belongs to."""
    return key.removeprefix("base_model.model.").partition(".lora_")[0]


def target_settings(
    config: AdapterConfig, linears: list[str], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What `adapter_config.json` says of what is adapted, and with which ranks.

    Args:
        linears: names of the adapted linears, without experts; whole names if `config.selects`.
        tensors: our key -> tensor, of the adapters.
    """
    patterned = bool(config.ends)
    ranks: dict[str, int] = {}
    for key, tensor in tensors.items():
        if (match := OURS.fullmatch(key)) is not None and match[3] == B:
            whole = config.selects or patterned
            ranks[module_of(key) if whole else f"experts.{match[2]}"] = tensor.size(1)
    taken = {*ROUTER_NAMES, *(TAKEN_FOR_EXPERTS if ranks else ())}
    parameters = [name for name in linears if name.rpartition(".")[2] in taken]
    settings: dict[str, Any] = {"target_modules": linears}
    if ranks or parameters:
        settings = {
            "target_modules": [name for name in linears if name not in parameters],
            "target_parameters": [*sorted(ranks), *(f"{name}.weight" for name in parameters)],
            "lora_dropout": 0.0,
        }
    # The first pattern that matches counts. B of experts is written for the factor of all others.
    own = {name: rank for name, rank in ranks.items() if patterned or rank != config.rank}
    power = 0.5 if config.rslora else 1.0
    alphas = {name: config.scaling * rank**power for name, rank in own.items()}
    patterns = {"rank_pattern": own | (config.rank_pattern or {})}
    patterns["alpha_pattern"] = alphas | (config.alpha_pattern or {})
    return settings | {key: pattern for key, pattern in patterns.items() if pattern}


# ---- reading -------------------------------------------------------------------------------------


def from_peft(
    file: Path,
    written: Mapping[str, Any],
    config: AdapterConfig,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, StoredTensor]:
    """Our key -> tensor, of the tensors of adapted experts among `shapes`.

    Args:
        file: `adapter_config.json`, for messages.
        written: its content; config: its ranks.
        shapes: name in the adapter's file -> shape.

    Raises:
        UserError: it is not known which parameter a tensor belongs to, or its shape is not that of
            whole experts.
    """
    matches = {name: m for name in shapes if (m := THEIRS.fullmatch(name)) is not None}
    found: dict[str, StoredTensor] = {}
    both = {match[1] for match in matches.values() if match[2]}
    for name, match in matches.items():
        stem, inner, field = match.groups()
        linear = INNER if inner else OUTER if stem in both else _only_target(file, written, stem)
        shape, experts = shapes[name], 0
        if "magnitude" not in field:
            rank, at = config.of(module_of(f"{stem}.{linear}")).rank, int(field == B)
            if len(shape) != 2 or shape[at] % rank:
                whole = f"{rank} * experts"
                expected = f"[{f'out, {whole}' if at else f'{whole}, in'}], as the rank is {rank}"
                raise UserError(f"tensor {name!r} has shape {list(shape)}; expected {expected}")
            experts = shape[at] // rank
            shape = (shape[0] * experts, rank) if at else shape
        key = f"{stem}.{linear}.{'lora_magnitude_vector' if 'magnitude' in field else field}"
        found[key] = StoredTensor(name, shape, experts, field == B)
    return found


def _only_target(file: Path, written: Mapping[str, Any], stem: str) -> str:
    """The one parameter of the experts `stem` that is adapted."""
    targets = [str(name) for name in written.get("target_parameters") or ()]
    names = [n for n in (INNER, OUTER) if any(f"{stem}.{n}".endswith(f".{t}") for t in targets)]
    if len(names) != 1:
        raise UserError(
            f"{file}: target_parameters {targets}; expected experts.{INNER} or "
            f"experts.{OUTER}, or tensors of both"
        )
    return names[0]
