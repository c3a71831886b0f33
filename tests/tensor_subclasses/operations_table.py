"""What operations of torch do with a quantized weight: the same as with its numbers, or one error.

python tests/tensor_subclasses/operations_table.py    prints a line for each operation

Each operation runs on a weight and on some rows of it, in every format. It works if it returns what
it returns for the dequantized weight: shape, dtype and every number. Names are those that torchao's
tests of NF4 use, and more.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # ForkingPickler then sends tensors in shared memory
import torch.nn.functional as F
from torch import Tensor, nn

from qfsdp.modules.quantized_linear import QuantizedLinear, linear
from qfsdp.tensor_subclasses.quantized_tensor import FORMATS, QuantizedTensor

ROWS, COLS = 150, 130  # 64 does not divide the columns; NF4 has two second-level scales
PARTS = {"whole": slice(None), "rows": slice(100, 140)}  # rows 100 to 140 have the second scale
Operation = Callable[[Any], Any]


def filled(format: str, rows: int, seed: int = 0) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(seed)
    weight = FORMATS[format].empty(rows, COLS, torch.float32, "cpu")
    weight.quantize_(torch.randn(rows, COLS, generator=generator) * 0.05)
    return weight


@functools.cache
def example(format: str, seed: int = 0) -> QuantizedTensor:
    return filled(format, ROWS, seed)


def saved(value: Any, **how: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer, **how)
    buffer.seek(0)
    return torch.load(buffer)


def through_shared_memory(weight: Any) -> Any:
    """As `torch.multiprocessing` sends a tensor to another process."""
    return pickle.loads(ForkingPickler.dumps(weight))


def times(x: Any, weight: Any) -> Tensor:
    """`x @ weight.T`, with qfsdp's linear for a quantized weight."""
    return linear(x, weight) if isinstance(weight, QuantizedTensor) else F.linear(x, weight)


def module(weight: Any) -> nn.Module:
    return QuantizedLinear(weight, None)


def loaded(weight: Any, state: Any) -> Any:
    held = module(weight)
    held.load_state_dict({"weight": state})
    return held.weight


def assigned(weight: Any, attribute: str, value: Any) -> Any:
    setattr(weight, attribute, value)
    return weight


def shape_and_dtype(value: Any) -> Any:
    return value.shape, value.dtype


X = torch.linspace(-1, 1, 2 * COLS).view(2, COLS)
HALF, INT8, MASK = torch.bfloat16, torch.int8, torch.arange(ROWS * COLS).view(ROWS, COLS) % 2 == 0

WORKS: dict[str, Operation] = {
    "to(bfloat16)": lambda w: w.to(HALF),
    "to(float16)": lambda w: w.to(torch.float16),
    "float(), half(), bfloat16(), double()": lambda w: [w.float(), w.half(), w.bfloat16()],
    "double()": lambda w: w.double(),
    'to("cpu"), cpu()': lambda w: [w.to("cpu"), w.cpu()],
    'to("meta")': lambda w: shape_and_dtype(w.to("meta")),
    "clone()": lambda w: w.clone(),
    "detach(), .data": lambda w: [w.detach(), w.data],
    "contiguous()": lambda w: w.contiguous(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "deepcopy of a module": lambda w: copy.deepcopy(module(w)).weight,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "sent to another process": through_shared_memory,
    "share_memory_()": lambda w: w.share_memory_(),
    "torch.save, torch.load": lambda w: saved(w),
    "torch.save in the form before 1.6": lambda w: saved(w, _use_new_zipfile_serialization=False),
    "torch.save of a Parameter": lambda w: saved(nn.Parameter(w, requires_grad=False)),
    "torch.save of a state dict": lambda w: saved(module(w).state_dict())["weight"],
    "Parameter(requires_grad=False)": lambda w: nn.Parameter(w, requires_grad=False),
    "requires_grad_(False)": lambda w: w.requires_grad_(False).requires_grad,
    "state_dict, load_state_dict": lambda w: loaded(w.clone(), module(w).state_dict()["weight"]),
    "Module.to(bfloat16)": lambda w: module(w).to(HALF).weight,
    "Module.share_memory()": lambda w: module(w).share_memory().weight,
    "copy_ of the same rows": lambda w: w.clone().copy_(w),
    "w[3:9] = the same rows": lambda w: (w.__setitem__(slice(3, 9), w.clone()[3:9]), w)[1],
    "w[3:9], w[-5:], w[9:2], w[:]": lambda w: [w[3:9], w[-5:], w[9:2], w[:]],
    "w[7:8], a single row": lambda w: w[7:8],
    "w[5:30][2:4]": lambda w: w[5:30][2:4],
    "narrow": lambda w: w.narrow(0, 3, 5),
    "rows in inference mode": torch.inference_mode()(lambda w: w[3:9].clone()),
    "split, chunk of rows": lambda w: [*w.split(7), *w.chunk(3), *w.split(7, dim=-2)],
    "tensor_split": lambda w: w.tensor_split(3),
    "view(-1), flatten(), ravel()": lambda w: [w.view(-1), w.flatten(), w.ravel()],
    "view(-1).clone(), .detach()": lambda w: [w.view(-1).clone(), w.view(-1).detach()],
    "view(-1).to(bfloat16)": lambda w: w.view(-1).to(HALF),
    "deepcopy, torch.save of view(-1)": lambda w: [copy.deepcopy(w.view(-1)), saved(w.view(-1))],
    "view(-1).view(rows, cols)": lambda w: w.view(-1).view(w.shape),
    "empty_like(view(-1))": lambda w: shape_and_dtype(torch.empty_like(w.view(-1))),
    "view, reshape of the same shape": lambda w: [w.view(-1, COLS), w.reshape(w.shape)],
    "as_strided with its strides": lambda w: w.as_strided(w.shape, w.stride()),
    "empty_like": lambda w: shape_and_dtype(torch.empty_like(w)),
    "empty_like(dtype=bfloat16)": lambda w: shape_and_dtype(torch.empty_like(w, dtype=HALF)),
    "new_empty(0)": lambda w: w.new_empty(0),
    "is_pinned, is_shared": lambda w: [w.is_pinned(), w.is_shared()],
    "shape, dim, numel, len, stride": lambda w: [w.shape, w.dim(), w.numel(), len(w), w.stride()],
    "element_size, nbytes, itemsize": lambda w: [w.element_size(), w.nbytes, w.itemsize],
    "is_floating_point, is_complex": lambda w: [w.is_floating_point(), w.is_complex()],
    "device, dtype, layout, grad": lambda w: [w.device, w.dtype, w.layout, w.grad],
    "w == None, hash": lambda w: [w == None, hash(w) == hash(w)],  # noqa: E711
    "repr, str, format": lambda w: [type(repr(w)), type(str(w)), type(f"{w}")],
    "qfsdp's linear": lambda w: times(X, w),
    "linear in activation checkpoint": lambda w: torch.utils.checkpoint.checkpoint(
        lambda x: times(x, w), X, use_reentrant=False
    ),
    "SGD with it among the parameters": lambda w: torch.optim.SGD([w], lr=0.1).step(),
}

# Operation -> what the error says, besides the class.
REFUSED: dict[str, tuple[Operation, str]] = {
    "int()": (lambda w: w.int(), "aten._to_copy to torch.int32"),
    "bool()": (lambda w: w.bool(), "aten._to_copy to torch.bool"),
    "to(complex64)": (lambda w: w.to(torch.complex64), "aten._to_copy to torch.complex64"),
    "view(int32)": (lambda w: w.view(torch.int32), "aten.view.dtype"),
    "empty_like(dtype=int8)": (lambda w: torch.empty_like(w, dtype=INT8), "aten.empty_like to"),
    "new_zeros(3, 7)": (lambda w: w.new_zeros(3, 7), r"aten.new_zeros .* of \[3, 7\]"),
    "new_empty(3, 7)": (lambda w: w.new_empty(3, 7), r"aten.new_empty of \[3, 7\]"),
    "new_zeros(())": (lambda w: w.new_zeros(()), r"of \[\]"),
    "new_zeros(dtype=int8)": (lambda w: w.new_zeros(3, COLS, dtype=INT8), "aten.new_zeros to"),
    "numbers of new_zeros": (lambda w: w.new_zeros(3, COLS).dequantize(), "holds no weights yet"),
    "linear by new_zeros": (lambda w: times(X, w.new_zeros(3, COLS)), "holds no weights yet"),
    "torch.save of new_zeros": (lambda w: saved(w.new_zeros(3, COLS)), "holds no weights yet"),
    "zeros_like, ones_like": (lambda w: torch.zeros_like(w), "aten.zeros_like"),
    "full_like": (lambda w: torch.full_like(w, 1.0), "aten.full_like"),
    "rand_like": (lambda w: torch.rand_like(w), "aten.rand_like"),
    "new_ones": (lambda w: w.new_ones(2), "aten.new_ones"),
    "new_full": (lambda w: w.new_full((2,), 3.0), "aten.new_full"),
    "copy_ of numbers": (lambda w: w.copy_(torch.zeros(w.shape)), "aten.copy_ from Tensor.*format"),
    "copy_ of other rows": (lambda w: w[3:5].copy_(w[5:7]), "holds other rows"),
    "copy_ of fewer rows": (lambda w: w.copy_(w[0:1]), "another shape"),
    "copy_ of another dtype": (lambda w: w.clone().copy_(w.to(HALF)), "another shape or dtype"),
    "copy_ into numbers": (lambda w: torch.zeros(w.shape).copy_(w), "aten.copy_"),
    "copy_ of new_zeros": (lambda w: w[0:3].copy_(w.new_zeros(3, COLS)), "holds no weights yet"),
    "w[3] = 0": (lambda w: w.__setitem__(3, 0.0), "aten.fill_|aten.select"),
    "w[0:3] = numbers": (lambda w: w.__setitem__(slice(0, 3), X[:1]), "aten.copy_"),
    "w[0:3] = other rows": (lambda w: w.__setitem__(slice(0, 3), w[3:6]), "holds other rows"),
    ".data = other": (lambda w: assigned(w, "data", w.clone()), "assignment to .data"),
    "set_": (lambda w: w.set_(w.clone()), "aten.set_"),
    "resize_": (lambda w: w.resize_(3), "aten.resize_"),
    "w[3], select": (lambda w: w[3], "aten.select"),
    "w[3, 4]": (lambda w: w[3, 4], "aten.select"),
    "w[::2]": (lambda w: w[::2], "aten.slice on dim 0, step 2"),
    "w[:, :64]": (lambda w: w[:, :64], "aten.slice on dim 1"),
    "w[[1, 2]]": (lambda w: w[[1, 2]], "aten.index"),
    "w[mask]": (lambda w: w[MASK[: len(w)]], "aten.index"),
    "w[None], unsqueeze": (lambda w: w[None], "aten.unsqueeze"),
    "index_select": (lambda w: w.index_select(0, torch.tensor([1])), "aten.index_select"),
    "gather": (lambda w: w.gather(0, torch.zeros(1, 2).long()), "aten.gather"),
    "masked_fill": (lambda w: w.masked_fill(MASK[: len(w)], 0.0), "aten.masked_fill"),
    "where": (lambda w: torch.where(MASK[: len(w)], w, 0.0), "aten.where"),
    "iteration, unbind": (list, "aten.unbind"),
    "split on dim 1": (lambda w: w.split(7, dim=1), "aten.split on dim 1"),
    "split into sizes": (lambda w: w.split([7, len(w) - 7]), "aten.split_with_sizes"),
    "view(cols, rows)": (lambda w: w.view(COLS, -1), "a view of"),
    "reshape of some numbers": (lambda w: w.reshape(2, -1), "a view of"),
    "view(-1)[5:9]": (lambda w: w.view(-1)[5:9], "aten.slice"),
    "view(-1).split": (lambda w: w.view(-1).split(5), "aten.split"),
    "linear by view(-1)": (lambda w: times(torch.ones(w.numel()), w.view(-1)), "of 1 dimensions"),
    "as_strided to columns": (lambda w: w.as_strided((COLS, 3), (1, COLS)), "aten.as_strided"),
    "as_strided from a later number": (lambda w: w.as_strided((3, COLS), (COLS, 1), 5), "as_strid"),
    "expand": (lambda w: w.expand(2, -1, -1), "aten.expand"),
    "squeeze": (lambda w: w.squeeze(), "aten.squeeze"),
    "t()": (lambda w: w.t(), "aten.t.default"),
    "transpose": (lambda w: w.transpose(0, 1), "aten.transpose"),
    "permute, .T": (lambda w: w.T, "aten.permute|aten.t.default"),
    "x @ w.T": (lambda w: X @ w.T, "aten.permute|aten.t.default"),
    "w @ x": (lambda w: w @ X.T, "aten.mm"),
    "addmm": (lambda w: torch.addmm(torch.zeros(2), w, X.T), "aten.addmm"),
    "F.linear": (lambda w: F.linear(X, w), "aten.t.default|aten.linear"),
    "F.linear with bias": (lambda w: F.linear(X, w, torch.zeros(len(w))), "aten.t|aten.linear"),
    "einsum": (lambda w: torch.einsum("oi,bi->bo", w, X), "aten"),
    "F.embedding": (lambda w: F.embedding(torch.tensor([3]), w), "aten.embedding"),
    "F.pad": (lambda w: F.pad(w, (0, 0, 0, 1)), "aten.constant_pad_nd"),
    "F.dropout": (lambda w: F.dropout(w), "aten.native_dropout|aten.bernoulli|aten.empty_like"),
    "cat": (lambda w: torch.cat([w, w]), "aten.cat"),
    "cat after numbers": (lambda w: torch.cat([X, w]), "aten.cat"),
    "stack": (lambda w: torch.stack([w, w]), "aten.stack"),
    "equal": (lambda w: torch.equal(w, w.clone()), "aten.equal"),
    "allclose": (lambda w: torch.allclose(w, w), "aten.allclose|aten.isclose"),
    "==, !=, <, >": (lambda w: w == w, "aten.eq"),
    "w + 1, w - 1": (lambda w: w + 1, "aten.add.Tensor"),
    "numbers + w": (lambda w: torch.ones(w.shape) + w, "aten.add.Tensor"),
    "w * 2": (lambda w: 2 * w, "aten.mul.Tensor"),
    "w / 2": (lambda w: w / 2, "aten.div"),
    "-w, abs": (lambda w: -w, "aten.neg"),
    "add_": (lambda w: w.add_(1), "aten.add_"),
    "mul_": (lambda w: w.mul_(2), "aten.mul_"),
    "zero_": (lambda w: w.zero_(), "aten.zero_"),
    "fill_": (lambda w: w.fill_(1.0), "aten.fill_"),
    "normal_": (lambda w: nn.init.normal_(w), "aten.normal_"),
    "clamp_": (lambda w: w.clamp_(0, 1), "aten.clamp_"),
    "_foreach_mul_": (lambda w: torch._foreach_mul_([w], 2.0), "aten._foreach_mul_"),
    "_foreach_copy_": (lambda w: torch._foreach_copy_([X], [w]), "aten._foreach_copy_"),
    "sum": (lambda w: w.sum(), "aten.sum"),
    "mean": (lambda w: w.mean(), "aten.mean"),
    "norm": (lambda w: w.norm(), "aten.linalg_vector_norm|aten.norm"),
    "max": (lambda w: w.max(), "aten.max"),
    "isnan": (lambda w: w.isnan(), "aten.isnan"),
    "isfinite": (lambda w: w.isfinite(), "aten.(abs|eq|isfinite)"),
    "softmax": (lambda w: w.softmax(-1), "aten._softmax"),
    "numpy()": (lambda w: w.numpy(), "numpy"),
    "tolist()": (lambda w: w.tolist(), "tolist"),
    "apply_": (lambda w: w.apply_(lambda x: x), "apply_"),
    "from_dlpack": (torch.from_dlpack, "__dlpack__"),
    "to_sparse": (lambda w: w.to_sparse(), "aten"),
    "requires_grad_()": (lambda w: w.requires_grad_(), "gradients"),
    "Parameter(w)": (nn.Parameter, "gradients"),
    "requires_grad = True, linear": (
        lambda w: times(X, assigned(w, "requires_grad", True)),
        "requires_grad=True",
    ),
    "vmap": (lambda w: torch.vmap(lambda row: row * 2)(w), "aten|vmap"),
    "compiled w * 2": (lambda w: torch.compile(lambda w: w * 2, backend="eager")(w), "aten.mul"),
}

# torch wraps the error in its own RuntimeError.
REFUSED_BY_TORCH: dict[str, tuple[Operation, str]] = {
    "load_state_dict of numbers": (lambda w: loaded(w, torch.zeros(w.shape)), "aten.copy_ from"),
    "load_state_dict into nn.Linear": (
        lambda w: nn.Linear(COLS, len(w), bias=False).load_state_dict({"weight": w}),
        "does not implement aten.copy_",
    ),
    "func.grad of linear": (
        lambda w: torch.func.grad(lambda x: times(x, w).sum())(X),
        "autograd.Function with functorch transforms",
    ),
}


def numbers(value: Any) -> Any:
    """A result without quantized tensors; raises where shape or dtype contradict the numbers."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [numbers(entry) for entry in value]
    if isinstance(value, QuantizedTensor):
        plain = value.dequantize()
        assert (plain.shape, plain.dtype) == (value.shape, value.dtype), "shape or dtype"
        return plain
    return value.detach() if isinstance(value, Tensor) else value


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def outcome(operation: Operation, format: str, part: str) -> str:
    """ "works", "refused: TEXT", or what is wrong."""
    # Names of functions such as `copy.deepcopy` come without a copy of their own.
    weight = example(format).clone()[PARTS[part]]
    before = weight.dequantize().clone()
    try:
        result = numbers(operation(weight))
    except (NotImplementedError, ValueError, TypeError, RuntimeError) as error:
        untouched = torch.equal(weight.dequantize(), before)
        kind = "refused" if untouched else "WRONG, it changed the weight and then raised"
        return f"{kind}: {type(error).__name__}: {error}"
    expected = numbers(operation(before))
    return "works" if same(result, expected) else f"WRONG: {result} instead of {expected}"


def table() -> list[str]:
    """One line for each operation: what it does in every format."""
    lines = []
    for name, operation in OPERATIONS.items():
        found = {" ".join(outcome(operation, f, p).split()) for f in FORMATS for p in PARTS}
        kinds = {entry.partition(":")[0] for entry in found}
        kind = kinds.pop() if len(kinds) == 1 else "WRONG: not the same in all formats"
        text = "" if kind == "works" else min(found).partition(": ")[2]
        lines.append(f"{kind:8} {name:38} {text}"[:150].rstrip())
    return lines


OPERATIONS: dict[str, Operation] = WORKS | {
    name: operation for name, (operation, _) in (REFUSED | REFUSED_BY_TORCH).items()
}

if __name__ == "__main__":
    rows = table()
    print("\n".join(rows))
    for kind in ("works", "refused", "WRONG"):
        print(f"{kind}: {sum(row.startswith(kind) for row in rows)}")
