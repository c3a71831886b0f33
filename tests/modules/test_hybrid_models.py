"""Layers with a state beside layers with attention, by our own decoder: what is theirs alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qfsdp.checkpoint.adapter_files import adapter_parameters
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.common.errors import UserError
from qfsdp.data.batch import Batch
from qfsdp.distributed.context_parallel import share_rows
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.evaluation.generation import start
from qfsdp.modules import delta_kernel
from qfsdp.modules.activations import ActivationConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters
from qfsdp.modules.attention.request_cache import RequestCache
from qfsdp.training.preference import check_packed
from qfsdp.training.run_config import check_with_model
from tests import hub_models
from tests.models import cpu_world
from tests.modules.test_hub_cut_rows import LENGTHS, PADDED, batch
from tests.modules.test_hub_packing import each_alone
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("eager")
CPU = torch.device("cpu")
native = partial(hub_models.built, implementation="native")
LORA = AdapterConfig("lora", rank=4, alpha=8)
PROMPTS = [[33], list(range(40, 63)), list(range(9, 150))]
MIXTURES = [pytest.param(name, marks=pytest.mark.long) for name in hub_models.HYBRID[2:]]


def loss_and_gradients(model: Any, *given: Any, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(*given, **more)
    loss.backward()
    found = {key: param.grad for key, param in adapter_parameters(model).items()}
    return loss.detach(), {key: grad for key, grad in found.items() if grad is not None}


def check_same(found: tuple[Tensor, dict[str, Tensor]], expected: Any, bound: float) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    assert found[1].keys() == expected[1].keys()
    for key, grad in expected[1].items():
        atol = bound * float(grad.abs().max())
        torch.testing.assert_close(found[1][key], grad, rtol=0, atol=atol, msg=key)


@pytest.mark.parametrize("name", ["qwen3_5", *MIXTURES])
def test_a_pack_equals_its_samples_alone(name: str, tmp_path: Path) -> None:
    """Loss and all gradients over NF4; samples of 1 to 72 tokens, and padding."""
    hub_models.save_hub_model(name, tmp_path)
    model, given = native(tmp_path, LORA), batch()
    more = {"labels": given.labels, "cu_seqlens": given.cu_seqlens}
    packed = loss_and_gradients(model, given.tokens, given.positions, **more)
    model.zero_grad()
    alone = [
        (tokens[None], labels[None])
        for row, lengths in enumerate(LENGTHS)
        for tokens, labels in zip(
            given.tokens[row].split(lengths), given.labels[row].split(lengths), strict=True
        )
        if (labels != -100).any()
    ]

    def each(_: Any) -> Tensor:
        return torch.stack([model(tokens, labels=labels) for tokens, labels in alone]).sum()

    expected = each(None)
    expected.backward()
    grads = {key: param.grad for key, param in adapter_parameters(model).items()}
    check_same(packed, (expected.detach(), grads), 2e-6)
    assert len(PADDED) == len(LENGTHS)


@pytest.mark.parametrize("name", ["qwen3_5", *MIXTURES])
def test_200_tokens_from_states_equal_computing_them_anew(name: str, tmp_path: Path) -> None:
    """Prompts of three lengths in one batch, padded on the right."""
    hub_models.save_hub_model(name, tmp_path)
    model = native(tmp_path)
    hub_models.check_200_tokens(model, PROMPTS, *start(model, PROMPTS, 200, CPU))


@torch.no_grad()
def test_states_of_requests_that_come_and_go(tmp_path: Path) -> None:
    """A row that leaves gives its place to the last one; the storage grows."""
    hub_models.save_hub_model("qwen3_5", tmp_path)
    model = native(tmp_path)
    cache, running, done = RequestCache(model.config, CPU), list[list[int]](), list[list[int]]()
    waiting = [[7], *PROMPTS, list(range(300, 330))]
    while waiting or running:
        if waiting and len(running) < 3:
            prompt = waiting.pop()
            one, tokens = start(model, [prompt], 0, CPU)
            first = int(model(tokens, cache=one)[0].argmax())
            cache.add(one, 8)
            running.append([*prompt, first])
        logits = model(torch.tensor([[row[-1]] for row in running]), cache=cache)
        for row, token in zip(running, logits.argmax(-1).tolist(), strict=True):
            row.append(token)
        for at in reversed(range(len(running))):
            if len(running[at]) >= 8 + 2 * at and len(running[at]) % 3 == 0:
                last = running.pop()
                done.append(last if at == len(running) else running[at])
                if at < len(running):
                    running[at] = last
                cache.remove(at)
    assert len(done) == 5
    for row in done:
        anew = model(torch.tensor([row[:-1]]))[0].argmax(-1).tolist()
        prompt = next(p for p in [[7], *PROMPTS, list(range(300, 330))] if row[: len(p)] == p)
        assert anew[len(prompt) - 1 :] == row[len(prompt) :]


@pytest.mark.parametrize(
    "kept",
    [
        ActivationConfig("full"),
        ActivationConfig("selective"),
        ActivationConfig(offload=True),
        ActivationConfig("full", tile_tokens=16),
    ],
    ids=["full", "selective", "offload", "tiles"],
)
def test_gradients_do_not_depend_on_what_is_kept(kept: ActivationConfig, tmp_path: Path) -> None:
    hub_models.save_hub_model("qwen3_5", tmp_path)
    given = batch()
    more = {"labels": given.labels, "cu_seqlens": given.cu_seqlens}
    found = [
        loss_and_gradients(native(tmp_path, LORA, one), given.tokens, given.positions, **more)
        for one in (None, kept)
    ]
    # What is computed again has the same bits. Tiles add up in another order: 1.1e-6 with AMX.
    check_same(found[1], found[0], 0 if kept.tile_tokens is None else 4e-6)


def test_flash_linear_attention_gets_the_borders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_models.save_hub_model("qwen3_5", tmp_path)
    given = batch()
    more = {"labels": given.labels, "cu_seqlens": given.cu_seqlens}
    expected = loss_and_gradients(native(tmp_path, LORA), given.tokens, given.positions, **more)
    calls = []

    def kernel(*parts: Tensor, **of_rows: Any) -> Any:
        calls.append(of_rows.pop("use_qk_l2norm_in_kernel"))
        return each_alone(*parts, **of_rows)

    names = ["fla", "fla.ops", "fla.ops.gated_delta_rule"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[names[2]], "chunk_gated_delta_rule", kernel, raising=False)
    assert delta_kernel.delta_kernel(torch.ones(2)) is None
    monkeypatch.setattr(delta_kernel, "is_installed", lambda _: True)
    for tokens, has in ((1 << 19, False), ((1 << 19) - 1, True)):
        values: Any = torch.empty(1, tokens, 4096, dtype=torch.bfloat16, device="meta")
        one: Any = SimpleNamespace(numel=values.numel, is_cuda=True, dtype=values.dtype)
        assert delta_kernel.has_kernel(one, "fla") == has
    monkeypatch.setattr(delta_kernel, "has_kernel", lambda *_: True)
    found = loss_and_gradients(native(tmp_path, LORA), given.tokens, given.positions, **more)
    assert calls == [True] * 3
    check_same(found, expected, 1e-5)  # chunks begin elsewhere


def loss_of_part(folder: Path, parts: int, mode: Any) -> tuple[Tensor, dict[str, Tensor]]:
    world = cpu_world()
    model, given = native(folder, LORA, ActivationConfig(mode)), batch()
    given = given.cut(world.rank, parts)
    share_rows(model, parts, world)
    more = {"labels": given.labels, "cu_seqlens": given.cu_seqlens}
    return loss_and_gradients(model, given.tokens, given.positions, **more)


@pytest.mark.parametrize(
    ("name", "parts", "mode"),
    [
        ("qwen3_5", 2, "none"),
        pytest.param("qwen3_next", 3, "full", marks=pytest.mark.long),
    ],
)
def test_rows_that_ranks_share(name: str, parts: int, mode: Any, tmp_path: Path) -> None:
    hub_models.save_hub_model(name, tmp_path)
    given: Batch = batch()
    more = {"labels": given.labels, "cu_seqlens": given.cu_seqlens}
    expected = loss_and_gradients(native(tmp_path, LORA), given.tokens, given.positions, **more)
    found = run_ranks(parts, loss_of_part, tmp_path, parts, mode)
    loss = sum(one[0] for one in found)
    grads = {key: sum(one[1][key] for one in found) for key in expected[1]}
    check_same((loss, grads), expected, 5e-6)
    assert [0, *accumulate(map(sum, LENGTHS))][-1] == given.tokens.numel()


def test_decays_are_fp32_in_any_model(tmp_path: Path) -> None:
    hub_models.save_hub_model("qwen3_5", tmp_path)
    model = native(tmp_path)
    before = model.model.layers[0].linear_attn.A_log.clone()
    model.to(torch.bfloat16)
    held = {name: param.dtype for name, param in model.named_parameters()}
    kept = {name for name, dtype in held.items() if dtype == torch.float32}
    assert kept == {name for name in held if name.endswith((".A_log", ".dt_bias"))} and kept
    assert torch.equal(model.model.layers[0].linear_attn.A_log, before)


def test_what_they_do_not_have_is_one_line(tmp_path: Path) -> None:
    hub_models.save_hub_model("qwen3_5_whole", tmp_path)
    config = ModelConfig(str(tmp_path), dtype="fp32")
    model = config.any_config()
    cfg = SimpleNamespace(compile=True, sharding=ShardingConfig(context_parallel=2))
    train = AdapterConfig("lora", rank=4, alpha=8, modules_to_save=["lm_head"])
    for message, refused in {
        "compile: true; expected false": lambda: check_with_model(cfg, model),
        "packed: true; expected false for pairs": lambda: check_packed(True, 64, model),
        "model.path: .* takes more than text": config.decoder,
        "model.quantize_cache: /x; expected null": lambda: replace(
            config, quantize_cache="/x"
        ).any_config(),
        "modules_to_save: .lm_head.; expected null": lambda: add_adapters(config.build(), train),
    }.items():
        with pytest.raises(UserError, match=message) as error:
            refused()
        assert "\n" not in str(error.value)
