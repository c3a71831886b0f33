"""Adapters of some layers and linears, with ranks and alphas by name: trained, saved, read and
merged as PEFT does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from qfsdp.checkpoint.adapter_config_file import CONFIG_FILE, WEIGHTS_FILE
from qfsdp.checkpoint.adapter_files import (
    adapter_parameters,
    check_adapter,
    load_adapter,
    read_adapter_config,
    save_adapter,
)
from qfsdp.common.errors import UserError
from qfsdp.data import Batch
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.adapters.linears import add_adapters, init_adapters
from qfsdp.modules.low_rank.linear import refresh_dora_norms
from qfsdp.tensor_subclasses.dtensor import whole_tensor
from qfsdp.training.steps import StepClock
from tests.checkpoint import test_expert_adapter_files as experts
from tests.models import adapted_model, build_meta_model, cpu_world, load_model, randomize_adapters
from tests.peft_oracle import dequantized_base, run_peft
from tests.ranks import run_ranks
from tests.tiny import ROOT, load_recipe, recipe_config, run_recipe, write_tiny_model

pytestmark = pytest.mark.usefixtures("eager")

UPDATES = 10
RANKS = {r"layers\.1\.mlp\..*": 6, "q_proj": 3}
# Our section `adapter`, and the same for PEFT.
CASES: dict[str, tuple[AdapterConfig, dict[str, Any]]] = {
    "layers": (
        AdapterConfig("lora", 5, 7.0, targets=["q_proj", "mlp.down_proj"], layers="1-1"),
        {"target_modules": ["q_proj", "mlp.down_proj"], "layers_to_transform": [1]},
    ),
    "pattern, ranks, alphas": (
        AdapterConfig(
            "dora",
            5,
            7.0,
            targets=r".*\.(0\.self_attn\.[qv]_proj|1\.mlp\.(up|gate)_proj)",
            rank_pattern=RANKS,
            alpha_pattern={"up_proj": 11.0},
        ),
        {
            "target_modules": r".*\.(0\.self_attn\.[qv]_proj|1\.mlp\.(up|gate)_proj)",
            "rank_pattern": RANKS,
            "alpha_pattern": {"up_proj": 11},
            "use_dora": True,
        },
    ),
    "exclude, rslora, ranks": (
        AdapterConfig(
            "lora",
            5,
            7.0,
            exclude=["o_proj", "layers.0.mlp.up_proj"],
            rslora=True,
            rank_pattern={"v_proj": 2},
        ),
        {
            "target_modules": "all-linear",
            "exclude_modules": ["o_proj", "layers.0.mlp.up_proj"],
            "use_rslora": True,
            "rank_pattern": {"v_proj": 2},
        },
    ),
}
# Trains with PEFT from our files, saves, and merges.
SCRIPT = """
import json
import peft
from torch.nn.functional import cross_entropy

result = {}
for name, settings in json.loads(arguments[0]).items():
    config = peft.LoraConfig(r=5, lora_alpha=7, task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(base_model(), config).eval()
    start = load_file(f"{folder}/{name}/ours/adapter_model.safetensors")
    found = peft.set_peft_model_state_dict(model, start)
    assert not found.unexpected_keys, found
    of_ours = peft.PeftModel.from_pretrained(base_model(), f"{folder}/{name}/ours").eval()
    with torch.no_grad():
        start = model(tokens).logits
        read = of_ours(tokens).logits
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, eps=1e-4)
    losses = []
    for _ in range(10):
        logits = model(tokens).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(f"{folder}/{name}/peft")
    with torch.no_grad():
        logits = model(tokens).logits
        merged = {k: v.clone() for k, v in model.merge_and_unload().state_dict().items()}
    count = sum(p.numel() for p in trained)
    result[name] = {"start": start, "read": read, "losses": losses, "logits": logits,
                    "merged": merged, "count": count}
torch.save(result, f"{folder}/result.pt")
"""


def ten_updates(
    model_dir: Path, format: str, sections: dict[str, AdapterConfig], tokens: Tensor
) -> dict[str, tuple[list[float], Tensor, dict[str, Tensor], int]]:
    """Losses of ten updates, then logits, the adapters, and the trained numbers."""
    recipe, results = load_recipe(), {}
    for name, section in sections.items():
        cfg = recipe_config(
            recipe, model_dir, quantization=recipe.QuantizationConfig(format), adapter=section
        )
        world = cpu_world()
        model = recipe.load_model(cfg, world)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, eps=1e-4)
        share = tokens.tensor_split(world.size)[world.rank]
        labels = F.pad(share[:, 1:], (0, 1), value=-100)
        batches, losses = [Batch(share, labels, int((labels != -100).sum()))], []
        for _ in range(UPDATES):
            clock = StepClock(world.device)
            step = recipe.train_step(model, optimizer, None, batches, None, world, clock)
            losses.append(step["loss"])
        with torch.no_grad():
            logits = model.eval()(tokens)
        tensors = {key: whole_tensor(p).clone() for key, p in adapter_parameters(model).items()}
        results[name] = losses, logits, tensors, sum(param.numel() for param in trained)
    return results


@pytest.mark.long
@pytest.mark.parametrize("format", ["none", "nf4"])
def test_ten_updates_files_and_merges_are_those_of_peft(format: str, tmp_path: Path) -> None:
    model_dir = write_tiny_model(tmp_path / "model")
    tokens = torch.randint(0, 577, (2, 48), generator=torch.Generator().manual_seed(0))
    quantized = {"format": format, "targets": ["all-linear"]}
    sections, started = {}, {}
    for name, (section, _) in CASES.items():
        model = adapted_model(model_dir, section, **quantized).eval()
        randomize_adapters(model)
        folder = tmp_path / name / "ours"
        save_adapter(model, section, str(model_dir), folder, cpu_world())
        sections[name] = replace(section, start_from=str(folder))
        with torch.no_grad():
            started[name] = model(tokens)
    base = dequantized_base(load_model(model_dir, **quantized))
    settings = json.dumps({name: case[1] for name, case in CASES.items()})
    theirs = run_peft(SCRIPT, model_dir, base, tokens, tmp_path, settings)
    for name in CASES:
        for found in ("start", "read"):
            assert (theirs[name][found] - started[name]).abs().max() < 1e-5, (name, found)
    for size in (1, 2):
        for ours in run_ranks(size, ten_updates, model_dir, format, sections, tokens):
            for name, (losses, logits, tensors, count) in ours.items():
                assert losses == pytest.approx(theirs[name]["losses"], rel=1e-6)
                assert (logits - theirs[name]["logits"]).abs().max() < 1e-4
                saved = load_file(tmp_path / name / "peft" / WEIGHTS_FILE)
                assert saved.keys() == tensors.keys()
                worst = max((saved[k] - v).abs().max().item() for k, v in tensors.items())
                print(f"{format}, {size} ranks, {name}: adapters differ by {worst:.1e}")
                assert worst < 1e-5
                assert count == theirs[name]["count"]
    for name in CASES:
        of_peft(model_dir, tmp_path / name, format, tokens, theirs[name])


def of_peft(
    model_dir: Path, folder: Path, format: str, tokens: Tensor, theirs: dict[str, Any]
) -> None:
    """PEFT's file has PEFT's logits here, and is merged as PEFT merges it."""
    section = read_adapter_config(folder / "peft")
    model = adapted_model(model_dir, section, format=format, targets=["all-linear"]).eval()
    check_adapter(section, folder / "peft", model)
    load_adapter(model, folder / "peft")
    refresh_dora_norms(model)
    with torch.no_grad():
        assert (model(tokens) - theirs["logits"]).abs().max() < 1e-5
    words = ["--config", str(ROOT / "configs/merge.yaml"), f"model.path={model_dir}"]
    words += [f"adapter={folder / 'peft'}", f"output_dir={folder / 'merged'}", "dtype=fp32"]
    words += ["model.dtype=fp32", f"quantization.format={format}"]
    run_recipe("merge", words)
    for name, value in load_file(folder / "merged/model.safetensors").items():
        assert (value - theirs["merged"][name]).abs().max() < 1e-5, name


def test_files_are_read_with_what_they_leave_out(tmp_path: Path) -> None:
    """Whole names, so that PEFT and we adapt the same linears; patterns as in the config."""
    model_dir = write_tiny_model(tmp_path / "model")
    for name, (section, _) in CASES.items():
        model = adapted_model(model_dir, section)
        randomize_adapters(model)
        save_adapter(model, section, "base", tmp_path / name, cpu_world())
        written = json.loads((tmp_path / name / CONFIG_FILE).read_text())
        again = read_adapter_config(tmp_path / name)
        assert again.targets == written["target_modules"]
        assert all(target.startswith("model.layers.") for target in again.linears)
        patterns = section.rank_pattern, section.alpha_pattern
        assert (again.rank_pattern, again.alpha_pattern) == patterns
        for config in (section, again):
            check_adapter(config, tmp_path / name, build_meta_model(model_dir, adapter=config))
    layers, _ = CASES["layers"]
    ranked, of_ranks = CASES["pattern, ranks, alphas"][0], tmp_path / "pattern, ranks, alphas"
    for section, folder, message in (
        (replace(layers, layers=None), tmp_path / "layers", "target_modules .* leaves out linears"),
        (
            replace(ranked, rank_pattern={"q_proj": 3}),
            of_ranks,
            r"adapter.rank_pattern: model.layers.1.mlp.gate_proj gets rank 5, but in .* it has 6; "
            r"expected adapter.rank_pattern={",
        ),
        (
            replace(ranked, alpha_pattern={}),
            of_ranks,
            r"adapter.alpha_pattern: model.layers.1.mlp.up_proj gets a scaling of .*; expected "
            r'adapter.alpha_pattern={"up_proj": 11.0}',
        ),
    ):
        with pytest.raises(UserError, match=message) as error:
            check_adapter(section, folder, build_meta_model(model_dir, adapter=section))
        assert "\n" not in str(error.value)


READ = """
from peft import PeftModel

model = AutoModelForCausalLM.from_pretrained(config_dir, attn_implementation="eager").eval()
model = PeftModel.from_pretrained(model, arguments[0]).eval()
with torch.no_grad():
    torch.save({"logits": model(tokens).logits}, f"{folder}/result.pt")
"""


@pytest.mark.long
def test_experts_of_some_layers_with_ranks_of_their_own(tmp_path: Path) -> None:
    theirs, tokens = experts.reference("qwen3-moe"), experts.random_tokens()
    theirs.save_pretrained(tmp_path / "model")
    model, config = experts.adapted(
        "qwen3-moe",
        ["q_proj", "gate_up_proj", "down_proj", "gate"],
        layers=[1],
        rank_pattern={"experts.gate_up_proj": 6, "q_proj": 2},
        alpha_pattern={"down_proj": 3.0},
    )
    save_adapter(model, config, "base", tmp_path / "adapter", cpu_world())
    found = run_peft(
        READ, tmp_path / "model", {"x": torch.zeros(1)}, tokens, tmp_path, tmp_path / "adapter"
    )
    with torch.no_grad():
        assert (found["logits"] - model(tokens)).abs().max() < 1e-5
    again = read_adapter_config(tmp_path / "adapter")
    for section in (config, again):  # the run's, and what merges and generation read
        other = experts.ours(theirs)
        add_adapters(other, section)
        init_adapters(other, seed=1)
        check_adapter(section, tmp_path / "adapter", other)
        load_adapter(other, tmp_path / "adapter")
        with torch.no_grad():
            assert (other(tokens) - model(tokens)).abs().max() < 1e-5
