"""A disk of 20 MB that fills up at six moments of a run: what is printed, and what is left.

    python -m tests.faults.full_disk [MOMENT ...]

Each run is a real recipe in a process of its own, in a file system in memory. A file fills it at
the moment (and is removed some steps later, where the run goes on). After a stop the run is resumed
with free space. Needs the right to mount in a user namespace (`unshare -rm`); says so without it.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qfsdp.common.files import PARTIAL
from tests.json_lines import json_lines, metric_lines
from tests.tiny import ROOT, write_tiny_model
from tests.waiting import LIMIT_S

RECIPE = ROOT / "recipes" / "qdora_distributed.py"
TENSORBOARD = "torchtune.training.metric_logging.TensorBoardLogger"
STEPS = 12
CONFIG = f"""
output_dir: {{disk}}/run
model: {{{{path: {{folder}}/model, dtype: fp32}}}}
tokenizer: {{{{_component_: tests.toy_data.tokenizer}}}}
dataset: {{{{_component_: tests.toy_data.Samples}}}}
metric_logger: {{{{_component_: {TENSORBOARD}, log_dir: {{disk}}/run/tensorboard}}}}
adapter: {{{{rank: 5}}}}
optimizer: {{{{_component_: torch.optim.AdamW, lr: 1e-3}}}}
batch_size: 2
max_seq_len: 64
max_steps: {STEPS}
checkpoint: {{{{every_n_steps: 4}}}}
validation:
  sets: {{{{held: {{{{_component_: tests.toy_data.Samples}}}}}}}}
  eval_every: 4
preflight: false
"""
FILLER = "filler"


# ---- in the process of a run ---------------------------------------------------------------------


def fill(disk: Path) -> None:
    """Leaves no free byte."""
    with open(disk / FILLER, "ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass


def free(disk: Path) -> None:
    """Removes what `fill` has written."""
    (disk / FILLER).unlink(missing_ok=True)


def before(owner: type, name: str, number: int, action: Callable[[], object]) -> None:
    """Has `action` called before call `number` (from 1) of a method."""
    method, calls = getattr(owner, name), [0]

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            action()
        return method(self, *args, **kwargs)

    setattr(owner, name, wrapped)


def run_recipe(moment: str, disk: Path, config: Path) -> None:
    """Runs the recipe, and fills the disk at the moment."""
    from qfsdp.checkpoint.resume import Checkpointer
    from qfsdp.training.metrics import RunLog
    from qfsdp.training.validation import Validation

    if moment == "start":
        fill(disk)
    elif moment in ("metrics", "TensorBoard"):
        before(RunLog, "log", 3, lambda: fill(disk))  # the last page of a file has room for some
        before(RunLog, "log", 11, lambda: free(disk))
    elif moment == "checkpoint":
        before(Checkpointer, "save", 2, lambda: fill(disk))
    elif moment == "best adapter":
        before(Validation, "_keep", 2, lambda: fill(disk))
        before(RunLog, "log", 9, lambda: free(disk))
    elif moment == "final adapter":
        save_result = Checkpointer.save_result

        def full(self: Checkpointer, *args: Any) -> None:
            self.wait()  # the last checkpoint is on the disk
            fill(disk)
            save_result(self, *args)

        Checkpointer.save_result = full  # type: ignore[method-assign]
    if moment == "TensorBoard":
        from torch.utils import tensorboard

        writer = tensorboard.SummaryWriter
        at_once: Any = lambda log_dir: writer(log_dir, flush_secs=0)  # noqa: E731  (of 120)
        tensorboard.SummaryWriter = at_once  # type: ignore[misc]
    words = ["~metric_logger"] if moment != "TensorBoard" else []
    if moment in ("metrics", "TensorBoard"):
        words += ["checkpoint.every_n_steps=11", "validation.eval_every=12"]
    elif moment == "best adapter":
        words += ["checkpoint.every_n_steps=5"]
    words += ["resume=auto"] if moment == "none" else []
    sys.argv = [str(RECIPE), "--config", str(config), *words]
    runpy.run_path(str(RECIPE), run_name="__main__")


# ---- around it -----------------------------------------------------------------------------------

MOMENTS = ("start", "metrics", "TensorBoard", "checkpoint", "best adapter", "final adapter")
STOPS = ("start", "checkpoint", "final adapter")


def start(moment: str, disk: Path, config: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tests.faults.full_disk", "--run", moment, disk, config]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "QFSDP_EAGER_KERNELS": "1"}
    return subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )


def check_left(run: Path) -> list[str]:
    """The files of a run, after a check that each is whole."""
    from qfsdp.checkpoint.adapter_files import read_adapter_config
    from qfsdp.checkpoint.state_files import read_trained

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    files = sorted(path for path in run.rglob("*") if path.is_file())
    assert not [path for path in run.rglob(f"*{PARTIAL}*")], files
    assert all(any(folder.iterdir()) for folder in run.rglob("*") if folder.is_dir()), "empty"
    for file in files:
        if file.name == "metrics.jsonl":
            json_lines(file)
        if file.name == "adapter_model.safetensors":
            read_adapter_config(file.parent)
        if file.name == "facts.json":
            read_trained(file.parent / "state")
    checkpoints = [f for f in files if f.name == "facts.json"]
    rest = [f for f in files if not any(f.is_relative_to(c.parent) for c in checkpoints)]
    whole = [f"{file.parent.relative_to(run)}/" for file in checkpoints]
    return whole + [f"{file.relative_to(run)} ({file.stat().st_size:,})" for file in rest]


def show(moment: str, folder: Path) -> None:
    """Runs until the moment, prints what happened, and resumes a run that has stopped."""
    disk = folder / moment.replace(" ", "_")
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20M", "tmpfs", disk], check=True)
    try:
        show_on(disk, moment, folder)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def show_on(disk: Path, moment: str, folder: Path) -> None:
    """The same on a mounted disk."""
    config = folder / f"{disk.name}.yaml"
    config.write_text(CONFIG.format(disk=disk, folder=folder))
    done = start(moment, disk, config)
    assert "Traceback" not in done.stderr, done.stderr
    told = [s for s in done.stderr.splitlines() if s.startswith(("error: ", "warning: "))]
    print(f"{moment}: exit status {done.returncode}")
    print(*(f"    {line.replace(str(disk), '')}" for line in told), sep="\n")
    print("  left: " + ", ".join(check_left(disk / "run")), flush=True)
    assert done.returncode == (2 if moment in STOPS else 0), done.stderr
    # The log may meet the full disk before the checkpoint that is written in the background.
    most = 1 if moment in ("start", "final adapter") else 3
    assert 1 <= len(told) <= most, done.stderr
    if moment in STOPS:
        free(disk)
        done = start("none", disk, config)
        assert done.returncode == 0, done.stderr
    steps = [line["step"] for line in metric_lines(disk / "run") if "loss" in line]
    assert steps == list(range(1, STEPS + 1)), steps
    check_left(disk / "run")
    assert (disk / "run/adapter/adapter_config.json").is_file()
    resumed = "resumed with free space: " if moment in STOPS else ""
    print(f"  {resumed}metrics of {len(steps)} of {STEPS} steps, adapter written", flush=True)


def can_mount() -> bool:
    words = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(words, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("moments", nargs="*", default=list(MOMENTS))
    parser.add_argument("--mounting", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        moment, disk, config = args.run
        return run_recipe(moment, Path(disk), Path(config))
    if not args.mounting:
        if not can_mount():
            return print("full_disk: skipped: this system lets nobody mount (unshare -rm)")
        words = [sys.executable, "-m", "tests.faults.full_disk", "--mounting", *args.moments]
        os.execvp("unshare", ["unshare", "-rm", *words])
    with tempfile.TemporaryDirectory() as name:
        write_tiny_model(Path(name) / "model")
        for moment in args.moments:
            show(moment, Path(name))


if __name__ == "__main__":
    main()
