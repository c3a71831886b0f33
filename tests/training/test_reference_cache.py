"""Cached log-probabilities of the reference: those of live passes, computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qfsdp.config.load import load_config
from tests.ranks import run_ranks
from tests.tiny import load_recipe, write_tiny_run
from tests.toy_data import TOY_PAIRS

CONFIG = """
output_dir: {folder}/run
adapter: {{rank: 5, alpha: 7, method: dora}}
batch_size: 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("reference"), TOY_PAIRS + CONFIG)


def compute(folder: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reads or computes the numbers of each case; runs on every rank."""
    recipe = load_recipe("dpo_distributed")
    from qfsdp.training.preference import Objective
    from qfsdp.training.reference_cache import cached_logprobs

    found, model = [], None
    for case in cases:
        cfg = load_config(recipe.Config, ["--config", f"{folder}/config.yaml", *case["words"]])
        world = recipe.init_world(cfg.sharding, cfg.distributed)
        model = model or recipe.load_model(cfg, world)
        objective = Objective(cfg.loss, cfg.reference)
        loader, passes = recipe.build_loader(cfg, world), []
        live_reference = objective.reference

        def reference(
            model: Any, batch: Any, passes: Any = passes, how: Any = live_reference
        ) -> Any:
            passes.append(batch)
            return how(model, batch)

        objective.reference = reference  # type: ignore[method-assign]
        steps = case.get("steps", 99)
        known = cached_logprobs(cfg, loader, model, objective, world, steps)
        objective.reference = live_reference  # type: ignore[method-assign]
        live = []
        for batch in loader.epoch() if steps > 1 else ():
            for part, column in ((batch, 0), (batch.mismatched, 1)):
                if part is not None:
                    exact = objective.reference(model, part)
                    of_items = known[loader.items_of(batch)]
                    cached = of_items.flatten() if loader.paired else of_items[:, column]
                    live.append(float((exact - cached).abs().max()) if len(exact) else 0.0)
        found.append({"known": known, "passes": len(passes), "error": max(live, default=0.0)})
    return found


def run(folder: Path, size: int, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    results: list[list[dict[str, Any]]] = run_ranks(size, compute, folder, list(cases))
    return results[0]


def words(folder: Path, *more: str) -> dict[str, Any]:
    return {"words": [f"reference_logprobs={folder}", *more]}


@pytest.mark.parametrize(
    "size", [pytest.param(1, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.slow)]
)
def test_cached_numbers_are_those_of_live_passes(size: int, folder: Path, tmp_path: Path) -> None:
    """To the bit in the batches in which they were computed; in others within 1e-5."""
    kto = ["dataset.labels=true", "loss=kto"]
    cases = [
        words(tmp_path / "cache") | {"steps": 1},
        *(words(tmp_path / "cache") for _ in range(2)),
        words(tmp_path / "cache", "batch_size=3", "seed=5"),
        words(tmp_path / "cache", "packed=true"),
        words(tmp_path / "cache", "dataset.seed=1"),
        words(tmp_path / "cache", *kto),
        words(tmp_path / "cache", "reference=start"),
    ]
    first, rest, again, other, packed, data, labels, start = run(folder, size, *cases)
    assert 0 < first["known"].isnan().any(1).sum() == 11 - min(11, 2 * size)
    assert rest["error"] == 0 and 0 < rest["passes"] < 6 and not rest["known"].isnan().any()
    assert again["error"] == 0 and again["passes"] == 0
    assert other["error"] < 1e-5 and packed["error"] < 1e-5
    assert other["passes"] == packed["passes"] == 0
    for case in (data, labels, start):
        assert case["error"] == 0 and case["passes"] > 0
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_a_start_that_changes_the_base_is_another_reference(folder: Path, tmp_path: Path) -> None:
    """The base, quantized, differs from its rest, quantized, with PiSSA's product of any rank."""
    starts = [], ["adapter.init=pissa"], ["adapter.init=pissa", "adapter.rank=4"]
    cases = [words(tmp_path, "adapter.method=lora", *more) | {"steps": 1} for more in starts]
    assert [found["passes"] for found in run(folder, 1, *cases)] == [1, 1, 1]


@pytest.mark.long
def test_damage_is_noticed(folder: Path, tmp_path: Path, capfd: Any) -> None:
    (whole,) = run(folder, 1, words(tmp_path))
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    for bad, reason in (
        (good[:-4] + b"abcd", "its content has changed (SHA-256)"),
        (good[:50], "Error"),
        (b"", "Error"),
    ):
        file.write_bytes(bad)
        capfd.readouterr()
        (again,) = run(folder, 1, words(tmp_path))
        assert torch.equal(again["known"], whole["known"]) and again["passes"] == 6
        error = capfd.readouterr().err
        assert error.count("warning: reference_logprobs: ") == 1 and reason in error
    other = good.replace(b'"key":"', b'"key":"x', 1)
    file.write_bytes(other)
    found = run(folder, 1, words(tmp_path), words(tmp_path))
    assert [one["passes"] for one in found] == [6, 0]


def test_a_folder_that_cannot_be_written(folder: Path, capfd: Any) -> None:
    (found,) = run(folder, 1, words(Path("/proc/numbers")))  # even root makes no folder there
    assert found["error"] == 0 and found["passes"] == 6
    assert "cannot be written: No such file or directory; they are" in capfd.readouterr().err
