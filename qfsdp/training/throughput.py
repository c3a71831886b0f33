"""Measures training steps: time per phase, tokens per second, FLOPs, utilization of the device.

Model FLOPs are those that forward and backward of this setup need. A frozen weight multiplies
activations and their gradients, but has no gradient itself; the output layer sees only target
positions; attention is causal and stays within documents. Hardware FLOPs add recomputation.
Divided by the time and by the rate of matrix products on the device they are the utilizations of
PaLM (arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from qfsdp.common import progress
from qfsdp.common.long_waits import long_wait
from qfsdp.data.batch import Batch
from qfsdp.data.cut_rows import CutRows
from qfsdp.distributed.world import World
from qfsdp.modules.adapters.linears import ScaledLinear
from qfsdp.modules.adapters.miss import BlockSharedLinear
from qfsdp.modules.adapters.oft import RotatedLinear
from qfsdp.modules.adapters.several import SeveralLinear
from qfsdp.modules.adapters.whole import computed_in
from qfsdp.modules.delta_net import DeltaNet
from qfsdp.modules.experts.routing import routing_metrics
from qfsdp.modules.hub_models.decoder import HubDecoder
from qfsdp.modules.low_rank.linear import LowRankLinear, low_rank_linears
from qfsdp.modules.mlp import MLP
from qfsdp.modules.quantized_linear import QuantizedLinear
from qfsdp.modules.transformer import Decoder, DecoderLayer
from qfsdp.training.memory_usage import MemoryUsage
from qfsdp.training.profiler import Profiler as Profiler
from qfsdp.training.profiler import ProfilerConfig as ProfilerConfig
from qfsdp.training.steps import StepClock as StepClock

# `matmul_rate` repeats the product for so long. An idle GPU takes a part of it to raise its clocks.
RATE_SECONDS, GPU_RATE_SECONDS = 0.3, 1.0
COPY_ROUNDS = 5  # of `best_rate`


# ---- work ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of matrix products; a multiplication and an addition are two.

    Fields:
        model: needed by forward and backward.
        hardware: the same plus recomputation.
        forward: of the forward pass alone.
    """

    model: int
    hardware: int
    forward: int


def document_lengths(batch: Batch) -> list[int]:
    """Tokens of each row, or of each document of packed rows: the parts that attend to themselves.

    Padding is included, as it is computed like other tokens. A prompt that two documents share
    counts in both, as attention computes it. Of a document that is cut: its tokens up to the end of
    this part and, as a negative number, those of earlier parts.
    """
    rows, seq = batch.tokens.shape
    if batch.cu_seqlens is None:
        return [seq] * rows
    if not isinstance(cut := batch.cu_seqlens, CutRows):
        return [n for n in cut.diff().tolist() if n]
    found: list[int] = []
    if (prompts := cut.prompts) is not None:
        keys, queries = prompts.cu_keys.diff(), prompts.cu_queries.diff()
        return [n for n in [*keys.tolist(), *(queries - keys).tolist()] if n]
    for begin, end in pairwise(cut.cu_seqlens.tolist()):
        first = begin // (seq * cut.parts) * seq * cut.parts + cut.part * seq
        if max(begin, first) < min(end, first + seq):
            found += [min(end, first + seq) - begin, min(begin - first, 0)]
    return [n for n in found if n]


def step_flops(
    model: Decoder | HubDecoder, lengths: Iterable[int], targets: int, tokens: int | None = None
) -> StepFlops:
    """The FLOPs of one rank's forward and backward passes over any number of batches.

    Not counted: everything but matrix products, dequantization, and DoRA's norms. A refresh of the
    norms takes 2 * rank operations per weight and update; every token takes 4.

    Args:
        model: sharded or not; its trained parameters and checkpointing decide.
        lengths: tokens of each document (`document_lengths`).
        targets: number of positions with a target; only these reach the output layer.
        tokens: of the rows, if documents share some; None: those of all documents.
    """
    lengths = list(lengths)
    tokens = sum(lengths) if tokens is None else tokens
    if isinstance(model, HubDecoder):
        return _flops_of_linears(model, tokens, targets)
    layers = [cast(DecoderLayer, layer) for layer in model.parts.layers]
    pairs = {w: _attended(lengths, w) for w in {layer.mixer.window for layer in layers}}
    rows = model.embedding_rows is not None and model.embedding_rows.weight.requires_grad
    work = _Work(model.parts.embedding.weight.requires_grad or rows)
    for layer in layers:
        mixer, mlp, forward = layer.mixer, layer.feed_forward, work.forward
        work.linears(tokens, *(mixer.get_submodule(name) for name in mixer.inner))
        if isinstance(mixer, DeltaNet):
            work.recurrence(mixer.products, tokens)
        else:
            work.attention(mixer.widths[0], pairs[mixer.window])
        work.linears(tokens, mixer.outer)
        for share, linears in mlp.stages():
            work.linears(tokens, *linears, share=share)
        if layer.checkpointing == "full" and work.trained:
            work.again += work.forward - forward - _spared(layer, tokens)
    work.linears(targets, model.parts.output)
    both = work.forward + work.backward
    return StepFlops(both, both + work.again, work.forward)


def _spared(layer: DecoderLayer, tokens: int) -> int:
    """FLOPs of a layer's last product, where backward computes the layer again but not that."""
    mlp = layer.feed_forward
    if layer.tile_tokens is not None or layer.norms.after_mlp or not isinstance(mlp, MLP):
        return 0
    last = mlp.get_submodule(mlp.outer)
    if isinstance(last, LowRankLinear):
        of_b = 2 * tokens * last.lora_B.numel()
        return 0 if last.magnitude is not None else 2 * tokens * last.weight.numel() + of_b
    ends = (nn.Linear, QuantizedLinear, ScaledLinear, RotatedLinear)
    return 2 * tokens * cast(Tensor, last.weight).numel() if isinstance(last, ends) else 0


def _flops_of_linears(model: HubDecoder, tokens: int, targets: int) -> StepFlops:
    """Of a model of transformers: its quantized, adapted linears and the output layer alone."""
    work = _Work(model.parts.embedding.weight.requires_grad)
    for name in model.linears:  # one by one: which have the same input is not known
        work.linears(tokens, model.get_submodule(name))
    again = work.forward if model.recomputes else 0
    work.linears(targets, model.parts.output)
    both = work.forward + work.backward
    return StepFlops(both, both + again, work.forward)


class _Work:
    """Adds up matrix products in the order in which the modules run.

    Fields:
        forward, backward, again: FLOPs; `again` counts recomputation.
        trained: whether any parameter so far is trained; if not, backward does not get here.
    """

    def __init__(self, trained: bool) -> None:
        self.forward = self.backward = self.again = 0
        self.trained = trained

    def linears(self, tokens: int, *linears: nn.Module, share: Fraction = Fraction(1)) -> None:
        """Adds linears that have the same input, and multiply it by a share of their rows."""
        trained = self.trained
        for linear in linears:
            # Each weight, and whether backward needs the gradient of the weight's input.
            weights = [(cast(Tensor, linear.weight), self.trained)]
            if isinstance(linear, ScaledLinear):
                weights = [(linear.weight, self.trained or linear.scales_input)]
                trained = True
            if isinstance(linear, LowRankLinear):
                weights += zip(linear.factors, (self.trained, True), strict=True)
            met: dict[Tensor, int] = {}  # by one of so many tokens
            if isinstance(linear, SeveralLinear):
                for _, part in low_rank_linears(linear):
                    weights += zip(part.factors, (self.trained, True), strict=True)
                    met |= dict.fromkeys(part.factors, len(linear.rows.names))
            if isinstance(linear, BlockSharedLinear):
                weights.append((linear.miss_block, True))
            if isinstance(linear, RotatedLinear):  # a rotation has each number twice
                weights = [(linear.weight, True), *2 * [(linear.oft_R, self.trained)]]
            for weight, wanted in weights:
                product = int(2 * tokens * weight.numel() * share / met.get(weight, 1))
                self.forward += product
                self.backward += product * (weight.requires_grad + wanted)
                trained = trained or weight.requires_grad
        self.trained = trained

    def attention(self, width: int, pairs: int) -> None:
        """Adds attention over `pairs` of tokens; `width` is the sum of all heads' dimensions."""
        product = 2 * width * pairs
        self.forward += 2 * product  # scores, and weighted sums of values
        if self.trained:
            self.backward += 4 * product  # gradients of scores, queries, keys and values
            self.again += product  # kernels do not keep the scores

    def recurrence(self, products: int, tokens: int) -> None:
        """Adds the products of a state, so many of each token, that no weight takes part in."""
        self.forward += 2 * products * tokens
        if self.trained:
            self.backward += 4 * products * tokens


def _attended(lengths: list[int], window: int | None) -> int:
    """Number of pairs of a token and a token that it attends to, itself included."""

    def of_document(tokens: int) -> int:
        hidden = 0 if window is None else max(0, tokens - window)
        return (tokens * (tokens + 1) - hidden * (hidden + 1)) // 2

    return sum(of_document(n) if n > 0 else -of_document(-n) for n in lengths)


class Meter:
    """Measures speed and memory of training steps; every rank makes one once the model is loaded.

    First measures the rate of matrix products, on all ranks at the same time, as they also train at
    the same time.

    Args:
        optimizer: its state is part of the memory by kind; None: left out.
    """

    def __init__(
        self,
        model: Decoder | HubDecoder,
        world: World,
        clock: StepClock,
        optimizer: Optimizer | None = None,
    ) -> None:
        self._model, self._world, self._clock = model, world, clock
        self._memory = MemoryUsage(model, optimizer, world)
        self._rate = matmul_rate(world.device, computed_in(model))
        self._memory.reset()  # leaves out the memory of measuring the rate
        self._start()

    def _start(self) -> None:
        self._steps = self._tokens = self._slots = self._targets = 0
        self._lengths: list[int] = []
        self._of_ranks: list[list[float]] | None = None
        self._since = time.perf_counter()

    def add(self, batches: Sequence[Batch]) -> None:
        """Adds a step with these micro-batches of this rank."""
        self._steps, self._of_ranks = self._steps + 1, None
        for batch in batches:
            self._tokens += batch.num_tokens
            self._slots += batch.num_slots
            self._targets += batch.num_targets
            self._lengths += document_lengths(batch)

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """A phase that is not part of training steps: its time does not lower their rates."""
        since = time.perf_counter()
        again = phase in progress.NOW.ended  # the clock tells of the first time
        with long_wait(phase) if again else nullcontext(), self._clock.phase(phase):
            yield
        self._since += time.perf_counter() - since

    def numbers(self) -> list[float]:
        """What `read` needs of every rank: `Checkpointer.agree` exchanges it with its own."""
        return [self._tokens, self._slots, *self._memory.numbers()]

    def take(self, of_ranks: list[list[float]]) -> None:
        """Gets the numbers of every rank, for the next `read`."""
        self._of_ranks = of_ranks

    def read(self) -> dict[str, float]:
        """The metrics of the steps since the last call; every rank must call it. The ranks exchange
        their numbers here, unless they have done so since the last step.

        tokens_per_second_per_rank   padding not counted
        slot_efficiency              share of tokens that are not padding
        seconds_per_step             by the wall clock, without evaluations
        peak_memory_gib, memory/NAME see `MemoryUsage.read`
        model_flops_utilization, hardware_flops_utilization
                                     of this rank, over its own rate of matrix products, or over
                                     the best rate of a step if that was higher; so at most 1
        seconds/NAME                 of a phase of this rank, per step; what an accelerator still
                                     runs counts for the next call
        routing/NAME                 of mixtures of experts, see `routing_metrics`
        """
        world, elapsed = self._world, time.perf_counter() - self._since
        of_ranks = self._of_ranks or world.exchange(*self.numbers())
        tokens, slots = (sum(of) for of in of_ranks[:2])
        metrics = {
            "tokens_per_second_per_rank": tokens / elapsed / world.size,
            "slot_efficiency": tokens / slots,
            "seconds_per_step": elapsed / self._steps,
        }
        metrics |= self._memory.read(of_ranks[2:])
        flops = step_flops(self._model, self._lengths, self._targets, self._slots)
        # The measured rate is too low if clocks were, or if other processes kept the CPU busy.
        self._rate = max(self._rate, flops.hardware / elapsed)
        metrics |= utilization(flops, elapsed, self._rate)
        for name, spent in self._clock.seconds(wait=False).items():
            metrics[f"seconds/{name}"] = spent / self._steps
        if (totals := self._model.routing.take()) is not None:
            experts = self._model.config.experts
            assert experts is not None
            metrics |= routing_metrics(world.sum_of(totals), experts.top_k)
        self._start()
        return metrics


# ---- the device's rate ---------------------------------------------------------------------


@functools.cache
@torch.no_grad()
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of large square products on `device`, in `dtype`: the best of as many as 0.3 s hold
    (1 s on an accelerator), measured once per process.

    The product is `a @ b.T`, as in a linear. The values are random: with zeros a GPU draws less
    power and keeps higher clocks.
    """
    size = 1024 if device.type == "cpu" else 8192
    # A separate generator leaves the random state of a resumed run's dropout as it was.
    seeded = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, dtype=dtype, generator=seeded) for _ in range(2))
    out, clock = torch.empty_like(a), StepClock(device)
    torch.mm(a, b.T, out=out)  # libraries load their kernels
    seconds = RATE_SECONDS if device.type == "cpu" else GPU_RATE_SECONDS
    best, end = math.inf, time.perf_counter() + seconds
    while best == math.inf or time.perf_counter() < end:
        with clock.phase("matmul"):
            torch.mm(a, b.T, out=out)
        best = min(best, clock.seconds()["matmul"])
    return 2 * size**3 / best


def best_rate(size: int, copy: Callable[[], object], wait: Callable[[], object]) -> float:
    """Bytes per second of the fastest of several calls; each moves `size` bytes."""
    copy()
    wait()
    seconds = []
    for _ in range(COPY_ROUNDS):
        since = time.perf_counter()
        copy()
        wait()
        seconds.append(time.perf_counter() - since)
    return size / min(seconds)


def gather_rate(size: int, device: torch.device) -> float:
    """Bytes per second that one rank sends in an all-gather of all ranks, `size` bytes in all.
    Raises ValueError if one arrives changed."""
    ranks = dist.get_world_size()
    mine = torch.full((size // ranks,), dist.get_rank() + 1, dtype=torch.uint8, device=device)
    everyone = torch.empty(ranks * mine.numel(), dtype=torch.uint8, device=device)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    sent = mine.numel() * (ranks - 1)  # in a ring, each rank sends all parts but one
    rate = best_rate(sent, lambda: dist.all_gather_into_tensor(everyone, mine), wait)
    if (got := everyone[:: mine.numel()].tolist()) != [*range(1, ranks + 1)]:
        raise ValueError(f"rank {dist.get_rank()} got numbers of {got}")
    return rate


def utilization(flops: StepFlops, seconds: float, rate: float) -> dict[str, float]:
    """Shares of `rate` FLOP/s (`matmul_rate`) that one rank's `flops` in `seconds` reach."""
    return {
        "model_flops_utilization": flops.model / seconds / rate,
        "hardware_flops_utilization": flops.hardware / seconds / rate,
    }
