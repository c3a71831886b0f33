"""Checkpointing and offloading of activations change no bit of any gradient."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qfsdp.checkpoint.adapter_files import adapter_parameters
from qfsdp.common.errors import InvalidField
from qfsdp.modules import activation_offload, rope
from qfsdp.modules.activations import ActivationConfig, checkpointed
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.attention.self_attention import Attention
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.dtensor import whole_tensor
from tests.models import adapted_model, randomize_adapters
from tests.ranks import run_ranks
from tests.tiny import needs_compiler, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")

LAYERS = 4
OLMO2 = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
MODES = {
    "full": ActivationConfig("full"),
    "selective": ActivationConfig("selective"),
    "full, every 2nd": ActivationConfig("full", every_n_layers=2),
    "selective, every 3rd": ActivationConfig("selective", every_n_layers=3),
    "offload": ActivationConfig(offload=True),
    "full, offload": ActivationConfig("full", offload=True),
    "selective, offload": ActivationConfig("selective", offload=True),
    "selective, every 2nd, offload": ActivationConfig("selective", 2, offload=True),
}
Batch = dict[str, Tensor]


@pytest.fixture(autouse=True)
def offload_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST_OFFLOADED", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=LAYERS)


def tiny(folder: Path, method: str = "dora", dropout: float = 0.0, **build: Any) -> Decoder:
    adapter = AdapterConfig(method, 5, 7.0, dropout, targets=["all-linear", "lm_head"])
    model = adapted_model(folder, adapter, **build)
    randomize_adapters(model)
    return model.train()


def batch(seq: int = 40, packed: bool = False, vocab: int = 577) -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocab, (2, seq), generator=generator)
    if not packed:
        return {"tokens": tokens, "labels": tokens}
    lengths = [13, seq - 13, 5, seq - 5]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths]).view(2, seq)
    return {"tokens": tokens, "labels": tokens, "positions": positions, "cu_seqlens": ends}


def gradients(model: Decoder, config: ActivationConfig, given: Batch) -> dict[str, Tensor]:
    """Gradients of two micro-batches; the second has another length."""
    model.set_activations(config)
    model.zero_grad()
    torch.manual_seed(5)  # dropout
    model(**given).backward()
    other = {name: t[:, :24] for name, t in given.items()} if "cu_seqlens" not in given else given
    model(**other).backward()
    params = adapter_parameters(model)
    return {name: whole_tensor(param.grad).clone() for name, param in params.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.norm() > 0, name
        assert torch.equal(found[name], value), f"{what}: {name}"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_gradients_are_equal_to_the_last_bit(
    method: str, dropout: float, packed: bool, folder: Path
) -> None:
    model = tiny(folder, method, dropout)
    given = batch(packed=packed)
    expected = gradients(model, ActivationConfig(), given)
    for name, config in MODES.items():
        assert_equal(gradients(model, config, given), expected, name)


@pytest.mark.parametrize("format", ["none", "nf4_fp32_absmax"])
def test_other_bases_and_bf16(format: str, folder: Path) -> None:
    model = tiny(folder, format=format, dtype="bf16")
    expected = gradients(model, ActivationConfig(), batch())
    for name, config in MODES.items():
        assert_equal(gradients(model, config, batch()), expected, name)


def on_ranks(folder: Path, wrap: str) -> list[str]:
    """Names of the modes whose gradients differ; runs on every rank."""
    activation_offload.SMALLEST_OFFLOADED = 1
    model = tiny(folder, dropout=0.2, wrap=wrap)
    expected = gradients(model, ActivationConfig(), batch())
    differ = []
    for name, config in MODES.items():
        found = gradients(model, config, batch())
        if any(not torch.equal(found[key], value) for key, value in expected.items()):
            differ.append(name)
    return differ


@pytest.mark.long
@pytest.mark.parametrize("wrap", ["decoder_layer", pytest.param("linear", marks=pytest.mark.long)])
def test_sharded_on_two_ranks(wrap: str, folder: Path) -> None:
    assert run_ranks(2, on_ranks, folder, wrap) == [[], []]


# ---- what is kept ------------------------------------------------------------------------------


@contextmanager
def counting(model: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of all storages that autograd keeps, without parameters. If hooks replace tensors, the
    tensors that the hooks keep are counted."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    weights |= {p.qdata.untyped_storage()._cdata for p in model.parameters() if is_packed(p)}
    kept: dict[int, int] = {}
    alive = []

    def count(packed: Any) -> Any:
        for tensor in tree_leaves(packed):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in weights:
                    alive.append(storage)
                    kept[storage._cdata] = storage.nbytes()
        return packed

    class Counted(saved_tensors_hooks):
        def __init__(self, pack: Any, unpack: Any) -> None:
            super().__init__(lambda tensor: count(pack(tensor)), unpack)

    with (
        patch.object(activation_offload, "saved_tensors_hooks", Counted),
        patch.object(rope, "saved_tensors_hooks", Counted),
        Counted(Tensor.detach, lambda tensor: tensor),
    ):
        yield kept


def is_packed(param: Tensor) -> bool:
    return hasattr(param, "qdata")


def bytes_kept(model: Decoder, config: ActivationConfig, given: Batch) -> int:
    model.set_activations(config)
    with counting(model) as kept:
        loss = model(**given)
    total = sum(kept.values())
    del loss
    return total


@pytest.mark.parametrize("packed", [False, True])
def test_dora_keeps_queries_and_keys_once(packed: bool, folder: Path) -> None:
    """Attention needs them after their rotation: it rotates again what the magnitude's gradient
    needs, to the same bits."""
    model, given = tiny(folder, format="nf4", dtype="bf16"), batch(packed=packed)
    found = (
        gradients(model, ActivationConfig(), given),
        bytes_kept(model, ActivationConfig(), given),
    )
    with patch.object(Attention, "_is_unrotated_kept", lambda self: False):
        assert_equal(gradients(model, ActivationConfig(), given), found[0], "rotated once")
        saved = bytes_kept(model, ActivationConfig(), given) - found[1]
    assert saved == LAYERS * 80 * (192 + 64) * 2  # tokens, widths of queries and keys, bf16


def test_selective_keeps_less_than_everything_and_more_than_inputs(folder: Path) -> None:
    results = {}
    for method in ("lora", "dora"):
        model = tiny(folder, method)
        modes = ("none", "selective", "full")
        kept = {mode: bytes_kept(model, ActivationConfig(mode), batch()) for mode in modes}
        print(method, kept)
        assert kept["full"] < 0.3 * kept["selective"]
        assert kept["selective"] < 0.7 * kept["none"]
        half = bytes_kept(model, ActivationConfig("full", every_n_layers=2), batch())
        assert half == pytest.approx((kept["none"] + kept["full"]) / 2, rel=0.1)
        results[method] = kept["selective"] - kept["full"]
    # A layer's last product, 80 tokens of 192 numbers in fp32: DoRA's magnitude takes its result.
    assert results["dora"] - results["lora"] == LAYERS * 80 * 192 * 4


class Products(TorchDispatchMode):
    """The memory of the results of every product with frozen weights in forward, also in forward
    that runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[StorageWeakRef]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() in ("qfsdp::adapted_linear", "qfsdp::packed_linear"):
            results = (tensor.untyped_storage() for tensor in tree_leaves(result))
            self.found.append([StorageWeakRef(storage) for storage in results])
        return result

    def freed(self) -> int:
        """Of how many products the memory of results is free."""
        return sum(all(result.expired() for result in results) for results in self.found)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize(
    ("changes", "adapter", "again", "spared"),
    [
        ({}, {"method": "lora"}, 3, 1),  # q, k and v are one product, gate and up another
        ({}, {"method": "dora"}, 4, 0),  # the magnitude's gradient takes the result
        ({}, {"method": "lora", "targets": ["q_proj", "v_proj"]}, 6, 1),
        (OLMO2, {"method": "lora"}, 4, 0),  # a norm takes it
    ],
)
def test_backward_ends_with_the_last_kept_tensor(
    changes: Any, adapter: Any, again: int, spared: int, mode: str, tmp_path: Path
) -> None:
    """A layer's last product is not computed again, and its result is not kept, where nothing in
    backward takes it."""
    folder = write_tiny_model(tmp_path / "model", num_hidden_layers=LAYERS, **changes)
    model = adapted_model(folder, AdapterConfig(**{"rank": 5, "alpha": 7.0} | adapter))
    randomize_adapters(model)
    expected = gradients(model, ActivationConfig(), batch())
    assert_equal(gradients(model, ActivationConfig(mode), batch()), expected, mode)
    with Products() as counted:
        loss = model(**batch())
        once = len(counted.found)
        assert once == LAYERS * (again + spared)
        assert counted.freed() == LAYERS * (spared if mode == "selective" else again + spared)
        loss.backward()
    assert len(counted.found) - once == (LAYERS * again if mode == "full" else 0)


class Ledger:
    """Records which tensors offloading has in host memory, and which it copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.to_host: list[tuple[torch.Size, torch.dtype]] = []
        self.to_device = 0
        to_host = activation_offload.to_host

        def counted(tensor: Tensor) -> Tensor:
            self.to_host.append((tensor.shape, tensor.dtype))
            return to_host(tensor)

        def moved(way: str, size: int) -> None:
            self.to_device += size

        monkeypatch.setattr(activation_offload, "to_host", counted)
        monkeypatch.setattr(activation_offload, "moved", moved)

    def bytes_to_host(self) -> int:
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self.to_host)


def test_every_storage_is_copied_once_and_comes_back_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(folder, "dora")
    kept = bytes_kept(model, ActivationConfig(), batch())
    ledger = Ledger(monkeypatch)
    model.set_activations(ActivationConfig(offload=True))
    loss = model(**batch())
    sent = ledger.bytes_to_host()
    # The last layer's stay, so do the loss's, cosines and sines.
    assert 0.9 * kept * (LAYERS - 1) / LAYERS < sent < kept
    loss.backward()
    assert ledger.to_device == sent == ledger.bytes_to_host()
    assert all(dtype == torch.float32 for _, dtype in ledger.to_host)


def test_with_full_checkpointing_only_inputs_travel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(folder)
    model.set_activations(ActivationConfig("full", offload=True))
    ledger = Ledger(monkeypatch)
    model(**batch()).backward()
    assert ledger.to_host == [(torch.Size([2 * 40 * 192]), torch.float32)] * (LAYERS - 1)


def test_parameters_and_small_tensors_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST_OFFLOADED", 2 * 40 * 192 * 4)
    for format in ("nf4", "none"):
        model = tiny(folder, format=format)
        of_weights = {p.numel() for p in model.parameters()}
        model.set_activations(ActivationConfig(offload=True))
        ledger = Ledger(monkeypatch)
        model(**batch()).backward()
        sizes = {shape.numel() for shape, _ in ledger.to_host}
        assert min(sizes) == 2 * 40 * 192 and not sizes & of_weights


def test_memory_leaves_with_the_graph(folder: Path) -> None:
    """Only autograd owns kept tensors: none is left after backward, or if there is no backward."""
    model = tiny(folder)
    for config in MODES.values():
        model.set_activations(config)
        for backward in (True, False):
            loss = model(**batch())
            kept = kept_pieces()
            assert bool(kept) == config.offload
            if backward:
                loss.backward()
            del loss, kept
            assert not kept_pieces(), config


def kept_pieces() -> list[Any]:
    return [o for o in gc.get_objects() if type(o) is activation_offload._Kept]


def test_backward_twice(folder: Path) -> None:
    model = tiny(folder)
    for config in (ActivationConfig(), *MODES.values()):
        model.set_activations(config)
        model.zero_grad()
        loss = model(**batch())
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        loss.backward()
        twice = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(torch.equal(2 * a, b) for a, b in zip(once, twice, strict=True)), config


def test_results_that_are_written_to(folder: Path) -> None:
    """Modules of other packages change the result of a product in place. That runs again in
    backward, on what the product gave."""
    torch.manual_seed(0)
    first, second = nn.Linear(6, 8), nn.Linear(8, 6)

    def block(x: Tensor) -> Tensor:
        y = first(x)
        y[:, 0].mul_(3.0)
        y += 1.0
        return second(y * y.tanh()).mul_(2.0).sin()

    x, of = torch.randn(5, 6, requires_grad=True), [first.weight, second.weight]
    expected = torch.autograd.grad(block(x).square().sum(), [x, *of])
    for mode in ("full", "selective"):
        loss = checkpointed(block, mode, x).square().sum()
        for _ in range(2):
            found = torch.autograd.grad(loss, [x, *of], retain_graph=True)
            assert all(map(torch.equal, found, expected)), mode


def test_two_passes_before_backward(folder: Path) -> None:
    """As for a loss that compares two batches."""
    model = tiny(folder)
    results = []
    for config in (ActivationConfig(), *MODES.values()):
        model.set_activations(config)
        model.zero_grad()
        (model(**batch()) + model(**batch(24)) * 2).backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    for config, found in zip(MODES, results[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True)), config


def test_without_gradients_nothing_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ledger = tiny(folder), Ledger(monkeypatch)
    expected = model(**batch())
    for config in MODES.values():
        model.set_activations(config)
        with torch.no_grad():
            assert torch.equal(model(**batch()), expected)
    assert not ledger.to_host


def test_every_n_layers_is_checked() -> None:
    with pytest.raises(InvalidField, match="every_n_layers"):
        ActivationConfig(every_n_layers=0).check()


# ---- torch.compile -----------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    "packed",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.long)],
)
def test_compiled_layers(packed: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit too: hooks are around the compiled code and do not change it."""
    torch._dynamo.reset()
    model, given = tiny(folder), batch(packed=packed)
    model.compile_layers()
    expected = gradients(model, ActivationConfig(), given)
    builds = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    kept = bytes_kept(model, ActivationConfig(), given)
    assert bytes_kept(model, MODES["selective"], given) == kept
    of_weights = {param.numel() for param in model.parameters()}
    ledger = Ledger(monkeypatch)
    for name in ("full", "full, offload", "selective, offload", "offload"):
        ledger.to_host.clear()
        assert_equal(gradients(model, MODES[name], given), expected, name)
        assert not {shape.numel() for shape, _ in ledger.to_host} & of_weights
        assert all(dtype == torch.float32 for _, dtype in ledger.to_host)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == builds
    ledger.to_host.clear()
    model(**given).backward()
    assert 0.8 * kept * (LAYERS - 1) / LAYERS < ledger.bytes_to_host() < kept


def compiled_on_ranks(folder: Path) -> bool:
    activation_offload.SMALLEST_OFFLOADED = 1
    model = tiny(folder, dropout=0.2)
    model.compile_layers()
    expected = gradients(model, ActivationConfig(), batch())
    found = gradients(model, ActivationConfig(offload=True), batch())
    return all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.slow
@needs_compiler
def test_compiled_on_two_ranks(folder: Path) -> None:
    assert run_ranks(2, compiled_on_ranks, folder) == [True, True]


# ---- the real model ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_real_model(smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST_OFFLOADED", 1 << 16)
    adapter = AdapterConfig("dora", 8, 16.0, dropout=0.1)
    model = adapted_model(smollm2_dir, adapter).train()
    randomize_adapters(model)
    given = batch(64, vocab=49152)
    expected = gradients(model, ActivationConfig(), given)
    for name in ("full, offload", "selective, offload"):
        assert_equal(gradients(model, MODES[name], given), expected, name)
    kept = {
        mode: bytes_kept(model, ActivationConfig(mode), given) for mode in ("none", "selective")
    }
    assert kept["selective"] < 0.7 * kept["none"]


# ---- accelerators ------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here")
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_and_peak_on_an_accelerator(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long rows of a small model: activations take most of the memory."""
    device = torch.accelerator.current_accelerator()
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    sizes |= {"num_key_value_heads": 4, "num_hidden_layers": 8, "max_position_embeddings": 4096}
    model = tiny(write_tiny_model(tmp_path, **sizes), dropout=0.1, dtype="bf16").to(device)
    monkeypatch.setattr(activation_offload, "SMALLEST_OFFLOADED", 1 << 20)
    if compiled:
        torch._dynamo.reset()
        model.compile_layers()
    given = {name: t.to(device) for name, t in batch(2048).items()}
    expected, peaks = gradients(model, ActivationConfig(), given), {}
    for name, config in {"none": ActivationConfig(), **MODES}.items():
        found = gradients(model, config, given)  # builds code, fills caches of memory
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        found = gradients(model, config, given)
        peaks[name] = torch.accelerator.max_memory_allocated()
        for key, value in expected.items():
            # Attention's gradients are added up in any order there.
            assert (found[key] - value).norm() < 0.02 * value.norm(), f"{name}: {key}"
    print({name: f"{peak / 2**20:.0f} MiB" for name, peak in peaks.items()})
    assert peaks["offload"] < 0.6 * peaks["none"]
    assert peaks["full, offload"] < peaks["full"] < peaks["none"]
    if not compiled:
        assert peaks["full"] < peaks["selective"] < peaks["none"]
        assert peaks["selective, offload"] < peaks["selective"]
