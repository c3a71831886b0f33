"""Preflight refuses runs that cannot fit and suggests changes that do fit.

Some tests use the real dry run of a small model, others a formula in its place.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from qfsdp.launch import ranks as ranks_module
from qfsdp.planning import predict, preflight
from qfsdp.planning.changes import as_words, changed
from qfsdp.planning.estimate import Estimate, Point
from qfsdp.planning.hardware import known_gpu, machine_memory
from qfsdp.planning.predict import PROCESS_BYTES, Predictor
from qfsdp.planning.preflight import check_memory, option_groups, refusal, suggest
from tests.tiny import ROOT, TINY_CONFIG, load_recipe, write_tiny_model

MIB = 1 << 20
SHAPE = {"num_hidden_layers": 4, "hidden_size": 384, "max_position_embeddings": 4096}


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    """The words of a config whose model has no weights."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY_CONFIG | SHAPE))
    words = [f"model.path={model}", "batch_size=4", "max_seq_len=4096", "adapter.method=lora"]
    return ["--config", str(ROOT / "configs/smollm2_135m_qdora.yaml"), *words]


def formula(
    build_model: Any, train_step: Any, cfg: Any, world_size: int, local: int, target: str
) -> Estimate:
    """Stands for the dry run: 1024 MiB of base, 100 of activations per sample, and 100 that only
    `cpu_offload` moves."""
    base = 1024 // (world_size if cfg.sharding.strategy == "full_shard" else 1)
    kept = {"none": 100, "selective": 60, "full": 30}[cfg.activation.checkpointing]
    kinds = {"base": base, "activations": cfg.batch_size * kept, "trained": 100}
    host = {}
    if cfg.activation.offload:
        host["activations"] = kinds.pop("activations")
    if cfg.sharding.offload_base != "none" or cfg.sharding.cpu_offload:
        host["base"] = kinds.pop("base")
    if cfg.sharding.cpu_offload:
        host["trained"] = kinds.pop("trained")
    kinds, host = ({k: size * MIB for k, size in part.items()} for part in (kinds, host))
    peak = sum(kinds.values())
    moved = {"to_device": sum(host.values()) * cfg.gradient_accumulation_steps}
    where = Point("", "", 0, {})
    return Estimate(peak, kinds, where, 0, host, {}, moved, [], peak)


@pytest.fixture
def by_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "Predictor", partial(Predictor, estimate=formula))
    monkeypatch.setattr(predict, "CONTEXT_BYTES", 0)  # the formula counts tensors only


def read(argv: list[str], *words: str) -> tuple[ModuleType, Any]:
    recipe = load_recipe()
    return recipe, load_config(recipe.Config, [*argv, *words])


def check(argv: list[str], *words: str) -> None:
    recipe, cfg = read(argv, *words)
    check_memory(cfg, recipe.build_model, recipe.train_step)


def refused(argv: list[str], *words: str) -> str:
    with pytest.raises(UserError) as caught:
        check(argv, *words)
    message = str(caught.value)
    assert "\n" not in message
    return message


def ways(message: str) -> list[list[str]]:
    """The words of each suggestion in a message."""
    return [found.split() for found in re.findall(r"with ((?:\S+=\S+ )+)\(", message)]


def test_a_run_that_fits_is_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    check(argv, "device_memory=8GiB")
    out = capsys.readouterr().out
    assert re.fullmatch(r"memory: about [\d.]+ GiB of 8.00 GiB per rank \(preflight\)\n", out)


def check_suggestions(argv: list[str], memory: str) -> list[list[str]]:
    """Applies every suggestion as a user would; returns their words."""
    suggested = ways(refused(argv, memory))
    for words in suggested:
        cfg = read(argv, memory, *words)[1]
        assert cfg.batch_size * cfg.gradient_accumulation_steps == 4
        check(argv, memory, *words)
    return suggested


@pytest.mark.long
def test_every_suggestion_fits(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    check(argv, "device_memory=8GiB")
    size = re.search(r"about ([\d.]+) GiB", capsys.readouterr().out)
    assert size is not None
    assert len(check_suggestions(argv, f"device_memory={float(size[1]) * 0.95}GiB")) == 3


@pytest.mark.usefixtures("by_formula")
def test_the_message_has_need_and_largest_kind(argv: list[str]) -> None:
    message = refused(argv, "device_memory=1.4GiB")
    assert message.startswith(
        "memory: a step needs 1.49 GiB per rank (base: 1.00 GiB); available: 1.40 GiB; "
        "it would fit with "
    )


@pytest.mark.usefixtures("by_formula")
@pytest.mark.parametrize(("size", "count"), [(1500, 3), (1300, 3), (900, 2), (320, 3), (120, 3)])
def test_every_combination_fits(argv: list[str], size: int, count: int) -> None:
    found = check_suggestions(argv, f"device_memory={size}MiB")
    assert len(found) == count
    if size < 1024:
        outside = {"sharding.offload_base=cpu", "sharding.cpu_offload=true"}
        assert all(outside & {*words} for words in found)


@pytest.mark.usefixtures("by_formula")
def test_no_change_is_enough(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "option_groups", lambda predict: [])
    message = refused(argv, "device_memory=800MiB")
    assert message.endswith(
        "not even another config would fit; it needs GPUs of 1.49 GiB, or 4 ranks"
    )


def test_preflight_false(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    check(argv, "device_memory=1MiB", "preflight=false")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["device_memory=1KiB"],
            "device_memory: 1.00 KiB; expected more than the 768.00 MiB that CUDA takes for every",
        ),
        (
            ["device_memory=1GiB", "batch_size=100000"],
            "batch_size: 100000 rows of 4096 tokens; 1.00 GiB per rank hold one layer of at most ",
        ),
        (
            ["device_memory=800MiB", "model.path={huge}", "max_seq_len=100000000"],
            "max_seq_len: 100000000; 800.00 MiB per rank hold one layer of at most ",
        ),
    ],
)
def test_bounds_need_no_dry_run(
    argv: list[str], words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Predictor, "__call__", lambda self, changes: pytest.fail("a dry run"))
    huge = write_tiny_model(tmp_path / "huge", max_position_embeddings=2**31 - 1)
    given = [word.format(huge=huge) for word in words]
    assert refused(argv, *given).startswith(message)


def test_a_bad_size(argv: list[str]) -> None:
    assert "expected a size such as 24GiB" in refused(argv, f"device_memory={'9' * 400}GiB")
    assert "device_memory: 'much'; expected a size such as 24GiB" in refused(
        argv, "device_memory=much"
    )


def test_a_rank_on_the_cpu_has_its_share_of_host_memory(
    argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    hardware, target = preflight.this_machine(read(argv)[1], ranks=4)
    assert (hardware.device_memory, target) == (machine_memory() // 4, "cpu")


# ---- suggestions ---------------------------------------------------------------------------


def predictor(argv: list[str], size: int, *words: str, world_size: int = 2) -> Predictor:
    recipe, cfg = read(argv, *words)
    hardware = replace(known_gpu("rtx4090"), device_memory=size * MIB)
    functions = (recipe.build_model, recipe.train_step)
    return Predictor(*functions, cfg, world_size, world_size, hardware, estimate=formula)


def test_options_save_more_than_the_config(argv: list[str]) -> None:
    words = ("activation.checkpointing=selective", "sharding.strategy=ddp")
    found = option_groups(predictor(argv, 1000, *words))
    assert found[0] == [{"activation.checkpointing": "full"}]
    assert [as_words(option) for option in found[1]] == [
        "batch_size=2 gradient_accumulation_steps=2",
        "batch_size=1 gradient_accumulation_steps=4",
    ]
    for group in found:  # each gives a valid config
        for option in group:
            changed(read(argv, *words)[1], option)
    alone = option_groups(predictor(argv, 1000, world_size=1))
    assert not any(key == "sharding.strategy" for group in alone for o in group for key in o)


def test_suggestions_are_ordered_and_none_extends_another(argv: list[str]) -> None:
    predict = predictor(argv, 900)
    found, _ = suggest(predict, predict({}))
    assert len(found) == 3
    times = [p.time.seconds for p in found]
    assert times == sorted(times)
    for one in found:
        others = [other.changes.items() for other in found if other is not one]
        assert not any(one.changes.items() <= other for other in others)


def test_of_far_too_large_a_micro_batch_only_its_size_is_advised(argv: list[str]) -> None:
    predict = predictor(argv, 3000, "batch_size=64", world_size=1)
    found, _ = suggest(predict, predict({}))
    assert [as_words(p.changes) for p in found] == ["batch_size=16 gradient_accumulation_steps=4"]
    assert predict.count == 3  # as given, the smallest, and the advice
    nearer = predictor(argv, 4000, "batch_size=64", world_size=1)
    assert len(suggest(nearer, nearer({}))[0]) == 3
    without = predictor(argv, 1000, "batch_size=64", world_size=1)  # the base alone takes more
    assert all(len(p.changes) > 2 for p in suggest(without, without({}))[0])


def test_too_little_host_memory(argv: list[str]) -> None:
    predict = predictor(argv, 4000, "activation.offload=true")
    now = predict({})
    assert now.host_bytes == 2 * (PROCESS_BYTES + 400 * MIB)
    predict.hardware = replace(predict.hardware, host_memory=2 * PROCESS_BYTES + 500 * MIB)
    message = refusal(predict, now)
    assert message.startswith(
        "memory: a step needs 6.78 GiB of host memory per machine; available: "
    )
    assert ["activation.checkpointing=selective"] in ways(message)


# ---- how many ranks ------------------------------------------------------------------------


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ranks_module, "local_world_size", lambda: 2)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield


@pytest.mark.usefixtures("two_devices")
def test_ranks_of_a_plain_start_and_of_torchruns_flags() -> None:
    assert ranks_module.planned_ranks() == (2, 2)
    for flags, ranks in ((("1", "4"), (4, 4)), (("2:3", "4"), (8, 4)), (("2", "gpu"), (4, 2))):
        with ranks_module.torchrun_flags(*flags):
            assert ranks_module.planned_ranks() == ranks
    assert ranks_module.planned_ranks() == (2, 2)


class ReadsValues(torch.optim.SGD):
    """Reads values, which fake tensors do not have."""

    def step(self, closure: Any = None) -> None:
        assert self.param_groups[0]["params"][0].flatten()[:2].tolist() != [1.0, 1.0]


def test_a_failing_dry_run_does_not_stop_training(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"optimizer._component_={__name__}.ReadsValues", "~optimizer.fused"]
    monkeypatch.setitem(sys.modules, __name__, sys.modules[ReadsValues.__module__])
    check(argv, *words)
    err = capsys.readouterr().err
    assert err.startswith("memory: not estimated, training starts without a check (")
    assert err.count("\n") == 1
