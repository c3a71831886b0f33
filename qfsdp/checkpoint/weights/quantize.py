"""Packing a model folder once, so that later runs load bytes instead of quantizing.

Streamed: of every tensor 16 MB are read at a time, and what is held is one packed weight. Files
are written one by one; a conversion that was interrupted goes on with the first unfinished
one. Ranks share the files out among themselves and talk only at the beginning and the end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qfsdp.checkpoint.lock import LOCK_FILE, FolderLock
from qfsdp.checkpoint.weights.bnb_layout import bnb_config, bnb_group, write_bnb
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.load import ModelConfig, check_finite, fill_quantized, streamed
from qfsdp.checkpoint.weights.qfsdp_layout import (
    MANIFEST,
    VERSION,
    quantized_group,
    write_quantized,
)
from qfsdp.checkpoint.weights.read import DTYPES, Read
from qfsdp.checkpoint.weights.write import (
    MAX_FILE_BYTES,
    Entry,
    Group,
    PlannedFile,
    SafetensorsFile,
    copy_companions,
    is_complete,
    plan_files,
    sha256,
    write_files,
    write_index,
    write_json,
)
from qfsdp.cli.errors import UserError
from qfsdp.distributed.world import World
from qfsdp.modules.adapters import base_parameters
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor

Layout = Literal["qfsdp", "bnb"]
BEGUN = MANIFEST + ".begun"


def quantize_folder(
    weights: ModelWeights,
    quantization: QuantizationConfig,
    folder: Path,
    world: World,
    layout: Layout = "qfsdp",
    max_file_bytes: int = MAX_FILE_BYTES,
    key: str = "output_dir",
) -> None:
    """Writes the model in `weights` with its targeted linears packed, as a model folder.

    Every rank must call it, and all of them must see `folder`; each converts a part of the files.
    A folder that such a call left unfinished is finished; in a finished one the files are
    compared with their checksums, and written again where they differ.

    Args:
        layout: "qfsdp" (docs/internals), or "bnb": what transformers loads with
            bitsandbytes.
        key: the config's name for `folder`, for the messages.

    Raises:
        UserError: `folder` holds something else, is being written by another process or cannot
            be written; or the weights are not those of their config.json.
    """
    model = quantized_model(weights, quantization)
    weights.check(model)
    params = dict(base_parameters(model))
    files = plan_files(
        {name: _group(weights, layout, name, param) for name, param in params.items()},
        max_file_bytes,
    )
    facts = _facts(weights, quantization, layout, max_file_bytes)
    with FolderLock(folder, key) if world.rank == 0 else nullcontext():
        known = world.broadcast(_begin(folder, facts, key) if world.rank == 0 else {})
        mine = files[world.rank :: world.size]
        todo = [f for f in mine if not _is_done(folder / f.name, f, known.get(f.name))]
        _write(weights, params, folder, todo, layout, world)
        checksums = {file.name: sha256(folder / file.name) for file in mine}
        every = {name: digest for part in world.gather(checksums) for name, digest in part.items()}
        if world.rank == 0:
            _finish(weights, model, folder, files, facts, every)
        world.gather(None)  # no rank opens the folder before it is complete


def quantized_model(weights: ModelWeights, quantization: QuantizationConfig) -> Decoder:
    """The decoder on the meta device, with the linears packed that the config means."""
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dir(weights.folder))
    quantize_linears(model, quantization, weights.formats)
    return model


def _facts(
    weights: ModelWeights, quantization: QuantizationConfig, layout: Layout, max_file_bytes: int
) -> dict[str, Any]:
    """What a conversion is made from and how; it goes on only where these are the same."""
    return {
        "version": VERSION,
        "layout": layout,
        "format": quantization.format,
        "targets": quantization.targets,
        "max_file_bytes": max_file_bytes,
        "source": {"path": str(weights.folder), "fingerprint": weights.fingerprint},
    }


def _begin(folder: Path, facts: dict[str, Any], key: str) -> dict[str, str]:
    """Makes the folder, or takes up an earlier conversion of the same source.

    Returns file name -> SHA-256 of the files of a finished one.
    """
    earlier: dict[str, Any] | None = None
    for name in (BEGUN, MANIFEST):
        if (folder / name).is_file():
            earlier = json.loads((folder / name).read_text())
            break
    if earlier is None:
        if any(file.name != LOCK_FILE for file in folder.iterdir()):
            raise UserError(f"{key}: '{folder}' is not empty; name a new folder")
        write_json(folder / BEGUN, facts)
        return {}
    for fact in facts:
        was, now = earlier.get(fact), facts[fact]
        if fact == "source":
            was, now = earlier["source"]["fingerprint"], facts["source"]["fingerprint"]
        if was != now:
            raise UserError(
                f"{key}: '{folder}' was made with another {fact} ({was!r}, now {now!r}); remove "
                "it or name another folder"
            )
    return earlier.get("files", {})


def _is_done(path: Path, planned: PlannedFile, checksum: str | None) -> bool:
    if not is_complete(path, planned):
        return False
    return checksum is None or sha256(path) == checksum


def _group(weights: ModelWeights, layout: Layout, name: str, param: nn.Parameter) -> Group:
    """The tensors that a parameter becomes."""
    if not isinstance(param.data, QuantizedTensor):
        stored = weights.plain[name]
        return {name: Entry(stored.dtype, stored.shape)}
    group = quantized_group if layout == "qfsdp" else bnb_group
    rows, cols = param.shape
    return group(name, param.data.format, rows, cols)


def _write(
    weights: ModelWeights,
    params: dict[str, nn.Parameter],
    folder: Path,
    files: list[PlannedFile],
    layout: Layout,
    world: World,
) -> None:
    """Converts the weights of these files, in their order."""
    names = [name for file in files for name in file.groups]
    reads = [read for name in names for read in _reads(weights, name, params[name], world.device)]
    write_weight = write_quantized if layout == "qfsdp" else write_bnb
    shown = world.rank == 0 and bool(files)
    with streamed(reads, shown) as pieces:

        def fill(name: str, file: SafetensorsFile) -> None:
            into = params[name].data
            if not isinstance(into, QuantizedTensor):
                return copy_pieces(name, next(pieces), file)
            rows, cols = into.shape
            dtype = _source_dtype(weights, name)
            packed = FORMATS[into.format].empty(rows, cols, dtype, "cpu")
            if name in weights.quantized:
                fill_quantized(packed, weights, weights.quantized[name], pieces)
            else:
                packed.quantize_(next(pieces), name)
            write_weight(file, name, packed)

        try:
            for _ in write_files(folder, files, fill):
                pass
        except ValueError as error:
            raise UserError(f"{weights.folder}: {error}") from None


def _source_dtype(weights: ModelWeights, name: str) -> torch.dtype:
    """What a weight was before it was packed, as far as its folder tells."""
    return DTYPES[weights.plain[name].dtype] if name in weights.plain else torch.bfloat16


def _reads(
    weights: ModelWeights, name: str, param: nn.Parameter, device: torch.device
) -> list[Read]:
    cpu = torch.device("cpu")
    if name in weights.quantized:
        return [Read(c, range(c.rows), cpu) for c in weights.quantized[name].columns]
    stored = weights.plain[name]
    to_be_packed = isinstance(param.data, QuantizedTensor)
    return [Read(stored, range(stored.rows), device if to_be_packed else cpu)]


def copy_pieces(name: str, pieces: Iterator[Tensor], file: SafetensorsFile) -> None:
    """Writes the pieces of a tensor as they are; ValueError if one holds NaN or infinity."""
    at = 0
    for piece in pieces:
        check_finite(name, piece)
        file.write(name, piece, at)
        at += len(piece)


def _finish(
    weights: ModelWeights,
    model: nn.Module,
    folder: Path,
    files: list[PlannedFile],
    facts: dict[str, Any],
    checksums: dict[str, str],
) -> None:
    """Everything beside the weights; the manifest last."""
    packed = {n: p.data for n, p in model.named_parameters() if isinstance(p.data, QuantizedTensor)}
    formats = {weight.format for weight in packed.values()}
    config = json.loads((weights.folder / "config.json").read_text())
    if facts["layout"] == "qfsdp":
        config["quantization_config"] = {"quant_method": "qfsdp", "format": facts["format"]}
    else:
        # transformers packs every linear that it is not told to leave alone.
        skipped = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
        config["quantization_config"] = bnb_config(
            formats.pop(), _source_dtype(weights, next(iter(packed))), skipped
        )
    copy_companions(weights.folder, folder)
    write_index(folder, files)
    write_json(folder / "config.json", config)
    shapes = {n: {"format": w.format, "shape": list(w.shape)} for n, w in packed.items()}
    write_json(folder / MANIFEST, facts | {"weights": shapes, "files": checksums})
    (folder / BEGUN).unlink(missing_ok=True)


def open_weights(
    config: ModelConfig, quantization: QuantizationConfig, world: World
) -> ModelWeights:
    """The weights that a run loads: those of `model.path`, or of their packed copy in
    `model.quantize_cache`, which is made if it is not there yet.

    Every rank must call it.
    """
    weights = ModelWeights(config.path)
    if config.quantize_cache is None or quantization.format == "none" or weights.quantized:
        return weights
    targets = json.dumps([weights.fingerprint, quantization.targets])
    digest = hashlib.sha256(targets.encode()).hexdigest()[:12]
    name = f"{weights.folder.resolve().name}-{quantization.format}-{digest}"
    folder = Path(config.quantize_cache).expanduser() / name
    if not world.broadcast((folder / MANIFEST).is_file()):
        quantize_folder(weights, quantization, folder, world, key="model.quantize_cache")
    return ModelWeights(folder)
