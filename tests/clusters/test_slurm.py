"""examples/clusters/qfsdp.sbatch on a Slurm of this machine: preempted, requeued, complete.

Needs Debian's slurm-wlm, and root: slurmd runs jobs as their users.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.json_lines import metric_lines
from tests.tiny import write_tiny_model
from tests.toy_data import TOY_CONFIG
from tests.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "examples" / "clusters" / "qfsdp.sbatch"
STEPS = 8
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or any(shutil.which(program) is None for program in PROGRAMS),
        reason="needs root and Slurm (Debian: slurm-wlm)",
    ),
]

# Two machines that are this one, and a partition whose jobs take nodes from the other's.
CONFIG = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=600
MinJobAge=3600
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=1
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs=1
PartitionName=cheap Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=600
PartitionName=urgent Nodes=n1,n2 PriorityTier=2 PreemptMode=OFF
"""


@dataclass
class Slurm:
    """A running cluster; `environment` makes Slurm's commands use it."""

    environment: dict[str, str]

    def __call__(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        shown = self("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def restarts(self, job: str) -> int:
        return int(self("scontrol", "show", "job", job).partition("Restarts=")[2].split()[0])


def free_ports(count: int) -> list[int]:
    listeners = [socket.socket() for _ in range(count)]
    for listener in listeners:
        listener.bind(("127.0.0.1", 0))
    ports = [int(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(folder=folder, host=socket.gethostname(), ports=free_ports(3)))
    environment = os.environ | {
        "SLURM_CONF": str(config),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "QFSDP_EAGER_KERNELS": "1",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",  # n1 and n2 are no names of hosts
        "RANKS": "1",
    }
    munge = [f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key"]
    munge += [f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log"]
    munge += [f"--seed-file={folder}/munge.seed", "--force", "--foreground"]
    commands = [["munged", *munge], ["slurmctld", "-D", "-f", str(config)]]
    commands += [["slurmd", "-D", "-f", str(config), "-N", name] for name in ("n1", "n2")]
    daemons = []
    try:
        for command in commands:
            log = (folder / f"{command[0]}-{len(daemons)}.out").open("w")
            daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            if command[0] == "munged":
                wait_until((folder / "munge.socket").exists, "munged listens")
        cluster = Slurm(environment)
        wait_until(lambda: nodes_are_idle(cluster), "both nodes are idle")
        yield cluster
        subprocess.run(["scancel", "--full", "--me"], env=environment)
    finally:
        for daemon in daemons[::-1]:
            daemon.terminate()
            daemon.wait(LIMIT_S)


def nodes_are_idle(cluster: Slurm) -> bool:
    command = ["sinfo", "--noheader", "--Node", "--partition=cheap", "--format=%T"]
    shown = subprocess.run(command, env=cluster.environment, capture_output=True, text=True)
    return shown.stdout.split() == ["idle", "idle"]


def logged(run: Path) -> dict[int, tuple[float, float]]:
    lines = metric_lines(run)
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


def test_a_preempted_job_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    config = tmp_path / "c.yaml"
    config.write_text(TOY_CONFIG.format(folder=tmp_path) + f"max_steps: {STEPS}\nepochs: 9\n")
    hold, resources = tmp_path / "hold", ["--gpus-per-node=0", "--cpus-per-task=1"]

    def submit(out: str, *flags: str) -> str:
        words = [
            "recipes/qdora_distributed",
            "--config",
            str(config),
            f"output_dir={tmp_path / out}",
        ]
        log = f"--output={tmp_path}/{out}.log"
        return slurm("sbatch", "--parsable", *resources, log, *flags, str(SCRIPT), *words)

    # Both machines train until three steps are logged; then they wait, until they are stopped.
    run = tmp_path / "preempted"
    hold.write_text(str(run / "metrics.jsonl"))
    job = submit("preempted", f"--export=ALL,TESTS_HOLD_FILE={hold}")
    wait_until(lambda: (run / "metrics.jsonl").exists() and len(logged(run)) >= 3, "3 steps")
    quick = ["--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=hostname"]
    urgent = slurm("sbatch", "--parsable", *quick)
    wait_until(lambda: slurm.restarts(job) == 1, "the job is requeued")
    hold.unlink()
    wait_until(lambda: slurm.state(job) == "COMPLETED", "the job is complete")
    assert slurm.state(urgent) == "COMPLETED"

    whole = submit("whole")
    wait_until(lambda: slurm.state(whole) == "COMPLETED", "the other job is complete")
    assert slurm.restarts(whole) == 0
    assert logged(run) == logged(tmp_path / "whole") and len(logged(run)) == STEPS
    for name in ("preempted", "whole"):
        assert (tmp_path / name / "adapter" / "adapter_model.safetensors").is_file()
    said = (tmp_path / "preempted.log").read_text()
    assert "saving after step" in said and "Traceback" not in said


def test_a_mistake_ends_the_job(slurm: Slurm, tmp_path: Path) -> None:
    flags = ["--gpus-per-node=0", "--cpus-per-task=1", f"--output={tmp_path}/log"]
    words = ["recipes/qdora_distributed", "--config", "configs/smollm2_135m_qdora.yaml"]
    job = slurm("sbatch", "--parsable", *flags, str(SCRIPT), *words, "adapter.rnak=8")
    wait_until(lambda: slurm.state(job) == "FAILED", "the job has failed")
    assert slurm.restarts(job) == 0
    said = (tmp_path / "log").read_text()
    assert "unknown key 'adapter.rnak'; did you mean 'adapter.rank'?" in said
