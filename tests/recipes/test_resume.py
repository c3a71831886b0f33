"""Resumed runs have the same bits as uninterrupted ones, or fail with one line.

Runs use the recipe's own functions or the command as typed, on the tiny model with dropout. They
break in the middle of the second epoch; the last step of an epoch is a short one.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from examples.demo.arithmetic import write_splits
from qfsdp.checkpoint.compatibility import read_settings
from qfsdp.checkpoint.resume import published
from qfsdp.common.errors import UserError
from qfsdp.config.load import load_config
from tests.json_lines import metric_lines
from tests.ranks import run_ranks
from tests.tiny import ROOT, load_recipe, run_in_turn, write_tiny_model, write_tiny_run
from tests.toy_data import TOY_CONFIG
from tests.waiting import LIMIT_S, wait_until

TUNE = Path(sys.executable).with_name("tune")
RECIPE = "recipes/qdora_distributed"
CONFIG = (
    TOY_CONFIG
    + """\
output_dir: {folder}/run
adapter: {{rank: 5, alpha: 7, dropout: 0.1}}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 2
batch_size: 12
epochs: 3
checkpoint: {{every_n_steps: 5, keep_last: 99}}
"""
)
STEPS = 9  # 26 samples, 12 a step: 12, 12 and 2, three times


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("resume"), CONFIG)


run_recipe = partial(run_in_turn, "qdora_distributed")


def losses(run: Path) -> dict[int, float]:
    lines = metric_lines(run)
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps)), f"{run}: {steps}"
    return {line["step"]: line["loss"] for line in lines}


def adapter_bytes(run: Path) -> bytes:
    return (run / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.long)]
)
def test_the_same_bits_as_without_the_break(folder: Path, ranks: int) -> None:
    """LoRA and DoRA with dropout, with and without accumulation, after step 5 of 9."""
    runs, pairs = [], []
    for method in ("lora", "dora"):
        for split in ((12 // ranks, 1), (4 // ranks, 3)):
            whole = folder / f"whole_{ranks}_{method}_{split[1]}"
            rest = folder / f"rest_{ranks}_{method}_{split[1]}"
            words = [f"adapter.method={method}", f"batch_size={split[0]}"]
            words += [f"gradient_accumulation_steps={split[1]}", f"output_dir={whole}"]
            resume = f"resume={whole}/checkpoints/step_00000005"
            runs += [words, [*words, f"output_dir={rest}", resume]]
            pairs.append((whole, rest))
    run_ranks(ranks, run_recipe, folder, *runs)
    seen = set()
    for whole, rest in pairs:
        expected = losses(whole)
        assert len(expected) == STEPS
        assert losses(rest) == {step: expected[step] for step in range(6, STEPS + 1)}
        assert adapter_bytes(rest) == adapter_bytes(whole)
        seen.add(tuple(expected.values()))
    assert len(seen) == 4, "methods and splits did not differ: dropout or the method had no effect"


@pytest.mark.parametrize(("before", "after"), [(2, 3), pytest.param(4, 1, marks=pytest.mark.long)])
def test_another_number_of_ranks_resumes(folder: Path, before: int, after: int) -> None:
    """Global batches are the same. No dropout, because each rank draws its own."""
    whole, rest = folder / f"from_{before}", folder / f"to_{after}"
    words = ["adapter.dropout=0", f"batch_size={12 // before}", f"output_dir={whole}"]
    run_ranks(before, run_recipe, folder, words)
    words = ["adapter.dropout=0", f"batch_size={12 // after}", f"output_dir={rest}"]
    run_ranks(after, run_recipe, folder, [*words, f"resume={whole}/checkpoints/step_00000005"])
    expected = losses(whole)
    assert losses(rest) == pytest.approx({s: expected[s] for s in range(6, STEPS + 1)}, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_damaged_checkpoint_is_passed_over(
    folder: Path, ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run goes on from the one before, with the losses and the adapter that it had."""
    run = folder / f"damaged_{ranks}"
    words = [f"batch_size={12 // ranks}", f"output_dir={run}"]
    run_ranks(ranks, run_recipe, folder, words)
    expected, adapter = losses(run), adapter_bytes(run)
    older, newest = published(run)
    file = max((newest / "state").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    capfd.readouterr()
    run_ranks(ranks, run_recipe, folder, [*words, "resume=auto"])
    assert losses(run) == expected
    assert adapter_bytes(run) == adapter
    assert [path.name for path in published(run)] == [older.name, newest.name]
    assert newest.with_name(f"{newest.name}.damaged").is_dir()
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "warning: resume" in line)
    assert line == (
        f"warning: resume: '{newest}' is damaged: state/{file.name}: content changed (SHA-256); "
        f"kept as '{newest.name}.damaged'; going on from '{older.name}'"
    )


# ---- what may change -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(folder: Path) -> Path:
    """A complete run of one process."""
    run_ranks(1, run_recipe, folder, [f"output_dir={folder}/finished"])
    return folder / "finished"


def check(folder: Path, *words: str) -> None:
    recipe = load_recipe()
    recipe.check(load_config(recipe.Config, ["--config", f"{folder}/config.yaml", *words]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["adapter.rank=6"], "adapter.rank: was 5, is 6"),
        (["adapter.method=lora"], "adapter.method: was dora, is lora"),
        (["adapter.targets=[q_proj]"], "adapter.targets: was null, is ['q_proj']"),
        (["quantization.format=none"], "quantization.format: was nf4, is none"),
        (["model.dtype=bf16"], "model.dtype: was fp32, is bf16"),
        (["optimizer.lr=1e-4"], "optimizer.lr: was 0.001, is 0.0001"),
        (["optimizer.betas=[0.9, 0.9]"], "optimizer.betas: was [0.9, 0.999], is [0.9, 0.9]"),
        (["lr_scheduler.num_warmup_steps=3"], "lr_scheduler.num_warmup_steps: was 2, is 3"),
        (["lr_scheduler=null"], "lr_scheduler.num_warmup_steps: was 2, is null"),
        (["dataset.seed=1"], "dataset.seed: was 0, is 1"),
        (["seed=4", "max_seq_len=32"], "max_seq_len: was 64, is 32; seed: was 0, is 4"),
        (["model.path={folder}/other"], "model (its weights): was "),
        (["model.path={folder}/roped"], "model (its config.json): was "),
    ],
)
def test_what_was_trained_may_not_change(
    folder: Path, finished: Path, words: list[str], message: str
) -> None:
    """The preflight lists every difference, before anything is loaded."""
    if not (folder / "other").exists():
        write_tiny_model(folder / "other", seed=1)
        write_tiny_model(folder / "roped", rope_theta=5e4)
    words = [word.format(folder=folder) for word in words]
    with pytest.raises(UserError) as error:
        check(folder, f"output_dir={finished}", "resume=auto", *words)
    text, last = str(error.value), published(finished)[-1]
    assert message in text and "\n" not in text
    assert text.startswith(f"resume: '{last}' was trained with other settings: ")
    assert text.endswith(f"adapter.start_from={last}/adapter begins with this adapter")


def test_what_is_not_computed_may_change(folder: Path, finished: Path) -> None:
    """As where another program has written `config.json` again."""
    changes = {"transformers_version": "9", "dtype": "float32", "eos_token_id": [1, 2]}
    model = write_tiny_model(folder / "again", **changes)  # type: ignore[arg-type]
    check(folder, f"output_dir={finished}", "resume=auto", f"model.path={model}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["batch_size=6"],
            "batch_size * gradient_accumulation_steps * ranks: was 12, is 6 "
            "(global_batch_size=12 keeps it); expected the same",
        ),
        (["dataset.size=25"], "dataset (its length): was 26, is 25"),
    ],
)
def test_the_samples_of_a_step_may_not_change(
    folder: Path, finished: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    """Checked after the data is read and before the weights are."""
    recipe, run = load_recipe(), tmp_path / "run"
    shutil.copytree(finished, run)
    argv = ["--config", f"{folder}/config.yaml", f"output_dir={run}", "resume=auto", *words]
    recipe.load_model = None
    before = (run / "config.yaml").read_text()
    with pytest.raises(UserError) as error:
        recipe.main(load_config(recipe.Config, argv))
    assert message in str(error.value)
    assert (run / "config.yaml").read_text() == before


def test_the_rest_may_change(folder: Path, finished: Path, tmp_path: Path) -> None:
    """Paths, splits of a batch, strategy and length may change; a finished run can be extended."""
    shutil.copytree(folder / "model", tmp_path / "moved")
    words = [f"output_dir={tmp_path}/more", f"resume={finished}", f"model.path={tmp_path}/moved"]
    words += ["activation.checkpointing=full", "log_every_n_steps=2", "max_steps=11", "epochs=4"]
    words += ["checkpoint.keep_last=1", "checkpoint.every_n_steps=null", "batch_size=6"]
    words += ["global_batch_size=12", "sharding.wrap=linear", "clip_grad_norm=2.0"]
    check(folder, *words)
    run_ranks(1, run_recipe, folder, words)
    assert list(losses(tmp_path / "more")) == [10, 11]
    assert [path.name for path in published(tmp_path / "more")] == ["step_00000011"]


def test_a_folder_with_checkpoints_is_not_started_over(folder: Path, finished: Path) -> None:
    with pytest.raises(UserError, match="up to step 9; expected resume=auto to continue it, or an"):
        check(folder, f"output_dir={finished}")
    before = losses(finished)
    run_ranks(1, run_recipe, folder, [f"output_dir={finished}", "resume=auto"])
    assert losses(finished) == before, "a run that was complete was trained further"


# ---- signals and kills -----------------------------------------------------------------------


def tune(folder: Path, *words: str, flags: str = "--nproc_per_node 2") -> list[str]:
    config = ["--config", f"{folder}/config.yaml", "batch_size=6", *words]
    return [str(TUNE), "run", *flags.split(), RECIPE, *config]


def start(command: list[str], held: Path | None = None) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "QFSDP_EAGER_KERNELS": "1"}
    if held is not None:
        environment["TESTS_HOLD_FILE"] = str(held)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def wait_for_step(
    run: Path, step: int, process: subprocess.Popen[str] | None = None, stale: int = 0
) -> None:
    """Returns when the log of `run` has `step` lines.

    Args:
        stale: inode of a log that the run will replace before its first step.
    """
    file = run / "metrics.jsonl"

    def taken() -> bool:
        fresh = file.exists() and file.stat().st_ino != stale
        return fresh and len(file.read_text().splitlines()) >= step

    wait_until(taken, f"{run} takes step {step}", process)


def rank_pids(agent: int) -> list[int]:
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    command = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, words in command.items() if b"qdora_distributed.py" in words]


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[int, float]:
    """Losses of two ranks without a break."""
    run_ranks(2, run_recipe, folder, ["batch_size=6", f"output_dir={folder}/reference"])
    return losses(folder / "reference")


def hold(run: Path) -> Path:
    """A file that makes processes of `run` wait after three or four steps; see `Samples`."""
    file = run.with_suffix(".hold")
    file.write_text(f"{run}/metrics.jsonl")
    return file


@pytest.mark.long
def test_sigterm_saves_and_the_same_command_goes_on(
    folder: Path, reference: dict[int, float]
) -> None:
    run = folder / "stopped"
    held = hold(run)
    words = [f"output_dir={run}", "resume=auto", "checkpoint.every_n_steps=null"]
    process = start(tune(folder, *words), held)
    wait_for_step(run, 3, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    (saved,) = published(run)
    at = read_settings(saved)["step"]
    assert list(losses(run)) == list(range(1, at + 1)) and 3 <= at < STEPS
    assert f"saving after step {at}, then stopping; resume=auto continues from there" in err
    assert "Traceback" not in err and "adapter (PEFT format)" not in out
    held.unlink()
    process = start(tune(folder, *words))
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert losses(run) == reference and "adapter (PEFT format)" in out
    assert adapter_bytes(run) == adapter_bytes(folder / "reference")


@pytest.mark.long
def test_a_killed_rank_is_replaced(folder: Path, reference: dict[int, float]) -> None:
    """torchrun starts all ranks again, and they resume; no rank hangs in a collective."""
    run = folder / "restarted"
    held = hold(run)
    words = [f"output_dir={run}", "resume=auto", "checkpoint.every_n_steps=1"]
    process = start(tune(folder, *words, flags="--nproc_per_node 2 --max-restarts 3"), held)
    wait_for_step(run, 3, process)
    first = rank_pids(process.pid)
    os.kill(first[1], signal.SIGKILL)
    ended = lambda: not set(first) & set(rank_pids(process.pid))  # noqa: E731
    wait_until(ended, "the first ranks end", process)
    held.unlink()
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert losses(run) == reference
    assert adapter_bytes(run) == adapter_bytes(folder / "reference")
    assert re.search(
        rf"^error: rank \d on .* \(process {first[1]}\) was killed by SIGKILL; ", err, re.M
    )
    assert "Traceback" not in err and "FAILED" not in err, err


@pytest.mark.long
def test_a_stopped_rank_is_named_and_replaced(folder: Path) -> None:
    """Rank 0 of 3 is stopped. The others say so after 20 s, and the restarted run goes on."""
    whole, run = folder / "whole_of_3", folder / "hung"
    words = ["adapter.dropout=0", "batch_size=4", "resume=auto", "checkpoint.every_n_steps=1"]
    finish(tune(folder, *words, f"output_dir={whole}", flags="--nproc_per_node 3"))
    held = hold(run)
    flags = "--nproc_per_node 3 --max-restarts 1"
    words += [f"output_dir={run}", "distributed.timeout=20s"]
    process = start(tune(folder, *words, flags=flags), held)
    wait_for_step(run, 3, process)
    of_rank = {int(rank_of(pid)): pid for pid in rank_pids(process.pid)}
    os.kill(of_rank[0], signal.SIGSTOP)
    held.unlink()
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert "no rank has moved on for 20 s (distributed.timeout)" in err
    assert "rank 0 did not arrive: last seen in step " in err  # a look may be a second old
    place = f"host {socket.gethostname()}, process {of_rank[0]}"
    assert f"{place}; its process does not answer; the system calls it T (stop" in err
    assert "ranks 1, 2" in err and "starting all ranks again (1 of --max-restarts 1)" in err
    assert "Traceback" not in err, err
    assert "qdora_distributed.py" in (run / "hangs/rank_1.txt").read_text()
    assert losses(run) == losses(whole)


def rank_of(pid: int) -> str:
    environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.partition("=")[::2] for entry in environment)["RANK"]


def kill_and_go_on(
    command: list[str],
    run: Path,
    kills: int,
    every: int,
    steps: int,
    scratch: Path,
    held: Path | None = None,
) -> list[tuple[float, int, int, int]]:
    """Kills all processes of a run `kills` times, then lets the run end.

    A kill comes at a random moment after 1 to `steps` steps beyond the last checkpoint. After each
    kill torch's own tool must read every published checkpoint to the last byte, and only steps
    after the last save may be lost.

    Args:
        every: steps between two saves.
        held: what `hold` wrote; removed after the last kill.

    Returns:
        per kill: seconds since the start, the step of the start, the last step taken, the last
        step saved.
    """
    chance, table = random.Random(kills), []
    for _ in range(kills):
        start_at, since, stale = newest_step(run), time.monotonic(), 0
        if table and table[-1][2] > start_at:
            stale = (run / "metrics.jsonl").stat().st_ino
        process = start(command, held)
        wait_for_step(run, start_at + chance.randint(1, steps), process, stale)
        time.sleep(chance.uniform(0, 0.2 * every))
        moment = time.monotonic() - since
        for pid in [process.pid, *rank_pids(process.pid)]:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
        taken, saved = len(losses(run)), newest_step(run)
        table.append((moment, start_at, taken, saved))
        for path in published(run):
            dcp_to_torch_save(path / "state", scratch)
            load_file(path / "adapter" / "adapter_model.safetensors")
        # A kill loses an unfinished save and up to `every` steps that were taken meanwhile.
        assert start_at <= saved and taken - saved < 2 * every, table
    if held is not None:
        held.unlink()
    process = start(command)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert not list((run / "checkpoints").glob("*.partial"))
    return table


def newest_step(run: Path) -> int:
    return read_settings(published(run)[-1])["step"] if published(run) else 0


@pytest.mark.long
def test_killed_at_random_moments(
    folder: Path, reference: dict[int, float], tmp_path: Path
) -> None:
    """The run saves at every step, so most kills hit a save."""
    run = folder / "killed"
    held = hold(run)
    words = [f"output_dir={run}", "resume=auto", "checkpoint.every_n_steps=1"]
    kill_and_go_on(tune(folder, *words), run, 2, 1, 2, tmp_path / "all.pt", held)
    assert losses(run) == reference
    assert adapter_bytes(run) == adapter_bytes(folder / "reference")


@pytest.fixture(scope="session")
def train_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_splits(tmp_path_factory.mktemp("arithmetic"), train=64, heldout=8)[0]


def real(model: Path, data: Path, run: Path, *words: str) -> list[str]:
    more = [f"model.path={model}", f"dataset.source={data}", f"output_dir={run}", "batch_size=2"]
    more += ["preflight=false"]  # a preflight takes 2.5 s
    config = ["--config", "configs/smollm2_135m_qdora.yaml", *more, *words]
    return [str(TUNE), "run", "--nproc_per_node", "2", RECIPE, *config]


def finish(command: list[str]) -> None:
    process = start(command)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err


def run_real(runs: list[list[str]]) -> None:
    recipe = load_recipe()
    for command in runs:
        recipe.main(load_config(recipe.Config, command[command.index("--config") :]))


@pytest.mark.slow
def test_the_real_model(smollm2_dir: Path, train_file: Path, tmp_path: Path) -> None:
    """The demonstration's config, resumed in the middle of an epoch."""
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    words = ["max_steps=3", "lr_scheduler.num_warmup_steps=1", "adapter.dropout=0.1"]
    words += ["checkpoint.every_n_steps=1", "checkpoint.keep_last=9"]
    resume = f"resume={whole}/checkpoints/step_00000002"
    runs = [real(smollm2_dir, train_file, whole, *words)]
    runs += [real(smollm2_dir, train_file, rest, *words, resume)]
    run_ranks(2, run_real, runs)
    assert losses(rest) == {3: losses(whole)[3]}
    assert adapter_bytes(rest) == adapter_bytes(whole)
    saved = published(whole)[-1] / "adapter" / "adapter_model.safetensors"
    assert saved.read_bytes() == adapter_bytes(whole)


@pytest.mark.slow
def test_twenty_kills_of_the_real_command(
    smollm2_dir: Path, train_file: Path, tmp_path: Path
) -> None:
    """Prints a line per kill (run with -s)."""
    words = ["max_steps=120", "epochs=99", "adapter.dropout=0.1", "max_seq_len=64"]
    finish(real(smollm2_dir, train_file, tmp_path / "whole", *words))
    run = tmp_path / "killed"
    words += ["resume=auto", "checkpoint.every_n_steps=3"]
    command = real(smollm2_dir, train_file, run, *words)
    table = kill_and_go_on(command, run, 20, 3, 4, tmp_path / "all.pt")
    expected, found = losses(tmp_path / "whole"), losses(run)
    print("\nkill  after s  started from  killed after  goes on from  lost  same losses")
    for at, (moment, started, taken, saved) in enumerate(table, 1):
        same = all(found[s] == expected[s] for s in range(started + 1, taken + 1))
        row = f"{at:4}  {moment:7.2f}  {started:12}  {taken:12}  {saved:12}"
        print(f"{row}  {taken - saved:4}  {same}")
    assert found == expected
    assert adapter_bytes(run) == adapter_bytes(tmp_path / "whole")
