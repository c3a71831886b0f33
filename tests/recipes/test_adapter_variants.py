"""IA3, MiSS, OFT, rsLoRA, LoRA+, whole modules and starts from the base, as runs of the recipe.

Losses and adapters are the same on 1, 2 and 3 ranks, and have the same bits in a resumed run.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qfsdp.checkpoint.adapter_files import WEIGHTS_FILE
from qfsdp.common.errors import UserError
from tests.json_lines import metric_lines
from tests.ranks import run_ranks
from tests.tiny import run_recipe, write_tiny_run
from tests.toy_data import TOY_CONFIG

CONFIG = (
    TOY_CONFIG
    + """\
output_dir: {folder}/run
adapter: {{rank: 5, alpha: 7}}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 0
max_steps: 3
checkpoint: {{every_n_steps: 2, keep_last: 99}}
"""
)
VARIANTS = {
    "lora": ["adapter.method=lora"],
    "rslora": ["adapter.method=lora", "adapter.rslora=true"],
    "lora_plus": ["adapter.method=dora", "adapter.lora_plus_ratio=8"],
    "loftq": ["adapter.method=lora", "adapter.init=loftq"],
    "loftq_dora": ["adapter.method=dora", "adapter.init=loftq"],
    "pissa": ["adapter.method=lora", "adapter.init=pissa"],
    "ia3": ["adapter.method=ia3", "optimizer.lr=0.01"],
    "miss": ["adapter.method=miss"],
    "oft": [
        "adapter.method=oft",
        "adapter.block_size=6",
        "adapter.targets=[q_proj,o_proj,lm_head]",
    ],
    "ia3_head": ["adapter.method=ia3", "optimizer.lr=0.01", "adapter.targets=[all-linear,lm_head]"],
    "whole": ["adapter.method=lora", "adapter.modules_to_save=[embed_tokens,lm_head]"],
    "whole_split": [
        "adapter.method=dora",
        "adapter.modules_to_save=[lm_head]",
        "sharding.vocabulary=split",
    ],
}
# On each rank torchao keeps 8-bit states for tensors of at least 4096 numbers, if 256 divides them.
EIGHT_BIT = ["optimizer=torchao.optim.AdamW8bit", "~optimizer.fused", "adapter.rank=64"]
EIGHT_BIT.append("adapter.targets=[q_proj,o_proj]")
RESUMED = {
    name: VARIANTS[name]
    for name in ("lora_plus", "loftq_dora", "pissa", "miss", "oft", "ia3_head", "whole")
}
RESUMED["lora_plus_8bit"] = [*VARIANTS["lora_plus"], *EIGHT_BIT]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("variants"), CONFIG)


def run(folder: Path, *words: str) -> None:
    run_recipe("qdora_distributed", ["--config", f"{folder}/config.yaml", *words])


def no_second_start(*_: object) -> None:
    raise AssertionError("a resumed run computes no start")


def run_variants(folder: Path) -> None:
    """Runs every variant, on two ranks also its resumed run from step 2. Runs on every rank."""
    import qfsdp.checkpoint.adapter_start as start

    size = int(os.environ.get("WORLD_SIZE", 1))
    torch.compiler.set_stance("force_eager")  # AdamW8bit compiles its update
    batch = f"batch_size={12 // size}"
    resumed = RESUMED if size == 2 else {}
    for name, words in (VARIANTS | resumed).items():
        whole = folder / f"{name}_{size}"
        run(folder, batch, f"output_dir={whole}", *words)
        if name in resumed:
            init, start.init_loftq = start.init_loftq, no_second_start
            rest = f"output_dir={whole}_rest"
            run(folder, batch, rest, f"resume={whole}/checkpoints/step_00000002", *words)
            start.init_loftq = init


def logged(run: Path, key: str) -> dict[int, float]:
    return {line["step"]: line[key] for line in metric_lines(run)}


def adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / WEIGHTS_FILE)


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    os.environ["QFSDP_EAGER_KERNELS"] = "1"
    for size in (1, 2, 3):
        run_ranks(size, run_variants, folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
def test_ranks_train_the_same(name: str, trained: Path) -> None:
    alone = trained / f"{name}_1"
    losses, tensors = logged(alone, "loss"), adapter(alone)
    assert len(losses) == 3
    for size in (2, 3):
        run = trained / f"{name}_{size}"
        assert logged(run, "loss") == pytest.approx(losses, abs=1e-5)
        found = adapter(run)
        assert found.keys() == tensors.keys()
        for key, value in tensors.items():
            # By norm, because Adam amplifies gradients that are only rounding. An update of the
            # wrong sign changes A by 2e-2 of its norm, B and factors by as much as they moved.
            assert (found[key] - value).norm() < 1e-3 * value.norm(), f"{size} ranks: {key}"


@pytest.mark.long
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_with_the_same_bits(name: str, trained: Path) -> None:
    """Two ranks, from step 2 of 3; the learning rates of both groups are restored."""
    whole, rest = trained / f"{name}_2", trained / f"{name}_2_rest"
    for key in ("loss", "lr", "grad_norm"):
        expected = logged(whole, key)
        assert logged(rest, key) == {3: expected[3]}
    expected_tensors = adapter(whole)
    for key, value in adapter(rest).items():
        assert torch.equal(value, expected_tensors[key]), key


@pytest.mark.long
def test_the_variants_are_other_runs(trained: Path) -> None:
    """First losses are equal, except where the start differs; last losses all differ."""
    first = {name: logged(trained / f"{name}_1", "loss")[1] for name in VARIANTS}
    last = {name: logged(trained / f"{name}_1", "loss")[3] for name in VARIANTS}
    for name in ("rslora", "lora_plus", "ia3", "miss", "oft", "ia3_head"):
        assert first[name] == pytest.approx(first["lora"], rel=1e-6), name
    for name in ("loftq", "pissa"):
        assert abs(first[name] - first["lora"]) > 1e-4
    assert first["loftq_dora"] == pytest.approx(first["loftq"], abs=1e-5)
    assert len({round(loss, 5) for loss in last.values()}) == len(VARIANTS)
    lr = logged(trained / "lora_plus_1", "lr")
    assert lr == logged(trained / "lora_1", "lr"), "what is logged is the rate of A"


@pytest.mark.long
def test_a_resumed_run_refuses_other_settings(trained: Path) -> None:
    origin = f"resume={trained}/lora_plus_1/checkpoints/step_00000002"
    words = ["batch_size=12", f"output_dir={trained}/other", origin, "adapter.method=dora"]
    with pytest.raises(UserError, match="adapter.lora_plus_ratio: was 8.0, is 4.0"):
        run(trained, *words, "adapter.lora_plus_ratio=4")
    with pytest.raises(UserError, match="adapter.init: was default, is loftq"):
        run(trained, *words, "adapter.lora_plus_ratio=8", "adapter.init=loftq")


def test_a_start_that_changes_weights_on_disk_is_told(folder: Path) -> None:
    words = ["adapter.method=lora", "adapter.init=olora", "sharding.offload_base=disk"]
    with pytest.raises(UserError, match="offload_base: 'disk' is not valid; expected none or cpu"):
        run(folder, *words)


def test_loftq_without_a_packed_base_is_told(folder: Path) -> None:
    with pytest.raises(UserError, match="adapter.init: 'loftq' compensates the quantization error"):
        run(folder, "adapter.init=loftq", "quantization.format=none")
