"""QDoRA of a model of 70 billion weights on a CPU, with its base on disk: the command as typed.

    python benchmarks/full_size.py [--json full_size.json] [--dir DIR] [--layers 80] [--ranks 1 2]
                                   [--vocabulary 128256] [--relay] [-- key=value ...]

Writes a quantized folder with the shapes of Llama-3-70B (35 GB, and 4.2 GB of embeddings; removed
at the end) and runs, for each number of ranks,

    tune run [--nproc_per_node N] recipes/qdora_distributed --config configs/llama3_70b_qdora.yaml
        sharding.offload_base=disk adapter.rank=16 ...

for two updates of 64 tokens in two rows of 32. Then it resumes the last run after its first update.
All runs train on the same tokens, so their losses agree as far as bf16 does. With `--relay` there
is one run: it is killed when the checkpoint of its first update is complete, and resumed on the
other number of ranks. That takes half of the time.

Weights are normal random numbers, quantized by qfsdp's own code. Two layers are drawn; the others
repeat their bytes in turn. So DoRA's norms are real. The tokenizer is SmolLM2's, whose 49,152 ids
are rows of the vocabulary. The trained rows are generated.

A rank's private memory is that of `/proc/PID/smaps_rollup` every 5 s: pages that no other process
maps and that are not the page cache. "anonymous" is its anonymous part, five times a second.

Keys of the JSON file are `ranks_N_NAME` and `resumed_NAME`:

    start_s, load_s, norms_s   until the memory is estimated; then until the rest of the base is
                               loaded; then until adapters and norms are there
    step_s                     the last update
    private, estimate          bytes of the rank with the most; private_over_estimate
    read, read_from_disk       bytes that all ranks read from files in the last update
    silence_s                  longest time without a line of output
    loss_K, grad_norm_K        of update K
    adapter                    bytes of the adapter
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.load_base import LLAMA3_70B
from benchmarks.timing import Figures, arguments, tell
from examples.demo import cache_dir
from examples.demo.smollm2 import prepare_model
from qfsdp.checkpoint.weights.qfsdp_layout import (
    MANIFEST,
    VERSION,
    quantized_group,
    write_quantized,
)
from qfsdp.checkpoint.weights.write import (
    Entry,
    Group,
    SafetensorsFile,
    plan_files,
    write_file,
    write_index,
)
from qfsdp.common.files import write_json
from qfsdp.common.sizes import parse_size
from qfsdp.modules.decoder_base import base_parameters
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.quantized_linear import QuantizationConfig, quantize_linears
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.nf4 import quantize
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor

ROOT = Path(__file__).parents[1]
CONFIG = "configs/llama3_70b_qdora.yaml"
DISTINCT = 2  # layers that are drawn
ROWS, LENGTH, UPDATES = 2, 32, 2  # rows of tokens per update, over all ranks
FIRST = Path("checkpoints/step_00000001")
KEPT_FREE = 20 << 30  # bytes of the disk that the folder must leave


# ---- the model and its data ----------------------------------------------------------------


def write_model(folder: Path, layers: int, vocabulary: int) -> None:
    """A quantized model folder of `layers` decoder layers."""
    folder.mkdir()
    config = LLAMA3_70B | {"num_hidden_layers": layers, "vocab_size": vocabulary}
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_dict(config)).bfloat16()
    quantize_linears(model, QuantizationConfig(), {})
    params = {name: param.data for name, param in base_parameters(model)}
    drawn: dict[str, QuantizedTensor] = {}
    noise = torch.randn(1 << 25, generator=torch.Generator().manual_seed(0))
    plain_noise = (noise * 0.02).bfloat16()

    def write(name: str, file: SafetensorsFile) -> None:
        param = params[name]
        if isinstance(param, QuantizedTensor):
            layer = int(name.split(".")[2])
            key = name.replace(f".{layer}.", f".{layer % DISTINCT}.")
            if key not in drawn:
                drawn[key] = _draw(key, param.size(0), param.size(1), layers)
            write_quantized(file, name, drawn[key])
        elif param.dim() == 1:
            file.write(name, torch.ones(param.shape, dtype=param.dtype))
        else:  # the embeddings and the output layer repeat 32 M numbers
            step = plain_noise.numel() // param.size(1)
            for start in range(0, param.size(0), step):
                rows = min(step, param.size(0) - start)
                file.write(name, plain_noise[: rows * param.size(1)].view(rows, -1), start)

    files = plan_files({name: _group(name, param) for name, param in params.items()})
    _check_space(folder, sum(file.size for file in files))
    for file in files:
        write_file(folder, file, write)
    write_index(folder, files)
    section = {"quant_method": "qfsdp", "format": "nf4"}
    write_json(folder / "config.json", config | {"quantization_config": section})
    weights = {
        name: {"format": param.format, "shape": list(param.shape)}
        for name, param in params.items()
        if isinstance(param, QuantizedTensor)
    }
    source = {"path": "generated", "fingerprint": f"{layers} generated layers"}
    write_json(folder / MANIFEST, {"version": VERSION, "weights": weights, "source": source})


def _group(name: str, param: torch.Tensor) -> Group:
    if isinstance(param, QuantizedTensor):
        return quantized_group(name, param.format, *param.shape)
    return {name: Entry.of(param)}


def _draw(name: str, rows: int, cols: int, layers: int) -> QuantizedTensor:
    """A quantized weight of normal numbers, in which the last linears of a layer are smaller, so
    that the hidden state grows as in a trained model and not by a factor of `layers`."""
    last = name.endswith(("o_proj.weight", "down_proj.weight"))
    scale = 0.02 * ((2 * layers) ** -0.5 if last else 1)
    seeded = torch.Generator().manual_seed(sum(name.encode()))
    return quantize((torch.randn(rows, cols, generator=seeded) * scale).bfloat16())


def _check_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free - size < KEPT_FREE:
        gb = f"{free / 1e9:.0f} GB free, {size / 1e9:.0f} GB needed"
        sys.exit(f"--dir {folder}: {gb}; expected {KEPT_FREE / 1e9:.0f} GB to be left")


def write_rows(file: Path) -> None:
    """Rows in the form of alpaca's."""
    numbers = [(a, a * 7 % 11) for a in range(64)]
    rows = [
        {"instruction": f"Add {b} to {a}.", "input": "", "output": f"{a} plus {b} is {a + b}."}
        for a, b in numbers
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- a run and what it takes ---------------------------------------------------------------


class Processes(threading.Thread):
    """Follows the ranks of a command: private memory, and bytes that they read from files. Kills it
    once the path `kill_after` exists.

    Attributes:
        private, anonymous: most bytes of any rank.
        together: most private bytes of all ranks at a time.
    """

    def __init__(self, pid: int, ranks: int, kill_after: Path | None) -> None:
        super().__init__(daemon=True)
        self._pid, self._ranks, self._kill_after = pid, ranks, kill_after
        self.private = self.anonymous = self.together = 0
        self._read: dict[int, tuple[int, int]] = {}
        self.over = threading.Event()
        self.start()

    def run(self) -> None:
        looks, pids = 0, list[int]()
        while not self.over.wait(0.2):
            if looks % 25 == 0:
                pids = ranks_of(self._pid, self._ranks)
            for pid in pids:
                with suppress(OSError, ValueError):
                    self.anonymous = max(self.anonymous, field(pid, "status", "RssAnon"))
            if looks % 25 == 0:
                self._look(pids)
                if self._kill_after is not None and self._kill_after.exists():
                    for pid in {self._pid, *pids}:
                        os.kill(pid, signal.SIGKILL)
                    return
            looks += 1

    def _look(self, pids: list[int]) -> None:
        private = []
        for pid in pids:
            with suppress(OSError, ValueError):
                clean = field(pid, "smaps_rollup", "Private_Clean")
                private.append(clean + field(pid, "smaps_rollup", "Private_Dirty"))
                self._read[pid] = field(pid, "io", "rchar"), field(pid, "io", "read_bytes")
        self.private = max([self.private, *private])
        self.together = max(self.together, sum(private))

    @property
    def read(self) -> tuple[int, int]:
        """Bytes that all ranks have read so far: from files, and of these from the disk."""
        return sum(r[0] for r in self._read.values()), sum(r[1] for r in self._read.values())


def field(pid: int, file: str, name: str) -> int:
    """A number of `/proc/PID/FILE`, in bytes."""
    text = Path(f"/proc/{pid}/{file}").read_text()
    found = re.search(rf"^{name}:\s*(\d+)( kB)?", text, re.MULTILINE)
    if found is None:
        raise ValueError(name)
    return int(found[1]) * (1024 if found[2] else 1)


def ranks_of(pid: int, ranks: int) -> list[int]:
    """The processes that train: `pid` itself, or the children that torchrun's agent started."""
    return [pid] if ranks == 1 else [child for child in children(pid) if is_rank(child)]


def children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def is_rank(pid: int) -> bool:
    with suppress(OSError):
        return b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def lines_of(process: subprocess.Popen[str], log: Path) -> Iterator[tuple[float, str]]:
    """The lines of a process with the seconds since its start; prints them and keeps them."""
    assert process.stdout is not None
    since = time.monotonic()
    with log.open("w") as kept:
        for line in process.stdout:
            seconds = time.monotonic() - since
            text = f"{seconds:8.1f}  {line.rstrip()}"
            print(text, flush=True)
            print(text, file=kept, flush=True)
            yield seconds, line


def train(
    ranks: int, work: Path, output: Path, *further: str, kill_after: Path | None = None
) -> Figures:
    """Runs the command on `ranks` ranks and returns its figures, without a prefix.

    Args:
        kill_after: the command is killed once this path exists.
    """
    ring = {1: "1GiB", 2: "512MiB"}.get(ranks, "512MiB")
    flags = ["--nproc_per_node", str(ranks)] if ranks > 1 else []
    command = [str(Path(sys.executable).with_name("tune")), "run", *flags]
    command += ["recipes/qdora_distributed", "--config", CONFIG]
    command += [f"model.path={work / 'model'}", f"dataset.source={work / 'rows.jsonl'}"]
    command += [f"tokenizer.path={prepare_model(cache_dir())}", f"output_dir={output}"]
    command += ["adapter.rank=16", "sharding.offload_base=disk", f"sharding.ring_memory={ring}"]
    command += [f"batch_size={ROWS // ranks}", "gradient_accumulation_steps=1"]
    command += [f"max_seq_len={LENGTH}", f"max_steps={UPDATES}", "dataset.train_on_input=true"]
    command += ["metric_logger=null", "checkpoint.every_n_steps=1", *further]
    print("$", " ".join(command).replace(str(work), "WORK"), flush=True)
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    watched, marks = Processes(process.pid, ranks, kill_after), list[Mark]()
    for seconds, line in lines_of(process, output.with_suffix(".log")):
        marks.append((seconds, line, *watched.read))
    watched.over.set()
    watched.join()
    if process.wait() != 0 and kill_after is None:
        sys.exit(f"{ranks} ranks: the command ended with status {process.returncode}")
    figures = measured(marks) | losses(output)
    figures |= {
        "private": watched.private,
        "anonymous": watched.anonymous,
        "private_together": watched.together,
        "private_over_estimate": watched.private / figures["estimate"],
    }
    if kill_after is None:
        figures["adapter"] = sum(f.stat().st_size for f in (output / "adapter").iterdir())
    return figures


Mark = tuple[float, str, int, int]
"""Seconds since the start, a line of output, bytes read from files so far, those from the disk."""


def measured(marks: list[Mark]) -> Figures:
    """Figures of a run's output."""

    def first(pattern: str) -> Mark:
        return next(mark for mark in marks if re.search(pattern, mark[1]))

    checked, loaded, begun = first("^memory: about"), first("^loaded "), first("^steps ")
    times = [0.0, *(mark[0] for mark in marks)]
    figures: Figures = {
        "estimate": parse_size(checked[1].split("about ")[1].split(" of ")[0].replace(" ", "")),
        "start_s": checked[0],
        "load_s": loaded[0] - checked[0],
        "norms_s": begun[0] - loaded[0],
        "silence_s": max(b - a for a, b in pairwise(times)),
        "total_s": times[-1],
    }
    steps = [mark for mark in marks if re.search(r" step \d+/", mark[1])]
    for before, step in pairwise([begun, *steps]):
        figures |= {
            "step_s": step[0] - before[0],
            "read": step[2] - before[2],
            "read_from_disk": step[3] - before[3],
        }
    return figures


def losses(output: Path) -> Figures:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return {f"loss_{m['step']}": m["loss"] for m in found if "loss" in m} | {
        f"grad_norm_{m['step']}": m["grad_norm"] for m in found if "grad_norm" in m
    }


def in_turn(ranks: list[int], work: Path, overrides: list[str], args: Any) -> Figures:
    """Two updates on each number of ranks, then the second one again from the last checkpoint."""
    figures: Figures = {}
    for count in ranks:
        found = train(count, work, work / f"ranks_{count}", *overrides)
        figures |= {f"ranks_{count}_{name}": value for name, value in found.items()}
        tell({}, args.json, figures)
    begun = work / f"ranks_{ranks[-1]}" / FIRST
    found = train(ranks[-1], work, work / "resumed", f"resume={begun}", *overrides)
    figures |= {f"resumed_{name}": value for name, value in found.items()}
    figures["resumed_loss_differs"] = abs(found["loss_2"] - figures[f"ranks_{ranks[-1]}_loss_2"])
    return figures


def relayed(ranks: list[int], work: Path, overrides: list[str], args: Any) -> Figures:
    """The first update on the first number of ranks, the second, from there, on the last."""
    output = work / "run"
    found = train(ranks[0], work, output, *overrides, kill_after=output / FIRST)
    figures = {f"ranks_{ranks[0]}_{name}": value for name, value in found.items()}
    tell({}, args.json, figures)
    found = train(ranks[-1], work, output, "resume=auto", *overrides)
    return figures | {f"ranks_{ranks[-1]}_{name}": value for name, value in found.items()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=LLAMA3_70B["num_hidden_layers"])
    parser.add_argument("--vocabulary", type=int, default=LLAMA3_70B["vocab_size"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--relay", action="store_true", help="an update on each, see above")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("overrides", nargs="*", help="key=value of the config, after --")
    args = parser.parse_args()
    layers = 2 if args.quick else args.layers
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="full-size-") as folder:
        work = Path(folder)
        since = time.monotonic()
        write_model(work / "model", layers, args.vocabulary)
        write_rows(work / "rows.jsonl")
        size = sum(f.stat().st_size for f in (work / "model").glob("*.safetensors"))
        figures = {"layers": layers, "folder": size, "write_s": time.monotonic() - since}
        print(f"{layers} layers, {size / 1e9:.1f} GB: {figures['write_s']:.0f} s", flush=True)
        figures |= (relayed if args.relay else in_turn)(args.ranks, work, args.overrides, args)
    tell(figures, args.json)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
