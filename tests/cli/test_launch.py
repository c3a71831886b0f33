"""From a command to processes and an exit status, with real processes and the real `tune`.

The recipe here is a stand-in: it needs no model, and the tests do not depend on the real ones.
The `tune` tests run in a virtual environment that holds the built wheel, with the stand-in beside
the recipes of the wheel; everything else in it is this environment's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from qfsdp.cli.ranks import share_cores
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]

RECIPE = '''
"""A stand-in: says what it would train, or fails as it is told."""
from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

import torch

from qfsdp.cli.component import Component
from qfsdp.cli.errors import UserError
from qfsdp.cli.launch import launch


@dataclass
class Model:
    path: str


@dataclass
class Config:
    model: Model
    fail: str = ""
    devices: int = 1
    optimizer: Component = field(default_factory=lambda: Component("torch.optim.SGD"))


def check(config: Config) -> None:
    print("PLACE preflight")
    if config.fail == "check":
        raise UserError("model.path: no such directory")
    torch.accelerator.device_count = lambda: config.devices


def main(config: Config) -> None:
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if config.fail == "user" or config.fail == f"user on {rank}":
        raise UserError("the data is odd")
    if config.fail == f"crash on {rank}":
        raise ValueError("a bug")
    if " on " in config.fail:
        print("PLACE waits", flush=True)
        time.sleep(600)
    os.write(1, f"PLACE rank {rank} of {size}: {config.model.path}\\n".encode())


if __name__ == "__main__":
    launch(__file__, Config, check, main)
'''

CONFIG = "# tune run recipes/stand_in --config configs/stand_in.yaml\nmodel:\n  path: llama\n"
STEP = ["--config", "configs/stand_in.yaml"]


def write_stand_in(root: Path, place: str) -> None:
    for folder, name, text in [
        ("recipes", "stand_in.py", RECIPE),
        ("configs", "stand_in.yaml", CONFIG),
    ]:
        (root / folder).mkdir(exist_ok=True)
        (root / folder / name).write_text(text.replace("PLACE", place))


@dataclass
class Result:
    status: int
    out: list[str]
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def run(*words: str, cwd: Path, **env: str) -> Result:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    clean.pop("PYTHONPATH", None)
    done = subprocess.run(
        words, cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=LIMIT_S
    )
    ours = sorted(line for line in done.stdout.splitlines() if " rank " in line or "flight" in line)
    return Result(done.returncode, ours or done.stdout.splitlines(), done.stderr)


# ---- the recipe by itself ------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkout")
    write_stand_in(root, "here")
    return root


def recipe(checkout: Path, *words: str, **env: str) -> Result:
    file = "recipes/stand_in.py"
    return run(sys.executable, file, *STEP, *words, cwd=checkout, PYTHONPATH=str(ROOT), **env)


def test_one_device_runs_in_this_process(checkout: Path) -> None:
    result = recipe(checkout, "model.path=m")
    assert (result.status, result.out) == (0, ["here preflight", "here rank 0 of 1: m"])


def test_two_devices_start_two_ranks(checkout: Path) -> None:
    result = recipe(checkout, "devices=2")
    assert result.status == 0, result.err
    assert result.out == [
        "here preflight",
        "here rank 0 of 2: llama",
        "here rank 1 of 2: llama",
    ]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("fail=check", "error: model.path: no such directory"),
        ("fale=check", "error: unknown key 'fale'; did you mean 'fail'?"),
        ("fail=user", "error: the data is odd"),
    ],
)
def test_mistakes_end_with_one_line_and_status_2(checkout: Path, word: str, message: str) -> None:
    result = recipe(checkout, word)
    assert (result.status, result.err) == (2, f"{message}\n")


@pytest.mark.parametrize(
    ("word", "status", "errors"),
    [
        ("fail=user", 2, ["error: the data is odd"]),
        ("fail=user on 1", 2, ["error: rank 1: the data is odd"]),
        ("fail=crash on 0", 1, []),
    ],
)
def test_failing_ranks(checkout: Path, word: str, status: int, errors: list[str]) -> None:
    result = recipe(checkout, "devices=2", word)
    assert (result.status, result.errors) == (status, errors), result.err
    assert ("Traceback" in result.err) == (status == 1)
    assert ("ValueError: a bug" in result.err) == (status == 1)


@pytest.mark.parametrize(
    ("ranks", "threads", "compilers"), [(4, "16", "16"), (1, "64", "32"), (99, "1", "1")]
)
def test_ranks_share_the_cores(
    ranks: int, threads: str, compilers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    share_cores(ranks)
    assert [os.environ[name] for name in names] == [threads, compilers]
    monkeypatch.setenv(names[1], "7")
    share_cores(ranks)
    assert os.environ[names[1]] == "7"


def test_ctrl_c_ends_all_ranks(checkout: Path) -> None:
    words = [sys.executable, "recipes/stand_in.py", *STEP, "devices=2", "fail=crash on 7"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        words, cwd=checkout, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "waits" in line:
                break
        process.send_signal(signal.SIGINT)
        process.stdout.read()  # ends when no rank holds the pipe any longer
        assert process.wait(timeout=LIMIT_S) == 128 + signal.SIGINT


# ---- building and the hook without torchtune -----------------------------------------------


def build(folder: Path, how: str) -> list[str]:
    code = f"import sys; from hatchling.build import {how}; print({how}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(folder / done.stdout.splitlines()[-1]) as archive:
        return archive.namelist()


def test_editable_wheel_carries_the_hook_and_no_copies(tmp_path: Path) -> None:
    names = build(tmp_path, "build_editable")
    assert {name for name in names if "dist-info" not in name} == {"_qfsdp.pth", "qfsdp_tune.pth"}


def test_hook_imports_nothing_and_survives_its_own_absence() -> None:
    pth = (ROOT / "qfsdp_tune.pth").read_text()
    assert pth.count("\n") == 1 and pth.startswith("import ")
    code = (
        "import os, sys; before = set(sys.modules); sys.path.insert(0, sys.argv[1])\n"
        f"{pth}"
        "print(sorted(set(sys.modules) - before), len(sys.meta_path))"
    )
    there = run(sys.executable, "-I", "-S", "-c", code, str(ROOT), cwd=ROOT)
    gone = run(sys.executable, "-I", "-S", "-c", code, "/nowhere", cwd=ROOT)
    assert there.out[0].startswith("['__future__', 'qfsdp', 'qfsdp.cli', 'qfsdp.cli.torchtune']")
    assert gone.out == ["[] 3"] and gone.err == ""


# ---- the installed wheel and `tune` --------------------------------------------------------


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtual environment with qfsdp's wheel and the stand-in installed."""
    root = tmp_path_factory.mktemp("wheel")
    build(root, "build_wheel")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / "venv")], check=True)
    base = {"base": str(root / "venv"), "platbase": str(root / "venv")}
    site = Path(sysconfig.get_path("purelib", scheme="venv", vars=base))
    # Paths only: the .pth files of this environment (it may have qfsdp in it) are not processed.
    (site / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    with zipfile.ZipFile(next(root.glob("*.whl"))) as archive:
        archive.extractall(site)
    write_stand_in(site / "qfsdp", "packaged")
    # What pip writes for torchtune, for this interpreter.
    (root / "venv/bin/tune").write_text("from torchtune._cli.tune import main\nmain()\n")
    return root / "venv" / "bin" / "python"


def tune(python: Path, cwd: Path, *words: str) -> Result:
    return run(str(python), str(python.with_name("tune")), *words, cwd=cwd)


def qfsdp(python: Path, cwd: Path, *words: str) -> Result:
    return run(str(python), "-m", "qfsdp.cli.command", *words, cwd=cwd)


def test_wheel_carries_recipes_and_configs(tmp_path: Path) -> None:
    names = set(build(tmp_path, "build_wheel"))
    files = [*ROOT.glob("recipes/*.py"), *ROOT.glob("configs/*.yaml")]
    assert {f"qfsdp/{file.parent.name}/{file.name}" for file in files} <= names
    assert "qfsdp_tune.pth" in names
    assert not any(name.startswith(("recipes", "configs", "tests")) for name in names)


def test_tune_run_from_an_empty_directory(python: Path, tmp_path: Path) -> None:
    one = tune(python, tmp_path, "run", "recipes/stand_in", *STEP, "model.path=m")
    assert (one.status, one.out) == (0, ["packaged preflight", "packaged rank 0 of 1: m"]), one.err
    two = tune(python, tmp_path, "run", "--nproc_per_node", "2", "recipes/stand_in.py", *STEP)
    assert two.status == 0, two.err
    assert two.out == [
        "packaged preflight",
        "packaged rank 0 of 2: llama",
        "packaged rank 1 of 2: llama",
    ]


def test_tune_run_tells_mistakes_once(python: Path, tmp_path: Path) -> None:
    flags = ["--nproc_per_node", "2"]
    typo = tune(python, tmp_path, "run", *flags, "recipes/stand_in", *STEP, "fale=x")
    assert (typo.status, typo.errors) == (2, ["error: unknown key 'fale'; did you mean 'fail'?"])
    odd = tune(python, tmp_path, "run", *flags, "recipes/stand_in", *STEP, "fail=user")
    assert (odd.status, odd.errors) == (2, ["error: the data is odd"]), odd.err
    assert "Traceback" not in typo.err + odd.err
    none = tune(python, tmp_path, "run", "recipes/nope", *STEP)
    assert none.status == 2
    assert none.errors == [
        "error: recipes/nope: no such recipe; expected one that `tune ls` lists, "
        "or a Python file that defines Config and main"
    ]


def test_a_copied_recipe_runs_and_the_working_directory_wins(python: Path, tmp_path: Path) -> None:
    copied = tune(python, tmp_path, "cp", "recipes/stand_in", "my_recipe.py")
    assert copied.out == ["Copied file to my_recipe.py"], copied.err
    (tmp_path / "my_recipe.py").write_text(RECIPE.replace("PLACE", "mine"))
    mine = tune(python, tmp_path, "run", "my_recipe", *STEP, "devices=2")
    assert mine.out == ["mine preflight", "mine rank 0 of 2: llama", "mine rank 1 of 2: llama"]
    flagged = tune(python, tmp_path, "run", "--nproc_per_node", "1", "my_recipe.py", *STEP)
    assert flagged.out == ["mine preflight", "mine rank 0 of 1: llama"], flagged.err

    write_stand_in(tmp_path, "local")
    (tmp_path / "configs" / "stand_in.yaml").write_text("model: {path: local-model}")
    local = tune(python, tmp_path, "run", "recipes/stand_in", *STEP)
    assert local.out == ["local preflight", "local rank 0 of 1: local-model"], local.err


COMMANDS = """
import contextlib, io, json, sys
from torchtune._cli.tune import main
results = []
for words in json.loads(sys.argv[1]):
    sys.argv, out, err, status = ["tune", *words], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as exit:
            status = exit.code
    results.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


def test_ls_cat_cp_validate(python: Path, tmp_path: Path) -> None:
    import json

    ours, bad, theirs = tmp_path / "ours.yaml", tmp_path / "bad.yaml", tmp_path / "theirs.yaml"
    ours.write_text(CONFIG + "optimizer: {_component_: torch.optim.SGD, lrr: 1}\n")
    bad.write_text("model: [\n")
    theirs.write_text("model: {_component_: torch.nn.Linear, in_features: 1}\n")
    commands = [
        ["ls"],
        ["cat", "configs/stand_in.yaml"],
        ["cat", "configs/stand_in"],
        ["cp", "configs/stand_in.yaml", "copy.yaml"],
        ["validate", "configs/stand_in.yaml"],
        ["validate", str(ours)],
        ["validate", "bad.yaml"],
        ["validate", "nope.yaml"],
        ["validate", str(theirs)],
    ]
    done = run(str(python), "-c", COMMANDS, json.dumps(commands), cwd=tmp_path)
    assert done.status == 0, done.err
    ls, cat, cat2, cp, *validated = json.loads(done.out[-1])

    rows = [line.split() for line in ls[1].splitlines() if "stand_in" in line]
    assert [row for row in rows if row[0] == "recipes/stand_in"] == [
        ["recipes/stand_in", "configs/stand_in.yaml"]
    ]
    assert "full_finetune_distributed" in ls[1]
    assert cat == cat2 == [0, "model:\n    path: llama\n", ""]
    assert cp[0] == 0 and (tmp_path / "copy.yaml").read_text() == CONFIG
    assert validated == [
        [0, "Config is well-formed!\n", ""],
        [
            2,
            "",
            "error: optimizer.lrr: 'torch.optim.SGD' takes no argument 'lrr'; did you mean 'lr'?\n",
        ],
        [2, "", "error: bad.yaml, line 2: not valid YAML: did not find expected node content\n"],
        [
            2,
            "",
            "error: --config nope.yaml: no such file; "
            "`qfsdp ls` lists those that come with qfsdp\n",
        ],
        [0, "Config is well-formed!\n", ""],
    ]
