"""What another program leaves in the environment or on a port, in one line."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError

from qfsdp.common.devices import check_system
from qfsdp.common.errors import UserError, user_errors
from qfsdp.config.component import Component
from qfsdp.launch.lost_peers import LOST_PEER_STATUS, lost_peers
from qfsdp.launch.ranks import check_environment, check_plain_start, rank_failures
from qfsdp.training.report.run_folder import read_steps


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "abc"),
        ("WORLD_SIZE", "0"),
        ("RANK", "-1"),
        ("LOCAL_RANK", ""),
        ("RANK", "1.0"),
    ],
)
def test_variables_of_torchrun(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_environment()
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{name}: '{value}' in the environment; expected an int"):
        check_environment()


@pytest.mark.parametrize(
    ("given", "devices", "refused", "told"),
    [
        ({"PET_NNODES": "2"}, 1, "PET_NNODES: '2'", ""),
        ({"NNODES": "2", "NODE_RANK": "1"}, 8, "NNODES: '2'", ""),  # as for LLaMA-Factory
        ({"NNODES": "2"}, 8, "", ""),  # of a script that starts all machines
        ({"PET_NNODES": "1:4"}, 8, "PET_NNODES: '1:4'", ""),
        ({"WORLD_SIZE": "2", "RANK": "1", "PET_NNODES": "2"}, 8, "WORLD_SIZE: '2'", ""),
        ({"WORLD_SIZE": "2", "RANK": "1", "PET_NNODES": "2"}, 1, "", ""),  # it is rank 1
        ({"WORLD_SIZE": "1", "PET_NNODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, 8, "", ""),
        ({"SLURM_STEP_NUM_TASKS": "4"}, 1, "", "SLURM_STEP_NUM_TASKS: 4 commands were started"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 8, "", "OMPI_COMM_WORLD_SIZE: 2 commands"),
    ],
)
def test_variables_of_several_machines(
    given: dict[str, str],
    devices: int,
    refused: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without torchrun's flags every machine trained on its own, or waited for ten minutes."""
    monkeypatch.setattr("qfsdp.launch.ranks.accelerator_count", lambda: devices)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        check_plain_start(trains=True)
    assert told in capsys.readouterr().err
    if devices == 1:  # chat, or one rank of an evaluation
        check_plain_start(trains=False)
        assert not capsys.readouterr().err


def test_an_interface_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nope0")
    check_environment()  # one rank has no network
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="GLOO_SOCKET_IFNAME: 'lo,nope0' in the environment; exp"):
        check_environment()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    check_environment()


def test_a_user_without_a_home(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Caches went to a folder named "~" in the current folder."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert os.path.expanduser("~") == "~"
    monkeypatch.setenv("HF_DATASETS_CACHE", "~/a")
    check_system()
    assert os.path.isabs(os.path.expanduser("~/.cache"))
    assert os.environ["HF_DATASETS_CACHE"] == f"{os.environ['HOME']}/a"
    assert capsys.readouterr().err.startswith(f"warning: HOME: not set, and user {os.getuid()} has")
    check_system()
    assert not capsys.readouterr().err


def test_a_lost_peer_without_an_agent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that a cluster's variables have made ended with a trace of gloo and status 1."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    for name in ("LOCAL_RANK", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=str(LOST_PEER_STATUS)), lost_peers():
        raise RuntimeError("[a/pair.cc:553] Connection closed by peer [10.0.0.1]:4. This is")
    told = "error: rank 1 has lost another rank: Connection closed by peer [10.0.0.1]:4\n"
    assert capsys.readouterr().err == told
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(RuntimeError), lost_peers():
        raise RuntimeError("Connection closed by peer")


def test_a_port_in_use() -> None:
    said = "The server socket has failed to listen. port: 29500, useIpv6: false, code: -98, name: "
    with pytest.raises(UserError, match="port 29500 of this machine is in use"), rank_failures():
        raise DistNetworkError(said + "EADDRINUSE, message: address already in use")


def test_odd_metrics(tmp_path: Path) -> None:
    odd = '{"step": "a"}\n{"loss": 1}\n{"step": 1, "loss": "x", "lr": [1], "n": null}\n[]\n'
    (tmp_path / "m.jsonl").write_text(odd + '{"step": 2, "loss": 1.5}')
    expected = [{"step": 1, "n": None}, {"step": 2, "loss": 1.5}]
    assert read_steps(tmp_path / "m.jsonl") == expected


@pytest.mark.parametrize(
    "code", ['int(os.environ["SOME_LIMIT"])', 'raise ValueError("SOME_LIMIT: no number")']
)
def test_a_variable_that_a_package_refuses(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as HF_HUB_DOWNLOAD_TIMEOUT=abc and TORCH_LOGS=foo: a traceback of torch's import."""
    (tmp_path / "package_with_limit.py").write_text(f"import os\n{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SOME_LIMIT", "abc")
    with pytest.raises(SystemExit, match="2"), user_errors():
        Component("package_with_limit.Thing").resolve("optimizer")
    assert capsys.readouterr().err.startswith("error: SOME_LIMIT: 'abc' in the environment; ")
    with pytest.raises(ValueError, match="abc"), user_errors():
        int(os.environ["SOME_LIMIT"])  # no import
