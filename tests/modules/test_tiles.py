"""A feed-forward in tiles of tokens: same outputs, same gradients, and no whole temporary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qfsdp.checkpoint.adapter_files import adapter_parameters
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.config.load import load_config
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.transformer import Decoder
from qfsdp.planning.known_models import find_config
from qfsdp.tensor_subclasses.dtensor import whole_tensor
from qfsdp.tensor_subclasses.nf4 import NF4Tensor
from tests.models import adapted_model, randomize_adapters
from tests.ranks import run_ranks
from tests.tiny import ROOT, load_recipe, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")
WHOLE, TILED = ActivationConfig("full"), ActivationConfig("full", tile_tokens=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


def tiny(folder: Path, method: str = "dora", **build: Any) -> Decoder:
    model = adapted_model(folder, AdapterConfig(method, 5, 7.0), **build)
    randomize_adapters(model)
    return model.train()


def given() -> dict[str, Tensor]:
    tokens = torch.randint(0, 577, (2, 37), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens, "labels": tokens}


def updates(model: Decoder, config: ActivationConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients of two micro-batches."""
    model.set_activations(config)
    model.zero_grad()
    batch = given()
    loss = model(**batch)
    loss.backward()
    model(**{name: tensor[:, 5:] for name, tensor in batch.items()}).backward()
    params = adapter_parameters(model)
    return loss.detach(), {k: whole_tensor(p.grad).clone() for k, p in params.items()}


def assert_same_loss(found: Tensor, expected: Tensor, bound: float = 1e-6) -> None:
    """Within a bound: a CPU may add up products of another number of rows in another order."""
    torch.testing.assert_close(found, expected, rtol=bound, atol=0)


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= bound * value.norm(), name


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_outputs_and_gradients_of_whole_rows(method: str, offload: bool, folder: Path) -> None:
    model = tiny(folder, method)
    loss, expected = updates(model, WHOLE)
    tiled = ActivationConfig("full", offload=offload, tile_tokens=16)
    found_loss, found = updates(model, tiled)
    assert_same_loss(found_loss, loss)
    assert_near(found, expected, 1e-6)
    with torch.no_grad():
        logits = model(given()["tokens"])
        model.set_activations(WHOLE)
        # Products of other rows round otherwise: 1.8e-6 by torch 2.11 with AMX.
        torch.testing.assert_close(logits, model(given()["tokens"]), rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("format", ["none", "hqq"])
def test_other_bases_and_bf16(format: str, folder: Path) -> None:
    model = tiny(folder, format=format, dtype="bf16")
    loss, expected = updates(model, WHOLE)
    found_loss, found = updates(model, TILED)
    assert_same_loss(found_loss, loss, 1e-3)
    assert_near(found, expected, 0.01)


def on_ranks(folder: Path) -> None:
    model = tiny(folder)
    (loss, expected), (found_loss, found) = (updates(model, kept) for kept in (WHOLE, TILED))
    assert_same_loss(found_loss, loss)
    assert_near(found, expected, 1e-6)


@pytest.mark.long
def test_sharded_on_two_ranks(folder: Path) -> None:
    run_ranks(2, on_ranks, folder)


class LargestInner(TorchDispatchMode):
    """Follows the most tokens of any tensor as wide as the feed-forward."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.inner, self.tokens = inner, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dim() == 3 and leaf.size(-1) == self.inner:
                self.tokens = max(self.tokens, leaf.shape[:2].numel())
        return result


def test_no_inner_tensor_is_whole_and_weights_are_dequantized_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in forward and once in backward, for any number of tiles."""
    model, dequantize, calls = tiny(folder), NF4Tensor.dequantize_rows, [0]

    def counted(*args: Any) -> Tensor:
        calls[0] += 1
        return dequantize(*args)

    monkeypatch.setattr(NF4Tensor, "dequantize_rows", staticmethod(counted))
    found = {}
    for config in (WHOLE, TILED):
        model.set_activations(config)
        calls[0] = 0
        with LargestInner(model.config.intermediate_size) as inner:
            model(**given()).backward()
        found[config.tile_tokens] = inner.tokens, calls[0]
    tokens, whole = found[None]
    assert tokens == given()["tokens"].numel()
    # Forward, forward again and backward are one more than forward and backward.
    assert found[16] == (16, whole - 2 * 3)


def test_a_layer_runs_attention_twice_and_the_feed_forward_per_tile(folder: Path) -> None:
    """What is kept comes before the walk, so computing a layer again does not walk once more."""
    model, calls = tiny(folder), [0, 0]
    layer = model.model.layers[1]
    layer.self_attn.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    layer.mlp.register_forward_hook(lambda *_: calls.__setitem__(1, calls[1] + 1))
    model.set_activations(TILED)
    model(**given()).backward()
    assert calls == [2, 2 * 5]  # 74 tokens are 5 tiles


def test_backward_frees_the_input_of_every_layer(folder: Path) -> None:
    model, refs = tiny(folder), []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _, __, y: refs.append(StorageWeakRef(y.untyped_storage()))
        )
    model.set_activations(TILED)
    loss = model(**given())
    loss.backward()
    assert [ref.expired() for ref in refs] == [True, True] and loss.grad_fn is not None


def test_mistakes_cost_one_line(folder: Path, tmp_path: Path) -> None:
    for wrong in (
        ActivationConfig(tile_tokens=16),
        ActivationConfig("selective", tile_tokens="auto"),
        ActivationConfig("full", every_n_layers=2, tile_tokens=16),
        ActivationConfig("full", tile_tokens=0),
    ):
        with pytest.raises(InvalidField, match="^tile_tokens: "):
            wrong.check()
    mixture = DecoderConfig.from_dict(find_config("Qwen3-30B-A3B"))
    with pytest.raises(UserError, match=r"^activation.tile_tokens: 16; expected null: the model"):
        TILED.tile_of(mixture)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("compile=true", "null with compile: true"),
        ("sharding.wrap=linear", "null with sharding.wrap: linear"),
        ("adapter.dropout=0.1", "null with adapter.dropout above 0"),
    ],
)
def test_settings_that_do_not_go_with_tiles(change: str, expected: str) -> None:
    words = ["--config", str(ROOT / "configs/llama3_8b_qdora.yaml"), "output_dir=x"]
    words += ["activation.checkpointing=full", "activation.tile_tokens=auto", change]
    with pytest.raises(UserError, match=f"activation.tile_tokens: 'auto' .*{expected}"):
        load_config(load_recipe().Config, words)
