"""Writes a merged model with 4-bit integers in groups, for the Marlin kernels of vLLM.

W4A16: weights are integers from -8 to 7 times a scale for each group of a row, activations stay in
16 bits. A scale is the group's largest magnitude / 7.5, rounded to the model's dtype, and weights
are rounded to the nearest integer times that scale. No data is used: GPTQ and AWQ, which are
calibrated on some, lose less.

The package `compressed-tensors` of the vLLM project quantizes, packs and describes the weights in
its layout `pack-quantized`; for every linear of a layer:

    NAME.weight_packed    I32 [out, in / 8]
    NAME.weight_scale     [out, in / group], of the model's dtype
    NAME.weight_shape     I64 [2]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qfsdp.checkpoint.weights.convert import WeightConversion, convert_folder
from qfsdp.checkpoint.weights.experts import PARAMETER
from qfsdp.checkpoint.weights.load import check_finite
from qfsdp.checkpoint.weights.merge import Merge, MergedWeight
from qfsdp.checkpoint.weights.output_folder import OutputFolder
from qfsdp.checkpoint.weights.quantize import quantized_model, quantized_weights
from qfsdp.checkpoint.weights.read import Pieces
from qfsdp.checkpoint.weights.write import DTYPE_NAMES, Entry, SafetensorsFile
from qfsdp.common.errors import UserError
from qfsdp.distributed.world import World
from qfsdp.modules.quantized_linear import QuantizationConfig

GROUP_SIZES = (32, 64, 128)  # that Marlin has
BITS = 4


@dataclass(frozen=True)
class W4A16Export:
    """What is written: see `plan_w4a16`.

    Fields:
        merge: the model's weights; its `dtype` is that of scales and of weights that stay plain.
        group_size: weights of a row that share a scale.
        plan: the weights of the model.
        quantized: names of those that become integers.
    """

    merge: Merge
    group_size: int
    plan: list[MergedWeight]
    quantized: set[str]

    def write(self, folder: Path, world: World, max_file_bytes: int) -> None:
        """Writes a model folder. Every rank must call it; each rank writes a part of the files.
        Raises UserError: see `convert_folder`."""
        merge = self.merge
        conversions = {w.name: self._conversion(w, world.device) for w in self.plan}
        config = merge.model_config(self.plan)
        config["quantization_config"] = self._described()
        output = OutputFolder(folder, texts=merge.texts())
        convert_folder(conversions, merge.weights, output, config, world, max_file_bytes)

    def _conversion(self, weight: MergedWeight, device: torch.device) -> WeightConversion:
        if weight.name not in self.quantized:
            return self.merge.conversion(weight, device)
        (rows, cols), dtype = weight.shape, DTYPE_NAMES[self.merge.dtype]
        group = {
            f"{weight.name}_packed": Entry("I32", (rows, cols * BITS // 32)),
            f"{weight.name}_scale": Entry(dtype, (rows, cols // self.group_size)),
            f"{weight.name}_shape": Entry("I64", (2,)),
        }
        write = partial(self._write_integers, weight, device)
        return WeightConversion(group, self.merge.reads(weight, device), write)

    def _write_integers(
        self, weight: MergedWeight, device: torch.device, file: SafetensorsFile, pieces: Pieces
    ) -> None:
        at = 0
        for chunk in self.merge.rows(weight, device, pieces):
            made = integers(chunk.float(), self.group_size, self.merge.dtype)
            check_finite(f"{weight.name}'s scales", made["weight_scale"])
            for field in ("packed", "scale"):
                file.write(f"{weight.name}_{field}", made[f"weight_{field}"], at)
            at += len(chunk)
        file.write(f"{weight.name}_shape", torch.tensor(weight.shape))

    def _described(self) -> dict[str, Any]:
        """The section `quantization_config` of config.json, as the library writes it."""
        from compressed_tensors.quantization import QuantizationConfig as Described

        linears = {w.name for w in self.plan if len(w.shape) == 2 and "embed" not in w.name}
        skipped = {name.removesuffix(".weight") for name in linears - self.quantized} | {"lm_head"}
        described = Described(
            config_groups={"group_0": _scheme(self.group_size)},
            format="pack-quantized",
            quantization_status="compressed",
            ignore=sorted(skipped),
        )
        return described.model_dump(mode="json", exclude_none=True)


def plan_w4a16(merge: Merge, group_size: int) -> W4A16Export:
    """Everything about the folder but the weights. Reads headers only. Raises UserError: see
    `Merge.plan`; or a weight has no whole groups or is of an expert, or the package
    `compressed-tensors` is missing."""
    try:
        import compressed_tensors  # noqa: F401
    except ImportError:
        raise UserError(
            "format: w4a16 needs the package compressed-tensors; expected `pip install "
            "compressed-tensors`"
        ) from None
    plan = merge.plan()
    every_linear = quantized_model(merge.weights, QuantizationConfig("nf4", "all-linear"))
    quantized = set(quantized_weights(every_linear))
    for weight in (weight for weight in plan if weight.name in quantized):
        if PARAMETER.fullmatch(weight.name):
            raise UserError(
                "format: w4a16 has no form here for the experts of a mixture "
                f"({weight.name!r}); expected a model without experts"
            )
        if weight.shape[1] % group_size:
            fitting = [size for size in GROUP_SIZES if weight.shape[1] % size == 0]
            raise UserError(
                f"group_size: {group_size} does not divide the {weight.shape[1]} columns of "
                f"{weight.name!r}; expected {' or '.join(map(str, fitting)) or 'another format'}"
            )
    return W4A16Export(merge, group_size, plan, quantized)


def integers(rows: Tensor, group_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Rows of a weight as packed integers.

    Args:
        rows: fp32 `[n, in]`.
        dtype: of the scales.

    Returns:
        `weight_packed`, int32 `[n, in / 8]`, and `weight_scale`, `[n, in / group_size]`.
    """
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = _scheme(group_size)
    groups = rows.unflatten(1, (-1, group_size))
    scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights)
    scale = scale.clamp(min=torch.finfo(dtype).tiny).to(dtype)  # no group is divided by 0
    state = {"weight": rows, "weight_scale": scale}
    made: dict[str, Tensor] = PackedQuantizationCompressor.compress(state, scheme)
    return made


def _scheme(group_size: int) -> Any:
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    scheme: QuantizationScheme = preset_name_to_scheme("W4A16", ["Linear"])
    scheme.weights.group_size = group_size
    return scheme
