"""Saved adapters of experts: PEFT computes the same logits and gradients from them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from qfsdp.checkpoint.adapter_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_parameters,
    add_read_adapters,
    check_adapter,
    load_adapter,
    read_adapter_config,
    save_adapter,
)
from qfsdp.checkpoint.expert_adapter_files import to_peft
from qfsdp.checkpoint.loftq import check_loftq
from qfsdp.common.errors import UserError
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.low_rank.linear import refresh_dora_norms
from qfsdp.modules.transformer import Decoder
from tests.models import cpu_world, randomize_adapters
from tests.modules.test_families import ours, random_tokens, reference
from tests.peft_oracle import run_peft

pytestmark = pytest.mark.usefixtures("eager")

FAMILY = "qwen3-moe-dense-layers"
ALL = ["all-linear"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
# Family, targets, adapter.expert_rank.
CASES: list[tuple[str, list[str], Any]] = [
    (FAMILY, ALL, None),
    (FAMILY, ["q_proj", "down_proj"], "divided"),
    ("mixtral", ["gate_up_proj"], 2),
    ("olmoe", ALL, None),
    ("gpt-oss", ALL, "divided"),
    ("qwen2-moe", ALL, 3),
    ("glm4-moe", ALL, None),
    ("glm4-moe", ["gate", "down_proj"], None),
    ("gpt-oss", ["q_proj", "router"], None),
    ("qwen2-moe", [*ALL, "gate"], 3),
    ("mixtral", [*ALL, "gate"], None),
]
PEFT_SCRIPT = """
import json
from peft import PeftModel

result = {}
for case in arguments:
    config = AutoConfig.from_pretrained(f"{case}/model")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    model.load_state_dict(load_file(f"{case}/base.safetensors"))
    model = PeftModel.from_pretrained(model, f"{case}/adapter", is_trainable=True).eval()
    logits = model(tokens).logits
    wanted = torch.load(f"{case}/labels.pt")
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
    loss.backward()
    grads = {
        name.replace(".default", ""): param.grad.clone()
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    result[case] = {"logits": logits.detach(), "grads": grads}
torch.save(result, f"{folder}/result.pt")
"""


def adapted(
    name: str, targets: list[str], expert_rank: Any = None, method: str = "lora", **more: Any
) -> tuple[Decoder, AdapterConfig]:
    """A tiny family with adapters that have values as after training."""
    model = ours(reference(name))
    config = AdapterConfig(method, 4, 8.0, targets=targets, expert_rank=expert_rank, **more)
    add_adapters(model, config)
    init_adapters(model, seed=0)
    randomize_adapters(model)
    return model, config


@pytest.mark.long
def test_peft_computes_the_same_logits_and_gradients(tmp_path: Path) -> None:
    tokens = random_tokens()
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    expected: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
    for at, (name, targets, expert_rank) in enumerate(CASES):
        folder = tmp_path / str(at)
        theirs = reference(name)
        theirs.config.save_pretrained(folder / "model")
        save_file(theirs.state_dict(), folder / "base.safetensors")
        torch.save(labels, folder / "labels.pt")
        model, config = adapted(name, targets, expert_rank)
        save_adapter(model, config, "base", folder / "adapter", cpu_world())
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        grads = {key: p.grad for key, p in adapter_parameters(model).items()}
        for key, grad in grads.items():
            assert grad is not None and grad.any(), key
        expected[str(folder)] = logits.detach(), grads
    found = run_peft(PEFT_SCRIPT, tmp_path, {"x": torch.zeros(1)}, tokens, tmp_path, *expected)
    for (case, (logits, grads)), (_, _, rank) in zip(expected.items(), CASES, strict=True):
        config = read_adapter_config(Path(case) / "adapter")
        assert (found[case]["logits"] - logits).abs().max() < 1e-4
        # B in the file is ours times a factor, so its gradient is ours divided by it.
        ranks = {config.of(f"experts.{name}").rank for name in ("gate_up_proj", "down_proj")}
        (own,) = ranks - {config.rank} or {config.rank}
        of_experts = AdapterConfig("lora", own, config.alpha)
        ratio = 1.0 if rank is None else config.scaling / of_experts.scaling
        in_layout = to_peft(grads, of_experts)
        for key, theirs_grad in found[case]["grads"].items():
            ours_grad = in_layout.pop(in_file(key, in_layout))
            if ".experts." in key and "lora_B" in key:
                ours_grad = ours_grad * ratio
            assert (ours_grad - theirs_grad).norm() < 1e-5 * theirs_grad.norm(), key
        assert not in_layout


def in_file(key: str, known: dict[str, Tensor]) -> str:
    """The key of a module of transformers in the file, where Mixtral's keeps its older name."""
    return key if key in known else key.replace(".mlp.", ".block_sparse_moe.")


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    for method, expert_rank in (("lora", None), ("lora", "divided"), ("dora", 3)):
        model, config = adapted(FAMILY, [*ALL, "gate"], expert_rank, method)
        save_adapter(model, config, "base", tmp_path, cpu_world())
        wanted = {key: p.detach().clone() for key, p in adapter_parameters(model).items()}
        init_adapters(model, seed=1)
        check_adapter(config, tmp_path, model)
        load_adapter(model, tmp_path)
        for key, param in adapter_parameters(model).items():
            assert torch.allclose(param, wanted[key], rtol=1e-6, atol=0), key
        again = read_adapter_config(tmp_path)
        top_k = model.config.experts.top_k if model.config.experts else 0
        experts = "model.layers.1.mlp.experts.down_proj"
        assert again.of(experts).rank == config.of_experts(top_k).rank


def test_experts_alone_beside_other_linears_of_their_name(tmp_path: Path) -> None:
    """As PEFT writes `target_parameters` of a mixture with shared experts or dense layers."""
    model, config = adapted("qwen2-moe", ["q_proj", *EXPERTS], None)
    save_adapter(model, config, "base", tmp_path, cpu_world())
    settings = json.loads((tmp_path / CONFIG_FILE).read_text())
    settings |= {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(settings))
    again = ours(reference("qwen2-moe"))
    check_adapter(add_read_adapters(again, tmp_path), tmp_path, again)
    load_adapter(again, tmp_path)
    tokens = random_tokens()
    assert (again(tokens) - model(tokens)).abs().max() < 1e-5
    with pytest.raises(UserError, match=f"{tmp_path}: .* 'model.layers.0.self_attn.q_proj' mat"):
        add_read_adapters(ours(reference("qwen3-5")), tmp_path)


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_shared_factors_are_written_for_every_expert(method: str, tmp_path: Path) -> None:
    """An adapter without sharing that reads the file computes the same, and one with it reads its
    own file; a file whose experts differ is refused."""
    model, config = adapted(FAMILY, ALL, 3, method, expert_sharing="outer")
    refresh_dora_norms(model)
    save_adapter(model, config, "base", tmp_path / "shared", cpu_world())
    tokens, wanted = random_tokens(), adapter_parameters(model)
    experts = "base_model.model.model.layers.1.mlp.experts"
    assert wanted[f"{experts}.gate_up_proj.lora_A.weight"].shape == (3, 132)
    assert wanted[f"{experts}.down_proj.lora_B.weight"].shape == (132, 3)

    whole, whole_config = adapted(FAMILY, ALL, 3, method)
    check_adapter(whole_config, tmp_path / "shared", whole)
    load_adapter(whole, tmp_path / "shared")
    refresh_dora_norms(whole)
    assert (whole(tokens) - model(tokens)).abs().max() < 1e-5
    values = {key: p.detach().clone() for key, p in wanted.items()}
    init_adapters(model, seed=1)
    check_adapter(config, tmp_path / "shared", model)
    load_adapter(model, tmp_path / "shared")
    for key, param in adapter_parameters(model).items():
        assert torch.allclose(param, values[key], rtol=1e-6, atol=0), key

    randomize_adapters(whole)
    save_adapter(whole, whole_config, "base", tmp_path / "whole", cpu_world())
    message = "lora_A.weight' differs between experts, which share it with adapter.expert_sharing"
    with pytest.raises(UserError, match=message):
        check_adapter(config, tmp_path / "whole", model)


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c, t: c.update(rank_pattern={"experts.down_proj": 3}),
            r"expected \[3 \* experts, in",
        ),
        (lambda c, t: c.update(r=8), r"has shape \[20, \d+\]; expected \[8 \* experts, in\]"),
        (lambda c, t: c.update(rank_pattern={"q_proj": 3}), "rank_pattern 3, but tensor .*q_proj"),
        (
            lambda c, t: c.update(rank_pattern={"experts.down_proj": 3, "experts.gate_up_proj": 3}),
            r"has shape \[20, \d+\]; expected \[3 \* experts, in\]",
        ),
        (
            lambda c, t: [t.pop(key) for key in list(t) if "layers.1.mlp.experts.lora" in key],
            "'down_proj' is adapted in other linears and not in experts of that name",
        ),
    ],
)
def test_files_that_do_not_match_are_refused_in_one_line(
    change: Any, message: str, tmp_path: Path
) -> None:
    model, config = adapted(FAMILY, ALL)
    save_adapter(model, config, "base", tmp_path, cpu_world())
    written = json.loads((tmp_path / CONFIG_FILE).read_text())
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    change(written, tensors)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(written))
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    with pytest.raises(UserError, match=message) as caught:
        check_adapter(config, tmp_path, model)
    assert "\n" not in str(caught.value)


def test_mistakes_in_configs_are_refused_in_one_line(tmp_path: Path) -> None:
    model, config = adapted(FAMILY, ALL, 3)
    save_adapter(model, config, "base", tmp_path, cpu_world())
    other, other_config = adapted(FAMILY, ALL)
    with pytest.raises(UserError, match=r"expected adapter.expert_rank=3$"):
        check_adapter(other_config, tmp_path, other)
    with pytest.raises(UserError, match="'loftq' has no start for experts"):
        check_loftq(model, SimpleNamespace(quantized=False))  # type: ignore[arg-type]
    for bad, message in (
        (AdapterConfig("ia3", targets=ALL), "adapter.method: 'ia3' has no form of experts"),
        (
            AdapterConfig("lora", 2, expert_rank=500),
            r"adapter.expert_rank: 500; expected at most \d+",
        ),
        (AdapterConfig("lora", 2, targets=["gate_proj"]), "'gate_proj' is not a linear of this"),
        (AdapterConfig("lora", 2, targets=["router"]), "'router' is not a linear of .*, gate$"),
        (AdapterConfig("ia3", targets=["gate"]), "adapter.method: 'ia3' has no form of routers"),
        (
            AdapterConfig("lora", 2, targets=["q_proj", "down_proj"], expert_sharing="outer"),
            "adapter.expert_sharing: 'outer', and adapter.targets selects down_proj of experts; "
            "expected gate_up_proj and down_proj",
        ),
    ):
        name = "qwen3-moe"  # without dense layers
        with pytest.raises(UserError, match=message):
            add_adapters(ours(reference(name)), bad)


# What PEFT makes of the targets gate_proj, up_proj and down_proj: twice the rank for both together.
FUSED_SCRIPT = """
from peft import LoraConfig, get_peft_model

model = AutoModelForCausalLM.from_pretrained(config_dir, attn_implementation="eager").eval()
settings = {
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    "rank_pattern": {arguments[0]: 8},
    "alpha_pattern": {arguments[0]: 16},
}
model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **settings))
torch.manual_seed(0)
for name, param in model.named_parameters():
    if "lora_" in name:
        param.data.normal_(std=0.2)
model.save_pretrained(f"{folder}/adapter")
with torch.no_grad():
    torch.save({"logits": model(tokens).logits}, f"{folder}/result.pt")
"""


@pytest.mark.long
@pytest.mark.parametrize("pattern", ["gate_up_proj", r".*\.gate_up_proj"])
def test_adapters_whose_experts_have_two_ranks_compute_as_in_peft(
    pattern: str, tmp_path: Path
) -> None:
    theirs, tokens = reference("qwen3-moe"), random_tokens()
    theirs.save_pretrained(tmp_path / "model")
    unused = {"x": torch.zeros(1)}
    result = run_peft(FUSED_SCRIPT, tmp_path / "model", unused, tokens, tmp_path, pattern)
    config = read_adapter_config(tmp_path / "adapter")
    experts = "model.layers.0.mlp.experts"
    ranks = [config.of(f"{experts}.{name}").rank for name in ("gate_up_proj", "down_proj")]
    assert ranks == [8, 4] and config.rank == 4
    model = ours(theirs)
    add_adapters(model, config)
    init_adapters(model, seed=0)
    check_adapter(config, tmp_path / "adapter", model)
    load_adapter(model, tmp_path / "adapter")
    assert torch.allclose(model(tokens), result["logits"], atol=1e-4)
    assert not torch.allclose(model(tokens), theirs(tokens).logits, atol=0.1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layers_to_transform": [0]}, "layers_to_transform .0. leaves out linears"),
        ({"target_modules": ".*layers.0.*q_proj"}, "target_modules '.*q_proj' leaves out linears"),
        ({"target_modules": ["layers.0.self_attn.q_proj"]}, "target_modules .* leaves out linears"),
    ],
)
def test_adapters_of_some_layers_are_refused_by_the_setting(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model, config = adapted(FAMILY, ["q_proj"])
    save_adapter(model, config, "base", tmp_path, cpu_world())
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    save_file({k: v for k, v in tensors.items() if ".layers.0." in k}, tmp_path / WEIGHTS_FILE)
    written = json.loads((tmp_path / CONFIG_FILE).read_text()) | settings
    (tmp_path / CONFIG_FILE).write_text(json.dumps(written))
    with pytest.raises(UserError, match=words) as caught:
        check_adapter(config, tmp_path, model)
    assert "\n" not in str(caught.value)
