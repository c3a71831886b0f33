"""The tensors of a safetensors folder: reads headers only; `read` has their rows."""

from __future__ import annotations

import json
import struct
from contextlib import closing
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qfsdp.checkpoint.weights.read import STORED_DTYPES, OpenFiles, StoredTensor
from qfsdp.common.errors import UserError
from qfsdp.common.files import check_no_pointer, why
from qfsdp.common.long_waits import long_wait
from qfsdp.common.terminal import warn
from qfsdp.hub.download import local_folder

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class SafetensorsFolder:
    """The tensors of a folder, in one `model.safetensors` or in the files that an index lists. Of a
    folder with both, the former is read, as transformers does, and a line says so. Opening it
    reads headers only.

    Attributes:
        folder: its path.
        tensors: name -> stored tensor.

    Raises:
        UserError: the folder, a file or an indexed tensor is missing or unreadable, or a file is
            truncated or no safetensors file.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = local_folder(folder)
        expected = "expected a Hugging Face model folder, or org/model of the hub"
        if not self.folder.exists():
            raise UserError(f"model.path: '{folder}' does not exist; {expected}")
        if not self.folder.is_dir():
            raise UserError(f"model.path: '{folder}' is a file; {expected}")
        self.tensors: dict[str, StoredTensor] = {}
        try:
            with long_wait(f"reading the headers of {self.folder}"):
                listed = self._read_index()
                for file in sorted(set(listed.values())) or [SINGLE]:
                    self._read_header(self.folder / file, listed)
        except OSError as error:
            raise UserError(
                f"{error.filename or self.folder}: cannot be read: {why(error)}"
            ) from None
        for name, file in listed.items():
            if name not in self.tensors:
                raise UserError(f"{self.folder / INDEX}: tensor {name!r} is not in {file}")

    def _read_index(self) -> dict[str, str]:
        index = self.folder / INDEX
        if not index.is_file():
            return {}
        if (self.folder / SINGLE).is_file():
            _say_once(f"{self.folder / SINGLE} is read, as transformers does; {INDEX} is not")
            return {}
        try:
            found = dict(json.loads(index.read_bytes())["weight_map"].items())
            outside = {file for file in set(found.values()) if "/" in file or file in ("", "..")}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{index}: not a safetensors index ({error})") from None
        if outside:
            name, file = next(entry for entry in found.items() if entry[1] in outside)
            raise UserError(f"{index}: tensor {name!r} is in '{file}'; expected a file beside it")
        return found

    def _read_header(self, file: Path, listed: dict[str, str]) -> None:
        if not file.is_file():
            told = f"{file} does not exist; the model's weights are read from it"
            if pickle := min(file.parent.glob("pytorch_model*.bin"), default=None):
                change = "AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)"
                why_not = f"a pickle, {pickle.name}, can run code"
                told += f"; {why_not}: transformers makes safetensors of it: {change}"
            elif not listed and (other := min(file.parent.glob("*.safetensors"), default=None)):
                told += f"; {other.name} would be read if {INDEX} named its tensors"
            raise UserError(told)
        check_no_pointer(file)
        with open(file, "rb") as handle:
            try:
                with safe_open(file, framework="pt"):
                    pass  # the library checks header and length
            except SafetensorError as error:
                raise UserError(f"{file}: truncated or not a safetensors file ({error})") from None
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if listed.get(name, file.name) != file.name:
                continue  # a file may hold an older one of a tensor that is in another
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            start = 8 + length + begin
            self.tensors[name] = StoredTensor(name, file, entry["dtype"], shape, start, end - begin)

    def read(self, tensor: StoredTensor) -> Tensor:
        """A whole tensor on the CPU, in the dtype of the file."""
        values = torch.empty(tensor.shape, dtype=STORED_DTYPES[tensor.dtype])
        with closing(OpenFiles()) as files:
            files.read_rows(tensor, 0, values)
        return values


@cache
def _say_once(warning: str) -> None:
    warn(warning)
