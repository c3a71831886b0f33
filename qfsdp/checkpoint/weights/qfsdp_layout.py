"""qfsdp's own layout of packed weights on disk: a row of bytes is a row of the file.

docs/internals/quantized-folders.md describes it. For a packed weight NAME of `[rows, cols]`:

    NAME            U8  [rows, row_bytes]    exactly what `QuantizedTensor.qdata` holds
    NAME.<extra>    F32                      its metadata, by the format's `metadata_names`

so any rank's shard of it is one contiguous range of one file. All other tensors are as in the
source. `qfsdp_packed.json` beside them names the packed weights, the source, and checksums.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qfsdp.checkpoint.weights.read import SafetensorsFolder, StoredTensor
from qfsdp.checkpoint.weights.write import Entry, Group, SafetensorsFile
from qfsdp.cli.errors import UserError
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor

MANIFEST = "qfsdp_packed.json"
VERSION = 1


@dataclass(frozen=True)
class QuantizedWeight:
    """Where the bytes of a packed weight are, in any layout.

    Fields:
        name, format, shape: of the weight.
        columns: uint8 `[rows, n]` each; side by side they are the packed rows.
        metadata: the metadata in the format's order, each a stored tensor or its value.
        tensor_names: all tensors in the folder that belong to it.
        source_fingerprint: of what it was packed from, where that is known.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    columns: Sequence[StoredTensor]
    metadata: Sequence[StoredTensor | float]
    tensor_names: Sequence[str]
    source_fingerprint: str = ""


def read_quantized(files: SafetensorsFolder, config: dict[str, Any]) -> dict[str, QuantizedWeight]:
    """The packed weights that the manifest of a folder lists.

    Raises:
        UserError: the manifest is missing or of another version, or a tensor is not as it says.
    """
    manifest = read_manifest(files)
    found = {}
    for name, weight in manifest["weights"].items():
        rows, cols = weight["shape"]
        quantized_format = FORMATS[weight["format"]]
        metadata = [f"{name}.{extra}" for extra in quantized_format.metadata_names]
        expected = dict.fromkeys([name, *metadata])
        for tensor in expected:
            if tensor not in files.tensors:
                raise UserError(f"{files.folder}: tensor {tensor!r} is missing")
        stored = files.tensors[name]
        if stored.dtype != "U8" or stored.shape != (rows, quantized_format.row_bytes(cols)):
            raise UserError(
                f"{stored.file}: tensor {name!r} is {stored.dtype} {list(stored.shape)}; "
                f"{MANIFEST} means U8 {[rows, quantized_format.row_bytes(cols)]}"
            )
        found[name] = QuantizedWeight(
            name,
            weight["format"],
            (rows, cols),
            [stored],
            [files.tensors[extra] for extra in metadata],
            list(expected),
            manifest["source"]["fingerprint"],
        )
    return found


def read_manifest(files: SafetensorsFolder) -> dict[str, Any]:
    """The manifest of a packed folder; raises UserError where it is not one of this version."""
    file = files.folder / MANIFEST
    try:
        manifest = json.loads(file.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{file} does not exist; the folder is not complete: run recipes/quantize again"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    if manifest.get("version") != VERSION:
        raise UserError(f"{file}: version {manifest.get('version')!r}; expected {VERSION}")
    for name, weight in manifest["weights"].items():
        if weight["format"] not in FORMATS:
            raise UserError(
                f"{file}: {name!r} is packed as {weight['format']!r}; known: {', '.join(FORMATS)}"
            )
    return manifest


def quantized_group(name: str, format: str, rows: int, cols: int) -> Group:
    """The tensors that a packed weight becomes in this layout."""
    quantized_format = FORMATS[format]
    group = {name: Entry("U8", (rows, quantized_format.row_bytes(cols)))}
    shapes = quantized_format.metadata_shapes(rows, cols)
    for extra, shape in zip(quantized_format.metadata_names, shapes, strict=True):
        group[f"{name}.{extra}"] = Entry("F32", shape)
    return group


def write_quantized(file: SafetensorsFile, name: str, weight: QuantizedTensor) -> None:
    """Writes the tensors of `quantized_group`."""
    file.write(name, weight.qdata)
    for extra, value in zip(weight.metadata_names, weight.metadata, strict=True):
        file.write(f"{name}.{extra}", value)


def local_columns(weight: QuantizedWeight, packed: Tensor) -> list[Tensor]:
    """The parts of packed rows `[n, row_bytes]` that the weight's columns fill, as views."""
    return list(packed.split([column.row_bytes for column in weight.columns], dim=1))
