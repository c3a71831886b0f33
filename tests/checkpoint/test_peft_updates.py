"""Kinds and starts of adapters against PEFT: ten updates in fp32 from the same start, over a plain
and a quantized base; files that PEFT loads, and PEFT's that are loaded here; merged weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from qfsdp.checkpoint.adapter_files import (
    WEIGHTS_FILE,
    adapter_parameters,
    load_adapter,
    save_adapter,
)
from qfsdp.checkpoint.adapter_start import start_adapters
from qfsdp.checkpoint.plain_lora import START_FIELDS
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.checkpoint.weights.merge import Merge
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.low_rank.linear import low_rank_linears
from qfsdp.modules.quantized_linear import QuantizationConfig
from tests.models import cpu_world, load_model, randomize_adapters
from tests.peft_oracle import dequantized_base, run_peft
from tests.tiny import write_tiny_model

pytestmark = [pytest.mark.usefixtures("eager"), pytest.mark.long]

# With a smaller epsilon Adam makes steps of gradients that are rounding alone.
UPDATES, LR, EPS = 10, 3e-4, 1e-5
KINDS = {
    "pissa": AdapterConfig("lora", rank=8, alpha=12.0, init="pissa"),
    "olora": AdapterConfig("lora", rank=8, alpha=12.0, init="olora", rslora=True),
    # Neither 192 nor 577 inputs are a multiple of 10, and 32 does not divide 577.
    "miss": AdapterConfig("miss", rank=10),
    "oft": AdapterConfig("oft", targets=["q_proj", "k_proj", "o_proj", "up_proj", "lm_head"]),
}
CASES = [f"{name} {base}" for name in KINDS for base in ("none", "nf4")]
UNCHANGED = [case for case in CASES if not KINDS[case.split()[0]].changes_base]

SCRIPT = """
import torch.nn.functional as F
from peft import PeftModel, get_peft_model_state_dict

def based_on(weights):
    model = base_model()
    model.load_state_dict(load_file(weights), strict=False)
    return model

def loss_of(model, batch):
    logits = model(batch).logits.double()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

result = {}
for case in arguments:
    model = PeftModel.from_pretrained(
        based_on(f"{case}/held.safetensors"), f"{case}/start", is_trainable=True
    ).eval()
    adamw = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), %s, eps=%s,
                              weight_decay=0.0)
    losses = []
    for batch in tokens:
        loss = loss_of(model, batch)
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(f"{case}/theirs", save_embedding_layers=False)
    with torch.no_grad():
        logits = model(tokens[0]).logits
        whole = based_on(f"{case}/whole.safetensors")
        loaded = PeftModel.from_pretrained(whole, f"{case}/ours").eval()
        of_ours = loaded(tokens[0]).logits
        merged = {n: w.clone() for n, w in loaded.merge_and_unload().state_dict().items()}
    result[case] = {"losses": losses, "logits": logits, "of_ours": of_ours, "merged": merged}
torch.save(result, f"{folder}/result.pt")
""" % (f"lr={LR}", EPS)  # noqa: UP031  (braces of its own)


def ten_updates(model: Any, tokens: Tensor) -> list[float]:
    adamw = torch.optim.AdamW(
        (p for p in model.parameters() if p.requires_grad), lr=LR, eps=EPS, weight_decay=0.0
    )
    losses = []
    for batch in tokens:
        logits = model(batch).double()  # of a loss near 7, fp32 has 5e-7
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return losses


def write_start(model: Any, config: AdapterConfig, base: Path, to: Path) -> None:
    """The adapters as they are, of the base as the model holds it, and both bases."""
    start = replace(config, init="default")
    save_adapter(model, start, str(base), to / "start", cpu_world())
    ends = tuple(START_FIELDS.values())
    tensors = load_file(to / "start" / WEIGHTS_FILE)
    if config.changes_base:
        kept = {key: value for key, value in tensors.items() if not key.endswith(ends)}
        save_file(kept, to / "start" / WEIGHTS_FILE)
    held = dequantized_base(model)
    save_file(held, to / "held.safetensors")
    if config.changes_base:
        for name, module in low_rank_linears(model):
            product = module.scaling * module.lora_B @ module.lora_A
            held[f"{name}.weight"] = held[f"{name}.weight"] + product.detach()
    save_file(held, to / "whole.safetensors")


def trained_here(
    config: AdapterConfig,
    base: Path,
    to: Path,
    tokens: Tensor,
    started: Callable[[Any], None] = lambda _: None,
    **options: Any,
) -> dict[str, Any]:
    """What ten updates of an adapter make of it, with all that PEFT needs for the same in `to`.

    Args:
        started: is given the model as it begins.
        options: of `load_model`.
    """
    to.mkdir()
    model = load_model(base, adapter=config, **options)
    start_adapters(model, config, str(base), seed=0)
    started(model)
    if not config.changes_base:
        randomize_adapters(model)
    write_start(model, config, base, to)
    losses = ten_updates(model, tokens)
    save_adapter(model, config, str(base), to / "ours", cpu_world())
    with torch.no_grad():
        logits = model(tokens[0])
    found = {"losses": losses, "model": model, "logits": logits, "at": to, "base": base}
    return found | {"tokens": tokens[0], "config": config}


def add_theirs(cases: list[dict[str, Any]], base: Path, tokens: Tensor, root: Path) -> None:
    """What PEFT makes of the same starts, in one process, as "theirs" of each case."""
    weights = dequantized_base(load_model(base, format="none"))
    theirs = run_peft(SCRIPT, base, weights, tokens, root, *(case["at"] for case in cases))
    for case in cases:
        case["theirs"] = theirs[str(case["at"])]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """For every case what we compute, and what PEFT does, from one process."""
    root = tmp_path_factory.mktemp("peft")
    base = write_tiny_model(root / "model")
    tokens = torch.randint(0, 577, (UPDATES, 2, 24), generator=torch.Generator().manual_seed(0))
    found: dict[str, dict[str, Any]] = {}
    for case in CASES:
        name, format = case.split()
        to = root / case.replace(" ", "_")
        found[case] = trained_here(KINDS[name], base, to, tokens, format=format)
    add_theirs([*found.values()], base, tokens, root)
    return found


@pytest.mark.parametrize("case", CASES)
def test_ten_updates_as_peft(case: str, results: dict[str, Any]) -> None:
    ours, theirs = results[case], results[case]["theirs"]
    pairs = zip(ours["losses"], theirs["losses"], strict=True)
    losses = max(abs(a - b) for a, b in pairs)
    trained, worst = load_file(ours["at"] / "theirs" / WEIGHTS_FILE), 0.0
    for key, param in adapter_parameters(ours["model"]).items():
        if key in trained:
            worst = max(worst, (trained.pop(key) - param).abs().max().item())
    assert not trained
    print(f"{case}: losses differ by {losses:.1e}, adapters by {worst:.1e}")
    assert losses <= 1e-6 and worst <= 1e-5
    assert ours["losses"][0] != pytest.approx(ours["losses"][-1], abs=1e-3), "it must train"


@pytest.mark.parametrize("case", CASES)
def test_peft_loads_and_merges_ours(case: str, results: dict[str, Any]) -> None:
    """Over the whole base: of a base that the start has changed, W_res + s B A at the start."""
    ours, theirs = results[case], results[case]["theirs"]
    logits = (ours["logits"] - theirs["of_ours"]).abs().max().item()
    print(f"{case}: logits differ by {logits:.1e}")
    assert logits <= 1e-5 * ours["logits"].abs().max()
    name, format = case.split()
    if KINDS[name].changes_base and format != "none":
        return  # merged into the weights as they are stored, which have other errors
    weights, quantization = ModelWeights(ours["base"]), QuantizationConfig(format)
    quantization.targets = ["all-linear", "lm_head"]
    merge = Merge(weights, quantization, torch.float32, ours["at"] / "ours", torch.float32)
    merge.write(ours["at"] / "merged", cpu_world())
    merged = load_file(ours["at"] / "merged/model.safetensors")
    for key, value in theirs["merged"].items():
        torch.testing.assert_close(merged[key], value, rtol=0, atol=4e-6, msg=key)


@pytest.mark.parametrize("case", UNCHANGED)
def test_what_peft_has_trained_is_loaded(case: str, results: dict[str, Any]) -> None:
    found = results[case]
    name, format = case.split()
    config = replace(KINDS[name], start_from=str(found["at"] / "theirs"))
    model = load_model(found["base"], adapter=config, format=format)
    load_adapter(model, found["at"] / "theirs")
    with torch.no_grad():
        logits = (model(found["tokens"]) - found["theirs"]["logits"]).abs().max().item()
    assert logits <= 1e-5 * found["logits"].abs().max(), case
