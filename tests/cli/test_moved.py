"""Import paths of version 0.1: recipes that users have copied go on working, and are told."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from qfsdp.common.moved import LEFT, MOVED, spec_of
from tests.tiny import ROOT

MOVED_INTO_A_PACKAGE = sorted(old for old, new in MOVED.items() if new.startswith(f"{old}."))


def test_every_old_path_is_gone_and_its_new_one_exists() -> None:
    for old, new in MOVED.items():
        file = new.removeprefix("qfsdp.") if new.startswith("qfsdp.examples.") else new
        assert (ROOT / f"{file.replace('.', '/')}.py").is_file(), new
        assert not (ROOT / f"{old.replace('.', '/')}.py").exists(), old


def test_packages_take_their_names_from_modules_of_today() -> None:
    for file in (ROOT / "qfsdp").rglob("__init__.py"):
        if "_MODULES" in file.read_text():
            package = importlib.import_module(".".join(file.parent.relative_to(ROOT).parts))
            for name in package.__all__:
                module = getattr(getattr(package, name), "__module__", None)
                assert module not in MOVED, module


@pytest.mark.long
def test_old_paths_hand_out_the_modules_of_today_and_say_so(tmp_path: Path) -> None:
    recipe = tmp_path / "copied.py"
    recipe.write_text(
        "import qfsdp.cli.sizes\n"
        "from qfsdp.cli.errors import UserError\n"
        "from qfsdp.memory.preflight import check_memory\n"
        "from qfsdp.memory.sweep.prices import read_prices\n"
        "from qfsdp.evaluation.judging.verdicts import winner\n"
        "from qfsdp.modules.adapters import AdaptedLinear\n"
        "from qfsdp.modules.adapters import row_norms\n"
        "from qfsdp.common.errors import UserError as now\n"
        "assert UserError is now and qfsdp.cli.sizes.parse_size('1GiB') == 2**30\n"
        "from qfsdp.distributed.gradients import clip_grad_norm\n"
        "from qfsdp.modules.adapters import linears\n"
        "assert AdaptedLinear is linears.AdaptedLinear and row_norms.__package__\n"
    )
    done = subprocess.run([sys.executable, recipe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "old path" in line]
    assert [line.split()[3] for line in told] == [
        "qfsdp.cli.sizes",
        "qfsdp.cli.errors",
        "qfsdp.memory.preflight",
        "qfsdp.memory.sweep.prices",
        "qfsdp.evaluation.judging.verdicts",
        "qfsdp.modules.adapters",
        "qfsdp.distributed.gradients.clip_grad_norm",
    ]
    assert "qfsdp.cli.errors is qfsdp.common.errors now; its old path works until" in told[1]


def test_a_module_hands_out_the_names_that_have_left_it() -> None:
    from qfsdp.distributed import gradients
    from qfsdp.training import steps

    assert gradients.clip_grad_norm is steps.clip_grad_norm


@pytest.mark.parametrize("package", [*MOVED_INTO_A_PACKAGE, *LEFT])
def test_a_package_has_no_names_that_its_module_never_had(package: str) -> None:
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = module.no_such_name


def test_a_path_that_never_was_is_not_found() -> None:
    assert spec_of("qfsdp.cli.no_such_module") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("qfsdp.cli.no_such_module")
