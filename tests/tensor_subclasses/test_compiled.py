"""Kernels skip Dynamo only for arguments of a known kind, and give the same results without it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from qfsdp.tensor_subclasses.kernels import dispatch
from qfsdp.tensor_subclasses.kernels.dispatch import Kernel
from tests.tiny import needs_compiler

pytestmark = needs_compiler


def scaled(x: Tensor, row_scale: Tensor | None, offset: int) -> tuple[Tensor, Tensor]:
    y = x * 2 + offset + x.size(0)
    return (y if row_scale is None else y * row_scale.unsqueeze(1)), y.sum(1)


def write(x: Tensor, y: Tensor, out: Tensor) -> None:
    out.copy_(x - 2 * y)


class Counted(Kernel):
    """Counts the calls that go through Dynamo."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(fn, True, None)
        self.by_dynamo, compiled = 0, self._by_dynamo

        def counted(*args: Any) -> Any:
            self.by_dynamo += 1
            return compiled(*args)

        self._by_dynamo = counted


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def check(kernel: Counted, args: tuple[Any, ...], new: bool) -> None:
    """Makes two calls with such arguments; `new`: the first one is of a new kind."""
    before = kernel.by_dynamo
    for _ in range(2):
        args = tuple(arg + 1 if isinstance(arg, Tensor) else arg for arg in args)
        torch.testing.assert_close(kernel(*args), scaled(*args), rtol=1e-6, atol=1e-6)
    assert kernel.by_dynamo == before + new


def test_one_build_serves_square_and_other_shapes() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    kernel = Counted(scaled)
    with torch.no_grad():
        for shape in ((8, 8), (6, 8), (40, 40), (8, 6)):
            check(kernel, (numbers(*shape), numbers(shape[0]), 3), new=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_second_call_of_a_kind_skips_dynamo() -> None:
    torch._dynamo.reset()
    kernel = Counted(scaled)
    with torch.no_grad():
        check(kernel, (numbers(6, 8), None, 3), new=True)
        check(kernel, (numbers(6, 8), None, 3), new=False)
        check(kernel, (numbers(6, 8), None, 4), new=True)  # another number
        check(kernel, (numbers(6, 8), numbers(6), 3), new=True)  # a tensor for None
        check(kernel, (numbers(9, 8), numbers(9), 3), new=True)  # another shape
        check(kernel, (numbers(6, 8, dtype=torch.float64), None, 3), new=True)
        check(kernel, (numbers(6, 8), None, 3), new=False)


def test_other_strides_are_another_kind() -> None:
    torch._dynamo.reset()
    kernel = Counted(scaled)
    with torch.no_grad():
        for x in (numbers(6, 6), numbers(6, 6).t(), numbers(6, 9)[:, 2:8]):
            for _ in range(2):
                y, sums = kernel(x, None, 0)
                torch.testing.assert_close((y, sums), scaled(x, None, 0))
    assert kernel.by_dynamo == 3


def test_another_number_of_threads_is_another_kind() -> None:
    """Inductor writes the number of threads into its code."""
    torch._dynamo.reset()
    kernel, threads = Counted(scaled), torch.get_num_threads()
    try:
        with torch.no_grad():
            check(kernel, (numbers(6, 8), None, 3), new=True)
            torch.set_num_threads(threads + 1)
            check(kernel, (numbers(6, 8), None, 3), new=True)
    finally:
        torch.set_num_threads(threads)


def test_one_tensor_given_twice() -> None:
    """An input could be either argument, so such a call must not be repeated for other arguments.
    A recorded call with different tensors may be repeated for it."""
    torch._dynamo.reset()
    kernel, x, y = Counted(write), numbers(4, 8), numbers(4, 8)
    with torch.no_grad():
        for first, second in ((x, x), (x, y), (y, x), (x, x)):
            out = torch.empty(4, 8)
            assert kernel(first, second, out) is None
            torch.testing.assert_close(out, first - 2 * second)
    assert kernel.by_dynamo == 2  # the last two repeat the second


def test_calls_from_several_threads_do_not_mix() -> None:
    torch._dynamo.reset()
    kernel = Counted(scaled)
    wrong: list[int] = []

    def work(width: int) -> None:
        for _ in range(20):
            x = numbers(5, width)
            with torch.no_grad():
                if not torch.allclose(kernel(x, None, 1)[0], scaled(x, None, 1)[0]):
                    wrong.append(width)

    with torch.no_grad():
        kernel(numbers(5, 4), None, 1)  # compiles before the threads start
    threads = [Thread(target=work, args=(width,)) for width in (3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_kinds_beyond_the_maximum_go_through_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    kernel = Counted(scaled)
    monkeypatch.setattr(dispatch, "MAX_DIRECT_CALLS", 1)
    with torch.no_grad():
        check(kernel, (numbers(6, 8), None, 3), new=True)
        x = numbers(7, 8)
        for _ in range(2):
            torch.testing.assert_close(kernel(x, None, 3), scaled(x, None, 3))
    assert kernel.by_dynamo == 3
