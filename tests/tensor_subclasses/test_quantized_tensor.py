"""A quantized weight in modules and shards, and that its linear saves only its bytes for backward.

`test_operations.py` tests each operation.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.low_rank.linear import LowRankLinear
from qfsdp.modules.quantized_linear import QuantizedLinear, linear
from qfsdp.tensor_subclasses import nf4
from qfsdp.tensor_subclasses.nf4 import NF4Tensor
from qfsdp.tensor_subclasses.plain import PlainRows
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor
from tests.tiny import needs_compiler

ROWS, COLS = 577, 130  # rows that no rank count divides, columns that 64 does not


pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture
def weight() -> NF4Tensor:
    generator = torch.Generator().manual_seed(0)
    return nf4.quantize(torch.randn(ROWS, COLS, generator=generator) * 0.05)


def same_weight(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether both are the same rows of the same whole weight, byte for byte."""
    return (
        type(a) is type(b)
        and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        and (a.row_offset, a.global_rows) == (b.row_offset, b.global_rows)
        and torch.equal(a.qdata, b.qdata)
        and all(torch.equal(x, y) for x, y in zip(a.metadata, b.metadata, strict=True))
    )


# ---- nn.Module and users -----------------------------------------------------------------------


def test_a_view_must_start_at_the_first_row_and_keep_the_strides(weight: NF4Tensor) -> None:
    assert same_weight(weight.as_strided((ROWS, COLS), (COLS, 1)), weight)
    for stride, offset in (((COLS, 1), COLS), ((1, ROWS), 0)):
        with pytest.raises(NotImplementedError):
            weight.as_strided((ROWS, COLS), stride, offset)


def test_detach_shares_and_clone_copies(weight: NF4Tensor) -> None:
    detached, clone = weight[100:].detach(), weight[100:].clone()
    assert same_weight(detached, weight[100:])
    assert same_weight(clone, weight[100:])
    weight.qdata.zero_()
    weight.scales.zero_()
    assert detached.qdata.eq(0).all()
    assert detached.scales.eq(0).all()
    assert not clone.qdata.eq(0).all()
    assert not clone.scales.eq(0).all()


def test_to_moves_bytes_and_keeps_them_for_another_dtype(weight: NF4Tensor) -> None:
    for half in (weight.to(torch.bfloat16), weight.bfloat16(), weight.to(weight.bfloat16().dtype)):
        assert half.dtype == torch.bfloat16
        assert torch.equal(half.qdata, weight.qdata)
        assert torch.equal(half.dequantize(), weight.dequantize().bfloat16())
        # No number was rounded, so the weight can be converted back exactly.
        assert torch.equal(half.float().dequantize(), weight.dequantize())
    meta = weight[5:].to("meta")
    assert (meta.device.type, meta.qdata.device.type, meta.scales.device.type) == ("meta",) * 3
    assert (meta.row_offset, meta.global_rows, meta.shape) == (5, ROWS, (ROWS - 5, COLS))


def test_on_the_meta_device(weight: NF4Tensor) -> None:
    meta = NF4Tensor.empty(ROWS, COLS, torch.bfloat16, "meta")
    assert (meta.qdata.shape, meta.qdata.dtype) == (weight.qdata.shape, torch.uint8)
    assert [t.shape for t in meta.metadata] == [t.shape for t in weight.metadata]
    assert meta.dequantize().shape == (ROWS, COLS)
    assert meta.dequantize().dtype == torch.bfloat16
    real = torch.empty_like(meta[7:], device="cpu")
    assert (real.qdata.device.type, real.row_offset, real.global_rows) == ("cpu", 7, ROWS)


def test_slices_and_splits_know_their_rows(weight: NF4Tensor) -> None:
    values = weight.dequantize()
    for rows in (slice(0, 5), slice(7, 300), slice(-9, None), slice(570, 9999), slice(9, 2)):
        part = weight[rows]
        assert part.global_rows == ROWS
        assert torch.equal(part.dequantize(), values[rows])
        assert torch.equal(part[1:].dequantize(), values[rows][1:])
    for parts in (weight.split(193), weight.chunk(4), weight.split(1000)):
        assert sum(len(part) for part in parts) == ROWS
        assert torch.equal(torch.cat([part.dequantize() for part in parts]), values)
    part = weight[100:300]
    assert [p.row_offset for p in part.split(90)] == [100, 190, 280]
    assert part.qdata.data_ptr() == weight.qdata[100:].data_ptr(), "a slice must be a view"


def test_copy_accepts_only_the_same_rows_in_the_same_format(weight: NF4Tensor) -> None:
    target = torch.empty_like(weight)
    assert same_weight(target.copy_(weight), weight)
    assert target.qdata.data_ptr() != weight.qdata.data_ptr()
    for rows in (slice(0, 3), slice(4, 7), slice(3, 7)):
        with pytest.raises(NotImplementedError, match="holds other rows|another shape"):
            weight[3:6].clone().copy_(weight[rows])


def test_is_a_frozen_parameter_in_a_state_dict(weight: NF4Tensor) -> None:
    module = QuantizedLinear(weight, torch.zeros(ROWS))
    assert isinstance(module.weight, nn.Parameter)
    assert isinstance(module.weight, NF4Tensor)
    assert not module.weight.requires_grad
    state = module.state_dict()
    assert same_weight(state["weight"], weight)
    for device, assign in (("cpu", False), ("meta", True)):
        other = QuantizedLinear(
            NF4Tensor.empty(ROWS, COLS, torch.float32, device), torch.ones(ROWS)
        )
        other.load_state_dict(state, assign=assign)
        assert same_weight(other.weight.data, weight)
    assert module.to(torch.bfloat16).weight.dtype == torch.bfloat16
    assert module.to_empty(device="meta").weight.qdata.device.type == "meta"


def save_and_load(value: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, save_and_load])
def test_copies_and_pickles(copied: Callable[[Tensor], QuantizedTensor], weight: NF4Tensor) -> None:
    for part in (weight, weight[100:103], nn.Parameter(weight, requires_grad=False)):
        again = copied(part)
        assert same_weight(again, part)
        assert torch.equal(again.dequantize(), part.dequantize())
        assert isinstance(again, nn.Parameter) == isinstance(part, nn.Parameter)


# ---- FSDP2 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [ROWS, 5, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shards_as_fsdp2_makes_and_gathers_them(ranks: int, rows: int, weight: NF4Tensor) -> None:
    weight = nf4.quantize(weight[:rows].dequantize())
    per_rank = -(-rows // ranks)
    chunks: list[QuantizedTensor | None] = list(weight.chunk(ranks))
    chunks += [None] * (ranks - len(chunks))  # 5 rows on 4 ranks: the last rank has none
    mesh = SimpleNamespace(size=lambda: ranks)
    gathered = []
    for chunk in chunks:
        shard: QuantizedTensor = weight if chunk is None else chunk
        held = 0 if chunk is None else len(chunk)
        for _ in range(2):  # in `fully_shard`, and at the first forward on the local shard
            padded = shard.new_zeros((per_rank, COLS))
            if held:
                padded.narrow(0, 0, held).copy_(shard)
            shard = padded.narrow(0, 0, held)
        assert shard.shape == (held, COLS)
        assert shard.global_rows == rows
        if chunk is not None:
            assert same_weight(shard, chunk)
            assert torch.equal(shard.dequantize(), chunk.dequantize())
        (sent,), metadata = shard.fsdp_pre_all_gather(mesh)
        assert (sent.shape, sent.dtype) == ((per_rank, weight.qdata.size(1)), torch.uint8)
        gathered.append(sent)
    output = (torch.cat(gathered),)
    whole, freed = shard.fsdp_post_all_gather(output, metadata, torch.float32)
    assert same_weight(whole, weight)
    assert freed == ()
    assert whole.qdata.data_ptr() == output[0].data_ptr(), "the weight must view the output"
    assert shard.fsdp_post_all_gather(output, metadata, torch.float32, out=whole) is None


def test_copy_sets_the_row_offset_once(weight: NF4Tensor) -> None:
    """Rows of `new_zeros`, and their slices from row 0 on, get the row offset of the first copy.
    After that they accept the same rows only."""
    padded = weight.new_zeros((10, COLS))
    alias = padded.narrow(0, 0, 8)
    alias.copy_(weight[300:308])
    assert (padded.row_offset, alias.row_offset) == (300, 300)
    with pytest.raises(NotImplementedError, match="holds other rows|another shape"):
        padded.narrow(0, 0, 8).copy_(weight[100:108])


# ---- the linear --------------------------------------------------------------------------------

INPUT_SHAPES = [(7, COLS), (2, 5, COLS), (0, COLS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", INPUT_SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_linear_equals_that_of_the_dequantized_weight(
    shape: tuple[int, ...], dtype: torch.dtype, with_bias: bool, weight: NF4Tensor
) -> None:
    plain = weight.dequantize(dtype)
    bias = torch.randn(ROWS, dtype=dtype) if with_bias else None
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    grad = torch.randn(*shape[:-1], ROWS, dtype=dtype)

    y = linear(x, weight, bias)
    y.backward(grad)

    product = F.linear(x.detach(), plain)
    assert y.dtype == dtype
    assert torch.equal(y, product if bias is None else product + bias)
    assert x.grad is not None
    assert torch.equal(x.grad, grad @ plain)
    with torch.no_grad():
        assert torch.equal(linear(x, plain, bias), F.linear(x, plain, bias))
        rows = PlainRows.empty(*plain.shape, dtype, "cpu")  # such as those of an offloaded base
        rows.quantize_(plain)
        assert torch.equal(linear(x, rows, bias), F.linear(x, plain, bias))


def test_linear_of_transposed_and_expanded_tensors(weight: NF4Tensor) -> None:
    x = torch.randn(COLS, 5, 2).permute(2, 1, 0).requires_grad_()
    y = linear(x, weight)
    y.sum().backward()  # the gradient of y is one expanded number
    torch.testing.assert_close(y, x.detach().contiguous() @ weight.dequantize().T)
    torch.testing.assert_close(x.grad, weight.dequantize().sum(0).expand(2, 5, COLS))


def test_linear_with_some_of_the_rows(weight: NF4Tensor) -> None:
    """Rows that do not start at row 0 need other scales than the first ones."""
    x = torch.randn(3, COLS, requires_grad=True)
    rows = slice(300, 500)
    y = linear(x, weight[rows])
    y.sum().backward()
    assert torch.equal(y, F.linear(x, weight.dequantize()[rows]))
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.dequantize()[rows].sum(0).expand(3, COLS))


class RecordedOps(TorchDispatchMode):
    """Records every call of a custom op of qfsdp."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "qfsdp":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", INPUT_SHAPES[:2], ids=str)
def test_custom_ops_keep_their_contract(shape: tuple[int, ...], weight: NF4Tensor) -> None:
    """Schema, fake kernel and dynamic shapes, with the arguments of `linear`."""
    x = torch.randn(shape, requires_grad=True)
    with RecordedOps() as record:
        linear(x, weight).sum().backward()
    forward, backward = record.calls
    assert [op.name() for op, _ in record.calls] == [
        "qfsdp::packed_linear",
        "qfsdp::packed_linear_backward",
    ]
    for op, (given, *rest) in (forward, backward):
        torch.library.opcheck(op, (given.detach(), *rest))


def test_a_second_derivative_is_refused(weight: NF4Tensor) -> None:
    """The ops of backward have no gradient: without an error it would silently be missing."""
    x = torch.randn(3, COLS, requires_grad=True)
    (grad,) = torch.autograd.grad(linear(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# ---- tensors that autograd keeps ---------------------------------------------------------------


def saved_bytes(run: Callable[[], Tensor]) -> int:
    """Bytes of all storages that autograd saves in `run`."""
    storages: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        parts = [saved.qdata, *saved.metadata] if isinstance(saved, QuantizedTensor) else [saved]
        for part in parts:
            storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        output = run()
    output.sum().backward()
    return sum(storages.values())


def quantized_bytes(weight: QuantizedTensor) -> int:
    return weight.qdata.nbytes + sum(t.nbytes for t in weight.metadata)


@pytest.fixture(params=["eager", pytest.param("compiled", marks=needs_compiler)])
def prepare(request: pytest.FixtureRequest) -> Callable[[nn.Module], Callable[..., Tensor]]:
    """Returns a module ready to be counted, eager or compiled."""
    if request.param == "eager":
        return lambda module: module
    torch._dynamo.reset()

    def build(module: nn.Module) -> Callable[..., Tensor]:
        call = torch.compile(module, fullgraph=True)
        call(torch.ones(2, 50, COLS, requires_grad=True)).sum().backward()
        return call

    return build


def test_a_quantized_linear_saves_only_the_quantized_bytes(
    prepare: Callable[[nn.Module], Callable[..., Tensor]], weight: NF4Tensor
) -> None:
    call = prepare(QuantizedLinear(weight, torch.zeros(ROWS)))
    x = torch.randn(2, 50, COLS, requires_grad=True)
    saved = saved_bytes(lambda: call(x))
    print(f"saved {saved:,} bytes; input {x.nbytes:,}, weight in fp32 {weight.numel() * 4:,}")
    assert saved == quantized_bytes(weight)


def test_a_plain_linear_saves_the_whole_weight(weight: NF4Tensor) -> None:
    """The test above can fail: dequantizing outside the op costs four bytes a weight."""
    x = torch.randn(2, 50, COLS, requires_grad=True)
    assert saved_bytes(lambda: F.linear(x, weight.dequantize())) == ROWS * COLS * 4


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_an_adapted_linear_saves_quantized_bytes_and_activations(
    method: str, prepare: Callable[[nn.Module], Callable[..., Tensor]], weight: NF4Tensor
) -> None:
    rank = 4
    module = LowRankLinear(QuantizedLinear(weight, None), AdapterConfig(method, rank, 8.0))
    for param in (module.lora_A, module.lora_B, module.magnitude, module.weight_norm):
        if param is not None:
            nn.init.normal_(param, 1.0, 0.1)
    call = prepare(module)
    x = torch.randn(2, 50, COLS, requires_grad=True)
    saved = saved_bytes(lambda: call(x))

    tokens, fp32 = 100, 4
    inputs_of_a_and_b = tokens * (COLS + rank) * fp32
    factors = rank * (COLS + ROWS) * fp32
    # DoRA: the product before scaling, the magnitudes and the norms.
    dora = (tokens * ROWS + 2 * ROWS) * fp32 if method == "dora" else 0
    expected = quantized_bytes(weight) + inputs_of_a_and_b + factors + dora
    print(f"{method}: saved {saved:,} bytes, quantized weight {quantized_bytes(weight):,}")
    assert expected <= saved <= expected + ROWS * fp32  # the ratio of both may be kept as well
    assert saved < expected + ROWS * COLS, "more than one byte per weight"
