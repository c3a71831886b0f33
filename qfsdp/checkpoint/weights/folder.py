"""The weights of a model folder, whether stored plain or quantized, by us or by bitsandbytes.

`ModelWeights` says where the bytes of every weight are. A quantized weight is described by the
byte columns that make up its rows, so one loader fills a shard from any layout. A layout is a
function that finds these columns (`qfsdp_layout.py`, `bnb_layout.py`). Hashes of the tensors do not
depend on how files divide them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from torch import nn

from qfsdp.checkpoint.weights.bnb_layout import read_bnb
from qfsdp.checkpoint.weights.experts import OF_SINGLE, read_mxfp4, stacked_experts
from qfsdp.checkpoint.weights.fp8_layout import FP8_METHODS, is_fp8, quantization_of, without_scales
from qfsdp.checkpoint.weights.mean_rows import TABLES, with_mean_rows
from qfsdp.checkpoint.weights.other_names import PREDICTOR, tensors_of_hub_model, with_our_names
from qfsdp.checkpoint.weights.qfsdp_layout import StoredQuantizedWeight, read_quantized
from qfsdp.checkpoint.weights.read import StoredTensor
from qfsdp.checkpoint.weights.safetensors_folder import SafetensorsFolder
from qfsdp.checkpoint.weights.verify import check_fit
from qfsdp.common.errors import UserError
from qfsdp.common.file_digests import range_digests, remembered
from qfsdp.common.files import json_object
from qfsdp.common.long_waits import long_wait
from qfsdp.hub.download import whole_folder
from qfsdp.modules.hub_models.config import HubConfig, Implementation, as_stored, model_config

_LAYOUTS = {"qfsdp": read_quantized, "bitsandbytes": read_bnb, "mxfp4": read_mxfp4}
"""`quant_method` of config.json -> the function that finds the quantized weights."""


class ModelWeights:
    """The base weights of a model folder.

    Attributes:
        folder: its path.
        files: all tensors of the folder.
        tensors: the same as they are read: those in FP8 as bf16 (`fp8_layout.py`).
        quantized: name -> weight, of the weights that are stored quantized.
        write_again: where the folder is a cache: `write_again(damage)` writes what is damaged anew
            and returns the weights; every rank must call it.
        keeps_plain: whether what is stored plain was to be so: bitsandbytes or we quantized it.
        mean_rows: of `model.mean_rows`, which the embedding and the output layer have.
        config: what the folder says of the model that is built; None if it is faulty.
        plain: name -> tensor, of all others. Experts are stacked, see `experts.py`. Layers that
            only predict further tokens (`DecoderParts.predictors`) are left out.

    Raises:
        UserError: see `SafetensorsFolder`; or the quantization method is unknown.
    """

    write_again: Callable[[str], ModelWeights] | None = None
    mean_rows: list[int] | None = None
    keeps_plain = False

    def __init__(
        self,
        folder: str | Path,
        implementation: Implementation = "auto",
        mean_rows: Sequence[int] | None = None,
    ) -> None:
        self.files = SafetensorsFolder(folder)
        self.folder = self.files.folder
        self.quantized: dict[str, StoredQuantizedWeight] = {}
        self.implementation, self.config = implementation, None
        with suppress(UserError):  # those who build the model report it
            found = model_config(self.folder, implementation)
            self.config = as_stored(found, lambda: self.files.tensors)
        parts, config = self.config, quantization_of(json_object(self.folder / "config.json"))
        if parts is not None and not isinstance(parts, HubConfig):
            self.files.tensors = with_our_names(self.files.tensors, parts)
        self.tensors = self.files.tensors
        if config is not None and is_fp8(config):
            self.tensors, config = without_scales(self.tensors, config), None
        if isinstance(parts, HubConfig):
            self.plain = tensors_of_hub_model(self.tensors, self.folder, parts, config)
            return
        if config is not None:
            if not isinstance(config, dict):
                wrong = f"quantization_config {config!r:.50}; expected a JSON object"
                raise UserError(f"{self.folder / 'config.json'}: {wrong}")
            method = config.get("quant_method", "bitsandbytes")
            if not isinstance(method, str) or method not in _LAYOUTS:
                raise UserError(
                    f"{self.folder / 'config.json'}: quant_method {method!r}; expected "
                    f"{', '.join(_LAYOUTS)}, {FP8_METHODS}, or weights that are not quantized"
                )
            self.quantized = _LAYOUTS[method](self.files, config)
            self.keeps_plain = method != "mxfp4" and bool(self.quantized)
        used = {name for weight in self.quantized.values() for name in weight.tensor_names}
        self.plain = {n: tensor for n, tensor in self.tensors.items() if n not in used}
        if single := next((name for name in self.quantized if OF_SINGLE.search(name)), None):
            raise UserError(
                f"{self.folder}: {single!r} is quantized by itself; expected the model in 16 bits: "
                "its experts are quantized while they are loaded"
            )
        if parts is not None:
            after = range(parts.num_hidden_layers, parts.num_hidden_layers + parts.predictors)
            unread = tuple(f"model.layers.{layer}." for layer in after)
            if parts.recurrent is not None:  # of Qwen 3.5: what sees pictures
                unread += ("model.visual.",)
            self.plain = {
                name: tensor
                for name, tensor in self.plain.items()
                if not name.startswith(unread) and not PREDICTOR.match(name)
            }
            self.plain = stacked_experts(self.plain, parts, self.folder)
        if mean_rows is not None and parts is not None:
            self._more_rows(*mean_rows)

    def _more_rows(self, first: int, rows: int) -> None:
        if stored := [name for name in TABLES if name in self.quantized]:
            expected = f"expected null: {stored[0]!r} is stored quantized"
            raise UserError(f"model.mean_rows: [{first}, {rows}]; {expected}")
        self.plain = with_mean_rows(self.plain, first, rows)
        self.config = replace(self.config, vocab_size=rows)  # type: ignore[type-var]
        self.mean_rows = [first, rows]

    @property
    def formats(self) -> dict[str, str]:
        """Weight name -> format, of the weights that are stored quantized; "none" of those that a
        quantized folder keeps plain."""
        plain = self.plain if self.keeps_plain else ()
        return dict.fromkeys(plain, "none") | {n: w.format for n, w in self.quantized.items()}

    @property
    def weight_files(self) -> list[Path]:
        """The files that hold tensors, in the order of their names."""
        return sorted({tensor.file for tensor in self.files.tensors.values()})

    @cached_property
    def fingerprint(self) -> str:
        """A hash of names, dtypes, shapes, and the first, middle and last 4 KB of every tensor, by
        which earlier versions identified a model; see `digest`. A folder that qfsdp quantized has
        the fingerprint of its source."""
        weight = self._of_source
        return weight.source_fingerprint if weight else sampled_digest(self._whole.tensors)

    @cached_property
    def digest(self) -> str | None:
        """Identifies a model: a hash of names, dtypes, shapes and all bytes of every tensor, which
        is read once (`qfsdp.common.file_digests`). A folder that qfsdp quantized has the digest of
        its source; None if an earlier version has not recorded it."""
        if (weight := self._of_source) is not None:
            return weight.source_digest
        return whole_digest(self._whole.tensors, self._whole.folder)

    @property
    def _of_source(self) -> StoredQuantizedWeight | None:
        """A weight that qfsdp quantized, which knows its source; None without one."""
        return next((w for w in self.quantized.values() if w.source_fingerprint), None)

    @property
    def _whole(self) -> SafetensorsFolder:
        """The files with all their bytes, where those of a model on the hub are not here yet."""
        whole = whole_folder(self.folder)
        return self.files if whole == self.folder else ModelWeights(whole).files

    def check(self, model: nn.Module) -> None:
        """Checks that the folder holds exactly the base parameters of `model`; see `check_fit`."""
        check_fit(self, model)


SAMPLE_BYTES = 4096


def sampled_digest(tensors: Mapping[str, StoredTensor]) -> str:
    """Of names, dtypes, shapes, and the first, middle and last 4 KB of every tensor."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        last = max(0, tensor.size - SAMPLE_BYTES)
        with open(tensor.file, "rb") as file:
            for at in sorted({0, last // 2, last}):
                file.seek(tensor.start + at)
                digest.update(file.read(min(SAMPLE_BYTES, tensor.size)))
    return digest.hexdigest()


def whole_digest(tensors: Mapping[str, StoredTensor], folder: Path) -> str:
    """Of names, dtypes, shapes, and all bytes; remembered while the files are the same.

    Args:
        folder: for a message, if hashing takes long.
    """
    parts = sorted(tensors.items())

    def compute() -> str:
        digests = range_digests([(tensor.file, tensor.start, tensor.size) for _, tensor in parts])
        lines = [
            f"{name} {tensor.dtype} {tensor.shape} {digest}\n"
            for (name, tensor), digest in zip(parts, digests, strict=True)
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    with long_wait(f"hashing {folder}"):
        return remembered(sorted({tensor.file for _, tensor in parts}), "tensors", compute)
