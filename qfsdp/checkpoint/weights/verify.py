"""What may be wrong with a model folder: weights that do not fit the model, and damaged files.

Digests of its files are compared while weights are loaded.

A folder that qfsdp quantized has digests of each file in its manifest: SHA-256, which says what it
is, and XXH3, which is compared at each load. Loading such a folder is little more than copying:
SHA-256 added 41 % on one rank and 73 % on two (EPYC 7003 with two busy cores), XXH3 10 and 13 %.
The hub's cache names files by their digests: SHA-256 for weights, git's SHA-1 for small files.
Other folders have none; of those, damage shows only in sizes, headers and numbers that are not
finite.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from qfsdp.checkpoint.digests import Verification
from qfsdp.checkpoint.weights.other_names import EMBEDDINGS, HEAD, same_values
from qfsdp.checkpoint.weights.qfsdp_layout import FAST_DIGESTS, MANIFEST, SETTINGS_DIGESTS
from qfsdp.common.errors import UserError
from qfsdp.common.files import sha256
from qfsdp.common.sealed import Damaged, read_sealed
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.score_head import score_head
from qfsdp.tensor_subclasses.dtensor import local_part
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from qfsdp.checkpoint.weights.folder import ModelWeights
    from qfsdp.checkpoint.weights.qfsdp_layout import StoredQuantizedWeight

PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
_SMALL = 64 << 20  # bytes; larger files of the hub have SHA-256


def known_digests(folder: Path, files: Iterable[Path]) -> dict[str, dict[str, str]]:
    """File name -> {"xxh3" or "sha256": digest}, of those of `files` (weights in `folder`) whose
    digest is known."""
    if (folder / MANIFEST).is_file():
        found = _manifest(folder)
        whole, fast = (_digests(found.get(key)) for key in ("files", FAST_DIGESTS))
        return {
            f.name: {"xxh3": fast[f.name]} if f.name in fast else {"sha256": whole[f.name]}
            for f in files
            if f.name in whole
        }
    blobs = {file.name: _blob(file) for file in files}
    return {name: {"sha256": blob} for name, blob in blobs.items() if len(blob) == 64}


def _digests(listed: object) -> dict[str, str]:
    return {k: str(v) for k, v in listed.items()} if isinstance(listed, dict) else {}


def changed_settings(folder: Path) -> list[str]:
    """The small files of a folder, such as `config.json`, that are not as they were written or
    downloaded. A user may have edited them."""
    if (folder / MANIFEST).is_file():
        listed = _digests(_manifest(folder).get(SETTINGS_DIGESTS))
        return [name for name, digest in listed.items() if _digest_of(folder / name) != digest]
    small = [f for f in sorted(folder.glob("*")) if len(_blob(f)) == 40]
    return [f.name for f in small if _git_digest(f) != _blob(f)]


def _manifest(folder: Path) -> dict[str, object]:
    try:
        return read_sealed(folder / MANIFEST, older=True)
    except Damaged:
        return {}  # whoever reads the manifest reports it


def _digest_of(file: Path) -> str | None:
    try:
        return sha256(file)
    except OSError:
        return None


def _git_digest(file: Path) -> str:
    if (size := file.stat().st_size) > _SMALL:
        return _blob(file)
    return hashlib.sha1(b"blob %d\0" % size + file.read_bytes(), usedforsecurity=False).hexdigest()


def _blob(file: Path) -> str:
    """The digest by which the hub's cache names the content of a file; "" for others."""
    if not file.is_symlink():
        return ""
    target = file.resolve()
    in_cache = target.parent.name == "blobs" and target.is_file()
    return target.name if in_cache and re.fullmatch(r"[0-9a-f]{40}(.{24})?", target.name) else ""


def compare_digests(folder: Path, files: Iterable[Path]) -> Callable[[], str | None]:
    """Compares the digests of a model's weights in threads, while they are read. Each rank compares
    its share of the files, in the order in which they are read. Returns a function that waits for
    them and says how a file of this rank's share is damaged, or None."""
    if not (expected := known_digests(folder, files)):
        return lambda: None
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return Verification(folder, expected, *ranks).damage


def of_any_rank(*found: str | None) -> list[str | None]:
    """Each of `found` as the first rank has it that has one. Every rank must call it."""
    of_ranks = [found]
    if dist.is_initialized():
        of_ranks *= dist.get_world_size()
        dist.all_gather_object(of_ranks, found)
    return [next(filter(None, each), None) for each in zip(*of_ranks, strict=True)]


def refusal(folder: Path, damage: str) -> UserError:
    """The message about a damaged folder that the user named."""
    if (folder / MANIFEST).is_file():
        repair = "as recipes/quantize wrote it; the command that made the folder repairs it"
    else:
        repair = "as the hub has it: remove it, and the next start downloads it again"
    return UserError(f"{folder}: {damage}; expected it {repair}")


@contextmanager
def verified(folder: Path, files: Iterable[Path]) -> Iterator[None]:
    """Compares the digests of weights while they are read in a `with` block. At its end it raises
    UserError if a file is damaged, whatever else the block has raised."""
    damage_of = compare_digests(folder, files)
    try:
        yield
    except (UserError, ValueError):
        if (damage := damage_of()) is not None:
            raise refusal(folder, damage) from None
        raise
    if (damage := damage_of()) is not None:
        raise refusal(folder, damage)


# ---- whether names, shapes and formats fit -------------------------------------------------------


def check_fit(source: ModelWeights, model: nn.Module) -> None:
    """Checks that a folder holds exactly the base parameters of `model`.

    Rotary tables and the output layer of a tied model, which some checkpoints carry, are ignored:
    the model computes or shares them. Raises UserError: a tensor is missing, unexpected, or has
    another shape or format; or a tied model has an output layer of its own (transformers would not
    tie it)."""
    expected = dict(base_parameters(model))
    for name, param in expected.items():
        if name in source.quantized:
            _check_quantized(source.quantized[name], param)
        else:
            _check_plain(source, name, tuple(param.shape))
    for name in (source.plain.keys() | source.quantized.keys()) - expected.keys():
        if name == HEAD and score_head(model) is None:
            _check_tied(source)
        elif name != HEAD and not name.endswith("rotary_emb.inv_freq"):
            stored = source.plain[name] if name in source.plain else source.files.tensors[name]
            raise stored.wrong("is not part of this architecture", name)


def _check_tied(source: ModelWeights) -> None:
    ends = EMBEDDINGS.removeprefix("model.")  # a text model stands deeper
    name = next((n for n in source.plain if n.endswith(f".{ends}")), EMBEDDINGS)
    head, embeddings = source.plain.get(HEAD), source.plain.get(name)
    if head is None or embeddings is None or not same_values(head, embeddings):
        stored = head or source.quantized[HEAD].columns[0]
        raise UserError(
            f"{stored.file}: {HEAD!r} differs from {EMBEDDINGS!r}, which tie_word_embeddings makes "
            "the output layer; expected tie_word_embeddings: false in config.json"
        )


def _check_plain(source: ModelWeights, name: str, shape: tuple[int, ...]) -> None:
    if name not in source.plain:
        near = difflib.get_close_matches(name, source.plain, 1)
        hint = f"; the nearest name there is {near[0]!r}" if near else ""
        raise UserError(f"{source.folder}: tensor {name!r} is missing{hint}")
    stored = source.plain[name]
    if stored.shape != shape:
        raise stored.wrong(
            f"has shape {list(stored.shape)}; expected {list(shape)}, as config.json says", name
        )
    if stored.dtype not in PLAIN_DTYPES:
        raise stored.wrong(f"is {stored.dtype}; expected {', '.join(PLAIN_DTYPES)}", name)


def _check_quantized(weight: StoredQuantizedWeight, param: nn.Parameter) -> None:
    if weight.shape != tuple(param.shape):
        raise UserError(
            f"{weight.columns[0].file}: quantized tensor {weight.name!r} has shape "
            f"{list(weight.shape)}; expected {list(param.shape)}, as config.json says"
        )
    local = local_part(param)
    if param.requires_grad:
        return  # the loader dequantizes a trained weight
    if not isinstance(local, QuantizedTensor) or local.format != weight.format:
        raise weight.columns[0].wrong(
            f"is quantized as {weight.format}; expected the format that the model was built for",
            weight.name,
        )
