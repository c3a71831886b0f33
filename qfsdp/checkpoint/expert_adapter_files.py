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

PEFT gives `gate_up_proj` twice the rank where its config named gate_proj and up_proj. A model has
one rank for all linears of experts: the others are read with ranks of zeros.

PEFT has no factors that experts share (`adapter.expert_sharing`). They are written once for every
expert, and a run that shares them reads the first expert's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch.nn.functional as F
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
        factor: B in the file, in PEFT's order of columns, times this is the model's. None: A.
        padding: ranks that the model has beyond those of the file. They are 0, as are their
            gradients.
    """

    name: str
    shape: tuple[int, ...]
    experts: int = 0
    factor: float | None = None
    padding: int = 0

    def rows(self, file: Any, rows: slice = slice(None)) -> Tensor:
        """Some rows, as a model has them, from an opened safetensors file."""
        stored = file.get_slice(self.name)
        if not self.experts or (self.factor is None and not self.padding):
            some: Tensor = stored[rows]
            return some
        whole: Tensor = stored[:]
        if self.factor is None:
            a = whole.view(self.experts, -1, self.shape[1])
            return F.pad(a, (0, 0, 0, self.padding)).reshape(self.shape)[rows]
        b = whole.view(len(whole), -1, self.experts).permute(2, 0, 1)
        return F.pad(b, (0, self.padding)).reshape(self.shape)[rows] * self.factor


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
            factor = expert_scaling(config, rank) / config.scaling
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


def expert_scaling(config: AdapterConfig, rank: int) -> float:
    """The factor of an expert's product."""
    return config.alpha / (rank**0.5 if config.rslora else rank)


def target_settings(
    config: AdapterConfig, linears: list[str], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What `adapter_config.json` says of what is adapted.

    Args:
        linears: names of the adapted linears, without experts.
        tensors: our key -> tensor, of the adapters.
    """
    names = {m[2]: tensors[key] for key in tensors if (m := OURS.fullmatch(key)) and m[3] == B}
    parameters = {*ROUTER_NAMES, *(TAKEN_FOR_EXPERTS if names else ())} & set(linears)
    if not names and not parameters:
        return {"target_modules": linears}
    targets = sorted(f"experts.{name}" for name in names)
    settings: dict[str, Any] = {
        "target_modules": [name for name in linears if name not in parameters],
        "target_parameters": [*targets, *(f"{name}.weight" for name in sorted(parameters))],
        "lora_dropout": 0.0,
    }
    if not names:
        return settings
    rank = next(iter(names.values())).size(1)
    if rank != config.rank:
        alpha = config.alpha * config.scaling / expert_scaling(config, rank)
        settings["rank_pattern"] = dict.fromkeys(targets, rank)
        settings["alpha_pattern"] = dict.fromkeys(targets, alpha)
    return settings


# ---- reading -------------------------------------------------------------------------------------


def expert_rank(file: Path, written: Mapping[str, Any]) -> int:
    """The rank of experts in a checked `adapter_config.json`: the larger of their two linears."""
    linears = {target.rpartition(".")[2] for target in _targets(written)} or {INNER}
    return max(int(_of_linear(file, "rank_pattern", written, name, "r")) for name in linears)


def from_peft(
    file: Path, written: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, StoredTensor]:
    """Our key -> tensor, of the tensors of adapted experts among `shapes`.

    Args:
        file: `adapter_config.json`, for messages.
        written: its content.
        shapes: name in the adapter's file -> shape.

    Raises:
        UserError: it is not known which parameter a tensor belongs to, or its shape is not that of
            whole experts.
    """
    matches = {name: m for name in shapes if (m := THEIRS.fullmatch(name)) is not None}
    if not matches:
        return {}
    rank = expert_rank(file, written)
    power = 0.5 if written.get("use_rslora") else 1.0
    found: dict[str, StoredTensor] = {}
    both = {match[1] for match in matches.values() if match[2]}
    for name, match in matches.items():
        stem, inner, field = match.groups()
        linear = INNER if inner else OUTER if stem in both else _only_target(file, written)
        shape, experts, factor, padding = shapes[name], 0, None, 0
        if "magnitude" not in field:
            of_this = int(_of_linear(file, "rank_pattern", written, linear, "r"))
            at, padding = int(field == B), rank - of_this
            if len(shape) != 2 or shape[at] % of_this:
                whole = f"{of_this} * experts"
                expected = (
                    f"[{f'out, {whole}' if at else f'{whole}, in'}], as the rank is {of_this}"
                )
                raise UserError(f"tensor {name!r} has shape {list(shape)}; expected {expected}")
            experts = shape[at] // of_this
            if at:
                alpha = _of_linear(file, "alpha_pattern", written, linear, "lora_alpha")
                factor = alpha / written["lora_alpha"] * (rank / of_this) ** power
            shape = (shape[0] * experts, rank) if at else (rank * experts, shape[1])
        key = f"{stem}.{linear}.{'lora_magnitude_vector' if 'magnitude' in field else field}"
        found[key] = StoredTensor(name, shape, experts, factor, padding)
    return found


def patterns_of_experts(written: Mapping[str, Any], pattern: Iterable[str]) -> bool:
    """Whether the keys of a `rank_pattern` or `alpha_pattern` name experts' parameters alone."""
    return all(any(_names(key, target) for target in _targets(written)) for key in pattern)


def _targets(written: Mapping[str, Any]) -> list[str]:
    """The target parameters that are experts."""
    names = [str(name) for name in written.get("target_parameters") or ()]
    return [name for name in names if name.rpartition(".")[2] in (INNER, OUTER)]


def _names(pattern: str, target: str) -> bool:
    """PEFT matches patterns, which may be regular expressions, at the end of a name."""
    with suppress(re.error):
        if re.fullmatch(rf"(.*\.)?({pattern})", f"mlp.experts.{target.rpartition('.')[2]}"):
            return True
    return f".{pattern}".endswith(f".{target}")


def _of_linear(file: Path, key: str, written: Mapping[str, Any], linear: str, usual: str) -> float:
    """The value that `written[key]` has for one of the experts' parameters in all layers, or that
    of `usual`."""
    pattern = written.get(key) or {}
    targets = [target for target in _targets(written) if target.rpartition(".")[2] == linear]
    values = {
        next((v for name, v in pattern.items() if _names(name, target)), written[usual])
        for target in targets or [f"experts.{linear}"]
    }
    if len(values) > 1:
        raise UserError(
            f"{file}: {key} {pattern}; expected one value for the experts of all layers"
        )
    return float(values.pop())


def _only_target(file: Path, written: Mapping[str, Any]) -> str:
    """The one parameter of experts that is adapted."""
    names = {target.rpartition(".")[2] for target in _targets(written)}
    if len(names) != 1 or not names <= {INNER, OUTER}:
        raise UserError(
            f"{file}: target_parameters {_targets(written)}; expected experts.{INNER} or "
            f"experts.{OUTER}, or tensors of both"
        )
    return names.pop()
