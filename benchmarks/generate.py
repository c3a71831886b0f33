"""Greedy answers of ours and of transformers on the same weights: equal tokens, and rates.

    python benchmarks/generate.py [--quick] [--json generate.json] [--compile]
                                  [--questions FILE.jsonl] [--prompts N] [--dtype DTYPE ...]
                                  [--processor-time]

SmolLM2-135M-Instruct answers 50 questions (generated, or of `--questions`, such as GSM8K's) with 64
new tokens each, in batches of 10, and some of them one by one; in fp32, and in bf16 if the device
multiplies bf16. Rates include the pass over the prompts. The contestants take turns. An answer
takes as long as its batch, and counts as right up to its first end token.

    prompts, identical_prompts          prompts, and those with equal tokens in fp32
    tokens_per_s/WHO/DTYPE/BATCH        WHO: transformers, ours, ours_nf4, ours_compiled
    requests_per_minute, latency_s/...  answers per minute, and seconds until a batch is answered
    exact_match/WHO/DTYPE               % of the questions whose last number is the answer's
    ours_over_transformers/DTYPE/BATCH  ratio of rates on the same batches
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.timing import Figures, arguments, ratios, spread, table, tell, usual_dtype
from examples.demo import arithmetic, cache_dir
from examples.demo.smollm2 import prepare_model
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.data import hf_tokenizer
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World
from qfsdp.evaluation.answers import parse_answer, same_answer
from qfsdp.evaluation.generation import SamplingConfig, generate
from qfsdp.evaluation.inference_model import load_for_inference
from qfsdp.evaluation.prompts import chat_tokens
from qfsdp.modules.compute_dtype import COMPUTE_DTYPES
from qfsdp.modules.quantized_linear import QuantizationConfig

BATCH = 10

Answer = Callable[[list[list[int]], int], list[list[int]]]
"""Takes prompts and a number of new tokens; returns the new tokens of each prompt."""


def questions(count: int, file: Path | None) -> list[dict[str, str]]:
    """Rows of `question` and `answer`."""
    if file is not None:
        return list(map(json.loads, file.read_text(encoding="utf-8").splitlines()[:count]))
    return arithmetic.generate(count, seed=0)


def transformers(folder: Path, dtype: str, device: str) -> Answer:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=COMPUTE_DTYPES[dtype])
    return by_transformers(model.to(device), device)


def by_transformers(model: Any, device: str) -> Answer:
    """Greedy answers of a model of transformers, or one that PEFT wraps."""
    model.eval()
    model.generation_config.eos_token_id = None

    def answer(prompts: list[list[int]], new: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        given = {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}
        whole = model.generate(**given, do_sample=False, max_new_tokens=new, pad_token_id=0)
        return whole[:, longest:].tolist()

    return answer


def ours(
    folder: Path,
    dtype: Any,
    device: str,
    format: Any,
    compile: bool = False,
    adapter: Path | None = None,
) -> Answer:
    world = World(torch.device(device))
    config, quantization = ModelConfig(str(folder), dtype), QuantizationConfig(format)
    sharding = ShardingConfig(strategy="ddp")
    path = None if adapter is None else str(adapter)
    model = load_for_inference(config, quantization, path, sharding, world)
    if compile:
        model.compile_layers()
    return lambda prompts, new: generate(model, prompts, SamplingConfig(new), set(), world)


def measure(
    who: dict[str, Answer],
    prompts: list[list[int]],
    batch: int,
    new: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, list[float]], dict[str, list[list[int]]]]:
    """Seconds of every batch, and all answers, by contestant."""
    seconds: dict[str, list[float]] = {name: [] for name in who}
    answers: dict[str, list[list[int]]] = {name: [] for name in who}
    for name, answer in who.items():
        for _ in range(
            2 if "compiled" in name else 1
        ):  # the second call compiles for varying sizes
            answer(prompts[:batch], 2)
    for start in range(0, len(prompts), batch):
        for name, answer in who.items():
            since = clock()
            answers[name] += answer(prompts[start : start + batch], new)
            seconds[name].append(clock() - since)
    return seconds, answers


def matches(answers: list[list[int]], asked: list[dict[str, str]], tokenizer: Any) -> float:
    """The percentage of right answers; each ends before its first end token."""
    right = []
    for tokens, row in zip(answers, asked, strict=True):
        text = tokenizer.decode([*takewhile(lambda token: token != tokenizer.eos_id, tokens)])
        right.append(same_answer(parse_answer(text), parse_answer(row["answer"])))
    return 100 * fmean(right)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--compile", action="store_true", help="measure compiled layers too")
    parser.add_argument("--questions", type=Path, help="a .jsonl file with rows of `question`")
    parser.add_argument("--prompts", type=int, help="how many questions; default: 50")
    parser.add_argument("--dtype", nargs="+", choices=("fp32", "bf16"), help="default: both")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="seconds of one core, whatever else runs on it; sets one thread",
    )
    args = parser.parse_args()
    clock = time.perf_counter
    if args.processor_time:
        torch.set_num_threads(1)
        clock = time.process_time
    count, new, single = (4, 8, 2) if args.quick else (args.prompts or 50, 64, args.repeat)
    folder = prepare_model(cache_dir())
    tokenizer = hf_tokenizer(str(folder))
    asked = questions(count, args.questions)
    chats = [[{"role": "user", "content": row["question"]}] for row in asked]
    prompts = [chat_tokens(tokenizer, messages) for messages in chats]
    figures: Figures = {"prompts": count}
    rows = [["tokens/s", "batch", "transformers", "ours", "ours, NF4", "ours, compiled"]]
    served = [["", "batch", "requests/min", "latency, s", "exact match, %"]]
    for dtype in args.dtype or dict.fromkeys(("fp32", usual_dtype(args.device))):
        who = {
            "transformers": transformers(folder, dtype, args.device),
            "ours": ours(folder, dtype, args.device, "none"),
            "ours_nf4": ours(folder, dtype, args.device, "nf4"),
        }
        if args.compile:
            who["ours_compiled"] = ours(folder, dtype, args.device, "none", compile=True)
        for batch in (1, min(BATCH, count)):
            chosen = prompts[:single] if batch == 1 else prompts
            seconds, answers = measure(who, chosen, batch, new, clock)
            row = [dtype, str(batch)]
            for name, of_name in seconds.items():
                rates = [batch * new / s for s in of_name]
                figures |= spread(f"tokens_per_s/{name}/{dtype}/{batch}", rates)
                row.append(f"{figures[f'tokens_per_s/{name}/{dtype}/{batch}']:.1f}")
                of, key = f"{name}/{dtype}/{batch}", f"exact_match/{name}/{dtype}"
                figures |= spread(f"requests_per_minute/{of}", [60 * batch / s for s in of_name])
                figures |= spread(f"latency_s/{of}", of_name)
                if batch > 1:
                    figures[key] = matches(answers[name], asked, tokenizer)
                told = [figures[f"{what}/{of}"] for what in ("requests_per_minute", "latency_s")]
                right = f"{figures[key]:.1f}" if batch > 1 else ""
                cells = [f"{name}, {dtype}", str(batch), *(f"{x:.2f}" for x in told), right]
                served.append(cells)
            rows.append(row + [""] * (len(rows[0]) - len(row)))
            key = f"ours_over_transformers/{dtype}/{batch}"
            figures |= ratios(key, seconds["transformers"], seconds["ours"])
            if dtype == "fp32" and batch > 1:
                pairs = zip(answers["ours"], answers["transformers"], strict=True)
                figures["identical_prompts"] = sum(a == b for a, b in pairs)
    print(f"{count} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens")
    table(rows)
    table(served)
    tell(figures, args.json)


if __name__ == "__main__":
    main()
