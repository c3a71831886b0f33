"""Several machines by torchrun's flags: two agents on one machine, and mistakes in the flags."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError

from qfsdp.common.errors import UserError
from qfsdp.distributed.world import init_world
from qfsdp.launch import nodes
from qfsdp.launch.nodes import WAIT_S, set_rendezvous, wait_for_master, wait_seconds
from qfsdp.launch.ranks import numbers_of_nodes
from tests.cli.stand_in import ROOT
from tests.json_lines import metric_lines
from tests.tiny import write_tiny_model
from tests.toy_data import TOY_CONFIG
from tests.waiting import LIMIT_S


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def flags(nnodes: str = "2", node_rank: int = 0, **changes: object) -> Namespace:
    values = {
        "rdzv_endpoint": "",
        "rdzv_backend": "static",
        "rdzv_conf": "",
        "local_addr": None,
        "master_addr": "127.0.0.1",
        "master_port": None,
        "standalone": False,
    }
    args = Namespace(nnodes=nnodes, node_rank=node_rank, **values | changes)
    set_rendezvous(args, numbers_of_nodes(nnodes))
    return args


def test_flags_are_completed() -> None:
    alone = flags("1")
    assert alone.standalone and alone.local_addr == "127.0.0.1"  # its name may be of no address
    assert flags("1", local_addr="10.0.0.7").local_addr == "10.0.0.7"
    static = flags("2", 1)
    assert (static.standalone, static.rdzv_endpoint, static.master_port) == (False, "", 29500)
    assert flags("1:2", rdzv_backend="c10d", master_addr="a").rdzv_endpoint == "a:29500"
    given = flags("1:2", rdzv_backend="c10d", rdzv_endpoint="b:1", node_rank=9)
    assert given.rdzv_endpoint == "b:1" and not given.standalone


@pytest.mark.parametrize(
    ("nnodes", "rank", "message"),
    [
        ("2", 2, "--node_rank: 2 is not valid; expected 0 to 1, as --nnodes is 2"),
        ("2", -1, "--node_rank: -1 is not valid; expected 0 to 1, as --nnodes is 2"),
        ("1", 1, "--node_rank: 1 is not valid; expected 0 to 0, as --nnodes is 1"),
        ("1:2", 0, "--nnodes: 1:2 is a changing number of machines; expected --rdzv_backend c10d"),
    ],
)
def test_mistakes_in_the_flags(nnodes: str, rank: int, message: str) -> None:
    with pytest.raises(UserError) as error:
        flags(nnodes, rank)
    assert str(error.value).startswith(message)


def test_one_machine_that_is_to_be_several() -> None:
    with pytest.raises(UserError, match="--standalone: with --nnodes 2; expected one of the two"):
        flags("2", standalone=True)  # it waited ten minutes for the other


def test_a_machine_that_cannot_be_reached() -> None:
    port = free_port()
    away = flags(node_rank=1, master_port=port, rdzv_conf="timeout=0")
    with pytest.raises(UserError, match=f"127.0.0.1:{port} cannot be reached for 0 s .*refused"):
        wait_for_master(away)
    wait_for_master(flags(node_rank=0, master_port=port))  # it is the machine itself
    assert wait_seconds(flags()) == WAIT_S
    with pytest.raises(UserError, match="--rdzv_conf: timeout='soon' is not valid"):
        wait_seconds(flags(rdzv_conf="read=1,timeout=soon"))


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--rdzv_endpoint", {"rdzv_backend": "c10d", "rdzv_endpoint": "nohost:29400"}),
        ("--master_addr", {"node_rank": 1, "master_addr": "nohost", "rdzv_conf": "timeout=0"}),
    ],
)
def test_a_name_that_nobody_knows_and_one_that_is_known_late(
    flag: str, words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def getaddrinfo(host: str, *_: object) -> list[Any]:
        asked.append(host)
        if len(asked) < known_at:
            raise socket.gaierror(-2, "Name or service not known")
        return []

    asked: list[str] = []
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    away = flags(**words)
    known_at = 2
    with nullcontext() if flag == "--rdzv_endpoint" else pytest.raises(UserError, match="reached"):
        wait_for_master(away)
    assert asked[:2] == ["nohost", "nohost"]
    known_at = 99
    monkeypatch.setattr(nodes, "NAME_WAIT_S", -1)
    with pytest.raises(UserError, match=f"{flag}: 'nohost' is not known .Name or service"):
        wait_for_master(away)


def test_a_rank_whose_environment_has_such_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asked for ten minutes."""
    monkeypatch.setattr(nodes, "NAME_WAIT_S", -1)
    monkeypatch.setenv("MASTER_ADDR", "no-such-machine.invalid")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="^MASTER_ADDR: 'no-such-machine.invalid' is not known"):
        init_world()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"MASTER_ADDR": ""}, "WORLD_SIZE: 2 in the environment, without MASTER_ADDR; exp"),
        ({"MASTER_PORT": ""}, "WORLD_SIZE: 2 in the environment, without MASTER_PORT; exp"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT: 'abc' in the environment; expected a port"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT: '99999' in the environment; expected a port"),
        ({}, "MASTER_PORT: port 29500 of this machine is in use; expected a free one"),
    ],
)
def test_where_rank_0_is_to_listen(
    given: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of our launcher: an empty address was asked for a minute, the rest were traces."""

    def used(**_: Any) -> None:  # in this process its groups would have other names afterwards
        raise DistNetworkError("port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message:")

    monkeypatch.setattr("torch.distributed.init_process_group", used)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in (variables | given).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=told):
        init_world()


@pytest.mark.long
def test_two_agents_train_like_one_with_two_ranks(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    config = tmp_path / "c.yaml"
    config.write_text(TOY_CONFIG.format(folder=tmp_path) + "max_steps: 3\nglobal_batch_size: 4\n")
    # With one rank per machine torchrun leaves PyTorch all cores: sums of another order.
    threads = {"OMP_NUM_THREADS": "1"}
    env = {**os.environ, **threads, "PYTHONPATH": str(ROOT), "QFSDP_EAGER_KERNELS": "1"}

    def start(out: str, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "qfsdp.cli.command", "run", *words, "qdora_distributed"]
        command += ["--config", str(config), f"output_dir={tmp_path / out}"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True)

    meet = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", "127.0.0.1"]
    meet += ["--master_port", str(free_port())]
    agents = [start("two", *meet, "--node_rank", str(rank)) for rank in (0, 1)]
    agents += [start("one", "--nproc_per_node", "2")]
    for agent in agents:
        _, err = agent.communicate(timeout=LIMIT_S)
        assert agent.returncode == 0, err
    one, two = (metric_lines(tmp_path / out) for out in ("one", "two"))
    assert len(one) == 3
    for key in ("loss", "grad_norm"):
        assert [step[key] for step in one] == [step[key] for step in two]
