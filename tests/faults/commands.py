"""SIGKILL before a random file operation of every recipe that writes; the same command again.

Files must then be those of an uninterrupted run: by bytes, where two uninterrupted runs write the
same ones; of others (logs with times, pages with dates) that they are there. A command whose result
was complete when it was killed may say that it exists.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import runpy
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from examples.demo import cache_dir
from examples.demo.smollm2 import prepare_model
from tests.faults.inputs import LETTERS, write_preferences_config, write_rows
from tests.faults.runs import ROOT, Outcome, Trial, Workshop, count_operations, metrics, print_to
from tests.tiny import write_tiny_model, write_tiny_model_with_tokenizer
from tests.toy_data import TOY_CONFIG
from tests.waiting import wait_until

NOTHING_WRITTEN = ("chat", "doctor", "find_fit", "serve")
TRAINING = ["resume=auto", "epochs=1", "checkpoint.every_n_steps=1", "checkpoint.keep_last=2"]
PUBLISHED = ["checkpoint.publish={work}/published", "checkpoint.publish_last=2"]
ROWS = "{{_component_: qfsdp.data.text_dataset, source: {shop}/rows.jsonl, window: 32%s}}"
VALIDATION = "validation={{sets: {{rows: {{_component_: tests.toy_data.Samples}}}}, eval_every: 2}}"
DISTILLED = """
adapter: {{rank: 5, alpha: 7}}
teacher: {{model: {{path: {folder}/model, dtype: fp32}}}}
distillation: {{weight: 0.5}}
"""
QUESTION = '{"question_id": 1, "turns": ["Why?", "And why?"]}\n'
SWEEP = """\
config: configs/llama3_8b_qdora.yaml
output_dir: {work}/out
gpu: rtx4090
overrides: ["model.path={shop}/model", max_seq_len=64, packed=false]
grid: {{batch_size: [1, 4]}}
prices: null
"""


@dataclass(frozen=True)
class Command:
    """A command line. In words, {shop} is a folder with inputs, {work} that of what is written."""

    recipe: str
    words: tuple[str, ...]

    def argv(self, shop: Workshop, work: Path) -> list[str]:
        """The words after the recipe's name."""
        own = shop.folder / f"{self.recipe}.yaml"
        config = own if own.exists() else ROOT / f"configs/{self.recipe}.yaml"
        places = {"shop": shop.folder, "work": work, "url": shop.inputs.get("url")}
        words = [word.format(**places) for word in self.words]
        return words if self.recipe == "report" else ["--config", str(config), *words]


def tool(recipe: str, *words: str) -> Command:
    return Command(recipe, ("model.path={shop}/even", "output_dir={work}/out", *words))


def training(recipe: str, *words: str) -> Command:
    return Command(recipe, ("output_dir={work}/run", "batch_size=12", *TRAINING, *words))


ADAPTED = ("model.dtype=fp32", "adapter={shop}/lora/adapter")
COMMANDS = {
    "train": training("qdora_distributed", *PUBLISHED),
    "train, best": training("qdora_distributed", VALIDATION),
    "train, caches": training(
        "qdora_distributed",
        "max_steps=3",
        "model.quantize_cache={work}/quantized",
        LETTERS,
        "dataset=" + ROWS % ", tokenized_cache: {work}/tokens",
    ),
    "full": training("full_finetune_distributed"),
    "dpo": training("dpo_distributed", "reference_logprobs={work}/logprobs"),
    "reward": training("reward_distributed"),
    "several": training("several_adapters"),
    "distill": training("distill_distributed"),
    "distill, written": training(
        "distill_distributed", "teacher.logprobs={work}/said", "distillation.top_k=4"
    ),
    "score": Command(
        "score",
        (
            *("adapter={shop}/reward/adapter", LETTERS),
            *("dataset={{_component_: tests.preferences.preferences}}", "max_seq_len=64"),
            *("model.path={shop}/model", "output={work}/out/scores.jsonl"),
        ),
    ),
    "tokens": tool("add_tokens", "model.path={shop}/worded", "new_tokens=[<think>]"),
    "quantize": tool("quantize"),
    "quantize, hqq": tool("quantize", "quantization.format=hqq", "max_file_bytes=300000"),
    "quantize, bnb": tool("quantize", "layout=bnb"),
    "merge": tool("merge", *ADAPTED, "max_file_bytes=300000"),
    "merge, 4 bits": tool("merge", *ADAPTED, "requantize=nf4-bnb"),
    "blocks": tool("block_expansion", "rate=null", "new_blocks=1"),
    "export, gguf": tool(
        "export", "model.path={shop}/worded", "adapter=null", "quantization.format=none"
    ),
    "export, w4a16": tool("export", *ADAPTED, "format=w4a16", "group_size=32"),
    "export, lora": tool("export", *ADAPTED, "format=lora"),
    "evaluate": Command(
        "evaluate",
        (
            *("model.path={shop}/even", *ADAPTED, LETTERS),
            *("~loss.arithmetic", "~exact_match.arithmetic", f"loss.rows={ROWS % ''}"),
            *("text.rows={{file: {shop}/rows.jsonl, window: 32}}", "max_seq_len=64"),
            "output={work}/out/measured.json",
        ),
    ),
    "generate": Command(
        "generate",
        (
            *("model.path={shop}/even", *ADAPTED, LETTERS),
            *("chat_template=false", "prompts={shop}/rows.jsonl", "prompt_column=text"),
            *("sampling.max_new_tokens=2", "output={work}/out/answers.jsonl", "batch_size=60"),
        ),
    ),
    "judge": Command(
        "judge",
        (
            *("output_dir={work}/out", "questions={shop}/questions.jsonl", "judge.url={url}"),
            *("candidates.base.url={url}", "candidates.tuned.url={url}"),
        ),
    ),
    "report": Command("report", ("{shop}/lora", "output={work}/out/page.html")),
    "sweep": Command("sweep", ("output_dir={work}/out",)),
    "estimate": Command(
        "estimate_memory", ("output_dir={work}/out", "gpu=rtx4090", "picture={work}/out/memory.png")
    ),
}


@dataclass
class Reference:
    """What uninterrupted runs write.

    Fields:
        files: bytes by path, or None for those that differ from run to run.
        operations: of files, in one run.
    """

    files: dict[str, bytes | None]
    operations: int


def trial(name: str | None, chance: random.Random, shop: Workshop) -> Outcome:
    """One command that is killed, and given again.

    Args:
        name: of the command; None for a random one.
    """
    name = name or chance.choice(list(COMMANDS))
    reference = shop.inputs.get(f"command {name}") or uninterrupted(shop, name)
    work, at = shop.fresh(), chance.randint(1, reference.operations)
    note = f"{name}, before file operation {at} of {reference.operations}"
    status, text, _ = run(shop, COMMANDS[name], work, at)
    if status == 0:
        return Outcome()  # this time it had fewer operations
    assert status == -9, f"{note}: status {status}\n{text[-3000:]}"
    status, text, _ = run(shop, COMMANDS[name], work)
    complete = status == 2 and any(word in text for word in ("exists", "is not empty"))
    assert status == 0 or complete, f"{note}: again: status {status}\n{text[-3000:]}"
    check(work, reference, note)
    return Outcome(1, 1, 1, [0], [note + ("; its result was complete" if complete else "")])


def check(work: Path, reference: Reference, note: str) -> None:
    """Raises AssertionError if files are missing, left over, or other ones."""
    found = written(work)
    missing, more = reference.files.keys() - found.keys(), found.keys() - reference.files.keys()
    assert not missing and not more, f"{note}: missing {sorted(missing)}, left {sorted(more)}"
    for path, content in reference.files.items():
        if content is None:
            assert found[path], f"{note}: {path} is empty"
        else:
            assert found[path] == content, f"{note}: {path} differs"


def uninterrupted(shop: Workshop, name: str) -> Reference:
    """Runs a command twice, each time in an empty folder of the same name."""
    if "url" not in shop.inputs:
        prepare(shop)
    runs = []
    for _ in range(2):
        work = shop.fresh()
        status, text, operations = run(shop, COMMANDS[name], work)
        assert status == 0, f"{name}: status {status}\n{text[-3000:]}"
        runs.append(written(work))
    first, second = runs
    assert first.keys() == second.keys(), f"{name}: {first.keys() ^ second.keys()}"
    files = {path: content if content == second[path] else None for path, content in first.items()}
    assert any(files.values()) or name in ("report", "judge"), f"{name}: nothing is the same twice"
    found = shop.inputs[f"command {name}"] = Reference(files, operations)
    return found


def prepare(shop: Workshop) -> None:
    """Writes what commands read, and starts an endpoint that answers."""
    from tests.recipes.test_judge import Endpoint

    write_rows(shop)
    write_preferences_config(shop)
    adapters = "adapters: {{a: {{rank: 3}}, b: {{rank: 2, method: lora, lr: 1e-4}}}}\n"
    text = (TOY_CONFIG + adapters).format(folder=shop.folder)
    (shop.folder / "several_adapters.yaml").write_text(text)
    distilled = (TOY_CONFIG + DISTILLED).format(folder=shop.folder)
    (shop.folder / "distill_distributed.yaml").write_text(distilled)
    # Columns that blocks of 64 divide, a tokenizer's files, and an adapter that vLLM loads.
    write_tiny_model(shop.folder / "even", intermediate_size=576)
    words = prepare_model(cache_dir())
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    write_tiny_model_with_tokenizer(shop.folder / "worded", words, **small, **heads)
    lora = ["model.path={shop}/even", "output_dir={shop}/lora", "adapter.method=lora"]
    made = run(shop, Command("qdora_distributed", (*lora, "epochs=1")), shop.folder / "run")
    assert made[0] == 0, made[1]
    made = run(
        shop,
        Command("reward_distributed", ("output_dir={shop}/reward", "epochs=1")),
        shop.folder / "run",
    )
    assert made[0] == 0, made[1]
    (shop.folder / "questions.jsonl").write_text(QUESTION)
    (shop.folder / "sweep.yaml").write_text(
        SWEEP.format(shop=shop.folder, work=shop.folder / "run")
    )
    shutil.copy(shop.folder / "qdora_distributed.yaml", shop.folder / "estimate_memory.yaml")
    shop.inputs["url"] = Endpoint(lambda model, messages: f"{model} [[7]] [[A]]").url


def written(work: Path) -> dict[str, bytes]:
    """The bytes of all files by path; of a log its losses, of a link where it leads, and of a
    training state its values, which are pickled differently after a resume."""
    found = {}
    for path in sorted(work.rglob("*")):
        name = str(path.relative_to(work))
        if path.is_symlink():
            found[name] = os.readlink(path).encode()
        elif path.name == "metrics.jsonl":
            lines = [
                {k: v for k, v in line.items() if "loss" in k} for line in metrics(path.parent)
            ]
            found[name] = json.dumps(lines).encode()
        elif path.name == ".metadata":
            found[name] = state_text(path.parent).encode()
        elif path.suffix == ".distcp":
            found[name] = b"see .metadata"
        elif path.name == "exchanges.jsonl":  # in the order of the answers
            found[name] = b"".join(sorted(path.read_bytes().splitlines(keepends=True)))
        elif path.is_file() and path.name != ".lock":
            found[name] = path.read_bytes()
    return found


def state_text(folder: Path) -> str:
    """All values of a training state, of tensors a digest."""
    whole = folder.parent.parent.with_suffix(".state")
    dcp_to_torch_save(str(folder), str(whole))
    values = torch.load(whole, weights_only=False)
    whole.unlink()
    return str(digested(values))


def digested(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: digested(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [digested(item) for item in value]
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
    return value


def run(shop: Workshop, command: Command, work: Path, die_at: int = 0) -> tuple[int, str, int]:
    """Status, output and file operations of a run."""
    output = work.with_suffix(".out")
    output.write_text("")
    counted = work.with_suffix(".operations")
    recipe = str(ROOT / f"recipes/{command.recipe}.py")
    given = (recipe, command.argv(shop, work), output, work, die_at, counted)
    process = get_context("forkserver").Process(target=run_alone, args=given)
    process.start()
    wait_until(lambda: process.exitcode is not None, "a command ends")
    operations = int(counted.read_text()) if process.exitcode == 0 else 0
    return int(process.exitcode or 0), output.read_text(errors="replace"), operations


def run_alone(
    recipe: str, argv: list[str], output: Path, work: Path, die_at: int, counted: Path
) -> None:
    """Is the one process of a command."""
    os.setsid()
    print_to(output)
    os.environ["QFSDP_EAGER_KERNELS"] = "1"
    torch.set_num_threads(1)
    count = count_operations(work, die_at)
    sys.argv = [recipe, *argv]
    runpy.run_path(recipe, run_name="__main__")
    counted.write_text(str(count[0]))
    sys.stdout.flush()


KINDS: dict[str, Trial] = {"kill_any": partial(trial, None)}
