"""The load-balancing loss in a run: the same on one and two ranks, and logged with its metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.json_lines import metric_lines
from tests.ranks import run_ranks
from tests.recipes.test_expert_adapters import CONFIG, train
from tests.recipes.test_sharded_mixtures import MIXTURE
from tests.tiny import write_tiny_run

pytestmark = [pytest.mark.usefixtures("eager"), pytest.mark.long]


def test_one_and_two_ranks_balance_alike(tmp_path: Path) -> None:
    write_tiny_run(tmp_path, CONFIG, **MIXTURE)
    runs: dict[str, list[dict[str, float]]] = {}
    for name, ranks, rows, factor in (("one", 1, 4, 0.5), ("two", 2, 1, 0.5), ("without", 1, 4, 0)):
        words = [f"model.router_aux_loss={factor}", f"output_dir={tmp_path / name}"]
        words += [f"batch_size={rows}", "global_batch_size=4", "max_steps=3", "preflight=false"]
        run_ranks(ranks, train, tmp_path, words)
        runs[name] = [line for line in metric_lines(tmp_path / name) if "loss" in line]
    assert [len(steps) for steps in runs.values()] == [3, 3, 3]
    for one, two, without in zip(*runs.values(), strict=True):
        for key in ("loss", "grad_norm", "routing/busiest_expert", "routing/entropy"):
            assert one[key] == pytest.approx(two[key], rel=1e-5)
        assert one["loss"] - without["loss"] > 0.9  # 0.5 times at least about top_k
        assert 0 < one["routing/entropy"] <= 1 and one["routing/balance_loss"] >= 1.9
