"""Where the time of training steps goes, and how much of the device's arithmetic they use.

Model FLOPs are what forward and backward of this setup need: a frozen weight multiplies
activations and their gradients but has no gradient of its own, the output layer sees target
positions only, attention is causal and ends at the borders of documents. Hardware FLOPs add what
is computed a second time. Divided by time and by what matrix products reach on the device, they
are the utilisations that PaLM (arXiv:2204.02311, appendix B) introduced.
"""

from __future__ import annotations

import functools
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import record_function

from qfsdp.data.loader import Batch
from qfsdp.distributed.world import World
from qfsdp.modules.adapters import LowRankLinear, ScaledLinear
from qfsdp.modules.transformer import Decoder, DecoderLayer
from qfsdp.tensor_subclasses.kernels.cpu import product_dtype
from qfsdp.training.memory_usage import MemoryUsage

RATE_SECONDS = 0.3  # that products are repeated for in `matmul_rate`


# ---- time ----------------------------------------------------------------------------------


class StepClock:
    """The time that the phases of training steps take.

        with clock.phase("forward"):
            loss = model(tokens)

    A phase is also a range of that name in a profiler's trace. It may come as often as one likes
    and add up; time of a phase within another one counts in both. Not for compiled code.

    On an accelerator a phase takes as long as its stream does from where it begins to where it
    ends, so that nothing is waited for: work of the host that the device does not wait for, such as
    a batch that is collated while the last step still runs, takes no time.
    """

    def __init__(self, device: torch.device) -> None:
        self.now: str | None = None  # the innermost phase; after an exception, where it came from
        self._device = device
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.Event, torch.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of a `with` block to the phase `name`; of one that raises, nothing."""
        outer, self.now = self.now, name
        with record_function(name):
            if self._device.type == "cpu":
                since = time.perf_counter()
                yield
                self._spent[name] += time.perf_counter() - since
            else:
                begin, end = _event(self._device), _event(self._device)
                begin.record()
                yield
                end.record()
                self._events.append((name, begin, end))
        self.now = outer

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase that ended since the last call; waits for the device."""
        for name, begin, end in self._events:
            end.synchronize()
            self._spent[name] += begin.elapsed_time(end) / 1000
        spent = dict(self._spent)
        self._spent.clear()
        self._events.clear()
        return spent


def _event(device: torch.device) -> torch.Event:
    return torch.Event(device, enable_timing=True)


# ---- work ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of matrix products, a multiplication and an addition being two.

    Fields:
        model: what forward and backward need.
        hardware: the same, what is computed a second time included.
    """

    model: int
    hardware: int


def document_lengths(batch: Batch) -> list[int]:
    """Tokens of each piece of a batch that attends to itself alone: a row, or a document of a
    packed row. Padding is computed like anything else, so it is in there."""
    if batch.cu_seqlens is None:
        rows, seq = batch.tokens.shape
        return [seq] * rows
    return [n for n in batch.cu_seqlens.diff().tolist() if n]


def step_flops(model: Decoder, lengths: Iterable[int], targets: int) -> StepFlops:
    """The work of a forward and backward pass over any number of batches, on one rank.

    Not counted: what is no matrix product, dequantizing, and DoRA's norms, whose refresh takes
    2 * rank operations per weight and update, where every token takes 4.

    Args:
        model: sharded or not; what of it is trained and checkpointed decides.
        lengths: tokens of each document (`document_lengths`).
        targets: positions that have a target; only these reach the output layer.
    """
    lengths = list(lengths)
    tokens = sum(lengths)
    layers = [cast(DecoderLayer, layer) for layer in model.model.layers]
    pairs = {
        window: _attended(lengths, window)
        for window in {layer.self_attn.window for layer in layers}
    }
    work = _Work(model.model.embed_tokens.weight.requires_grad)
    for layer in layers:
        attention, mlp, forward = layer.self_attn, layer.mlp, work.forward
        work.linears(tokens, attention.q_proj, attention.k_proj, attention.v_proj)
        work.attention(attention.q_proj.weight.size(0), pairs[attention.window])
        work.linears(tokens, attention.o_proj)
        work.linears(tokens, mlp.gate_proj, mlp.up_proj)
        work.linears(tokens, mlp.down_proj)
        if layer.checkpointing == "full" and work.trained:
            work.again += work.forward - forward
    work.linears(targets, model.lm_head)
    return StepFlops(work.forward + work.backward, work.forward + work.backward + work.again)


class _Work:
    """Adds up matrix products in the order in which the modules run.

    Fields:
        forward, backward, again: FLOPs; `again` is what is computed for a second time.
        trained: whether anything so far is trained. If nothing is, backward does not come here.
    """

    def __init__(self, trained: bool) -> None:
        self.forward = self.backward = self.again = 0
        self.trained = trained

    def linears(self, tokens: int, *linears: nn.Module) -> None:
        """Linears that take the same input."""
        trained = self.trained
        for linear in linears:
            # Each weight, and whether backward wants the gradient of what it multiplies.
            weights = [(cast(Tensor, linear.weight), self.trained)]
            if isinstance(linear, ScaledLinear):
                weights = [(linear.weight, self.trained or linear.scales_input)]
                trained = True
            if isinstance(linear, LowRankLinear):
                weights += [(linear.lora_A, self.trained), (linear.lora_B, True)]
            for weight, wanted in weights:
                product = 2 * tokens * weight.numel()
                self.forward += product
                self.backward += product * (weight.requires_grad + wanted)
                trained = trained or weight.requires_grad
        self.trained = trained

    def attention(self, width: int, pairs: int) -> None:
        """Of `pairs` of tokens, where all heads together are `width` wide."""
        product = 2 * width * pairs
        self.forward += 2 * product  # scores, and the sum of values
        if self.trained:
            self.backward += 4 * product  # gradients of scores, of queries, keys and values
            self.again += product  # no kernel keeps the scores


def _attended(lengths: list[int], window: int | None) -> int:
    """Pairs of a token and one that it sees, itself included."""
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    if window is not None:
        hidden = (n - window for n in lengths if n > window)
        pairs -= sum(n * (n + 1) // 2 for n in hidden)
    return pairs


class Meter:
    """The speed and memory of training steps, from what is added after each; every rank makes one,
    once everything is loaded.

    Measures the rate of matrix products first, on all ranks at once, as they will train at once.

    Args:
        optimizer: whose state is told among the memory, if given.
    """

    def __init__(
        self, model: Decoder, world: World, clock: StepClock, optimizer: Optimizer | None = None
    ) -> None:
        self._model, self._world, self._clock = model, world, clock
        self._memory = MemoryUsage(model, optimizer, world)
        dtype = model.compute_dtype or model.model.norm.weight.dtype
        self._rate = matmul_rate(world.device, dtype)
        self._memory.reset()  # of what measuring took
        self._start()

    def _start(self) -> None:
        self._steps = self._tokens = self._slots = self._targets = 0
        self._lengths: list[int] = []
        self._since = time.perf_counter()

    def add(self, batches: Sequence[Batch]) -> None:
        """One more step, of these micro-batches of this rank (as the loader gave them)."""
        self._steps += 1
        for batch in batches:
            self._tokens += batch.num_tokens
            self._slots += batch.num_slots
            self._targets += batch.num_targets
            self._lengths += document_lengths(batch)

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Around what is no part of training steps: a phase whose time lowers no rate."""
        since = time.perf_counter()
        with self._clock.phase(phase):
            yield
        self._since += time.perf_counter() - since

    def read(self) -> dict[str, float]:
        """What the steps since the last call were like; every rank must call it.

        tokens_per_second_per_rank   padding not counted
        slot_efficiency              tokens over slots: what is not padding
        peak_memory_gib, memory/NAME see `MemoryUsage.read`
        model_flops_utilization, hardware_flops_utilization
                                     of this rank, over its own rate of matrix products
        seconds/NAME                 of a phase of this rank, per step
        """
        world, elapsed = self._world, time.perf_counter() - self._since
        tokens, slots = world.sum(self._tokens), world.sum(self._slots)
        metrics = {
            "tokens_per_second_per_rank": tokens / elapsed / world.size,
            "slot_efficiency": tokens / slots,
        }
        metrics |= self._memory.read()
        flops = step_flops(self._model, self._lengths, self._targets)
        metrics |= utilization(flops, elapsed, self._rate)
        for name, spent in self._clock.seconds().items():
            metrics[f"seconds/{name}"] = spent / self._steps
        self._start()
        return metrics


# ---- the ceiling ---------------------------------------------------------------------------


@torch.no_grad()
@functools.cache
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of large square products on `device`, as a model of `dtype` multiplies there
    (`product_dtype`): the best of as many as 0.3 s hold, measured once per process.

    The product is `a @ b.T`, a linear's own. Numbers are random, as on zeros a GPU draws less power
    and keeps higher clocks.
    """
    dtype = product_dtype(torch.empty(0, dtype=dtype, device=device))
    size = 1024 if device.type == "cpu" else 8192
    # A generator of its own: dropout of a resumed run goes on where the broken one was.
    own = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, dtype=dtype, generator=own) for _ in range(2))
    out, clock = torch.empty_like(a), StepClock(device)
    torch.mm(a, b.T, out=out)  # libraries load their kernels
    best, end = math.inf, time.perf_counter() + RATE_SECONDS
    while best == math.inf or time.perf_counter() < end:
        with clock.phase("matmul"):
            torch.mm(a, b.T, out=out)
        best = min(best, clock.seconds()["matmul"])
    return 2 * size**3 / best


def utilization(flops: StepFlops, seconds: float, rate: float) -> dict[str, float]:
    """What share of `rate` FLOP/s (`matmul_rate`) the `flops` of one rank in `seconds` are."""
    return {
        "model_flops_utilization": flops.model / seconds / rate,
        "hardware_flops_utilization": flops.hardware / seconds / rate,
    }
