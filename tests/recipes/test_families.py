"""Every family through the recipes: quantized, trained, resumed, exported to PEFT and merged."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from qfsdp.checkpoint.adapter_files import WEIGHTS_FILE, load_adapter
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.low_rank.linear import refresh_dora_norms
from tests import tiny
from tests.json_lines import metric_lines
from tests.models import load_model
from tests.modules import test_families as families
from tests.modules.test_families import max_difference
from tests.peft_oracle import dequantized_base, run_peft
from tests.ranks import run_ranks
from tests.tiny import ROOT
from tests.toy_data import TOY_CONFIG

STEPS = 4
CONFIG = (
    TOY_CONFIG
    + """\
output_dir: {folder}/run
adapter: {{rank: 5, alpha: 7}}
epochs: 2
max_steps: 4
checkpoint: {{every_n_steps: 2, keep_last: 99}}
"""
)
NAMES = [
    "smollm3",
    "granite",
    "granite4",
    "seed-oss",
    "olmo2",
    "olmo3",
    "gemma3",
    "phi3-longrope",
    "glm4",
    "ministral",
    "ministral3",
    "llama-yarn",
]
MIXTURES = ["qwen3-moe-dense-layers", "qwen2-moe", "olmoe", "mixtral", "glm4-moe", "gpt-oss"]
ALL = [*NAMES, *MIXTURES]
PEFT_SCRIPT = """
from peft import PeftModel

result = {}
for family in arguments:
    config_dir, folder = f"{family}/plain", f"{family}/peft"
    with torch.no_grad():
        base = base_model()(tokens).logits
        adapted = PeftModel.from_pretrained(base_model(), f"{family}/run/adapter").eval()
        result[family] = {"base": base, "adapted": adapted(tokens).logits}
torch.save(result, f"{sys.argv[2]}/result.pt")
"""
TOKENS = torch.randint(1, 577, (2, 40), generator=torch.Generator().manual_seed(2))


def run_recipe(name: str, runs: list[tuple[str, list[str]]]) -> None:
    """Runs a recipe with each config and its words in turn; runs on every rank."""
    for config, words in runs:
        tiny.run_recipe(name, ["--config", config, *words])


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metric_lines(run)}


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(tokens)
    return out if isinstance(out, Tensor) else out.logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for every family, with its model, and the runs `run`, `alone` and `rest`: on two
    ranks, on one, and the second half of `run` again. One start of the ranks serves all."""
    root = tmp_path_factory.mktemp("families")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.SIZES, "vocab_size", 577)  # of the toy samples
        patch.setenv("QFSDP_EAGER_KERNELS", "1")
        quantized, together, alone = [], [], []
        for name in ALL:
            folder, config = root / name, root / name / "config.yaml"
            families.reference(name).save_pretrained(folder / "plain")
            config.write_text(CONFIG.format(folder=folder))
            words = [f"model.path={folder}/plain", f"output_dir={folder}/model", targets(name)]
            quantized.append((str(ROOT / "configs/quantize.yaml"), words))
            words = [f"output_dir={folder}/run", "batch_size=6", targets(name)]
            resume = f"resume={folder}/run/checkpoints/step_00000002"
            together.append((str(config), words))
            together.append((str(config), [*words, f"output_dir={folder}/rest", resume]))
            words = [f"output_dir={folder}/alone", "batch_size=12", targets(name)]
            alone.append((str(config), words))
        run_recipe("quantize", quantized)
        run_ranks(2, run_recipe, "qdora_distributed", together)
        run_ranks(1, run_recipe, "qdora_distributed", alone)
        yield root


@functools.cache
def targets(name: str) -> str:
    """All linears, and the output layer where it is not the embedding, as in tests.models."""
    tied = families.tiny_config(name).tie_word_embeddings
    return f"quantization.targets={'all-linear' if tied else '[all-linear,lm_head]'}"


@pytest.fixture(scope="module")
def ours(folder: Path) -> dict[str, Tensor]:
    """Logits of every family with its trained adapter."""
    found = {}
    for name in ALL:
        model = load_model(folder / name / "model", adapter=AdapterConfig(rank=5, alpha=7.0))
        load_adapter(model, folder / name / "run" / "adapter")
        refresh_dora_norms(model)
        if name in NAMES:
            (folder / name / "peft").mkdir()
            save_file(dequantized_base(model), folder / name / "peft" / "base.safetensors")
        found[name] = logits(model.eval(), TOKENS)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_two_ranks_one_rank_and_a_resumed_run_agree(name: str, folder: Path) -> None:
    expected = losses(folder / name / "run")
    assert len(expected) == STEPS
    assert losses(folder / name / "alone") == pytest.approx(expected, abs=1e-5)
    assert losses(folder / name / "rest") == {step: expected[step] for step in (3, 4)}
    adapters = [folder / name / run / "adapter" / WEIGHTS_FILE for run in ("run", "rest")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


@pytest.fixture(scope="module")
def theirs(folder: Path, ours: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """PEFT's logits of every dense family, without and with the adapter.

    PEFT has no DoRA for experts; `test_expert_adapter_files.py` loads LoRA of the mixtures.
    """
    places = [folder / name for name in NAMES]
    found = run_peft(PEFT_SCRIPT, places[0] / "plain", {}, TOKENS, folder / "all", *places)
    return {name: found[str(folder / name)] for name in NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_peft_computes_the_same(
    name: str, ours: dict[str, Tensor], theirs: dict[str, dict[str, Tensor]]
) -> None:
    moved, apart = (max_difference(theirs[name][key], ours[name]) for key in ("base", "adapted"))
    print(f"{name}: the adapter moves logits by {moved:.2f}; PEFT's differ by {apart:.1e}")
    assert moved > 0.01, "the adapter must matter"
    assert apart < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_transformers_loads_the_merged_model(
    name: str, folder: Path, ours: dict[str, Tensor]
) -> None:
    place = folder / name
    words = [f"model.path={place}/model", f"adapter={place}/run/adapter", "dtype=fp32"]
    words += ["model.dtype=fp32", f"output_dir={place}/merged", targets(name)]
    run_recipe("merge", [(str(ROOT / "configs/merge.yaml"), words)])
    merged = AutoModelForCausalLM.from_pretrained(place / "merged", dtype=torch.float32)
    apart = max_difference(logits(merged.eval(), TOKENS), ours[name])
    print(f"{name}: logits of the merged model differ by {apart:.1e}")
    assert apart < 1e-4
