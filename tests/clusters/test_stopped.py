"""The shell code of examples/clusters: what a job does after SIGTERM. `tune` is a stand-in."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.waiting import LIMIT_S, wait_until

CLUSTERS = Path(__file__).resolve().parent.parent.parent / "examples" / "clusters"
# Waits until it is told to stop; "status=N" ends at once.
TUNE = """#!/bin/bash
echo "$*" > {folder}/words
for word in "$@"; do [[ $word == status=* ]] && exit ${{word#status=}}; done
trap 'exit 0' TERM
touch {folder}/started
while :; do sleep 0.05; done
"""
SCONTROL = """#!/bin/bash
[ "$1" = show ] && echo first && exit
echo "$*" >> {folder}/requeued
"""
SRUN = """#!/bin/bash
echo $$ > {folder}/step
while [[ $1 == -* ]]; do shift; done
exec "$@"
"""


def kubernetes() -> tuple[list[str], dict[str, str]]:
    runtime = next(yaml.safe_load_all((CLUSTERS / "trainjob.yaml").read_text()))
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    names = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")
    return container["command"], {f"PET_{name}": name.lower() for name in names}


def slurm() -> tuple[list[str], dict[str, str]]:
    variables = {"JOB_NODELIST": "n[1-2]", "JOB_ID": "7", "NNODES": "2", "NODEID": "0"}
    environment = {f"SLURM_{name}": value for name, value in variables.items()}
    return ["bash", str(CLUSTERS / "qfsdp.sbatch")], environment


@pytest.fixture(params=[kubernetes, slurm])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[list[str], dict[str, str], int]:
    """Command, environment, and the status of a job that was stopped."""
    command, variables = request.param()
    for name, text in (("tune", TUNE), ("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    environment = os.environ | variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return command, environment, 75 if request.param is kubernetes else 0


def test_a_stopped_job_goes_on(job: tuple[list[str], dict[str, str], int], tmp_path: Path) -> None:
    command, environment, status = job
    process = subprocess.Popen([*command, "recipe"], env=environment)
    wait_until((tmp_path / "started").exists, "the run has started")
    step = tmp_path / "step"  # Slurm signals what srun has started, Kubernetes the command
    os.kill(int(step.read_text()) if step.exists() else process.pid, signal.SIGTERM)
    assert process.wait(LIMIT_S) == status
    words = (tmp_path / "words").read_text().split()
    assert words[0] == "run" and words[-2:] == ["recipe", "resume=auto"]
    requeued = tmp_path / "requeued"
    assert not requeued.exists() if status else requeued.read_text() == "requeue 7\n"


@pytest.mark.parametrize("status", [0, 2, 76])
def test_a_run_that_ends_gives_its_status(
    job: tuple[list[str], dict[str, str], int], status: int, tmp_path: Path
) -> None:
    command, environment, _ = job
    done = subprocess.run(
        [*command, "recipe", f"status={status}"], env=environment, timeout=LIMIT_S
    )
    assert done.returncode == status and not (tmp_path / "requeued").exists()
