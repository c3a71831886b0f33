"""Adapters in PEFT's format, which transformers, vLLM and others load and PEFT writes.

A folder with `adapter_config.json` (https://huggingface.co/docs/peft/developer_guides/checkpoint)
and `adapter_model.safetensors`, fp32, whose keys are `base_model.model.` and the Hugging Face
names of the linears:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight            [rank, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight            [out, rank]
    base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector    [out]
    base_model.model.model.layers.0.self_attn.k_proj.ia3_l                    [out, 1] or [1, in]
    base_model.model.model.layers.0.self_attn.q_proj.miss_block               [rank, out]
    base_model.model.model.layers.0.self_attn.q_proj.oft_R.weight             [blocks, numbers]
    base_model.model.score.weight                                             [classes, hidden]
    base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta  [ids, hidden]

Experts: see `expert_adapter_files`. Until they are written, their keys are formed like the others.
`save_adapter` writes one, `check_adapter` and `load_adapter` read one, ours or PEFT's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from qfsdp.checkpoint.adapter_config_file import (
    CONFIG_FILE,
    HEAD_KEY,
    KEY_ENDS,
    WEIGHTS_FILE,
    config_of,
    missing_files,
    peft_config,
    read_peft_config,
    row_ids,
    whole_names,
    why_missing,
    why_unread,
)
from qfsdp.checkpoint.adapter_settings import check_settings
from qfsdp.checkpoint.expert_adapter_files import (
    StoredTensor,
    from_peft,
    is_of_experts,
    module_of,
    to_peft,
)
from qfsdp.checkpoint.plain_lora import as_lora, start_tensors
from qfsdp.checkpoint.tensor_file import check_digests, digests, save_tensors
from qfsdp.common.errors import UserError
from qfsdp.common.files import check_no_pointer, not_written, to_json, whole_file, why, write_text
from qfsdp.distributed.world import World
from qfsdp.hub.download import local_folder
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import LowRankExpertLinear, add_adapters
from qfsdp.modules.adapters.trained_rows import DELTA, row_parameters, ties_rows
from qfsdp.modules.adapters.whole import (
    EMBEDDING,
    HEAD,
    KEY,
    tied_copy,
    ties_whole,
    whole_parameters,
)
from qfsdp.modules.low_rank.adapted import adapted_linears
from qfsdp.modules.low_rank.linear import low_rank_linears
from qfsdp.modules.score_head import score_head
from qfsdp.tensor_subclasses.dtensor import local_part, local_rows, whole_tensor
from qfsdp.tensor_subclasses.finite import is_finite

STORED_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")  # safetensors' names
PEFT_FIELDS = {
    "lora_A": "lora_A.weight",
    "lora_B": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
    "ia3_l": "ia3_l",
    "miss_block": "miss_block",
    "oft_R": "oft_R.weight",
}


def adapter_parameters(model: nn.Module) -> dict[str, Tensor]:
    """PEFT's key -> parameter, of every adapter tensor of `model`, of its score head, and of
    `start_tensors`, `whole_parameters` and `row_parameters`."""
    head = score_head(model)
    heads: dict[str, Tensor] = {} if head is None else {HEAD_KEY: head.weight}
    return (
        heads
        | whole_parameters(model)
        | row_parameters(model)
        | start_tensors(model)
        | {
            f"base_model.model.{name}.{peft_field}": param
            for name, module in adapted_linears(model)
            for field, peft_field in PEFT_FIELDS.items()
            if (param := getattr(module, field, None)) is not None
        }
    )


@torch.no_grad()
def save_adapter(
    model: nn.Module,
    config: AdapterConfig,
    base: str,
    folder: Path,
    world: World,
    files: Mapping[str, str] | None = None,
) -> None:
    """Gathers the adapters of `model`, one tensor at a time, and writes them on rank 0.

    Every rank must call it.

    Args:
        base: the base model's path or name, recorded in `adapter_config.json`.
        folder: is created if it is missing.
        files: name -> text of files beside it, such as the chat template.

    Raises:
        UserError: on every rank; see `write_adapter`.
    """
    tensors = {}
    for key, param in adapter_parameters(model).items():
        tensor = whole_tensor(param)
        if world.rank == 0:
            tensors[key] = tensor.cpu().contiguous()
    with world.same_error():
        if world.rank == 0:
            write_adapter(tensors, config, base, folder, files)


def write_adapter(
    tensors: dict[str, Tensor],
    config: AdapterConfig,
    base: str,
    folder: Path,
    files: Mapping[str, str] | None = None,
) -> None:
    """Writes adapter tensors (PEFT's key -> CPU tensor) in PEFT's format, and `files` beside them.
    Raises UserError: a number is not finite, or the folder cannot be written (a full disk). The
    folder is then as it was before."""
    for key, tensor in tensors.items():
        if not is_finite(tensor):
            raise UserError(f"'{folder}': tensor {key!r} holds NaN or infinity; nothing is written")
    tensors, config = as_lora(tensors, config)
    tied = tied_copy(config.modules_to_save, tensors)
    tensors = tensors | tied
    linears = _adapted_modules(key for key in tensors if not is_of_experts(key))
    linears = linears if config.selects else _last_names(linears)
    settings = peft_config(config, linears, base, tensors)
    if tied and config.is_low_rank:  # PEFT has it for LoRA alone
        settings["ensure_weight_tying"] = True
    tensors = to_peft(tensors, config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (files or {}).items():
            write_text(folder / name, content)
        # The config is renamed last: a folder with a config is complete.
        with whole_file(folder / CONFIG_FILE) as text, whole_file(folder / WEIGHTS_FILE) as weights:
            text.write_text(to_json(settings, indent=2) + "\n", encoding="utf-8")
            save_tensors(tensors, weights, digests(tensors, settings))
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            folder.rmdir()  # if it is empty
        size = sum(tensor.nbytes for tensor in tensors.values())
        raise UserError(not_written(folder, error, size)) from None


def adapter_export(
    config: AdapterConfig, base: str, files: Mapping[str, str] | None = None
) -> Callable[[dict[str, Tensor], Path], None]:
    """The `export` of a `Checkpointer`: writes `adapter/` in PEFT's format; see `write_adapter`."""
    return lambda tensors, folder: write_adapter(tensors, config, base, folder / "adapter", files)


def _adapted_modules(keys: Iterable[str]) -> list[str]:
    """Names of the linears that these adapter keys belong to, sorted."""
    ends = tuple(KEY_ENDS.values())
    stems = {key.removesuffix(end) for key in keys for end in ends if key.endswith(end)}
    return sorted(stem.removeprefix("base_model.model.") for stem in stems)


def _last_names(modules: Iterable[str]) -> list[str]:
    """Names such as "q_proj", sorted."""
    return sorted({name.rpartition(".")[2] for name in modules})


# ---- reading -------------------------------------------------------------------------------------


def read_adapter_config(folder: str | Path) -> AdapterConfig:
    """The adapter in `folder` as a section `adapter`; `targets` are the linears that its tensors
    belong to. Reads settings and a file's header only. Raises UserError: a file is missing or
    broken, or the adapter is of another kind."""
    folder = local_folder(folder)
    written, tensors = read_peft_config(folder), read_adapter_header(folder)
    modules = _adapted_modules(tensors)
    if not modules:
        raise UserError(f"{folder / WEIGHTS_FILE}: no tensor of an adapter of linears")
    config = config_of(written, modules)
    config.targets = modules
    config.modules_to_save = whole_names(folder / CONFIG_FILE, written, tensors)
    config.trainable_token_indices = row_ids(folder / CONFIG_FILE, written, tensors)
    if not config.is_low_rank:
        return config
    for key, stored in tensors.items():
        if is_of_experts(key) or not key.endswith(KEY_ENDS["LORA"]):
            continue
        rank = config.of(module_of(key)).rank
        if stored.shape[:1] != (rank,):
            shape, key = list(stored.shape), "r" if rank == config.rank else "rank_pattern"
            raise UserError(
                f"{folder / CONFIG_FILE}: {key} {rank}, but tensor {stored.name!r} has "
                f"shape {shape}; expected [{rank}, in]"
            )
    return config


def add_read_adapters(model: nn.Module, folder: str | Path) -> AdapterConfig:
    """Adds the adapters of a folder to `model`, unset; returns their config. Raises UserError: see
    `read_adapter_config`; or one of them belongs to no linear of the model."""
    config = read_adapter_config(folder)
    try:
        add_adapters(model, config)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    return config


def check_adapter(config: AdapterConfig, folder: str | Path, model: nn.Module) -> None:
    """The preflight of `load_adapter`; reads the whole adapter, one tensor at a time.

    Args:
        config: the run's section `adapter`.
        folder: in PEFT's format.
        model: adapted as `config` says; may be on the meta device.

    Raises:
        UserError: see `read_adapter_config`; or the adapter's settings differ from the run's, or
            its tensors from those of the model's adapters; or a number is not finite; or a
            tensor is not as qfsdp has written it (`tensor_file`).
    """
    check_settings(config, read_adapter_config(folder), folder, model)
    file = local_folder(folder) / WEIGHTS_FILE
    names, params = _matching_tensors(model, file.parent), adapter_parameters(model)
    with _opened(file) as tensors:
        check_digests(file, tensors, read_peft_config(file.parent))
        if ties_whole(model) and not torch.equal(*map(tensors.get_tensor, (EMBEDDING, HEAD))):
            expected = "expected equal ones, as this model ties them"
            raise UserError(f"{file}: tensors {EMBEDDING!r} and {HEAD!r} differ; {expected}")
        for key, stored in names.items():
            values = stored.rows(tensors)
            _check_finite(file, stored.name, values.float())
            experts = values.view(-1, *params[key].shape)
            if not torch.equal(experts, experts[:1].expand_as(experts)):
                raise UserError(
                    f"{file}: tensor {stored.name!r} differs between experts, which share it with "
                    f"adapter.expert_sharing={config.expert_sharing}; expected null"
                )


@torch.no_grad()
def load_adapter(model: nn.Module, folder: str | Path) -> None:
    """Fills the adapters of `model` from a folder in PEFT's format; each rank keeps only its rows.

    Call `refresh_dora_norms` afterwards: DoRA's norms depend on the loaded tensors. Raises
    UserError: the folder's tensors or their scaling differ from the model's, a number is not
    finite, or a tensor is not as qfsdp has written it."""
    folder = local_folder(folder)
    names = _matching_tensors(model, folder)
    config = read_adapter_config(folder)
    factors = {}  # of B, whose experts' is written for one scaling
    for name, module in low_rank_linears(model):
        scaling = config.of(name).scaling
        if isinstance(module, LowRankExpertLinear):
            factors[f"base_model.model.{name}.lora_B.weight"] = scaling / module.scaling
        elif module.scaling != scaling:
            raise UserError(
                f"{folder / CONFIG_FILE}: lora_alpha and r make a scaling of {scaling:g}; expected "
                f"{module.scaling:g}, as in this model ({name})"
            )
    file = folder / WEIGHTS_FILE
    with _opened(file) as tensors:
        check_digests(file, tensors)
        for key, param in adapter_parameters(model).items():
            local = local_part(param)
            local.copy_(names[key].rows(tensors, local_rows(param)))
            if factors.get(key, 1.0) != 1.0:
                local.mul_(factors[key])
            _check_finite(file, names[key].name, local)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A safetensors file that is read within a `with` block. Raises UserError: it cannot be read,
    or is damaged."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise UserError(f"{file}: truncated or not a safetensors file ({error})") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {why(error)}") from None


def _check_finite(file: Path, name: str, values: Tensor) -> None:
    if not is_finite(values):
        raise UserError(f"{file}: tensor {name!r} holds NaN or infinity; expected finite numbers")


def read_adapter_header(folder: Path) -> dict[str, StoredTensor]:
    """Key as in `adapter_parameters` -> where the tensor is, and its shape in a model.

    Leaves out base weights: PEFT writes a copy of an `lm_head` that it adapts. Some files name
    `lora_magnitude_vector` by its module, `lora_magnitude_vector.weight`. Raises UserError: the
    folder or the file is missing or broken, or a tensor has no float dtype."""
    file, shapes = folder / WEIGHTS_FILE, {}
    if not file.is_file():
        raise UserError(missing_files(folder))
    check_no_pointer(file)
    with _opened(file) as tensors:
        for name in tensors.keys():  # noqa: SIM118  (not a dict)
            part = tensors.get_slice(name)
            if ".base_layer." in name and ".lora_" not in name:
                continue
            if (kind := part.get_dtype()) not in STORED_FLOATS:
                raise UserError(f"{file}: tensor {name!r} is of type {kind}; expected floats")
            shapes[name] = tuple(part.get_shape())
    found: dict[str, StoredTensor] = {}
    if any(".experts." in name for name in shapes):
        written = read_peft_config(folder)
        found = from_peft(folder / CONFIG_FILE, written, config_of(written), shapes)
    of_experts = {stored.name for stored in found.values()}
    for name in (name for name in shapes if name not in of_experts):
        key = name.removesuffix(".weight") if "magnitude_vector" in name else name
        found[key] = StoredTensor(name, shapes[name])
    return found


def _matching_tensors(model: nn.Module, folder: Path) -> dict[str, StoredTensor]:
    """Key -> tensor in the file, of every adapter tensor of `model`. Raises UserError: the file
    lacks a tensor, has another one, or a tensor has another shape."""
    file = folder / WEIGHTS_FILE
    params, found = adapter_parameters(model), read_adapter_header(folder)
    if missing := params.keys() - found.keys():
        _check_coverage(folder, min(missing), found)
    if ties_whole(model):
        found.pop(HEAD, None)
    if ties_rows(model):  # PEFT writes a copy beside a resized base
        found.pop(f"{KEY}lm_head.{DELTA}", None)
    for key in sorted(params.keys() ^ found.keys()):
        where = why_missing(key) if key in params else why_unread(key)
        raise UserError(f"{file}: tensor {key!r} {where}")
    shared = {
        f"base_model.model.{name}.{PEFT_FIELDS[module.shared]}": module.experts
        for name, module in low_rank_linears(model)
        if isinstance(module, LowRankExpertLinear) and module.shared is not None
    }
    for key, param in params.items():
        repeated = (param.size(0) * shared.get(key, 1), *param.shape[1:])
        if (shape := found[key].shape) != repeated:
            raise UserError(
                f"{file}: tensor {key!r} has shape {list(shape)}; expected {list(repeated)}"
            )
    return found


def _check_coverage(folder: Path, missing: str, found: Iterable[str]) -> None:
    """Names the setting of PEFT that adapts a linear in some places and not in others."""
    written = read_peft_config(folder)
    for name in ("layers_to_transform", "exclude_modules", "target_modules"):
        value = written.get(name)
        names = [str(n) for n in value] if isinstance(value, list) else [str(value)]
        chosen = name != "target_modules" or not all(re.fullmatch(r"\w+", n) for n in names)
        if value not in (None, [], "") and chosen:
            raise UserError(
                f"{folder / CONFIG_FILE}: {name} {value!r:.80} leaves out linears with the names "
                f"of adapted ones ({missing!r}); expected adapter.layers, adapter.targets or "
                "adapter.exclude that leave out the same"
            )
    (name,) = _last_names(_adapted_modules([missing])) or [""]
    of_experts = {is_of_experts(key) for key in found if f".{name}." in key}
    if name and of_experts == {not is_of_experts(missing)}:
        some, others = ("other linears", "experts")[:: -1 if True in of_experts else 1]
        raise UserError(
            f"{folder / WEIGHTS_FILE}: {name!r} is adapted in {some} and not in {others} of that "
            f"name; expected both, or adapter.targets with longer names, as experts.{name}"
        )
