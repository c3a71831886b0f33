"""`tune` and `qfsdp` with the installed wheel, from a directory outside of the project.

The virtual environment holds the built wheel, with a stand-in next to the recipes of the wheel;
everything else in it is this environment's.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from qfsdp.cli.command import copy
from qfsdp.common.errors import UserError
from tests.cli.stand_in import CONFIG, RECIPE, ROOT, STEP, Result, run, write_stand_in

FLAGS = ["--nproc_per_node", "2", "--max-restarts", "1", "--nnodes", "1"]
FLAGS += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
TWO_RANKS = ["packaged preflight", "packaged rank 0 of 2: llama", "packaged rank 1 of 2: llama"]
NO_RECIPE = (
    "error: {}: no such recipe; expected one that `{} ls` lists, "
    "or a Python file that defines Config and main"
)


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


def qfsdp(python: Path, cwd: Path, *words: str, **env: str) -> Result:
    return run(str(python), "-m", "qfsdp.cli.command", *words, cwd=cwd, **env)


def test_wheel_carries_recipes_configs_and_the_demonstration(tmp_path: Path) -> None:
    names = set(build(tmp_path, "build_wheel"))
    files = [
        *ROOT.glob("recipes/*.py"),
        *ROOT.glob("configs/*.yaml"),
        *ROOT.glob("examples/*/*.py"),
    ]
    assert {f"qfsdp/{file.relative_to(ROOT).as_posix()}" for file in files} <= names
    assert "qfsdp_tune.pth" in names
    assert not any(name.startswith(("recipes", "configs", "examples", "tests")) for name in names)


def test_the_demonstration_of_the_wheel_imports(python: Path, tmp_path: Path) -> None:
    done = run(str(python), "-c", "import qfsdp.examples.demo.prepare", cwd=tmp_path)
    assert done.status == 0, done.err


@pytest.mark.long
def test_tune_run_from_an_empty_directory(python: Path, tmp_path: Path) -> None:
    one = tune(python, tmp_path, "run", "recipes/stand_in", *STEP, "model.path=m")
    assert (one.status, one.out) == (0, ["packaged preflight", "packaged rank 0 of 1: m"]), one.err
    assert one.err == ""  # importing torchtune and torchao prints nothing
    two = tune(python, tmp_path, "run", "--nproc_per_node", "2", "recipes/stand_in.py", *STEP)
    assert two.status == 0, two.err
    assert two.out == TWO_RANKS
    none = tune(python, tmp_path, "run", "recipes/nope", *STEP)
    assert (none.status, none.errors) == (2, [NO_RECIPE.format("recipes/nope", "tune")])


def test_qfsdp_run_from_an_empty_directory(python: Path, tmp_path: Path) -> None:
    words = ["run", "recipes/stand_in", *STEP, "model.path=m"]
    one = qfsdp(python, tmp_path, *words, PYTHONPROFILEIMPORTTIME="1")
    assert (one.status, one.out) == (0, ["packaged preflight", "packaged rank 0 of 1: m"]), one.err
    imported = {line.rpartition("|")[2].strip() for line in one.err.splitlines()}
    assert "torch" in imported and "torchtune" not in imported
    two = qfsdp(python, tmp_path, "run", *FLAGS, "./recipes/stand_in.py", *STEP)
    assert (two.status, two.out) == (0, TWO_RANKS), two.err


def test_mistakes_are_reported_once(python: Path, tmp_path: Path) -> None:
    none = qfsdp(python, tmp_path, "run", "nope.py", *STEP)
    assert (none.status, none.err) == (2, NO_RECIPE.format("nope.py", "qfsdp") + "\n")
    flags = ["--nproc_per_node", "2"]
    typo = qfsdp(python, tmp_path, "run", *flags, "recipes/stand_in", *STEP, "fale=x")
    assert (typo.status, typo.errors) == (2, ["error: unknown key 'fale'; did you mean 'fail'?"])
    odd = qfsdp(python, tmp_path, "run", *flags, "recipes/stand_in", *STEP, "fail=user")
    assert (odd.status, odd.errors) == (2, ["error: the data is odd"]), odd.err
    assert "Traceback" not in typo.err + odd.err


@pytest.mark.long
def test_a_copied_recipe_runs_and_the_working_directory_wins(python: Path, tmp_path: Path) -> None:
    (tmp_path / "my_recipe.py").write_text(RECIPE.replace("PLACE", "mine"))
    mine = tune(python, tmp_path, "run", "--nproc_per_node", "1", "my_recipe", *STEP)
    assert mine.out == ["mine preflight", "mine rank 0 of 1: llama"], mine.err
    plain = qfsdp(python, tmp_path, "run", "my_recipe.py", *STEP)
    assert plain.out == mine.out, plain.err

    write_stand_in(tmp_path, "local")
    (tmp_path / "configs" / "stand_in.yaml").write_text("model: {path: local-model}")
    local = qfsdp(python, tmp_path, "run", "recipes/stand_in", *STEP)
    assert local.out == ["local preflight", "local rank 0 of 1: local-model"], local.err


# Runs commands in one process, which imports torchtune once.
COMMANDS = """
import contextlib, io, json, sys
from qfsdp.cli.command import main as qfsdp

def outcome(main, program, words):
    sys.argv, out, err, status = [program, *words], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as exit:
            status = exit.code
    return [status, out.getvalue(), err.getvalue()]

commands = json.loads(sys.argv[1])
ours = [outcome(qfsdp, "qfsdp", words) for words in commands if words[0] != "validate"]
heavy = sorted({"torch", "torchtune", "torchao", "omegaconf"} & set(sys.modules))
from torchtune._cli.tune import main as tune
theirs = [outcome(tune, "tune", words) for words in commands]
ours += [outcome(qfsdp, "qfsdp", words) for words in commands if words[0] == "validate"]
print(json.dumps([heavy, ours, theirs]))
"""


@pytest.mark.long
def test_ls_cat_cp_validate(python: Path, tmp_path: Path) -> None:
    ours, bad, theirs = tmp_path / "ours.yaml", tmp_path / "bad.yaml", tmp_path / "theirs.yaml"
    ours.write_text(CONFIG + "optimizer: {_component_: torch.optim.SGD, lrr: 1}\n")
    bad.write_text("model: [\n")
    theirs.write_text("model: {_component_: torch.nn.Linear, in_features: 1}\n")
    (tmp_path / "kept.yaml").write_text("mine\n")
    commands = [
        ["ls"],
        ["cat", "configs/stand_in.yaml"],
        ["cat", "configs/stand_in"],
        ["cat", "./configs/stand_in.yaml"],
        ["cat", "configs/stand_in", "--sort"],
        ["cat", "recipes/stand_in"],
        ["cat", "merge"],
        ["cp", "configs/stand_in.yaml", "copy.yaml"],
        ["cp", "configs/stand_in", "new/copy", "--make-parents"],
        ["cp", "-n", "configs/stand_in", "kept.yaml"],
        ["cp", "configs/stand_in", "absent/copy.yaml"],
        ["validate", "configs/stand_in.yaml"],
        ["validate", str(ours)],
        ["validate", "bad.yaml"],
        ["validate", "nope.yaml"],
        ["validate", str(theirs)],
    ]
    done = run(str(python), "-c", COMMANDS, json.dumps(commands), cwd=tmp_path)
    assert done.status == 0, done.err
    heavy, of_qfsdp, of_tune = json.loads(done.out[-1])
    assert heavy == []
    assert of_qfsdp[1:-1] == of_tune[1:-1]  # all but ls and the last, which is torchtune's config

    for _, listed, _ in (of_qfsdp[0], of_tune[0]):
        rows = [line.split() for line in listed.splitlines() if "stand_in" in line]
        assert rows == [["recipes/stand_in", "configs/stand_in.yaml"]]
    names = [line.split()[0] for line in of_tune[0][1].splitlines() if line.strip()]
    assert names.index("recipes/stand_in") < names.index("full_finetune_single_device")
    _, cat, cat2, by_name, sorted_keys, recipe, both, cp, made, kept, absent, *validated = of_tune
    assert cat == cat2 == [0, CONFIG, ""]
    assert by_name == cat and sorted_keys == [0, "model:\n    path: llama\n", ""]
    assert recipe == [0, RECIPE.replace("PLACE", "packaged"), ""]
    assert both[2] == (
        "error: merge: a recipe and a config have this name; "
        "expected recipes/merge or configs/merge\n"
    )
    assert cp == [0, "Copied file to copy.yaml\n", ""]
    assert made == [0, "Copied file to new/copy.yaml\n", ""]
    assert (tmp_path / "copy.yaml").read_text() == CONFIG
    assert kept[0] == 0 and (tmp_path / "kept.yaml").read_text() == "mine\n"
    assert absent[0] == 2 and absent[2].startswith("error: absent/copy.yaml: cannot be written: ")
    no_node = "expected the node content, but found '<stream end>'"
    assert validated == [
        [0, "Config is well-formed!\n", ""],
        [
            2,
            "",
            "error: optimizer.lrr: 'torch.optim.SGD' takes no argument 'lrr'; did you mean 'lr'?\n",
        ],
        [2, "", f"error: bad.yaml, line 2: not valid YAML: {no_node}\n"],
        [
            2,
            "",
            "error: --config nope.yaml: no such file; "
            "`qfsdp ls` lists those that come with qfsdp\n",
        ],
        [0, "Config is well-formed!\n", ""],
    ]


@pytest.mark.long
def test_names_that_torchtune_has_too(python: Path, tmp_path: Path) -> None:
    """`tune` takes torchtune's recipe, unless the config is none of torchtune's."""
    (tmp_path / "mine.yaml").write_text("lora_r: 8\n")
    (tmp_path / "stand_in_2.py").write_text(RECIPE.replace("PLACE", "mine"))
    name = "full_finetune_distributed"
    commands = [
        ["run", name, "--config", "llama3_8b_full", "lora_r=8"],
        ["run", name, "--config", "mine.yaml"],
        ["run", name, "--help"],
        ["run", "stand_in", "--config=stand_in", "fale=x"],
        ["run", "stand_in_2", "--config", "configs/stand_in.yaml", "fale=x"],
        ["cp", name, "theirs.py"],
        ["--help"],
        ["run", "--help"],
    ]
    code = COMMANDS.replace("ours = [", "ours = [] and [").replace("ours += [", "ours += [] and [")
    done = run(str(python), "-c", code, json.dumps(commands), cwd=tmp_path)
    assert done.status == 0, done.err
    _, _, (shipped, mine, helped, bare, own, copied, plain, flags) = json.loads(done.out[-1])
    taken = f"{name}: qfsdp's recipe, as {{}} is no config of torchtune\n"
    here = "here it is 'adapter.rank', which this recipe does not have\n"
    assert shipped[::2] == [
        2,
        taken.format("llama3_8b_full") + f"error: unknown key 'lora_r'; {here}",
    ]
    assert mine[0] == 2 and mine[2].startswith(taken.format("mine.yaml"))
    assert helped[2].startswith(f"{name}: torchtune's recipe; qfsdp's is recipes/{name}\n")
    typo = "error: unknown key 'fale'; did you mean 'fail'?\n"
    assert bare == [2, "", typo] and own == [2, "", typo]
    assert copied[0] == 0 and "torchtune's" in copied[2]
    assert "qfsdp" not in (tmp_path / "theirs.py").read_text()
    for status, out, _ in (plain, flags):
        assert status == 0 and "usage: tune" in out and "tune run NAME --help" in out
    assert "--nproc" in flags[1]


def test_ctrl_c_before_a_recipe_starts_is_no_traceback() -> None:
    interrupted = (
        "import qfsdp.cli.command as command\n"
        "def list_recipes(): raise KeyboardInterrupt\n"
        "command.list_recipes = list_recipes\n"
        "command.run_command('qfsdp', ['ls'])\n"
    )
    done = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("mine", "mine.yaml"),
        ("mine.txt", "mine.yaml"),
        ("mine.yml", "mine.yml"),
        ("llama3.1_mine", "llama3.1_mine.yaml"),  # was llama3.yaml, perhaps another config
        ("mine.v2", "mine.v2.yaml"),
    ],
)
def test_a_copy_has_the_name_that_was_given(given: str, written: str, tmp_path: Path) -> None:
    copy("llama3_8b_qdora", tmp_path / given, no_clobber=False, make_parents=False)
    assert [file.name for file in tmp_path.iterdir()] == [written]
    with pytest.raises(UserError, match="are the same file"):
        copy(str(tmp_path / written), tmp_path / written, no_clobber=False, make_parents=False)
