"""A train step of ours, PEFT and torchtune: same model, tokens, rank and first adapters.

    python benchmarks/train_step.py [--quick] [--json step.json] [--model FOLDER] [--device cuda]
                                    [--dtype fp32] [--only ours,peft_qlora] [--eager]
                                    [--steps 7] [--warmup 3] [--before FOLDER] [--kinds]
                                    [--checkpointing full]

Contestants, in groups that fit into memory together:

    ours_lora, ours_qlora, ours_qdora   the recipe's `train_step`, DoRA's norms included, layers
                                        compiled (`compile: true`) unless --eager or --quick
    peft_lora, peft_qlora, peft_qdora   PEFT and bitsandbytes (NF4, double quantization) on a
                                        transformers model, in bf16 under autocast
    torchtune_lora, torchtune_qlora     the setup of its `lora_finetune_single_device`
    before_lora, _qlora, _qdora         ours in another checkout, with --before; then no others run
    ours_qrslora, _qmiss_rank64, _qoft, _qpissa
                                        kinds of adapters, with --kinds; then beside ours_lora,
                                        ours_qlora and ours_qdora alone

bf16 (fp32 on a CPU without bf16 products), alpha 32, adapters on every linear of every layer,
random tokens with a target at every position, gradients clipped to norm 1, fused AdamW. Each
contestant is a process that lives as long as its group. They take one step each in turn, so noise
of the machine affects all equally, and ratios are of the steps of one turn. Memory is sampled in
warm-up steps, which are not timed. torchtune's NF4 refuses weights of SmolLM2's sizes; its QLoRA
and ours then run on a model of random weights, nearly as large.

Keys of the JSON file. `tokens` is our tokens per second over the peer's. Ratios of speed have
`_min` and `_max`:

    qdora_over_qlora_time, qdora_over_qlora_memory      ours; also with `_rank64`
    qlora_over_lora_tokens                              ours
    qlora_over_peft_tokens, qdora_over_peft_tokens, lora_over_peft_tokens, memory_over_peft
    qlora_over_torchtune_tokens, lora_over_torchtune_tokens, memory_over_torchtune
    lora_over_before_time, qlora_, qdora_               ours; `_cpu` with CPU seconds
    qoft_over_qlora_time, lora_, qdora_ and so on       ours, with --kinds
    max_loss_difference, max_loss_difference_torchtune  largest of any step; torchtune's adapters
                                                        have the dtype of products
    NAME_seconds, NAME_tokens_per_second                medians
    NAME_cpu_seconds                                    of all threads, median; compare these on
                                                        a shared machine
    NAME_peak_bytes, NAME_max_rss_bytes                 peak private memory while training (on a
                                                        GPU: allocated); resident, with loading
    idle_cpu_seconds                                    the most that a process used at rest
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.peers import PEFT, TORCHTUNE, python_for
from benchmarks.timing import usual_dtype
from benchmarks.train_step_worker import Job
from examples.demo import cache_dir
from examples.demo.smollm2 import prepare_model
from qfsdp.modules.decoder_config import DecoderConfig
from qfsdp.modules.transformer import Decoder

ROOT = Path(__file__).resolve().parent.parent
Answer = dict[str, float]

# An idle process keeps its heap: 2.4 GB (ours) to 4.6 GB (PEFT's QDoRA) at 4 x 512 tokens.
GROUPS = (
    ("ours_qlora", "ours_qdora", "peft_qlora", "peft_qdora"),
    ("ours_qlora", "ours_lora", "peft_lora"),
    ("ours_qlora", "torchtune_qlora"),
    ("ours_lora", "torchtune_lora"),
    ("ours_qlora_rank64", "ours_qdora_rank64"),
)
KINDS = ("lora", "qlora", "qrslora", "qdora", "qmiss_rank64", "qoft", "qpissa")
METHODS = ("lora", "qlora", "qdora")
BEFORE_GROUPS = tuple((f"ours_{method}", f"before_{method}") for method in METHODS)
# Seconds of the first over seconds of the second.
TIME_RATIOS = {
    "qdora_over_qlora_time": ("ours_qdora", "ours_qlora"),
    "qdora_over_qlora_time_rank64": ("ours_qdora_rank64", "ours_qlora_rank64"),
    "qlora_over_lora_tokens": ("ours_lora", "ours_qlora"),
    "qlora_over_peft_tokens": ("peft_qlora", "ours_qlora"),
    "qdora_over_peft_tokens": ("peft_qdora", "ours_qdora"),
    "lora_over_peft_tokens": ("peft_lora", "ours_lora"),
    "qlora_over_torchtune_tokens": ("torchtune_qlora", "ours_qlora"),
    "lora_over_torchtune_tokens": ("torchtune_lora", "ours_lora"),
}
TIME_RATIOS |= {f"{m}_over_before_time": (f"ours_{m}", f"before_{m}") for m in METHODS}
TIME_RATIOS |= {
    f"{kind}_over_qlora_time": (f"ours_{kind}", "ours_qlora") for kind in KINDS if kind != "qlora"
}
MEMORY_RATIOS = {
    "qdora_over_qlora_memory": ("ours_qdora", "ours_qlora"),
    "qdora_over_qlora_memory_rank64": ("ours_qdora_rank64", "ours_qlora_rank64"),
    "memory_over_peft": ("ours_qlora", "peft_qlora"),
    "memory_over_torchtune": ("ours_qlora", "torchtune_qlora"),
}
LOSS_DIFFERENCES = {"peft": "max_loss_difference", "torchtune": "max_loss_difference_torchtune"}
TORCHTUNE_NF4_WEIGHTS = 64 * 256  # blocks of 64, their scales in whole blocks of 256
RANDOM_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


class Contestant:
    """A process that runs `train_step_worker.py`."""

    def __init__(self, name: str, job: Job, python: Path, checkout: Path) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the process)
        # OpenMP threads spin while they wait for each other. With another process on a core, long
        # spinning made steps of 0.6 s take up to 71 s (PEFT) and 11 s (ours). Without spinning
        # every small operation takes 0.1 ms. This count spins for some 10 us.
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "20000"}
        # Where qfsdp is installed, Python imports it at its start, before the worker runs.
        environment["PYTHONPATH"] = str(checkout.resolve())
        if job.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        worker = checkout / "benchmarks" / "train_step_worker.py"
        self._process = subprocess.Popen(
            [python, worker, json.dumps(asdict(job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
            bufsize=1,
        )

    def answer(self) -> Answer | None:
        """The next answer; None and a printed line if the process has ended."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        print(f"{self.name}: does not run: {(lines or ['killed'])[-1][:150]}", flush=True)
        return None

    def step(self, command: str) -> Answer | None:
        """Takes a step ("step"), or one whose memory is sampled ("sample")."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended; `answer` reports it
            self._process.stdin.write(f"{command}\n")
        return self.answer()

    def close(self) -> None:
        self._process.communicate()  # closes its input, which ends it
        self._log.close()


def job_of(name: str, model: Path, args: argparse.Namespace) -> Job:
    """The job of a name such as `ours_qdora_rank64`: library, method, and rank if it differs."""
    library, kind, *rank = name.split("_")
    return Job(
        library=library.replace("before", "ours"),  # type: ignore[arg-type]
        method=kind.removeprefix("q"),  # type: ignore[arg-type]
        base="nf4" if kind.startswith("q") else "none",
        rank=int(rank[0].removeprefix("rank")) if rank else args.rank,
        model=str(model),
        batch=args.batch,
        seq=args.seq,
        device=args.device,
        dtype=args.dtype,
        compile=not args.eager and library in ("ours", "before"),
        checkpointing=args.checkpointing if library in ("ours", "before") else "none",
    )


def run_group(
    names: Iterable[str], model: Path, pythons: dict[str, Path], args: argparse.Namespace
) -> dict[str, list[Answer]]:
    """The answers of the contestants that took every step."""
    with ExitStack() as stack:
        running = {}
        for name in names:
            library = name.split("_")[0]
            checkout = args.before if library == "before" else ROOT
            contestant = Contestant(name, job_of(name, model, args), pythons[library], checkout)
            stack.callback(contestant.close)
            running[name] = contestant
        running = {name: c for name, c in running.items() if c.answer() is not None}
        answers: dict[str, list[Answer]] = {name: [] for name in running}
        for round in range(args.warmup + args.steps):
            command = "sample" if round < args.warmup else "step"
            for name in list(answers):
                if (answer := running[name].step(command)) is None:
                    del answers[name]
                else:
                    answers[name].append(answer)
    return answers


def figures(groups: list[dict[str, list[Answer]]], warmup: int, tokens: int) -> dict[str, float]:
    """The keys of the JSON file; where several groups give a key, the first group's counts."""
    found: dict[str, float] = {}
    for group in groups:
        seconds = {n: [a["seconds"] for a in steps[warmup:]] for n, steps in group.items()}
        peaks = {n: max(a["peak"] for a in steps) for n, steps in group.items()}
        new: dict[str, float] = {}
        for name, steps in group.items():
            median = statistics.median(seconds[name])
            new |= {f"{name}_seconds": median, f"{name}_tokens_per_second": tokens / median}
            new[f"{name}_cpu_seconds"] = statistics.median(a["cpu"] for a in steps[warmup:])
            new[f"{name}_peak_bytes"] = peaks[name]
            new[f"{name}_max_rss_bytes"] = max(a["rss"] for a in steps)
        for key, (over, under) in TIME_RATIOS.items():
            if over in group and under in group:
                ratios = [a / b for a, b in zip(seconds[over], seconds[under], strict=True)]
                new[key] = statistics.median(ratios)
                new |= {f"{key}_min": min(ratios), f"{key}_max": max(ratios)}
                if under.startswith("before"):
                    pairs = zip(group[over][warmup:], group[under][warmup:], strict=True)
                    new[f"{key}_cpu"] = statistics.median(a["cpu"] / b["cpu"] for a, b in pairs)
        for key, (over, under) in MEMORY_RATIOS.items():
            if over in group and under in group:
                new[key] = peaks[over] / peaks[under]
        found = new | found
    for library, key in LOSS_DIFFERENCES.items():
        if apart := [d for group in groups for d in loss_differences(group, library)]:
            found[key] = max(apart)
    every = [a["idle"] for group in groups for steps in group.values() for a in steps]
    return found | {"idle_cpu_seconds": max(every, default=0.0)}


def loss_differences(group: dict[str, list[Answer]], library: str) -> Iterator[float]:
    """Differences of the losses of `library` and ours, for every step of the same job."""
    for name, theirs in group.items():
        ours = group.get(name.replace(library, "ours"))
        if name.startswith(library) and ours:
            yield from (abs(a["loss"] - b["loss"]) for a, b in zip(theirs, ours, strict=True))


def print_group(group: dict[str, list[Answer]], warmup: int, tokens: int) -> None:
    header = ("s/step", "min", "max", "CPU s", "tokens/s", "peak MB", "first loss", "last loss")
    print(f"{'':20}" + "".join(f"{cell:>11}" for cell in header))
    for name, steps in group.items():
        seconds = [a["seconds"] for a in steps[warmup:]]
        median, peak = statistics.median(seconds), max(a["peak"] for a in steps)
        cpu = statistics.median(a["cpu"] for a in steps[warmup:])
        cells = [f"{s:.2f}" for s in (median, min(seconds), max(seconds), cpu)]
        cells += [f"{tokens / median:.0f}", f"{peak / 1e6:.0f}"]
        cells += [f"{steps[0]['loss']:.4f}", f"{steps[-1]['loss']:.4f}"]
        print(f"{name:20}" + "".join(f"{cell:>11}" for cell in cells))
    for name, steps in group.items():
        print(f"losses {name:20}" + " ".join(f"{a['loss']:7.4f}" for a in steps))
    print(flush=True)


def chosen_groups(only: list[str], available: Iterable[str]) -> list[list[str]]:
    """The groups without contestants that are not chosen or cannot run. A contestant that is left
    alone in a group stays only if no other group has it."""
    kept = []
    for group in BEFORE_GROUPS if "before" in available else GROUPS:
        left = [n for n in group if n.split("_")[0] in available]
        kept.append([n for n in left if not only or n in only or n.split("_")[0] in only])
    paired = {name for left in kept if len(left) > 1 for name in left}
    return [left for left in kept if len(left) > 1 or set(left) - paired]


def fits_torchtune(folder: Path) -> bool:
    """Whether torchao's NF4 takes every linear of a layer."""
    with torch.device("meta"):
        layer = Decoder(DecoderConfig.from_dir(folder)).model.layers[0]
    linears = [m for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    return all(m.weight.numel() % TORCHTUNE_NF4_WEIGHTS == 0 for m in linears)


def write_random_model(folder: Path) -> Path:
    """Writes a model with SmolLM2's layers and vocabulary and widths that torchao's NF4 takes."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.from_dict(RANDOM_MODEL)).bfloat16()
    for name, param in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(param, std=0.02)
    tensors = dict(model.named_parameters())
    save_file({n: p.detach() for n, p in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(RANDOM_MODEL))
    return folder


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="QLoRA, QDoRA of us and PEFT, 1 x 128, 3 steps, eager"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--model", type=Path, help="a Llama; default: SmolLM2-135M-Instruct")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="default: bf16, if the CPU can")
    parser.add_argument("--only", default="", help="contestants or libraries, comma-separated")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4, help="samples per step")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=7, help="that are timed")
    parser.add_argument("--warmup", type=int, help="before them; default: 3, eager 2, quick 1")
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--kinds", action="store_true", help="kinds of adapters, of ours alone")
    modes = ("none", "selective", "full")
    parser.add_argument("--checkpointing", choices=modes, default="none", help="of ours")
    parser.add_argument("--eager", action="store_true", help="do not compile our layers")
    args = parser.parse_args()
    if args.quick:
        args.batch, args.seq, args.steps, args.eager = 1, 128, 3, True
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = args.dtype or usual_dtype(args.device)
    args.warmup = args.warmup or (1 if args.quick else 2 if args.eager else 3)
    return args


def main() -> None:
    args = arguments()
    model = args.model or prepare_model(cache_dir())
    pythons: dict[str, Path] = {"ours": Path(sys.executable)}
    peers = () if args.before or args.kinds else (PEFT,) if args.quick else (PEFT, TORCHTUNE)
    for peer in peers:
        if (python := python_for(peer)) is not None:
            pythons[peer.name] = python
    if args.before:
        pythons["before"] = pythons["ours"]
    groups = chosen_groups([name for name in args.only.split(",") if name], pythons)
    if args.kinds:
        groups = [[f"ours_{kind}" for kind in KINDS]]
    results, tokens = [], args.batch * args.seq
    with tempfile.TemporaryDirectory() as scratch:
        for group in groups[:1] if args.quick else groups:
            folder = model
            if "torchtune_qlora" in group and not fits_torchtune(model):
                folder = write_random_model(Path(scratch) / "random-weights")
            print(f"{args.batch} x {args.seq} tokens, {folder.name}, {args.dtype}, {args.device}")
            results.append(run_group(group, folder, pythons, args))
            print_group(results[-1], args.warmup, tokens)
    found = figures(results, args.warmup, tokens)
    keys = [k for name in TIME_RATIOS for k in (name, f"{name}_cpu")]
    for key in (*keys, *MEMORY_RATIOS, *LOSS_DIFFERENCES.values()):
        if key in found:
            ends = [f"{found[k]:.3f}" for k in (f"{key}_min", f"{key}_max") if k in found]
            print(f"{key} {found[key]:.4g}" + (f" ({' to '.join(ends)})" if ends else ""))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
