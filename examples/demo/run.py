"""`make demo`: finetunes SmolLM2-135M-Instruct with QDoRA on two CPU processes.

Makes the model and arithmetic word problems, measures the model on held-out problems, finetunes it
with `tune run`, and measures it again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from qfsdp.common.errors import user_errors
from qfsdp.common.quiet import quiet_torchao
from qfsdp.data.files.json_lines import to_lines
from qfsdp.training.report.run_folder import SAMPLES
from qfsdp.training.report.sections import report_at_end

from . import cache_dir
from .prepare import prepare
from .progress import run_command, say, working

RECIPE = "recipes/qdora_distributed"
CONFIG = "configs/smollm2_135m_qdora.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", default="runs/demo", help="folder of the run")
    parser.add_argument("--max-steps", type=int, default=32, help="updates to train")
    parser.add_argument("--heldout", type=int, default=100, help="held-out problems for the loss")
    args = parser.parse_args()
    started = time.perf_counter()
    say("finetunes SmolLM2-135M-Instruct with QDoRA (4-bit base, DoRA adapters) on two CPU")
    say("processes, to solve arithmetic word problems. Takes a few minutes.")
    quiet_torchao()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same demo on every machine
    with working(f"1/4 preparing the model and the problems in {cache_dir()}"):
        model, train, heldout = prepare()
    say(f"model: {model}")
    say(f"training problems: {train}")
    say(f"held-out problems: {heldout}")
    with working(f"2/4 measuring the model before training, on {args.heldout} held-out problems"):
        from .measure import measure  # imports torch, which takes seconds

        overrides = [f"output_dir={args.output_dir}", f"max_steps={args.max_steps}"]
        before = measure(RECIPE, CONFIG, overrides, heldout, args.heldout, adapter=None)
    say(f"held-out loss before training: {before[0]:.3f}")

    # A run does not start among the checkpoints of an earlier one.
    shutil.rmtree(Path(args.output_dir) / "checkpoints", ignore_errors=True)
    command = ["run", "--nproc_per_node", "2", RECIPE, "--config", CONFIG, *overrides]
    say(f"3/4 training {args.max_steps} updates with this command:")
    say(f"tune {' '.join(command)}")
    # `tune` on PATH may belong to another environment.
    tune = Path(sys.executable).with_name("tune")
    status = run_command("3/4 training", [str(tune), *command])
    if status != 0:
        raise SystemExit(status)
    adapter = Path(args.output_dir) / "adapter"
    with working(f"4/4 measuring the model with its adapter, on {args.heldout} held-out problems"):
        after = measure(RECIPE, CONFIG, overrides, heldout, args.heldout, adapter)

    rows = [
        {"prompt": question, "before": old, "after": new}
        for (question, old), (_, new) in zip(before[1], after[1], strict=True)
    ]
    for row in rows:
        print(f"\nquestion: {row['prompt']}\nbefore:   {row['before']}\nafter:    {row['after']}")
    print()
    (Path(args.output_dir) / SAMPLES).write_text(to_lines(rows), encoding="utf-8")
    report_at_end(Path(args.output_dir))  # with the samples
    say(f"finished in {time.perf_counter() - started:.0f} s")
    say(f"held-out loss: {before[0]:.3f} before training, {after[0]:.3f} after")
    say(f"the adapter, in PEFT's format: {adapter}")
    say(f"the curves: {args.output_dir}/report.html, or tensorboard --logdir {args.output_dir}")


if __name__ == "__main__":
    with user_errors():
        main()
