"""Where a pass would have the host wait for a GPU: it drains the stream, and ends a capture.

Tensors say that they are on a GPU (`pretended_gpu`). The host waits to read numbers, for results
whose size depends on numbers, and to send constants to the device. Each wait is noted with the line
of `qfsdp` that asks for it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.config import AdapterConfig
from tests.host_waits import waits_for
from tests.hub_models import built, save_hub_model
from tests.models import adapted_model, randomize_adapters
from tests.modules.test_families import CONFIG_MAPPING, SIZES, TINY, ours, randomized
from tests.modules.test_several_adapters import base, several
from tests.pretended_gpu import pretend
from tests.tiny import write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")
ROOT = Path(__file__).resolve().parent.parent


class Waits(TorchDispatchMode):
    """The lines of `qfsdp` that make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def note(self) -> None:
        """Of the stand-in for a GPU none counts: it computes attention on the CPU."""
        for frame in reversed(traceback.extract_stack()):
            if frame.filename.endswith("pretended_gpu.py") and frame.name != "made":
                return
            if frame.filename.startswith(str(ROOT / "qfsdp")):
                file = Path(frame.filename).relative_to(ROOT)
                self.found.add(f"{file} {frame.name}: {frame.line}")
                return

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if waits_for(func, args, kwargs):
            self.note()
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Tensor]], set[str]]:
    """Runs a pass twice on a pretended GPU, and tells the waits of the second one."""

    def found(loss: Callable[[], Tensor]) -> set[str]:
        pretend(monkeypatch)
        loss().backward()
        mode = Waits()
        for owner, name in (
            (Tensor, "tolist"),
            (Tensor, "numpy"),
            (Tensor, "cpu"),
            (torch, "tensor"),
        ):
            read = getattr(owner, name)
            noted = lambda *a, read=read, **k: (mode.note(), read(*a, **k))[1]  # noqa: E731
            monkeypatch.setattr(owner, name, noted)
        with mode:
            loss().backward()
        return mode.found

    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("waits") / "model"
    return write_tiny_model(path, head_dim=16, intermediate_size=576)


def batch(packed: bool) -> dict[str, Any]:
    tokens = torch.arange(80).view(2, 40) * 7 % 101
    told = {"tokens": tokens, "labels": tokens, "num_targets": tokens.numel()}
    if not packed:
        return told
    ends = torch.tensor([0, 23, 40, 70, 80, 80, 80], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in (23, 17, 30, 10)]).view(2, 40)
    return told | {"positions": positions, "cu_seqlens": ends}


def adapted(folder: Path, method: Any) -> nn.Module:
    model = adapted_model(folder, AdapterConfig(method, rank=4, block_size=4), dtype="bf16")
    randomize_adapters(model)
    return model.train()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", ["lora", "dora", "miss", "oft", "ia3"])
def test_decoder(folder: Path, method: str, packed: bool, waits: Any) -> None:
    model, given = adapted(folder, method), batch(packed)
    assert waits(lambda: model(**given)) == set()


@pytest.mark.parametrize("packed", [False, True])
def test_tiles(folder: Path, packed: bool, waits: Any) -> None:
    model, given = adapted(folder, "dora"), batch(packed)
    model.set_activations(ActivationConfig("full", tile_tokens=16))  # type: ignore[operator]
    assert waits(lambda: model(**given)) == set()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["qwen3-5", "qwen3-next", "gemma3"])
def test_layers_of_several_kinds(name: str, packed: bool, waits: Any) -> None:
    """The delta rule in chunks, the convolution, and windows. Experts are known to wait."""
    kind, changes = TINY[name]
    config = CONFIG_MAPPING[kind](**SIZES | changes | {"head_dim": 16})
    model, given = ours(randomized(config)).to(torch.bfloat16).train(), batch(packed)
    found = waits(lambda: model(**given))
    assert {line for line in found if "modules/experts" not in line} == set()


def test_several_adapters(waits: Any) -> None:
    linear, x = several(base("nf4", torch.bfloat16)), torch.randn(6, 7, 64, dtype=torch.bfloat16)
    assert waits(lambda: linear(x).float().sum()) == set()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma4"])
def test_layers_of_transformers(tmp_path: Path, name: str, packed: bool, waits: Any) -> None:
    """transformers asks once whether positions begin anew within a row; nothing else waits."""
    save_hub_model(name, tmp_path)
    model, given = built(tmp_path, AdapterConfig("dora", rank=4)), batch(packed)
    asks = "qfsdp/modules/hub_models/decoder.py _run_body: return body(**given)"
    assert waits(lambda: model(**given)) <= {asks}
