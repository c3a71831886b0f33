"""Adapters in PEFT's format, which transformers, vLLM and others load and PEFT writes.

A folder with `adapter_config.json` (https://huggingface.co/docs/peft/developer_guides/checkpoint)
and `adapter_model.safetensors`, fp32, whose keys are `base_model.model.` and the Hugging Face
names of the linears:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight            [rank, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight            [out, rank]
    base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector    [out]
    base_model.model.model.layers.0.self_attn.k_proj.ia3_l                    [out, 1] or [1, in]

`save_adapter` writes one. `check_adapter` and `load_adapter` read one, ours or PEFT's, as the start
of a run. PEFT has options that qfsdp/modules/adapters.py does not; those that would change the
results are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from qfsdp.cli.errors import UserError
from qfsdp.distributed.world import World
from qfsdp.modules.adapter_config import AdapterConfig
from qfsdp.modules.adapters import SCALED_INPUTS, adapted_linears, low_rank_linears
from qfsdp.modules.targets import ALL_LINEAR, LINEAR_NAMES
from qfsdp.tensor_subclasses.dtensor import local_part, local_rows, whole_tensor

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
PEFT_FIELDS = {
    "lora_A": "lora_A.weight",
    "lora_B": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
    "ia3_l": "ia3_l",
}
# `peft_type` -> end of the key that every adapted linear has exactly once.
KEY_ENDS = {"LORA": ".lora_A.weight", "IA3": ".ia3_l"}
# Settings that a run must share with the adapter that it starts from: our field -> PEFT's key.
SHARED_FIELDS = {"method": "use_dora", "rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora"}
# PEFT's keys with any value: names, training options, and the adapted linears, which the tensors
# show. Any other key that turns something on is refused.
IGNORED_KEYS = {
    *("auto_mapping", "inference_mode", "runtime_config", "velora_config"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("feedforward_modules", "init_ia3_weights"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # see UNCHANGED_BASE_INIT
}
# Initializations that leave the base unchanged. PiSSA, LoftQ and others change it.
UNCHANGED_BASE_INIT = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


def adapter_parameters(model: nn.Module) -> dict[str, Tensor]:
    """PEFT's key -> parameter, of every adapter tensor of `model`."""
    return {
        f"base_model.model.{name}.{peft_field}": param
        for name, module in adapted_linears(model)
        for field, peft_field in PEFT_FIELDS.items()
        if (param := getattr(module, field, None)) is not None
    }


@torch.no_grad()
def save_adapter(
    model: nn.Module, config: AdapterConfig, base: str, folder: Path, world: World
) -> None:
    """Gathers the adapters of `model`, one tensor at a time, and writes them on rank 0.

    Every rank must call it.

    Args:
        base: the base model's path or name, recorded in `adapter_config.json`.
        folder: is created if it is missing.
    """
    tensors = {}
    for key, param in adapter_parameters(model).items():
        tensor = whole_tensor(param)
        if world.rank == 0:
            tensors[key] = tensor.cpu().contiguous()
    if world.rank == 0:
        write_adapter(tensors, config, base, folder)


def write_adapter(
    tensors: dict[str, Tensor], config: AdapterConfig, base: str, folder: Path
) -> None:
    """Writes adapter tensors (PEFT's key -> CPU tensor) in PEFT's format."""
    targets = _adapted_names(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    # The config is written last and renamed: a folder with a config is complete.
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    partial = folder / (CONFIG_FILE + ".partial")
    partial.write_text(json.dumps(_peft_config(config, targets, base), indent=2) + "\n")
    partial.replace(folder / CONFIG_FILE)


def adapter_export(config: AdapterConfig, base: str) -> Callable[[dict[str, Tensor], Path], None]:
    """The `export` of a `Checkpointer`: writes `adapter/` in PEFT's format."""
    return lambda tensors, folder: write_adapter(tensors, config, base, folder / "adapter")


def _peft_config(config: AdapterConfig, targets: list[str], base: str) -> dict[str, object]:
    settings: dict[str, object] = {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "target_modules": targets,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
    }
    if config.method == "ia3":
        scaled = [name for name in targets if name in SCALED_INPUTS]
        more = {"peft_type": "IA3", "feedforward_modules": scaled, "init_ia3_weights": True}
        return more | settings
    return {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_dora": config.method == "dora",
        "use_rslora": config.rslora,
        "bias": "none",
        "init_lora_weights": True,
    } | settings


def _adapted_names(keys: Iterable[str]) -> list[str]:
    """Names such as "q_proj" of the linears that these adapter keys belong to, sorted."""
    ends = tuple(KEY_ENDS.values())
    stems = {key.removesuffix(end) for key in keys for end in ends if key.endswith(end)}
    return sorted({stem.rpartition(".")[2] for stem in stems})


# ---- reading -------------------------------------------------------------------------------------


def read_adapter_config(folder: str | Path) -> AdapterConfig:
    """The adapter in `folder` as a section `adapter`; `targets` are the linears that its tensors
    belong to. Reads settings and a file's header only.

    Raises:
        UserError: a file is missing or broken, or the adapter is not LoRA, DoRA or IA3.
    """
    folder = Path(folder).expanduser()
    written, tensors = _read_settings(folder), read_adapter_header(folder)
    targets = _adapted_names(tensors)
    if written["peft_type"] == "IA3":
        return AdapterConfig("ia3", targets=targets)
    try:
        config = AdapterConfig(
            method="dora" if written.get("use_dora") else "lora",
            rank=int(written["r"]),
            alpha=float(written["lora_alpha"]),
            targets=targets,
            rslora=bool(written.get("use_rslora")),
        )
        replace(config, targets=ALL_LINEAR).check()  # callers check the targets
        return config
    except (KeyError, TypeError, ValueError) as error:  # InvalidField is a ValueError
        raise UserError(f"{folder / CONFIG_FILE}: not an adapter's config ({error!r})") from None


def check_adapter(config: AdapterConfig, folder: str | Path, model: nn.Module) -> None:
    """The preflight of `load_adapter`; reads settings and a header, no tensors.

    Args:
        config: the run's section `adapter`.
        folder: in PEFT's format.
        model: adapted as `config` says; may be on the meta device.

    Raises:
        UserError: see `read_adapter_config`; or the adapter's settings differ from the run's, or
            its tensors from those of the model's adapters.
    """
    theirs = read_adapter_config(folder)
    fields = ["method"] if "ia3" in (config.method, theirs.method) else list(SHARED_FIELDS)
    differing = [field for field in fields if getattr(config, field) != getattr(theirs, field)]
    if differing:
        mine = ", ".join(f"adapter.{field}: {_as_yaml(config, field)}" for field in differing)
        trained = ", ".join(_as_peft(theirs, field) for field in differing)
        fix = " ".join(f"adapter.{field}={_as_yaml(theirs, field)}" for field in differing)
        raise UserError(f"{mine}, but {folder} was trained with {trained}; expected {fix}")
    adapted = {name.rpartition(".")[2] for name, _ in adapted_linears(model)}
    found = set(theirs.linears)
    if found != adapted and found <= set(LINEAR_NAMES):
        raise UserError(
            f"adapter.targets: {_as_targets(adapted)}, but {folder} adapts "
            f"{_as_targets(found)}; expected adapter.targets={_as_targets(found)}"
        )
    _matching_tensors(model, Path(folder).expanduser())


@torch.no_grad()
def load_adapter(model: nn.Module, folder: str | Path) -> None:
    """Fills the adapters of `model` from a folder in PEFT's format; each rank reads only its rows.

    Call `refresh_dora_norms` afterwards: DoRA's norms depend on the loaded tensors.

    Raises:
        UserError: the folder's tensors or their scaling differ from the model's.
    """
    folder = Path(folder).expanduser()
    names = _matching_tensors(model, folder)
    scaling = read_adapter_config(folder).scaling
    for name, module in low_rank_linears(model):
        if module.scaling != scaling:
            raise UserError(
                f"{folder / CONFIG_FILE}: lora_alpha and r make a scaling of {scaling:g}; expected "
                f"{module.scaling:g}, as in this model ({name})"
            )
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        for key, param in adapter_parameters(model).items():
            local_part(param).copy_(file.get_slice(names[key])[local_rows(param)])


def read_adapter_header(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """PEFT's key -> the tensor's name in the file, and its shape.

    Leaves out base weights: PEFT writes a copy of an `lm_head` that it adapts. Some files name
    `lora_magnitude_vector` by its module, `lora_magnitude_vector.weight`.

    Raises:
        UserError: the folder or the file is missing or broken, or a tensor has no float dtype.
    """
    file, found = folder / WEIGHTS_FILE, {}
    if not file.is_file():
        raise UserError(_missing_files(folder))
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                part = tensors.get_slice(name)
                if ".base_layer." in name:
                    continue
                if not part.get_dtype().startswith(("F", "BF")):
                    kind = part.get_dtype()
                    raise UserError(f"{file}: tensor {name!r} is of type {kind}; expected floats")
                key = name.removesuffix(".weight") if "magnitude_vector" in name else name
                found[key] = name, tuple(part.get_shape())
    except SafetensorError as error:
        raise UserError(f"{file}: truncated or not a safetensors file ({error})") from None
    return found


def _matching_tensors(model: nn.Module, folder: Path) -> dict[str, str]:
    """PEFT's key -> name in the file, of every adapter tensor of `model`.

    Raises:
        UserError: the file lacks a tensor, has another one, or a tensor has another shape.
    """
    file = folder / WEIGHTS_FILE
    params, found = adapter_parameters(model), read_adapter_header(folder)
    for key in sorted(params.keys() ^ found.keys()):
        where = "is missing" if key in params else "is not among this model's adapters"
        raise UserError(f"{file}: tensor {key!r} {where}")
    for key, param in params.items():
        if (shape := found[key][1]) != tuple(param.shape):
            raise UserError(
                f"{file}: tensor {key!r} has shape {list(shape)}; expected {list(param.shape)}"
            )
    return {key: name for key, (name, _) in found.items()}


def _read_settings(folder: Path) -> dict[str, Any]:
    """The content of `adapter_config.json`.

    Raises:
        UserError: the file is missing or broken, or has an option that qfsdp lacks.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise UserError(_missing_files(folder))
    try:
        written = json.loads(file.read_text())
        kind = written["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: not an adapter's config ({error!r})") from None
    if kind not in KEY_ENDS:
        raise UserError(f"{file}: peft_type {kind!r}; expected 'LORA' or 'IA3'")
    if written.get("modules_to_save"):
        raise UserError(
            f"{file}: modules_to_save {written['modules_to_save']}; expected none: qfsdp does not "
            "load modules that were trained as a whole"
        )
    for key, value in written.items():
        if (reason := _unsupported(key, value, written)) is not None:
            raise UserError(f"{file}: {key} {value!r}: {reason}")
    return written


def _unsupported(key: str, value: Any, written: dict[str, Any]) -> str | None:
    """Why an adapter with this setting cannot be loaded; None if it can."""
    if key == "bias":
        return None if value == "none" else "qfsdp trains no biases"
    if key == "init_lora_weights":
        kept = value in UNCHANGED_BASE_INIT
        return None if kept else "this initialization changed the base that the adapter belongs to"
    if key in ("rank_pattern", "alpha_pattern"):
        usual = written.get("r" if key == "rank_pattern" else "lora_alpha")
        same = not value or (isinstance(value, dict) and set(value.values()) == {usual})
        return None if same else f"qfsdp has one {key.partition('_')[0]} for all linears"
    # Switches, lists and sections turn options on; numbers and names are their parameters.
    turned_on = value is True or (bool(value) and isinstance(value, list | dict))
    known = {*IGNORED_KEYS, *SHARED_FIELDS.values()}
    return "qfsdp does not have this option" if turned_on and key not in known else None


def _missing_files(folder: Path) -> str:
    """The message for a folder that is not a whole adapter."""
    expected = f"expected an adapter in PEFT's format, {CONFIG_FILE} and {WEIGHTS_FILE}"
    if (folder / PICKLE_FILE).is_file() and not (folder / WEIGHTS_FILE).is_file():
        return f"{folder / PICKLE_FILE}: a pickle file, which can run code; {expected}"
    if (folder / "adapter" / CONFIG_FILE).is_file():
        return f"{folder}: not an adapter's folder; did you mean {folder / 'adapter'}?"
    for file in (folder, folder / CONFIG_FILE):
        if not file.exists():
            return f"{file} does not exist; {expected}"
    return f"{folder / WEIGHTS_FILE} does not exist; {expected}"


def _as_yaml(config: AdapterConfig, field: str) -> str:
    """A field's value as written in YAML and on the command line."""
    value = getattr(config, field)
    return str(value).lower() if isinstance(value, bool) else f"{value}".removesuffix(".0")


def _as_peft(config: AdapterConfig, field: str) -> str:
    """A field's key and value as written in `adapter_config.json`."""
    if config.method == "ia3":
        return "peft_type IA3"
    value = str(config.method == "dora").lower() if field == "method" else _as_yaml(config, field)
    return f"{SHARED_FIELDS[field]} {value}"


def _as_targets(names: set[str]) -> str:
    """The shortest `adapter.targets` for these linears."""
    rest = [name for name in LINEAR_NAMES if name in names]
    if set(LINEAR_NAMES) - {"lm_head"} <= names:
        rest = [ALL_LINEAR, *(["lm_head"] if "lm_head" in names else [])]
    return rest[0] if rest == [ALL_LINEAR] else f"[{','.join(rest)}]"
