"""A model judges the demonstration's model before and after finetuning.

    python -m examples.demo.judged runs/x/adapter [key=value of configs/judge.yaml ...]

Serves SmolLM2-135M-Instruct and the adapter (`qfsdp serve`), and runs recipes/judge on 40 generated
questions, with the base as the judge, in both orders. A judge of this size shows that the parts
work together, not which answers are better. Interrupted, the same command goes on.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from time import monotonic, sleep

from . import cache_dir
from .smollm2 import prepare_model

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 600.0


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "qfsdp.cli.command", *words]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Returns when the server answers."""
    until = monotonic() + PATIENCE_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/models", timeout=5).close()
            return
        except urllib.error.HTTPError:
            return  # it wants a key
        except OSError:
            if server.poll() is not None or monotonic() > until:
                raise SystemExit("the server does not answer") from None
            sleep(0.2)


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    adapter, *words = sys.argv[1:]
    model = prepare_model(cache_dir())
    # The address is part of every kept exchange: the same command needs the same one to go on.
    kept = Path("runs/judged.port")
    kept.parent.mkdir(exist_ok=True)
    if not kept.exists():
        kept.write_text(str(free_port()))
    port = kept.read_text()
    url = f"http://127.0.0.1:{port}/v1"
    server = subprocess.Popen(
        command("serve", f"model.path={model}", f"adapters.tuned={adapter}", f"port={port}")
    )
    try:
        wait_for(url, server)
        ends = [f"{key}.url={url}" for key in ("candidates.base", "candidates.tuned", "judge")]
        ends += [f"candidates.{name}.max_tokens=64" for name in ("base", "tuned")]
        ends += ["judge.max_tokens=96", "output_dir=runs/judged", "in_flight=32"]
        judge = command("run", "recipes/judge", f"--config={ROOT}/configs/judge.yaml", *ends)
        return subprocess.run([*judge, *words]).returncode
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    raise SystemExit(main())
