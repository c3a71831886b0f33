"""Tokenizing many rows: seconds of the first and the second start, and memory of two ranks.

    python benchmarks/tokenize_rows.py [--quick] [--rows 200000] [--model DIR]

Writes word problems of `examples.demo.arithmetic` to a JSONL file and starts two ranks twice, with
an empty cache. Each rank builds the tokenizer, `instruct_dataset` and the packs, reads every sample
once, and says how long that took and how much memory it has: private pages, and its share of all
pages (PSS) that belong to the tokens. Standard error shows the progress that users see.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--quick", action="store_true", help="10,000 rows")
    parser.add_argument("--model", default="~/.cache/qfsdp/SmolLM2-135M-Instruct")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        measure(Path(args.worker), args.model)
        return
    args.rows = 10_000 if args.quick else args.rows
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        write_rows(data, args.rows)
        print(f"{args.rows:,} rows, {data.stat().st_size / 1e6:.0f} MB of JSONL", flush=True)
        for start in ("first", "second"):
            for line in start_ranks(data, args.model, Path(folder)):
                print(f"{start} start, {line}", flush=True)


def write_rows(file: Path, count: int) -> None:
    """Writes different word problems with answers."""
    from examples.demo.arithmetic import generate

    with file.open("w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in generate(count, seed=0))


def start_ranks(data: Path, model: str, cache: Path) -> list[str]:
    """What two ranks say after one start."""
    command = [sys.executable, __file__, "--worker", str(data), "--model", model]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(cache / "cache")}
    environment |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": os.getcwd()}
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    lines = []
    for rank in ranks:  # both have read everything before one measures, so pages are shared
        assert rank.stdout is not None
        lines.append(rank.stdout.readline().strip())
    for number, rank in enumerate(ranks):
        assert rank.stdin is not None and rank.stdout is not None
        rank.stdin.write("measure\n")
        rank.stdin.flush()
        lines[number] = f"rank {number}: {lines[number]}; {rank.stdout.readline().strip()}"
    for rank in ranks:
        rank.communicate()  # end of input: no rank ends before all have measured
    return lines


def measure(data: Path, model: str) -> None:
    """One rank: builds the dataset, reads it, and prints two lines."""
    from qfsdp.common.quiet import quiet_torchao

    quiet_torchao()
    import torchtune.data  # noqa: F401  imports are not what is measured

    from qfsdp.config.component import Component
    from qfsdp.data import PackedDataset, build_dataset, hf_tokenizer

    tokenizer = hf_tokenizer(model, max_seq_len=512)
    before = memory("anonymous")
    began = time.monotonic()
    component = Component(
        "qfsdp.data.instruct_dataset",
        {"source": str(data), "prompt_column": "question", "answer_column": "answer"},
    )
    dataset = build_dataset("dataset", component, tokenizer, tokenizer.vocab_size)
    built = time.monotonic() - began
    packed = PackedDataset(dataset, 2048, 0)
    packing = time.monotonic() - began - built
    total = int(dataset.tokens[:].sum()) + int(dataset.labels[:].sum())  # reads every page
    grown = (memory("anonymous") - before) / 1e6
    print(
        f"dataset {built:.1f} s ({len(dataset) / built:,.0f} rows/s), {len(packed)} packs "
        f"{packing:.1f} s, {len(dataset.tokens):,} tokens (sum {total})",
        flush=True,
    )
    sys.stdin.readline()
    shared, part = memory("mapped"), memory("share")
    print(
        f"private memory +{grown:.0f} MB, tokens mapped {shared / 1e6:.0f} MB, of which its share "
        f"(PSS) {part / 1e6:.0f} MB",
        flush=True,
    )
    sys.stdin.read()


def memory(kind: str) -> int:
    """Bytes of this process: "anonymous" (private), or resident pages of the token files: "mapped",
    and "share", each page divided by the processes that map it."""
    smaps = Path("/proc/self/smaps").read_text().splitlines()
    names = {"anonymous": "Anonymous:", "mapped": "Rss:", "share": "Pss:"}
    total, of_tokens = 0, False
    for line in smaps:
        if "-" in line.split()[0]:
            of_tokens = line.endswith(("tokens.bin", "labels.bin", "ends.bin"))
        elif line.startswith(names[kind]) and (of_tokens or kind == "anonymous"):
            total += int(line.split()[1]) * 1024
    return total


if __name__ == "__main__":
    main()
