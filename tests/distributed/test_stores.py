"""The disk ring and copies ahead of use; test_strategies.py trains with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.offload_tiers import work, write_quantized_model
from qfsdp.checkpoint.weights.read import OpenFiles
from qfsdp.checkpoint.weights.safetensors_folder import SafetensorsFolder
from qfsdp.common import progress
from qfsdp.common.errors import UserError
from qfsdp.distributed.disk_ring import DiskRing, FileRows
from qfsdp.distributed.fetch_order import FetchOrder
from qfsdp.distributed.stores import DeviceAhead, DiskStore, HostStore
from qfsdp.tensor_subclasses.kernels import host_memory
from qfsdp.tensor_subclasses.kernels.host_memory import HostBlocks, pinned_size
from qfsdp.tensor_subclasses.plain import PlainRows
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

CPU = torch.device("cpu")
LAYERS = [f"model.layers.{n}" for n in range(5)]
STEP = [*LAYERS, *LAYERS[::-1], *LAYERS]  # forward, backward, norms


def test_the_order_is_known_after_the_first_step() -> None:
    order = FetchOrder()
    order.guess(LAYERS)
    assert order.next(3) == [None, *LAYERS[:2]]
    wrong = []
    for _ in range(4):
        before = len(wrong)
        for unit in STEP:
            following = order.next(2)
            if following[1:] != [unit] and unit != following[0]:
                wrong.append(unit)
            order.saw(unit)
            order.saw(unit)  # several weights of a unit
    assert before == len(wrong), "something was still not predicted in the last step"
    assert len(wrong) < len(STEP)


def test_a_fetched_weight_says_where_the_step_is(files: SafetensorsFolder) -> None:
    """A layer may take minutes: without this the watchdog takes a long phase for a hang."""
    weights, moves = weights_on_disk(files, memory=2048), progress.NOW.moves
    weights[f"{LAYERS[3]}.a"].fetch()
    assert (progress.NOW.moves, progress.NOW.part) == (moves + 1, LAYERS[3])


@pytest.fixture
def files(tmp_path: Path) -> SafetensorsFolder:
    """Two weights per layer, with 6 and 4 rows."""
    torch.manual_seed(0)
    tensors = {}
    for layer in LAYERS:
        for name, rows in (("a", 6), ("b", 4)):
            tensors[f"{layer}.{name}"] = torch.randint(0, 256, (rows, 64), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    return SafetensorsFolder(tmp_path)


def weights_on_disk(
    files: SafetensorsFolder, memory: int, ahead: DeviceAhead | None = None
) -> dict[str, QuantizedTensor]:
    """Rows 1 to 3 of every weight."""
    ring, opened, weights = DiskRing(memory), OpenFiles(), {}
    for name, stored in sorted(files.tensors.items()):
        store = DiskStore(name.rpartition(".")[0], ahead)
        empty = PlainRows.empty(3, 32, torch.bfloat16, "meta").keep_in(store)
        weights[name] = torch.empty_like(empty, device=CPU)
        store.attach(ring, FileRows(3, stored.row_bytes, partial(opened.read_rows, stored, 1)))
    ring.start()
    return weights


@pytest.mark.parametrize("memory", [2 * 384, 3 * 384, 100 * 384])
@pytest.mark.parametrize("ahead", [False, True])
def test_any_order_reads_the_right_rows(files: SafetensorsFolder, memory: int, ahead: bool) -> None:
    weights = weights_on_disk(files, memory, DeviceAhead(CPU) if ahead else None)
    held = {name: files.read(stored)[1:4] for name, stored in files.tensors.items()}
    generator = torch.Generator().manual_seed(0)
    surprises = [LAYERS[i] for i in torch.randint(0, 5, (40,), generator=generator)]
    for unit in [*STEP, *STEP, *surprises, *STEP]:
        for name in "ab":
            weight = weights[f"{unit}.{name}"]
            assert weight.qdata.untyped_storage().nbytes() == 1
            assert torch.equal(weight.fetch().qdata, held[f"{unit}.{name}"])
    ring = next(iter(weights.values())).store._ring  # type: ignore[union-attr]
    assert sum(slot.buffer.numel() for slot in ring._slots) <= memory


def test_unused_copies_are_freed() -> None:
    """If a pass fetches only some weights of a unit, the copies of the others are freed."""
    ahead, weights = DeviceAhead(CPU), {}
    for layer in LAYERS:
        for name in "ab":
            empty = PlainRows.empty(2, 8, torch.bfloat16, "meta")
            weight = torch.empty_like(empty.keep_in(HostStore(layer, ahead)), device=CPU)
            weight.qdata.fill_(len(weights))
            weights[layer, name] = weight
    for names in ("ab", "ab", "a", "ab", "b"):
        for unit in STEP:
            for name in names:
                expected = list(weights).index((unit, name))
                assert (weights[unit, name].fetch().qdata == expected).all()
            assert len(ahead._copied) <= 4


def test_memory_for_fewer_than_two_units_is_an_error(files: SafetensorsFolder) -> None:
    with pytest.raises(UserError, match=r"ring_memory: 767 B; .* expected 768 bytes or more"):
        weights_on_disk(files, 2 * 384 - 1)


def test_a_truncated_file_is_an_error(files: SafetensorsFolder) -> None:
    path = files.folder / "model.safetensors"
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 300)
    weights = weights_on_disk(files, 2 * 384)
    with pytest.raises(UserError, match="truncated"):
        for unit in STEP:
            weights[f"{unit}.b"].fetch()


class _Pipe:
    """The connection of `benchmarks.tiers.work`: asks for two steps, and keeps the answers."""

    def __init__(self) -> None:
        self.answers: list = []

    def send(self, answer: object) -> None:
        self.answers.append(answer)

    def recv(self) -> str:
        return "step" if len(self.answers) < 3 else "end"


def _memory_of_two_steps(folder: Path, ring: int) -> int:
    pipe = _Pipe()
    work("disk", folder, 64, ring, pipe, ends=False)  # type: ignore[arg-type]
    return pipe.answers[-1][2]


@pytest.mark.slow
def test_memory_is_bounded_by_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base is 3 times the memory that the process takes above its start."""
    from tests.ranks import run_ranks

    monkeypatch.setenv("QFSDP_EAGER_KERNELS", "0")
    quantized = write_quantized_model(tmp_path, 60)
    (taken,) = run_ranks(1, _memory_of_two_steps, tmp_path, quantized // 16)
    print(f"quantized {quantized / 1e6:.0f} MB, taken {taken / 1e6:.0f} MB")
    assert taken < quantized / 3


# ---- pinned memory -------------------------------------------------------------------------------


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every pinned tensor that is made: memory without numbers, on a pretended GPU."""
    made: list[int] = []
    empty: Callable[..., Tensor] = torch.empty

    def noted(*shape: Any, pin_memory: bool = False, **how: Any) -> Tensor:
        tensor = empty(*shape, **how)
        if pin_memory:
            made.append(pinned_size(tensor.nbytes))
            tensor = tensor.to("meta") if tensor.nbytes > 1 << 20 else tensor
        return tensor

    monkeypatch.setattr(host_memory, "accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "empty", noted)
    return made


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_pinned_weights_of_a_70b_take_their_bytes(pinned: list[int], ranks: int) -> None:
    """PyTorch rounds each size up to a power of two: 35 GB took 44."""
    wide, hidden = 28672, 8192
    shapes = [(hidden, hidden)] * 2 + [(1024, hidden)] * 2 + [(wide, hidden)] * 2 + [(hidden, wide)]
    sizes = [-(-rows // ranks) * (cols // 2 + cols // 64) for rows, cols in shapes] * 80
    assert sum(map(pinned_size, sizes)) > 1.25 * sum(sizes)
    blocks = HostBlocks(sum(sizes))
    taken = [blocks.take(size) for size in sizes]
    assert [tensor.nbytes for tensor in taken] == sizes
    assert sum(pinned) < 1.01 * sum(sizes) and max(pinned) <= 1 << 30


def test_weights_of_blocks_share_no_byte(pinned: list[int]) -> None:
    sizes = [700, 1, 0, 512, 513, 100000, 3, 4096, 60000]
    blocks = HostBlocks()  # it is not known how much comes
    taken = [blocks.take(size) for size in sizes]
    for at, tensor in enumerate(taken):
        tensor.fill_(at)
    assert all((tensor == at).all() for at, tensor in enumerate(taken))
    assert len({tensor.untyped_storage().data_ptr() for tensor in taken if len(tensor)}) > 1
    assert all(tensor.storage_offset() % 512 == 0 for tensor in taken)


def test_a_padded_shard_is_in_the_memory_of_its_rows(pinned: list[int]) -> None:
    """FSDP2 asks for it where a rank has fewer rows, when a model is made and when it first runs;
    blocks would keep the memory of the first."""
    for rows in (4, 3, 0):
        store = HostStore("layer", None, blocks := HostBlocks(4 * 32), rows=4)
        held = store.empty((rows, 32)).fill_(1)
        padded = store.empty((4, 32))
        assert padded.shape == (4, 32) and len(blocks._unused) == 1 + (rows == 4)
        if rows < 4:
            assert (padded[:rows] == 1).all() and store.empty((4, 32)) is padded
        else:  # somebody's copy
            assert padded.data_ptr() != held.data_ptr()
