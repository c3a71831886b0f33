"""qfsdp's layout of quantized weights on disk: a row of bytes is a row of the file.

docs/internals/quantized-folders.md describes it. For a quantized weight NAME of `[rows, cols]`:

    NAME              U8  [rows, row_bytes]    the bytes of `QuantizedTensor.qdata`
    NAME.<metadata>   F32                      its metadata, by the format's `metadata_names`

so every rank's shard is one contiguous range of one file. All other tensors are as in the source.
The manifest `qfsdp_packed.json` lists the quantized weights, the source, and checksums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qfsdp.checkpoint.weights.read import StoredTensor
from qfsdp.checkpoint.weights.safetensors_folder import SafetensorsFolder
from qfsdp.checkpoint.weights.write import Entry, Group, SafetensorsFile
from qfsdp.common.errors import UserError
from qfsdp.common.sealed import Damaged, read_sealed
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor

MANIFEST = "qfsdp_packed.json"
VERSION = 1
FAST_DIGESTS = "xxh3"  # in the manifest: of each file of weights
SETTINGS_DIGESTS = "settings"  # in the manifest: SHA-256 of config.json, tokenizer.json, ...


@dataclass(frozen=True)
class StoredQuantizedWeight:
    """Where the bytes of a quantized weight are, in any layout.

    Fields:
        name, format, shape: of the weight.
        columns: uint8 `[rows, n]` each; side by side they are the rows of `qdata`.
        metadata: a stored tensor or a value each, in the format's order.
        tensor_names: all tensors of the folder that belong to the weight.
        source_fingerprint: of the model that it was quantized from, if known.
        source_digest: of all bytes of that model, if known.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    columns: Sequence[StoredTensor]
    metadata: Sequence[StoredTensor | float]
    tensor_names: Sequence[str]
    source_fingerprint: str = ""
    source_digest: str | None = None


def read_quantized(
    files: SafetensorsFolder, config: dict[str, Any]
) -> dict[str, StoredQuantizedWeight]:
    """The quantized weights that the manifest of a folder lists. Raises UserError: the manifest is
    missing or of another version, or contradicts a tensor."""
    manifest = read_manifest(files)
    found = {}
    for name, weight in manifest["weights"].items():
        rows, cols = weight["shape"]
        quantized_format = FORMATS[weight["format"]]
        metadata = [f"{name}.{field}" for field in quantized_format.metadata_names]
        expected = dict.fromkeys([name, *metadata])
        for tensor in expected:
            if tensor not in files.tensors:
                raise UserError(f"{files.folder}: tensor {tensor!r} is missing")
        stored = files.tensors[name]
        if stored.dtype != "U8" or stored.shape != (rows, quantized_format.row_bytes(cols)):
            size = [rows, quantized_format.row_bytes(cols)]
            raise stored.wrong(
                f"is {stored.dtype} {list(stored.shape)}; expected U8 {size}, as {MANIFEST} says"
            )
        found[name] = StoredQuantizedWeight(
            name,
            weight["format"],
            (rows, cols),
            [stored],
            [files.tensors[tensor] for tensor in metadata],
            list(expected),
            manifest["source"]["fingerprint"],
            manifest["source"].get("digest"),
        )
    return found


def read_manifest(files: SafetensorsFolder) -> dict[str, Any]:
    """The manifest of a quantized folder. Raises UserError: it is missing, broken or of another
    version."""
    file = files.folder / MANIFEST
    if not file.exists():
        raise UserError(
            f"{file} does not exist; the folder is not complete: run recipes/quantize again"
        )
    try:
        manifest = read_sealed(file, older=True)
    except Damaged as error:
        raise UserError(
            f"{files.folder}: {error}; expected it as recipes/quantize wrote it"
        ) from None
    if manifest.get("version") != VERSION:
        raise UserError(f"{file}: version {manifest.get('version')!r}; expected {VERSION}")
    weights, source = manifest.get("weights"), manifest.get("source")
    if not (isinstance(weights, dict) and isinstance(source, dict) and "fingerprint" in source):
        raise UserError(f"{file}: expected the weights and the source of a quantized model")
    for name, weight in weights.items():
        entry = weight if isinstance(weight, dict) else {}
        format, shape = entry.get("format"), entry.get("shape")
        if not isinstance(format, str) or format not in FORMATS:
            known = ", ".join(FORMATS)
            raise UserError(f"{file}: format of {name!r}: {format!r}; expected {known}")
        sizes = shape if isinstance(shape, list) else []
        if [type(size) is int and size > 0 for size in sizes] != [True, True]:
            raise UserError(f"{file}: shape of {name!r}: {shape!r:.50}; expected rows and columns")
    return manifest


def quantized_group(name: str, format: str, rows: int, cols: int) -> Group:
    """The tensors that a quantized weight is stored as."""
    quantized_format = FORMATS[format]
    group = {name: Entry("U8", (rows, quantized_format.row_bytes(cols)))}
    shapes = quantized_format.metadata_shapes(rows, cols)
    for field, shape in zip(quantized_format.metadata_names, shapes, strict=True):
        group[f"{name}.{field}"] = Entry("F32", shape)
    return group


def write_quantized(file: SafetensorsFile, name: str, weight: QuantizedTensor) -> None:
    """Writes the tensors of `quantized_group`."""
    file.write(name, weight.qdata)
    for field, value in zip(weight.metadata_names, weight.metadata, strict=True):
        file.write(f"{name}.{field}", value)
