"""Every operation on a quantized weight works as on its numbers or raises one clear error."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from qfsdp.modules.quantized_linear import QuantizedLinear, linear
from qfsdp.tensor_subclasses import nf4, tensor_methods
from qfsdp.tensor_subclasses.dtensor import local_rows
from qfsdp.tensor_subclasses.plain import PlainRows
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor
from tests.ranks import run_ranks
from tests.tensor_subclasses.operations_table import (
    COLS,
    PARTS,
    REFUSED,
    REFUSED_BY_TORCH,
    ROWS,
    WORKS,
    X,
    example,
    filled,
    outcome,
    saved,
)

pytestmark = pytest.mark.usefixtures("eager")


def outcomes(operation: Callable[[Any], Any]) -> dict[str, str]:
    return {f"{f} {part}": outcome(operation, f, part) for f in FORMATS for part in PARTS}


@pytest.mark.parametrize("name", WORKS)
def test_works_as_on_the_numbers(name: str) -> None:
    found = outcomes(WORKS[name])
    assert set(found.values()) == {"works"}, found


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_with_one_clear_error(name: str) -> None:
    operation, text = REFUSED[name]
    for where, found in outcomes(operation).items():
        assert re.match("refused: (NotImplementedError|ValueError|TypeError): ", found), where
        assert re.search(text, found), found
        assert re.search(r"\.dequantize\(\)|expected", found), "says what to do"
        assert "\n" not in found


@pytest.mark.parametrize("name", REFUSED_BY_TORCH)
def test_is_refused_and_torch_wraps_the_error(name: str) -> None:
    operation, text = REFUSED_BY_TORCH[name]
    for found in outcomes(operation).values():
        assert re.match("refused: RuntimeError: ", found)
        assert text in found


# ---- copy_ -------------------------------------------------------------------------------------


def test_copy_into_some_rows_leaves_the_scales_of_the_others() -> None:
    """NF4's second-level scales are of the whole weight. Copying rows with other scales changed
    the numbers of all other rows."""
    weight, other = example("nf4").clone(), example("nf4", seed=1)
    before = weight.dequantize()
    with pytest.raises(NotImplementedError, match="other rows share its scales"):
        weight[100:140].copy_(other[100:140])
    with pytest.raises(NotImplementedError, match="other rows share its scales"):
        weight[:5].copy_(other[:5])
    assert torch.equal(weight.dequantize(), before)
    weight.copy_(other)
    assert torch.equal(weight.dequantize(), other.dequantize())
    rows = other[100:140].clone()  # has scales of its own
    rows.copy_(example("nf4")[100:140])
    assert torch.equal(rows.dequantize(), example("nf4").dequantize()[100:140])
    assert torch.equal(other.dequantize(), weight.dequantize())


@pytest.mark.parametrize("format", ["nf4_fp32_absmax", "hqq", "mxfp4", "plain"])
def test_copy_into_some_rows_of_a_format_without_metadata(format: str) -> None:
    weight, other = example(format).clone(), example(format, seed=1)
    expected = weight.dequantize().clone()
    expected[100:140] = other.dequantize()[100:140]
    weight[100:140].copy_(other[100:140])
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_copy_compares_the_shape_of_the_weight(format: str) -> None:
    """In NF4 rows of 64 and of 63 columns have 33 bytes both."""
    weights = []
    for cols in (64, 63):
        weight = FORMATS[format].empty(3, cols, torch.float32, "cpu")
        weight.quantize_(torch.ones(3, cols))
        weights.append(weight)
    with pytest.raises(NotImplementedError, match="another shape or dtype"):
        weights[0].copy_(weights[1])


# ---- quantizing --------------------------------------------------------------------------------

NOT_A_MATRIX: dict[str, tuple[Tensor, str]] = {
    "empty": (torch.ones(0, 130), r"weight: \[0, 130\] has no numbers"),
    "no columns": (torch.ones(130, 0), r"weight: \[130, 0\] has no numbers"),
    "1-D": (torch.ones(130), r"a weight \[130\]; expected \[rows, cols\]"),
    "3-D": (torch.ones(2, 3, 64), r"a weight \[2, 3, 64\]; expected \[rows, cols\]"),
    "integers": (torch.ones(2, 64, dtype=torch.int32), "dtype torch.int32; expected floating"),
    "complex": (torch.ones(2, 64, dtype=torch.complex64), "torch.complex64; expected floating"),
}


@pytest.mark.parametrize("kind", NOT_A_MATRIX)
def test_quantizing_something_else_says_what_is_expected(kind: str) -> None:
    weight, text = NOT_A_MATRIX[kind]
    with pytest.raises((ValueError, TypeError), match=text):
        nf4.quantize(weight)


@pytest.mark.parametrize("format", FORMATS)
def test_quantize_checks_shape_dtype_and_numbers(format: str) -> None:
    weight = FORMATS[format].empty(ROWS, COLS, torch.float32, "cpu")
    fits = torch.ones(ROWS, COLS)
    for given, text in {
        fits[:, 1:]: rf"name: \[150, 129\] cannot be quantized into .*; expected \[150, {COLS}\]",
        fits[1:]: "name: 149 rows; expected 150",
        torch.ones(ROWS + 1, COLS): r"name: \[151, 130\] cannot",
        fits[0]: r"name: \[130\] cannot",
        fits.int(): "name: torch.int32 cannot be quantized; expected floating point",
        fits.index_fill(0, torch.tensor(7), torch.nan): "name: .*NaN",
        fits.index_fill(1, torch.tensor(129), torch.inf): "name: .*infinity",
    }.items():
        with pytest.raises((ValueError, TypeError), match=text):
            weight.quantize_(given, "name")
    with pytest.raises(ValueError, match="149 rows; expected 150"):
        weight.quantize_(iter(fits[1:].split(7)), "name")
    with pytest.raises(ValueError, match="without gather_rows; expected all rows"):
        weight[3:9].quantize_(fits[3:9], "name")


@pytest.mark.parametrize("format", FORMATS)
def test_quantize_of_transposed_numbers_and_columns_that_64_does_not_divide(format: str) -> None:
    transposed = torch.randn(COLS, ROWS, generator=torch.Generator().manual_seed(0)).t()
    weights = [FORMATS[format].empty(ROWS, COLS, torch.float32, "cpu") for _ in range(2)]
    weights[0].quantize_(transposed)
    weights[1].quantize_(transposed.contiguous())
    assert torch.equal(weights[0].qdata, weights[1].qdata)
    assert (weights[0].dequantize() - transposed).abs().max() < 1


def test_plain_rows_of_another_compute_dtype_keep_their_stored_dtype() -> None:
    weight = PlainRows.empty(3, 64, torch.float32, "cpu").to(torch.bfloat16)
    weight.quantize_(torch.full((3, 64), 1.001))
    assert torch.equal(weight.dequantize(torch.float32), torch.full((3, 64), 1.001))
    with pytest.raises(TypeError, match="float64; expected bfloat16, float16 or float32"):
        PlainRows.empty(3, 64, torch.float64, "cpu")
    half = PlainRows.empty(3, 64, torch.float16, "cpu")
    half.quantize_(torch.full((3, 64), 1.001))
    expected = torch.full((3, 64), 1.001).half()
    for held in (half, half.to(torch.bfloat16)):
        assert torch.equal(held.dequantize(torch.float32), expected.float())


# ---- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "nf5"}, "format 'nf5'; expected one of"),
        ({"cols": 65}, "nf4 of shapes"),
        ({"global_rows": 3000}, "nf4 of shapes"),
        ({"row_offset": 140}, "nf4 of shapes"),
    ],
    ids=str,
)
def test_a_file_with_parts_that_do_not_fit_is_refused(change: dict[str, Any], text: str) -> None:
    weight = example("nf4")
    parts = {
        "format": "nf4",
        "inner": [weight.qdata, *weight.metadata],
        "cols": COLS,
        "dtype": torch.float32,
        "row_offset": 0,
        "global_rows": ROWS,
        "dim": 2,
        "is_parameter": False,
    }
    assert torch.equal(tensor_methods.rebuild(**parts).dequantize(), weight.dequantize())
    with pytest.raises(ValueError, match=text):
        tensor_methods.rebuild(**(parts | change))


def test_torch_load_moves_a_weight() -> None:
    buffer = io.BytesIO()
    torch.save(example("nf4"), buffer)
    buffer.seek(0)
    weight = torch.load(buffer, map_location="meta")
    assert {weight.device.type, *(t.device.type for t in weight.metadata)} == {"meta"}


# ---- shards ------------------------------------------------------------------------------------


def loaded_into_another(layer: nn.Module, format: str, rows: int) -> Tensor:
    other = sharded_layer(filled(format, rows, seed=1))
    other.load_state_dict(layer.state_dict())
    return other.weight


SHARD_WORKS: dict[str, Callable[[Any], Any]] = {
    "detach": lambda w: w.detach(),
    "clone": lambda w: w.clone(),
    "to": lambda w: w.bfloat16().float(),
    "cpu": lambda w: w.cpu(),
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
    "copy_": lambda w: torch.empty_like(w).copy_(w),
}
SHARD_REFUSED: dict[str, Callable[[Any], Any]] = {
    "full_tensor": lambda w: w.full_tensor(),
    "redistribute": lambda w: w.redistribute(placements=[Replicate()]),
    "distribute_tensor": lambda w: distribute_tensor(example("nf4"), w.device_mesh, [Shard(0)]),
    "w + 1": lambda w: w + 1,
    "zero_": lambda w: w.zero_(),
    "int": lambda w: w.int(),
    "sum": lambda w: w.sum(),
    "linear": lambda w: linear(X, w),
    "columns": lambda w: w[:, :3],
    "new_zeros(3, 7)": lambda w: w.new_zeros(3, 7),
    "broadcast": lambda w: dist.broadcast(w.to_local(), 0),
}


def sharded_layer(weight: QuantizedTensor) -> nn.Module:
    layer = QuantizedLinear(weight, None)
    return fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def check_shards(rows: int) -> None:
    for format in FORMATS:
        whole = filled(format, rows)
        numbers, layer = whole.dequantize().clone(), sharded_layer(whole)
        assert torch.equal(layer(X), F.linear(X, numbers))
        layer.reshard()
        shard, mine = layer.weight, numbers[local_rows(layer.weight)]
        results = {name: operation(shard) for name, operation in SHARD_WORKS.items()}
        results["load_state_dict"] = loaded_into_another(layer, format, rows)
        for name, result in results.items():
            assert result.shape == (rows, COLS), name
            assert torch.equal(result.to_local().dequantize(torch.float32), mine), name
        for name, operation in SHARD_REFUSED.items():
            with pytest.raises(NotImplementedError, match="does not implement .*dequantize"):
                print(name, operation(shard))
        assert torch.equal(layer(X), F.linear(X, numbers)), "an operation changed the shard"
        layer.reshard()


@pytest.mark.parametrize(("ranks", "rows"), [(5, 147), (7, 5)], ids=str)
def test_shards_of_any_number_of_rows(ranks: int, rows: int) -> None:
    """7 ranks share 5 rows: two have none."""
    run_ranks(ranks, check_shards, rows)
