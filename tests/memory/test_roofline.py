"""Step times against hand calculations; hardware figures as users write them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from qfsdp.common.errors import InvalidField, UserError
from qfsdp.planning.hardware import (
    GPUS,
    Hardware,
    HardwareConfig,
    check_bf16,
    known_gpu,
    parse_rate,
    with_memory,
)
from qfsdp.planning.roofline import Load, step_time

# A step reaches 75 of 100 TFLOP/s.
CARD = Hardware(
    device_memory=24 << 30,
    matmul_rate=100e12,
    memory_bandwidth=1e12,
    interconnect=50e9,
    pcie=25e9,
    host_bandwidth=80e9,
    disk=5e9,
    network=10e9,
)


def test_arithmetic_alone() -> None:
    time = step_time(Load(flops=150e12, dequantized_bytes=0.5e12), CARD, ranks=1)
    assert time.seconds == pytest.approx(2 + 0.5)
    assert time.bound == "compute"
    assert time.parts["dequantize"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("moves", "ranks", "bound", "moving"),
    [
        ({"wire_bytes": 200e9}, 1, "wire", 4),
        ({"to_device_bytes": 60e9, "to_host_bytes": 40e9}, 1, "PCIe", 4),
        ({"to_device_bytes": 100e9}, 4, "host memory", 5),  # 400 GB through 80 GB/s
        ({"disk_bytes": 25e9}, 2, "disk", 10),
        ({"wire_bytes": 100e9, "network_bytes": 30e9}, 1, "network", 3),
    ],
)
def test_transfers_overlap_with_arithmetic(
    moves: dict[str, float], ranks: int, bound: str, moving: float
) -> None:
    load = Load(flops=150e12, units=10, **moves)
    time = step_time(load, CARD, ranks)
    assert time.bound == bound
    assert time.seconds == pytest.approx(
        moving + moving / 10
    )  # one unit's transfer overlaps with nothing
    added = step_time(replace(load, prefetched=False), CARD, ranks)
    assert added.seconds == pytest.approx(2 + moving)
    hidden = step_time(replace(load, flops=75e12 * 20), CARD, ranks)
    assert (hidden.bound, hidden.seconds) == ("compute", pytest.approx(20 + moving / 10))


def test_gpus_without_a_link_communicate_over_pcie() -> None:
    load = Load(flops=0, wire_bytes=50e9, to_device_bytes=50e9, units=10**9)
    assert step_time(load, CARD, 1).seconds == pytest.approx(2)
    shared = step_time(load, replace(CARD, interconnect=None), 1)
    assert (shared.bound, shared.seconds) == ("PCIe", pytest.approx(4))


def test_the_optimizer_runs_where_its_state_is() -> None:
    load = Load(flops=0, trained=1e9)  # 28 GB
    assert step_time(load, CARD, 2).seconds == pytest.approx(0.028)
    on_host = step_time(replace(load, host_optimizer=True), CARD, 2)
    assert on_host.seconds == pytest.approx(28 / 40)


# ---- hardware ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rtx4090", "RTX 4090", "NVIDIA GeForce RTX 4090"])
def test_names_as_users_write_them(name: str) -> None:
    card = known_gpu(name)
    assert card.device_memory == int(23.6 * 2**30)
    assert card.matmul_rate == pytest.approx(0.8 * 165e12)
    assert card.interconnect is None


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("Tesla V100-PCIE-32GB", "v100-32"),
        ("Tesla T4", "t4"),
        ("NVIDIA RTX A5000", "a5000"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_names_as_drivers_report_them(driver: str, name: str) -> None:
    assert known_gpu(driver) == known_gpu(name)


@pytest.mark.parametrize("name", GPUS)
def test_every_known_gpu(name: str) -> None:
    card = known_gpu(name)
    assert 1 < card.matmul_rate / 1e13 < 200
    assert 0.2e12 < card.memory_bandwidth < 8e12 and 14 < card.device_memory / 2**30 < 200


@pytest.mark.parametrize("name", ["t4", "Tesla V100-SXM2-32GB"])
def test_a_gpu_without_bf16(name: str) -> None:
    with pytest.raises(UserError, match=f"^model.dtype: 'bf16', which a {name} .*; expected fp16$"):
        check_bf16(name, "bf16")
    for gpu, dtype in ((name, "fp16"), ("a10", "bf16"), (None, "bf16")):
        check_bf16(gpu, dtype)


def test_unknown_gpu() -> None:
    with pytest.raises(UserError, match="gpu: 'rtx4085' is unknown; did you mean 'rtx40[89]0'"):
        known_gpu("rtx4085")
    with pytest.raises(
        UserError, match="gpu: 'abacus' is unknown; expected one of v100-16, v100-32, "
    ):
        known_gpu("abacus")


def test_a_gpu_without_a_name() -> None:
    assert with_memory(24 << 30) == replace(known_gpu("rtx3090"), device_memory=24 << 30)
    assert with_memory(80 << 30) == replace(known_gpu("a100-80"), device_memory=80 << 30)
    assert with_memory(1 << 40).matmul_rate == known_gpu("mi300x").matmul_rate


def test_fields_replace_the_file_which_replaces_the_gpu(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    file.write_text(json.dumps({"pcie": 11e9, "disk": 7e9}))
    config = HardwareConfig(gpu="h100", hardware=str(file), pcie="20GB/s", interconnect="pcie")
    config.check()
    found = config.build(device_memory=1 << 30)
    assert (found.pcie, found.disk, found.interconnect) == (20e9, 7e9, None)
    assert found.device_memory == 1 << 30
    assert found.matmul_rate == known_gpu("h100").matmul_rate


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gpu: null; expected gpu=rtx4090, "):
        HardwareConfig().build()
    with pytest.raises(InvalidField, match="pcie: 'fast' is not valid; expected a "):
        HardwareConfig(pcie="fast").check()
    with pytest.raises(InvalidField, match="host_memory: 'all' is not valid; expected a size"):
        HardwareConfig(host_memory="all").check()
    file = tmp_path / "wrong.json"
    for text, message in (
        ("{", "is not valid; expected JSON: "),
        ("[]", "is not valid; expected a JSON object"),
        ('{"pci": 1}', "'pci' is unknown; expected one of "),
        ('{"pcie": "25GB"}', "pcie is '25GB'; expected a number above 0"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            HardwareConfig(hardware=str(file)).build(1 << 30)


def test_rates() -> None:
    assert parse_rate("25GB") == parse_rate("25 GB/s") == 25e9
    assert parse_rate("165TFLOPS") == parse_rate("165 TFLOP/s") == parse_rate("1.65e14") == 165e12
    for text in ("", "fast", "0GB", "-1GB", "1.2.3TFLOPS"):
        with pytest.raises(ValueError):
            parse_rate(text)
