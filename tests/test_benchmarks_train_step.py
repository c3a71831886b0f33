"""`benchmarks/train_step.py`: figures from given steps, and the choice of groups."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.train_step import Answer, Contestant, chosen_groups, figures
from benchmarks.train_step_worker import Job


def steps(seconds: list[float], losses: list[float], peak: float = 1e9) -> list[Answer]:
    """Answers of a warm-up step of 100 s and of steps of `seconds`; the first has the peak."""
    rows = zip([100.0, *seconds], losses, strict=True)
    rest = {"peak": 0.0, "rss": 2e9, "idle": 0.0}
    answers = [{"seconds": s, "cpu": 2 * s, "loss": x} | rest for s, x in rows]
    answers[0]["peak"] = peak
    return answers


def test_ratios_compare_the_steps_of_a_turn_in_the_first_group() -> None:
    ours = steps([1.0, 2.0, 4.0], [3.0, 2.0, 1.0, 0.5])
    group = {
        "ours_qlora": ours,
        "ours_qdora": steps([1.1, 2.4, 6.0], [3.0, 2.0, 1.0, 0.5], peak=1.2e9),
        "peft_qlora": steps([2.0, 4.0, 4.0], [3.0, 2.25, 1.0, 0.5], peak=4e9),
    }
    noisy = {
        "ours_qlora": steps([9.0, 9.0, 9.0], [3.0, 2.0, 1.0, 0.5]),
        "torchtune_qlora": steps([9.0, 18.0, 27.0], [3.0, 1.0, 1.0, 0.5]),
    }
    found = figures([group, noisy], warmup=1, tokens=100)
    assert found["qdora_over_qlora_time"] == pytest.approx(1.2)
    assert found["qdora_over_qlora_time_min"] == pytest.approx(1.1)
    assert found["qdora_over_qlora_time_max"] == pytest.approx(1.5)
    assert found["qlora_over_peft_tokens"] == 2.0 and found["qlora_over_peft_tokens_min"] == 1.0
    assert found["qdora_over_qlora_memory"] == pytest.approx(1.2)
    assert found["memory_over_peft"] == 0.25
    assert found["ours_qlora_seconds"] == 2.0 and found["ours_qlora_cpu_seconds"] == 4.0
    assert found["ours_qlora_tokens_per_second"] == 50.0
    assert found["qlora_over_torchtune_tokens"] == 2.0
    assert found["max_loss_difference"] == 0.25 and found["max_loss_difference_torchtune"] == 1.0
    assert "lora_over_peft_tokens" not in found


def test_another_checkout_is_compared_by_seconds_and_by_cpu_seconds() -> None:
    assert chosen_groups([], ["ours", "before"])[0] == ["ours_lora", "before_lora"]
    group = {
        "ours_lora": steps([1.0, 3.0, 2.0], [1.0] * 4),
        "before_lora": steps([2.0, 3.0, 1.0], [1.0] * 4),
    }
    group["before_lora"][1]["cpu"] = 20.0  # one of three
    found = figures([group], warmup=1, tokens=1)
    assert found["lora_over_before_time"] == found["lora_over_before_time_cpu"] == 1.0
    assert found["lora_over_before_time_max"] == 2.0


def test_groups_leave_out_contestants_that_cannot_run() -> None:
    groups = chosen_groups([], ["ours", "peft"])
    assert ["ours_qlora", "ours_lora", "peft_lora"] in groups
    assert not any("torchtune" in name for group in groups for name in group)
    assert ["ours_qlora"] not in groups  # another group has it
    assert chosen_groups(["torchtune"], ["ours", "torchtune"]) == [
        ["torchtune_qlora"],
        ["torchtune_lora"],
    ]


def test_a_contestant_runs_the_code_of_its_checkout(tmp_path: Path) -> None:
    """Where qfsdp is installed, Python imports the installed one at its start."""
    (tmp_path / "qfsdp").mkdir()
    (tmp_path / "qfsdp/__init__.py").touch()
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/train_step_worker.py").write_text(
        "import json, qfsdp\n"
        f"print(json.dumps({{'own': qfsdp.__file__.startswith('{tmp_path}/')}}), flush=True)\n"
    )
    job = Job("ours", "lora", "nf4", 4, str(tmp_path), 1, 8, "cpu")
    contestant = Contestant("before_qlora", job, Path(sys.executable), tmp_path)
    assert contestant.answer() == {"own": True}
    contestant.close()
