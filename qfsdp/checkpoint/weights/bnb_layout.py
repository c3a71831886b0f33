"""bitsandbytes' 4-bit layout on disk (`*-bnb-4bit`), read and written without rounding.

transformers stores a `[rows, cols]` weight NAME that bitsandbytes quantized to NF4 as:

    NAME                                      U8  [rows * cols / 2, 1]   codes, row after row
    NAME.absmax                               U8  [blocks]  with nested absmax, else F32 [blocks]
    NAME.quant_map                            F32 [16]      the levels
    NAME.nested_absmax, NAME.nested_quant_map F32 [blocks / 256], [256]     nested only
    NAME.quant_state.bitsandbytes__nf4        U8            JSON: shape, block sizes, offset

with blocks of 64 weights. If 64 divides `cols`, blocks do not cross rows, and the rows of codes
and the rows of absmax are the two byte columns of `QuantizedTensor.qdata`.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from qfsdp.checkpoint.weights.qfsdp_layout import StoredQuantizedWeight
from qfsdp.checkpoint.weights.safetensors_folder import SafetensorsFolder
from qfsdp.checkpoint.weights.write import Entry, Group, SafetensorsFile
from qfsdp.common.errors import UserError
from qfsdp.tensor_subclasses.four_bit import BLOCK
from qfsdp.tensor_subclasses.nf4_levels import DYNAMIC_LEVELS, NF4_LEVELS, SCALE_BLOCK
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

STATE = ".quant_state.bitsandbytes__"
CHUNK_ROWS = 1 << 10  # rows of codes written at a time
_JSON_BYTES = 256  # size of a quant_state, padded with blanks


def read_bnb(files: SafetensorsFolder, config: dict[str, Any]) -> dict[str, StoredQuantizedWeight]:
    """The quantized weights of a bitsandbytes checkpoint. Raises UserError: 8-bit or FP4 weights,
    other block sizes or levels than NF4's, a number of columns that 64 does not divide, or a
    missing tensor or one of another size."""
    if config.get("load_in_8bit"):
        raise UserError(f"{files.folder}: bitsandbytes 8-bit weights; expected 4-bit NF4")
    states = [name for name in files.tensors if STATE in name]
    return {weight.name: weight for weight in (_read_weight(files, name) for name in states)}


def _read_weight(files: SafetensorsFolder, state_name: str) -> StoredQuantizedWeight:
    name, _, kind = state_name.partition(STATE)
    where = f"{files.tensors[state_name].file}: tensor {name!r}"
    if kind != "nf4":
        raise UserError(f"{where} is quantized as {kind!r}; expected nf4")
    state = _read_state(files, state_name, where)
    rows, cols = state["shape"]
    nested = "nested_blocksize" in state
    blocks = (state.get("blocksize"), state.get("nested_blocksize", SCALE_BLOCK))
    if blocks != (BLOCK, SCALE_BLOCK):
        raise UserError(f"{where} has blocks of {blocks}; expected {(BLOCK, SCALE_BLOCK)}")
    if cols % BLOCK:
        raise UserError(f"{where} has {cols} columns; expected a multiple of {BLOCK}")
    fields = {"": (rows * cols // 2,), ".absmax": (rows * cols // BLOCK,), ".quant_map": (16,)}
    if nested:
        scales = -(-rows * cols // (BLOCK * SCALE_BLOCK))
        fields |= {".nested_absmax": (scales,), ".nested_quant_map": (256,)}
    if name in files.tensors and files.tensors[name].dtype != "U8":  # bnb_4bit_quant_storage
        files.tensors[name] = files.tensors[name].as_bytes(rows * cols // 2)
    for field, shape in fields.items():
        _check_tensor(files, name + field, shape)
    _check_levels(files, f"{name}.quant_map", NF4_LEVELS)
    if nested:
        _check_levels(files, f"{name}.nested_quant_map", DYNAMIC_LEVELS)
    tensors = files.tensors
    return StoredQuantizedWeight(
        name,
        "nf4" if nested else "nf4_fp32_absmax",
        (rows, cols),
        [tensors[name].as_bytes(rows), tensors[f"{name}.absmax"].as_bytes(rows)],
        [tensors[f"{name}.nested_absmax"], state["nested_offset"]] if nested else [],
        [*(name + field for field in fields), state_name],
    )


def _read_state(files: SafetensorsFolder, name: str, where: str) -> dict[str, Any]:
    """The JSON object in a `quant_state` tensor; the values that are used have their types. Raises
    UserError, which begins with `where`."""
    stored = files.tensors[name]
    try:
        state = json.loads(bytes(files.read(stored).tolist()) if stored.dtype == "U8" else b"")
    except (ValueError, RecursionError):
        state = None
    state = state if isinstance(state, dict) else {}
    shape: Any = state.get("shape")
    sizes = shape if isinstance(shape, list) else []
    offset: Any = state.get("nested_offset", math.nan if "nested_blocksize" in state else 0.0)
    if (
        [type(size) is int and size > 0 for size in sizes] != [True, True]
        or type(offset) not in (int, float)
        or not math.isfinite(offset)
    ):
        raise UserError(f"{where}: its quant_state is damaged; expected that of bitsandbytes")
    return state


def _check_tensor(files: SafetensorsFolder, name: str, shape: tuple[int, ...]) -> None:
    if name not in files.tensors:
        raise UserError(f"{files.folder}: tensor {name!r} is missing")
    stored = files.tensors[name]
    found = tuple(n for n in stored.shape if n != 1)
    if found != tuple(n for n in shape if n != 1):
        raise stored.wrong(
            f"has shape {list(stored.shape)}; expected {list(shape)}, as its quant_state says"
        )


def _check_levels(files: SafetensorsFolder, name: str, levels: tuple[float, ...]) -> None:
    if not torch.equal(files.read(files.tensors[name]), torch.tensor(levels)):
        raise files.tensors[name].wrong("holds other levels; expected those of NF4")


def bnb_group(name: str, format: str, rows: int, cols: int) -> Group:
    """The tensors that a weight of format "nf4" or "nf4_fp32_absmax" is stored as. Raises
    UserError: 64 does not divide `cols`."""
    if cols % BLOCK:
        raise UserError(
            f"layout: bnb stores whole blocks of {BLOCK} columns, and {name!r} has {cols} columns; "
            "expected layout=qfsdp"
        )
    blocks = rows * cols // BLOCK
    nested = format == "nf4"
    group = {
        name: Entry("U8", (rows * cols // 2, 1)),
        f"{name}.absmax": Entry("U8" if nested else "F32", (blocks,)),
        f"{name}.quant_map": Entry("F32", (16,)),
    }
    if nested:
        group[f"{name}.nested_absmax"] = Entry("F32", (-(-blocks // SCALE_BLOCK),))
        group[f"{name}.nested_quant_map"] = Entry("F32", (256,))
    return group | {f"{name}{STATE}nf4": Entry("U8", (_JSON_BYTES,))}


def write_bnb(file: SafetensorsFile, name: str, weight: QuantizedTensor) -> None:
    """Writes the tensors of `bnb_group(name, weight.format, *weight.shape)`."""
    rows, cols = weight.shape
    codes, absmax = weight.qdata.split([cols // 2, weight.qdata.size(1) - cols // 2], dim=1)
    for start in range(0, rows, CHUNK_ROWS):  # flattening columns copies them
        part = codes[start : start + CHUNK_ROWS]
        file.write(name, part.reshape(-1, 1), start * cols // 2)
    file.write(f"{name}.quant_map", torch.tensor(NF4_LEVELS))
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": [rows, cols],
    }
    if weight.format == "nf4":
        scales, offset = weight.metadata
        file.write(f"{name}.absmax", absmax.reshape(-1))
        file.write(f"{name}.nested_absmax", scales)
        file.write(f"{name}.nested_quant_map", torch.tensor(DYNAMIC_LEVELS))
        state |= {"nested_blocksize": SCALE_BLOCK, "nested_dtype": "float32"}
        state |= {"nested_offset": offset.item()}
    else:
        file.write(f"{name}.absmax", absmax.contiguous().view(torch.float32).reshape(-1))
    text = json.dumps(state).encode().ljust(_JSON_BYTES)
    file.write(f"{name}{STATE}nf4", torch.tensor(list(text), dtype=torch.uint8))


def bnb_config(format: str, dtype: torch.dtype, skipped: list[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json for weights written by `write_bnb`.

    Args:
        skipped: names of the linears that are not quantized.
    """
    name = str(dtype).removeprefix("torch.")
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": format == "nf4",
        "bnb_4bit_compute_dtype": name,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": skipped,
    }
