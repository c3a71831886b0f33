"""Base weights from Hugging Face safetensors, each rank reading its own rows only."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from qfsdp.errors import UserError
from qfsdp.modules.adapters import AdaptedLinear
from qfsdp.modules.shards import gather_rows, local_part, local_rows
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.packed import PackedTensor

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass
class ModelConfig:
    """Section `model`: the base model.

    Fields:
        path: a Hugging Face model folder: `config.json` and safetensors.
        dtype: what the model computes in, and what weights that are not packed are held in.
            Adapters and the optimizer are fp32 always. Files may be in any dtype.
    """

    path: str
    dtype: Literal["bf16", "fp32"] = "bf16"

    @property
    def folder(self) -> Path:
        """`path` with a leading `~` expanded."""
        return Path(self.path).expanduser()


class SafetensorsFolder:
    """The weights of a Hugging Face model folder: one `model.safetensors`, or an index.

    Opening it reads headers only. Tensors are read by rows, from memory-mapped files.

    Raises:
        UserError: the folder, a file or a tensor that the index names is missing, or a file
            is truncated or no safetensors file.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise UserError(
                f"model.path: '{folder}' does not exist; expected a Hugging Face model folder"
            )
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        listed = self._read_index()
        for file in sorted(set(listed.values())) if listed else [self.folder / SINGLE]:
            self._read_header(file)
        for name, file in listed.items():
            if self._files.get(name) != file:
                raise UserError(f"{self.folder / INDEX}: tensor {name!r} is not in {file.name}")

    def _read_index(self) -> dict[str, Path]:
        index = self.folder / INDEX
        if not index.is_file():
            return {}
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            return {name: self.folder / file for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index}: not a safetensors index ({error})") from None

    def _read_header(self, file: Path) -> None:
        if not file.is_file():
            raise UserError(f"{file} does not exist; the model's weights are read from it")
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a dict)
                    self._files[name] = file
                    self.shapes[name] = tuple(tensors.get_slice(name).get_shape())
        except SafetensorError as error:
            raise UserError(f"{file}: truncated or not a safetensors file ({error})") from None

    def read_rows(self, name: str, rows: slice) -> Tensor:
        """`tensor[rows]` on the CPU, in the dtype of the file."""
        with safe_open(self._files[name], framework="pt") as tensors:
            return tensors.get_slice(name)[rows]

    def check(self, model: nn.Module) -> None:
        """Raises `UserError` unless the folder holds exactly the base parameters of `model`.

        Rotary tables and the output layer of a tied model, which some checkpoints carry, are
        computed or shared here, and passed over.
        """
        expected = {name: tuple(p.shape) for name, p in base_parameters(model)}
        for name, shape in expected.items():
            if name not in self.shapes:
                near = difflib.get_close_matches(name, self.shapes, 1)
                hint = f"; the nearest name there is {near[0]!r}" if near else ""
                raise UserError(f"{self.folder}: tensor {name!r} is missing{hint}")
            if self.shapes[name] != shape:
                raise UserError(
                    f"{self._files[name]}: tensor {name!r} has shape "
                    f"{list(self.shapes[name])}; config.json means {list(shape)}"
                )
        for name in self.shapes.keys() - expected.keys():
            if not name.endswith("rotary_emb.inv_freq") and name != "lm_head.weight":
                raise UserError(
                    f"{self._files[name]}: tensor {name!r} has no place in this architecture"
                )


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(Hugging Face name, parameter) of the model without its adapters."""
    adapted = {name for name, m in model.named_modules() if isinstance(m, AdaptedLinear)}
    for name, param in model.named_parameters():
        module, _, field = name.rpartition(".")
        if module not in adapted or field in ("weight", "bias"):
            yield name, param


@torch.no_grad()
def load_base(model: Decoder, source: SafetensorsFolder, device: torch.device) -> None:
    """Gives `model` storage on `device` and fills its base parameters.

    One tensor at a time: a rank reads its own rows, moves them, quantizes them where the
    parameter is packed, and writes them into its shard. Above the shards it holds one
    tensor's rows; ranks exchange nothing but the scales of packed weights. Adapters are left
    unset.

    Args:
        model: built on the meta device, adapted, packed and sharded already.
        source: weights of the same architecture.
        device: this rank's.

    Raises:
        UserError: the weights are not this model's (`SafetensorsFolder.check`), or one that
            is to be packed holds NaN or infinity.
    """
    source.check(model)
    model.to_empty(device=device)
    model.tie_weights()
    for name, param in base_parameters(model):
        local = local_part(param)
        values = source.read_rows(name, local_rows(param)).to(device)
        if not isinstance(local, PackedTensor):
            local.copy_(values)
            continue
        try:
            local.quantize_(values, name, gather_rows=partial(gather_rows, param))
        except ValueError as error:
            raise UserError(f"{source.folder}: {error}") from None
