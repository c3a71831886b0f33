"""The tracker, with a few allocations of known sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import record_function

from qfsdp.planning.kernel_memory import WORKSPACE
from qfsdp.planning.tracker import ACTIVATIONS, TEMPORARIES, MemoryTracker
from qfsdp.tensor_subclasses.kernels import dry_run, host_memory
from qfsdp.training.memory_usage import GRADIENTS, OPTIMIZER, QUANTIZED

KB = 1024


@pytest.fixture
def tracker() -> Iterator[MemoryTracker]:
    tracker = MemoryTracker("cpu")
    with FakeTensorMode(), tracker.following(nn.Identity()):
        yield tracker


def held(tracker: MemoryTracker) -> int:
    return sum(tracker.now.values())


def test_storages_count_until_they_are_released(tracker: MemoryTracker) -> None:
    a = torch.empty(KB, dtype=torch.uint8)
    b = torch.empty(2 * KB, dtype=torch.uint8)
    assert held(tracker) == 3 * KB
    del a
    assert held(tracker) == 2 * KB
    c = b + b
    del b, c
    assert held(tracker) == 0
    assert tracker.peak.total == 4 * KB


def test_views_and_in_place_results_take_no_memory(tracker: MemoryTracker) -> None:
    a = torch.zeros(8, 128, dtype=torch.uint8)
    views = [a[2:], a.view(-1), a.t(), a.add_(1), a.detach()]
    del a
    assert held(tracker) == KB
    del views
    assert held(tracker) == 0


def test_resized_storages(tracker: MemoryTracker) -> None:
    a = torch.empty(KB, dtype=torch.uint8)
    a.untyped_storage().resize_(0)
    assert held(tracker) == 0
    a.untyped_storage().resize_(3 * KB)
    assert held(tracker) == 3 * KB
    del a
    assert held(tracker) == 0


def test_cuda_allocates_in_multiples_of_512_bytes() -> None:
    tracker = MemoryTracker("cuda")
    with FakeTensorMode(), tracker.following(nn.Identity()):
        a = torch.empty(1, dtype=torch.uint8)
        assert held(tracker) == 512
        del a


def test_host_memory_does_not_count_for_the_device(tracker: MemoryTracker) -> None:
    a = torch.empty(KB, dtype=torch.uint8)
    kept = host_memory.to_host(a)
    back = host_memory.to_device(kept, a.device)
    del a, kept
    assert tracker.peak.total <= 2 * KB and held(tracker) == KB
    assert sum(tracker.host_peak.values()) == KB and not any(tracker.host.values())
    assert tracker.per_step(tracker.copies) == {"to_host": KB, "to_device": KB}
    del back


def test_pinned_memory_is_a_power_of_two() -> None:
    """Of tensors that are pinned alone; the optimizer's state is not pinned."""
    tracker = MemoryTracker("cuda", optimizer_in_host=True)
    with FakeTensorMode(), tracker.following(nn.Identity()):
        a, b = (torch.empty(3 * KB, dtype=torch.uint8) for _ in range(2))
        tracker.follow(a, QUANTIZED)
        tracker.follow(b, OPTIMIZER)
        with record_function("forward"):
            c = torch.empty(3 * KB, dtype=torch.uint8)
            assert held(tracker) == 3 * KB
            tracker.in_host_memory(c)
        found = {QUANTIZED: 4 * KB, OPTIMIZER: 3 * KB, ACTIVATIONS: 4 * KB}
        assert +tracker.host == found and held(tracker) == 0
        del a, b, c


def test_data_dependent_operations(tracker: MemoryTracker) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    mask = torch.zeros(4, dtype=torch.bool)
    assert x[mask].shape == (4, 8)  # the mask counts as true everywhere
    assert mask.nonzero().shape == (4, 1)
    x[mask].sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert x.sum().item() == 1.0 and int(mask.sum()) == 1


def test_kinds_phases_and_modules() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
    tracker = MemoryTracker("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True), tracker.following(model):
        model.to_empty(device="cpu")
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(tracker.mark_gradient)
        with record_function("forward"):
            loss = F.silu(model(torch.randn(8, 16))).sum()
            assert tracker.now[ACTIVATIONS] >= 8 * (32 + 16 + 16) * 4
        with record_function("backward"):
            loss.backward()
        del loss
        tracker.note_peak()
        assert tracker.now[ACTIVATIONS] == 0
        assert tracker.now[GRADIENTS] == 2 * 16 * 32 * 4
    places = [(point.phase, point.module) for point in tracker.points]
    assert [p for p in places if p[1]] == [
        ("forward", "0"),
        ("forward", "1"),
        ("backward", "1"),
        ("backward", "0"),
    ]
    assert [point.at for point in tracker.points] == sorted(p.at for p in tracker.points)
    assert TEMPORARIES in tracker.peak.by_kind


def test_gradients_are_summed_in_place(tracker: MemoryTracker) -> None:
    """As with real tensors; fake ones would need a third tensor."""
    x = torch.randn(KB, requires_grad=True)
    y = x * 1
    with record_function("backward"):
        (y.sin().sum() + y.cos().sum()).backward()
    del y
    tracker.note_peak()
    # x, y, sin and cos; then a gradient for each of the two paths, and its intermediate
    assert tracker.peak.total <= 4 * KB * 5 + 64


def test_nothing_global_is_left() -> None:
    resize, norm = torch.UntypedStorage.resize_, F.rms_norm
    following = MemoryTracker("cuda").following(nn.Identity())
    with pytest.raises(RuntimeError, match="stop"), FakeTensorMode(), following:
        assert F.rms_norm is not norm
        raise RuntimeError("stop")
    assert (torch.UntypedStorage.resize_, F.rms_norm) == (resize, norm)
    assert dry_run.current is None


def test_gradients_of_keys_for_every_head_of_the_queries() -> None:
    """In FlashAttention's backward pass: of all keys that a part of a shared row sees."""
    workspace = WORKSPACE["cuda", torch.ops.qfsdp.attend_with_sinks_backward.default]
    q, k = (torch.empty(n, heads, 32, dtype=torch.bfloat16) for n, heads in ((128, 4), (1024, 2)))
    assert workspace(q, q, k, k) == 128 * 4 * (4 * 32 + 4) + 2 * (1024 * 4 * 32 * 2)
    assert workspace(k, k, k, k) == 1024 * 2 * (4 * 32 + 4)
