"""Limits of containers and of jobs, in the files by which Linux tells them."""

from __future__ import annotations

from pathlib import Path

import pytest

from qfsdp.common import control_groups
from qfsdp.common.devices import cores
from qfsdp.planning.hardware import machine_memory


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/", {"memory.max": "8192", "cpu.max": "50000 100000"}),  # a container
        (
            "0::/slurm/job_7/task_0",  # the job has the limits, not its tasks
            {
                "slurm/job_7/memory.max": "8192",
                "slurm/memory.max": "max",
                "slurm/job_7/task_0/cpu.max": "max 100000",
                "slurm/job_7/cpu.max": "100000 100000",
            },
        ),
        (
            "4:cpu,memory:/docker/a",  # version 1, which names the group as the host does
            {
                "memory/memory.limit_in_bytes": "8192",
                "cpu/cpu.cfs_quota_us": "100000",
                "cpu/cpu.cfs_period_us": "100000",
            },
        ),
    ],
)
def test_limits_of_containers_and_jobs(
    line: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, line, files, monkeypatch)
    assert (control_groups.memory_limit(), control_groups.core_limit()) == (8192, 1)
    assert (machine_memory(), cores()) == (8192, 1)


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/", {"memory.max": "max", "cpu.max": "max 100000"}),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}),
        ("1:name=systemd:/", {}),
    ],
)
def test_no_limits(
    line: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, line, files, monkeypatch)
    assert control_groups.memory_limit() is control_groups.core_limit() is None
    assert machine_memory() > 8192 and cores() >= 1


def test_a_system_without_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "none")
    assert control_groups.memory_limit() is control_groups.core_limit() is None


def write(folder: Path, line: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "own").write_text(f"2:pids:/\n{line}\n")
    for name, text in files.items():
        file = folder / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    monkeypatch.setattr(control_groups, "OWN", folder / "own")
    monkeypatch.setattr(control_groups, "ROOT", folder / "groups")
