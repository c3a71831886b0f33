"""The load-balancing loss against transformers', its splits, and metrics of routing."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from qfsdp.checkpoint.adapter_start import check_start
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.common.errors import InvalidField, UserError
from qfsdp.data.cut_rows import counted_tokens
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.experts.routing import balance_loss, routing_metrics, routing_sums
from qfsdp.modules.transformer import Decoder
from tests.modules.test_families import (
    max_difference,
    ours,
    random_tokens,
    reference,
    with_our_names,
)

FACTOR, LENGTHS = 0.7, [40, 29, 13]  # a large factor: its gradients must be seen


def balanced(decoder: Decoder, factor: float = FACTOR) -> Decoder:
    """The same decoder with a balancing loss, in training."""
    experts = decoder.config.experts
    assert experts is not None
    router = dataclasses.replace(experts.router, aux_loss=factor)
    experts = dataclasses.replace(experts, router=router)
    other = Decoder(dataclasses.replace(decoder.config, experts=experts))
    other.load_state_dict(decoder.state_dict())
    return other.train()


def padded() -> tuple[Tensor, Tensor, Tensor]:
    """Three rows of different lengths: tokens, shifted labels, and True for tokens."""
    tokens = random_tokens(3)
    real = torch.arange(tokens.size(1)) < torch.tensor(LENGTHS)[:, None]
    tokens = tokens.masked_fill(~real, 0)
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1)).masked_fill(~real.roll(-1, 1), -100)
    labels[:, -1] = -100
    labels[1, :6] = -100  # a prompt
    return tokens, labels, real


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert found.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in found.items():
        size = max(expected[name].abs().max().item(), 1e-2 * largest)
        assert max_difference(gradient, expected[name]) < bound * size, name


@pytest.mark.parametrize("name", ["qwen3-moe", "olmoe", "mixtral"])
@pytest.mark.parametrize("row", [0, 1])
def test_loss_and_all_gradients_match_transformers(name: str, row: int) -> None:
    """One row, with and without padding: there both have the same definition."""
    model = reference(name)
    tokens, labels, real = (part[row : row + 1] for part in padded())
    decoder, targets = balanced(ours(model)), int((labels != -100).sum())
    loss = decoder(tokens, labels=labels) / targets
    loss.backward()
    model.config.output_router_logits, model.router_aux_loss_coef = True, FACTOR
    shifted = labels.roll(1, 1)
    given: Any = {"attention_mask": real.long(), "labels": shifted, "output_router_logits": True}
    out: Any = model(tokens, **given)
    out.loss.backward()
    assert out.aux_loss > 1.0
    assert torch.allclose(loss, out.loss, rtol=1e-5)
    theirs = with_our_names(gradients(model), model.config.model_type)
    assert_gradients(gradients(decoder), theirs, 2e-5)


def test_sums_of_layers_give_transformers_value() -> None:
    """Its function on random scores of several layers, with padding."""
    scores, real = torch.randn(3, 80, 6), padded()[2][:2]
    expected: Any = load_balancing_loss_func(tuple(scores), 6, 2, real.long())
    sums = torch.stack([routing_sums(layer, layer.topk(2).indices, real) for layer in scores])
    assert torch.allclose(balance_loss(sums.sum((0, 1)), 3 * real.sum()), expected)


def test_losses_of_samples_have_no_balancing_loss() -> None:
    """It was added to each: a loop of one's own read other log-probabilities."""
    decoder, (tokens, labels, _) = balanced(ours(reference("qwen3-moe"))), padded()
    ids = torch.arange(3).unsqueeze(1).expand_as(tokens)
    with pytest.raises(UserError, match="router_aux_loss: 0.7; expected null"):
        decoder(tokens, labels=labels, sample_ids=ids, num_samples=3)


def test_the_loss_does_not_depend_on_how_rows_are_split() -> None:
    decoder = balanced(ours(reference("qwen3-moe")))
    tokens, labels, _ = padded()
    whole = decoder(tokens, labels=labels)
    whole.backward()
    expected = gradients(decoder)
    parts = [decoder(tokens[i : i + 1], labels=labels[i : i + 1]) for i in range(3)]
    sum(parts[1:], parts[0]).backward()
    assert torch.allclose(sum(parts[1:], parts[0]), whole, rtol=1e-6)
    assert_gradients(gradients(decoder), expected, 1e-5)


@pytest.mark.parametrize(
    ("checkpointing", "compiled"),
    [("full", False), ("selective", False), pytest.param("none", True, marks=pytest.mark.long)],
)
def test_recomputed_and_compiled_layers_route_alike(checkpointing: Any, compiled: bool) -> None:
    decoder = balanced(ours(reference("qwen3-moe-dense-layers")))
    tokens, labels, _ = padded()
    loss = decoder(tokens, labels=labels)
    loss.backward()
    expected, totals = gradients(decoder), decoder.routing.take()
    decoder.set_activations(ActivationConfig(checkpointing))
    if compiled:
        torch._dynamo.reset()
        for layer in decoder.model.layers:
            layer.block = torch.compile(layer.block, backend="aot_eager", fullgraph=True)
    again = decoder(tokens, labels=labels)
    again.backward()
    assert torch.allclose(loss, again, rtol=1e-6)
    assert_gradients(gradients(decoder), expected, 1e-5)
    found = decoder.routing.take()
    assert found is not None and totals is not None
    assert found.shape == (1, 3, 5) and torch.allclose(found, totals, rtol=1e-5)


def test_without_the_key_the_loss_is_the_cross_entropy() -> None:
    decoder, (tokens, labels, _) = ours(reference("qwen3-moe")), padded()
    expected = decoder.eval()(tokens, labels=labels)
    assert decoder.routing.take() is None  # followed in training only
    assert torch.allclose(decoder.train()(tokens, labels=labels), expected)
    assert balanced(decoder).eval()(tokens, labels=labels) == expected


def test_tokens_count_up_to_the_last_target() -> None:
    """Padding has other tokens, the sums are the same."""
    tokens, labels, real = padded()
    assert counted_tokens(labels).equal(real)
    assert not counted_tokens(torch.full((1, 4), -100)).any()
    decoder, taken = ours(reference("qwen3-moe")).train(), []
    for pad in (0, 7):
        decoder(tokens.masked_fill(~real, pad), labels=labels)
        taken.append(decoder.routing.take())
    assert taken[0][:, 0].sum() == 2 * 4 * sum(LENGTHS)  # top_k, layers
    assert taken[0][:, 0].equal(taken[1][:, 0]) and max_difference(*taken) < 1e-4


def test_metrics_of_routing() -> None:
    """One layer of four experts uses them evenly, the other only two, both with top_k 2."""
    even = [[5.0] * 4, [2.5] * 4, [2.5 * math.log(4)] * 4]
    uneven = [[10.0, 10.0, 0.0, 0.0], [5.0, 5.0, 0.0, 0.0], [0.0] * 4]
    metrics = routing_metrics(torch.tensor([even, uneven]), 2)
    assert metrics["routing/entropy"] == pytest.approx(0.5)
    assert metrics["routing/busiest_expert"] == pytest.approx(0.5)
    assert metrics["routing/unused_experts"] == pytest.approx(0.25)
    assert metrics["routing/balance_loss"] == pytest.approx(2.5)


# ---- the key ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "expected"), [(None, 0.0), ("family", 0.001), (0.5, 0.5)])
def test_the_key_chooses_the_factor(tmp_path: Path, factor: Any, expected: float) -> None:
    config = reference("qwen3-moe").config.to_dict()
    config |= {"architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    decoder = ModelConfig(str(tmp_path), router_aux_loss=factor).decoder()
    assert decoder.experts is not None and decoder.experts.router.aux_loss == expected


@pytest.mark.parametrize(("name", "router"), [("glm4-moe", "gate"), ("gpt-oss", "router")])
def test_routers_are_frozen_unless_they_are_named(name: str, router: str) -> None:
    """Named, they start as the base, and keep their correction in fp32."""
    tokens = random_tokens()
    frozen, named = ours(reference(name)), ours(reference(name))
    expected = frozen(tokens)
    for model, targets in ((frozen, ["all-linear"]), (named, ["all-linear", router])):
        add_adapters(model, AdapterConfig("dora", 4, 8.0, targets=targets))
        init_adapters(model, seed=0)
        assert max_difference(model(tokens), expected) < 1e-5
    trained = {key for key, param in named.named_parameters() if param.requires_grad}
    of_routers = trained - {k for k, param in frozen.named_parameters() if param.requires_grad}
    fields = {key.rpartition(".")[2] for key in of_routers}
    assert fields == {"lora_A", "lora_B", "magnitude"}
    assert {key.rpartition(".")[0].rpartition(".")[2] for key in of_routers} == {router}
    named.bfloat16()
    corrections = [p for k, p in base_parameters(named) if k.endswith("_correction_bias")]
    assert bool(corrections) == (name == "glm4-moe")
    assert all(param.dtype == torch.float32 for param in corrections)


def test_the_key_without_experts_is_refused(tmp_path: Path) -> None:
    config = {**reference("granite").config.to_dict(), "architectures": ["GraniteForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match=r"router_aux_loss: 0.1, but .* no mixture of experts"):
        ModelConfig(str(tmp_path), router_aux_loss=0.1).decoder()
    with pytest.raises(InvalidField, match="at least 0"):
        ModelConfig(str(tmp_path), router_aux_loss=-0.1).check()
    adapter = AdapterConfig(expert_rank=4)
    model: Any = SimpleNamespace(config=DecoderConfig.from_dir(tmp_path))
    with pytest.raises(UserError, match=r"expert_rank: 4, but .* no mixture .* expected null$"):
        check_start(adapter, model, None)  # type: ignore[arg-type]
