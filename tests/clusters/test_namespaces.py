"""Two machines with a network between them: network namespaces, two ranks in each.

Needs root and Debian's iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qfsdp.launch.lost_peers import LOST_PEER_STATUS
from tests.json_lines import metric_lines
from tests.tiny import write_tiny_model
from tests.toy_data import TOY_CONFIG
from tests.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
HOSTS = {"qfsdp-a": "10.213.7.1", "qfsdp-b": "10.213.7.2"}  # namespace -> its address
STEPS = 6

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
    ),
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two namespaces, joined by a cable."""
    one, two = HOSTS
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", "eth9", "netns", one, "type", "veth", "peer", "eth9", "netns", two)
        for host, address in HOSTS.items():
            ip("-n", host, "address", "add", f"{address}/24", "dev", "eth9")
            for link in ("eth9", "lo"):
                ip("-n", host, "link", "set", link, "up")
        yield list(HOSTS)
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True)


def start(host: str | None, *words: str, **variables: str) -> subprocess.Popen[str]:
    """The command `qfsdp run` on a host, in a session of its own; None: outside of namespaces."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "QFSDP_EAGER_KERNELS": "1"}
    environment |= {"OMP_NUM_THREADS": "1"} | variables
    inside = []
    if host is not None:
        environment["GLOO_SOCKET_IFNAME"] = "eth9"  # gloo would take the address of the host's name
        inside = ["ip", "netns", "exec", host]
    command = [*inside, sys.executable, "-m", "qfsdp.cli.command", "run", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def agents(hosts: list[str], words: list[str], **variables: str) -> list[subprocess.Popen[str]]:
    meet = ["--nnodes", "2", "--nproc_per_node", "2", "--master_addr", HOSTS[hosts[0]]]
    return [
        start(host, *meet, "--node_rank", str(rank), *words, **variables)
        for rank, host in enumerate(hosts)
    ]


def logged(run: Path) -> dict[int, tuple[float, float]]:
    lines = metric_lines(run)
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


def test_hybrid_sharding_over_two_hosts_and_a_killed_one(hosts: list[str], tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    config = tmp_path / "c.yaml"
    keys = f"max_steps: {STEPS}\nepochs: 9\nsharding: {{strategy: hybrid_full_shard}}\n"
    config.write_text(TOY_CONFIG.format(folder=tmp_path) + keys)
    words = ["qdora_distributed", "--config", str(config), "checkpoint.every_n_steps=1"]

    whole = tmp_path / "whole"
    for agent in agents(hosts, [*words, f"output_dir={whole}"]):
        _, err = agent.communicate(timeout=LIMIT_S)
        assert agent.returncode == 0, err

    # The same sharding on one machine.
    groups = ["sharding.replicate=2", "sharding.shard=2", f"output_dir={tmp_path / 'one'}"]
    one = start(None, "--nproc_per_node", "4", *words, *groups)
    _, err = one.communicate(timeout=LIMIT_S)
    assert one.returncode == 0, err
    assert logged(tmp_path / "one") == logged(whole) and len(logged(whole)) == STEPS

    # A host that dies takes its agent and ranks with it.
    run, hold = tmp_path / "killed", tmp_path / "hold"
    hold.write_text(str(run / "metrics.jsonl"))
    again = [*words, f"output_dir={run}", "resume=auto"]
    first, second = agents(hosts, again, TESTS_HOLD_FILE=str(hold))
    wait_until(lambda: (run / "metrics.jsonl").exists() and len(logged(run)) >= 3, "3 steps", first)
    pids = subprocess.run(
        ["ip", "netns", "pids", hosts[1]], capture_output=True, text=True, check=True
    ).stdout.split()
    for pid in pids:
        os.kill(int(pid), signal.SIGKILL)
    second.communicate(timeout=LIMIT_S)
    hold.unlink()
    out, err = first.communicate(timeout=LIMIT_S)
    assert first.returncode == LOST_PEER_STATUS, (out, err)
    assert "error: lost another rank: " in err and "Traceback" not in err
    for agent in agents(hosts, again):
        _, err = agent.communicate(timeout=LIMIT_S)
        assert agent.returncode == 0, err
    assert logged(run) == logged(whole)
