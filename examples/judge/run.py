"""Is the finetuned SmolLM2-135M-Instruct better than its base? Asks two judges on this machine.

    python -m qfsdp.examples.judge.run [--output-dir runs/judge] [--updates 32] [--questions 40]
                                 [--tokens 64] [--kill-after 150]

Trains a QDoRA adapter on arithmetic word problems, serves base and adapter with `qfsdp serve`, and
compares their answers to our questions by `recipes/judge`, each pair in both orders:

    rules   decides by rules (`examples.judge.rules`), and refuses where it has none
    model   the base itself: too small to judge well, as its refusals and contradictions show

The first comparison is killed after some exchanges and goes on. An adapter that is there already is
used again. Needs `pip install starlette uvicorn openai`; about a quarter of an hour of one core.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qfsdp.common.errors import user_errors
from qfsdp.common.quiet import quiet_torchao

from ..demo.prepare import prepare
from ..demo.progress import run_command, say, working
from .rules import start_judge

TUNE = [str(Path(sys.executable).with_name("tune")), "run"]


def train(model: Path, folder: Path, updates: int) -> Path:
    """Trains the adapter, unless it is there; returns its folder."""
    adapter = folder / "adapter"
    if not (adapter / "adapter_config.json").exists():
        words = ["--config", "configs/smollm2_135m_qdora.yaml", f"max_steps={updates}"]
        words += [f"output_dir={folder}", f"model.path={model}", "model.dtype=bf16", "resume=auto"]
        if run_command("training", [*TUNE, "recipes/qdora_distributed", *words]):
            raise SystemExit("training failed")
    return adapter


@contextmanager
def serving(model: Path, adapter: Path, folder: Path) -> Iterator[str]:
    """The URL of a server with the models "base" and "tuned"."""
    command = [str(Path(sys.executable).with_name("qfsdp")), "serve", "port=0", "model_name=base"]
    command += [f"model.path={model}", f"adapters.tuned={adapter}"]
    log = folder / "server.txt"
    with log.open("w") as stream:
        server = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
    try:
        with working("starting the server"):
            while not (found := re.search(r"at (http://\S+/v1)", log.read_text())):
                if server.poll() is not None:
                    raise SystemExit(f"the server has ended, see {log}")
                time.sleep(0.2)
        yield found[1]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def killed(command: list[str], exchanges: Path, count: int) -> None:
    """Runs a command, and kills it when the file has `count` lines more than before."""
    already = lines_of(exchanges)
    with working(f"judging until {count} exchanges are there"):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and lines_of(exchanges) < already + count:
            time.sleep(0.05)
        process.kill()
        process.wait()
    say(f"killed with {lines_of(exchanges)} exchanges; the same command again:")


def lines_of(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def judging(
    server: str, judge: tuple[str, str], folder: Path, questions: int, tokens: int
) -> list[str]:
    """The command of a comparison; one folder for both judges, as answers are kept there."""
    url, name = judge
    words = ["--config", "configs/judge.yaml", f"output_dir={folder}", f"max_questions={questions}"]
    words += [
        "in_flight=32",
        f"judge.url={url}",
        f"judge.model={name}",
        f"judge.max_tokens={tokens}",
    ]
    for candidate in ("base", "tuned"):
        words += [
            f"candidates.{candidate}.url={server}",
            f"candidates.{candidate}.model={candidate}",
        ]
        words += [f"candidates.{candidate}.max_tokens={tokens}"]
    return [*TUNE, "recipes/judge", *words]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("runs/judge"), help="of all files")
    parser.add_argument("--updates", type=int, default=32, help="of the adapter, 8 problems each")
    parser.add_argument("--questions", type=int, default=40, help="of ours")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--kill-after", type=int, default=150, help="exchanges; 0: never")
    args = parser.parse_args()
    quiet_torchao()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same on every machine
    began, folder = time.perf_counter(), args.output_dir.absolute()
    with working("preparing the model and the problems"):
        model, _, _ = prepare()
    adapter = train(model, folder / "tuned", args.updates)
    with serving(model, adapter, folder) as server:
        rules = judging(server, (start_judge(), "rules"), folder, args.questions, args.tokens)
        if args.kill_after:
            killed(rules, folder / "exchanges.jsonl", args.kill_after)
        by_model = judging(server, (server, "base"), folder, args.questions, args.tokens)
        for name, command in (("rules", rules), ("model", by_model)):
            say(f"judge: {name}")
            if run_command("judging", command):
                raise SystemExit(f"judging failed, see {folder / 'server.txt'}")
            (folder / "results.json").rename(folder / f"results_{name}.json")
    say(f"finished in {time.perf_counter() - began:.0f} s; {folder}/results_*.json")


if __name__ == "__main__":
    with user_errors():
        main()
