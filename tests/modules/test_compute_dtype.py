"""bf16 models on a CPU without bf16 products: computed in fp32, and reported once."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.config.load import load_config
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.evaluation.inference_model import check_for_inference
from qfsdp.modules import compute_dtype as module
from qfsdp.modules.compute_dtype import compute_dtype, has_bf16_products, planned_for
from qfsdp.modules.quantized_linear import QuantizationConfig
from qfsdp.modules.trainable import TrainableConfig
from qfsdp.planning.estimate import Estimate, estimate
from tests.tiny import ROOT, load_recipe, write_tiny_model

BF16, FP32 = torch.bfloat16, torch.float32
LINE = "model.dtype: this CPU has no bf16 products; computing in fp32\n"


@pytest.fixture
def without_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_bf16_products", lambda: False)
    monkeypatch.setattr(module, "device_kind", lambda: module.planned_device or "cpu")
    monkeypatch.setenv(module.REPORTED, "")
    monkeypatch.delenv(module.REPORTED)


def test_without_bf16_products(
    without_products: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compute_dtype("fp32") == FP32 and capsys.readouterr().out == ""
    assert compute_dtype("bf16") == FP32
    config = ModelConfig(str(write_tiny_model(tmp_path / "model")), "bf16")
    model = check_for_inference(config, QuantizationConfig(), None, ShardingConfig())
    assert {p.dtype for p in model.parameters()} == {FP32}
    assert capsys.readouterr().out == LINE


def test_only_rank_0_reports(
    without_products: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert compute_dtype("bf16") == FP32 and capsys.readouterr().out == ""


def test_bf16_for_a_gpu(without_products: None, capsys: pytest.CaptureFixture[str]) -> None:
    with planned_for("cuda"):
        assert compute_dtype("bf16") == BF16
        with planned_for("cpu"):
            assert compute_dtype("fp32") == FP32
        assert compute_dtype("bf16") == BF16
    assert capsys.readouterr().out == ""


def test_with_bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_bf16_products", lambda: True)
    assert (compute_dtype("bf16"), compute_dtype("fp32")) == (BF16, FP32)


def test_trained_weights_are_cast(monkeypatch: pytest.MonkeyPatch, without_products: None) -> None:
    """They are held in `trainable.dtype`, whatever the CPU has."""
    fp32, bf16 = TrainableConfig(), TrainableConfig(dtype="bf16")
    assert not fp32.casts("bf16") and bf16.casts("bf16")
    monkeypatch.setattr(module, "has_bf16_products", lambda: True)
    assert fp32.casts("bf16") and not bf16.casts("bf16")


def test_estimates_know_the_device(without_products: None, tmp_path: Path) -> None:
    """bf16 for a GPU, even where it is estimated on a CPU without bf16 products."""
    model = write_tiny_model(tmp_path / "model")
    recipe = load_recipe()

    def found(dtype: str, target: Any) -> Estimate:
        words = ["max_seq_len=64", f"model.path={model}", f"model.dtype={dtype}"]
        argv = ["--config", "configs/smollm2_135m_qdora.yaml", *words]
        cfg = load_config(recipe.Config, argv)
        return estimate(recipe.build_model, recipe.train_step, cfg, 1, target=target)

    assert found("bf16", "cpu").peak == found("fp32", "cpu").peak
    assert found("bf16", "cuda").peak < 0.9 * found("fp32", "cuda").peak


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, False),  # Skylake, Ice Lake
        ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, True),  # Zen 4
        ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": True}, True),  # Sapphire Rapids
        ({}, False),
    ],
)
def test_detection_on_x86(
    capabilities: dict[str, bool], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert has_bf16_products.__wrapped__() == expected
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert has_bf16_products.__wrapped__()
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert not has_bf16_products.__wrapped__()


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_with_fewer_instructions(isa: str) -> None:
    """oneDNN takes its instructions from the environment, once per process."""
    code = "from qfsdp.modules.compute_dtype import compute_dtype; compute_dtype('bf16')"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa, "CUDA_VISIBLE_DEVICES": "", "RANK": "0"}
    environment.pop(module.REPORTED, None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, LINE)
