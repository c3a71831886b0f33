"""The bad inputs of the other recipes and of the command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.faults.bad_input_cases import _changed, _cut, _file, _set, adapter_changes
from tests.faults.bad_inputs import Case
from tests.faults.good_inputs import GoodInputs

WORDS: dict[str, tuple[str, ...]] = {
    "generate": (
        "prompt=null prompts=missing.jsonl",
        "prompt=x prompts=y.jsonl",
        "sampling.max_new_tokens=0",
        "sampling.max_new_tokens=1000000000",
        "sampling.temperature=-1",
        "sampling.temperature=.nan",
        "sampling.temperature=hot",
        "sampling.top_p=0",
        "sampling.top_p=2",
        "sampling.seed=-1",
        "sampling.seed=1208925819614629174706176",
        "batch_size=0",
        "adapter=/nowhere",
        "adapter=5",
        "model.path=/nowhere",
        "model.dtype=fp8",
        "quantization.format=gguf",
        "system_prompt=x chat_template=false",
        "output=/proc/nothing/out.jsonl prompt=null prompts={rows} prompt_column=question",
        "prompt=null prompts={rows} prompt_column=missing",
        "prompts=[1,2]",
        "prompt=",
        "tokenizer.path=/nowhere",
        "tokenizer._component_=subprocess.Popen",
        "sharding.strategy=ring",
        "no_such_key=1",
    ),
    "evaluate": (
        "lm_eval.tasks=[no_such_task]",
        "lm_eval.tasks=[arc_esay]",
        "lm_eval.tasks=arc_easy",
        "lm_eval.tasks=[arc_easy] lm_eval.limit=0",
        "lm_eval.tasks=[arc_easy] lm_eval.num_fewshot=-1",
        "lm_eval.tasks=[arc_easy] lm_eval.local_data=/nowhere",
        "text.text.file=/nowhere",
        "text.text.file={good}",
        "text.text.window=0",
        "text.text.window=1000000",
        "text.text.stride=0",
        "text.text.max_tokens=-1",
        "exact_match.rows.source=/nowhere.jsonl",
        "exact_match.rows.question_column=missing",
        "exact_match.rows.shots=-1",
        "exact_match.rows.shots=1000",
        "exact_match.rows.compare=taste",
        "exact_match.rows.max_rows=0",
        "exact_match.rows.max_new_tokens=0",
        "loss.rows.source=/nowhere.jsonl",
        "loss.rows=5",
        "output=/proc/out.json",
        "output={good}",
        "output=null",
        "batch_size=-1",
        "max_seq_len=0",
        "~loss ~text ~exact_match",
    ),
    "merge": (
        "adapter=/nowhere",
        "output_dir={good}",
        "output_dir=/proc/x",
        "output_dir={model}",
        "dtype=int4",
        "requantize=hqq",
        "max_file_bytes=0",
        "max_file_bytes=many",
        "model.path=/nowhere",
        "quantization.format=none requantize=nf4-bnb quantization.targets=[x]",
    ),
    "quantize": (
        "output_dir={good}",
        "output_dir=/proc/x",
        "layout=gguf",
        "layout=bnb quantization.format=hqq",
        "quantization.format=none",
        "quantization.format=int4",
        "quantization.compute=fp8",
        "quantization.expert_chunk=1MiB",
        "model.dtype=fp32",
        "max_file_bytes=-1",
        "model.path=/nowhere",
        "model.path={rows}",
    ),
    "add_tokens": (
        "new_tokens=[]",
        "new_tokens=['']",
        "pad_to_multiple_of=0",
        "output_dir={good}",
        "model.path=/nowhere",
    ),
    "block_expansion": (
        "rate=0",
        "rate=-1",
        "rate=.inf",
        "rate=.nan",
        "rate=1e9",
        "rate=null",
        "new_blocks=1",
        "rate=null new_blocks=1000000000",
        "rate=null new_blocks=0",
        "output_dir={good}",
        "model.path=/nowhere",
    ),
}
"""Recipe -> overrides of its good config, each line wrong by itself."""

TOOL_WORDS: dict[str, tuple[str, ...]] = {
    "estimate_memory": (
        "world_size=0",
        "world_size=1000000000",
        "world_size=many",
        "world_size=8 local_world_size=3",
        "target=tpu",
        "picture=/proc/nothing/x.png",
        "picture=x.docx",
        "device_memory=lots",
        "batch_size=100000000",
        "max_seq_len=1000000000",
        "model.path=no-such-model",
    ),
    "find_fit": (
        "device_memory=1MiB",
        "device_memory=-1",
        "gpu=rtx9999",
        "gpu=rtx4090 device_memory=.nan",
        "gpu=rtx4090 world_size=0",
        "gpu=rtx4090 world_size=1000000000",
        "gpu=rtx4090 host_memory=1KiB",
        "gpu=rtx4090 matmul_rate=-1",
        "hardware=/nowhere.json",
        "hardware={rows}",
        "gpu=null",
        "gpu=rtx4090 model.path=no-such-model",
    ),
}
"""The same for the recipes that take a training config."""


def tool_cases(good: GoodInputs) -> Iterator[Case]:
    places = {"{rows}": good.rows, "{good}": good.folder, "{model}": good.model}

    def split(line: str) -> list[str]:
        for name, path in places.items():
            line = line.replace(name, str(path))
        return line.split(" ")

    for recipe, lines in WORDS.items():
        for line in lines:
            yield Case(recipe, line, good.command(recipe, *split(line)), lines=2)
    config = str(good.configs["qdora_distributed"])
    for recipe, lines in TOOL_WORDS.items():
        for line in lines:
            words = ["run", f"recipes/{recipe}", "--config", config, *split(line)]
            yield Case(recipe, line, words, lines=2)
    yield from files(good)
    yield from command(good, config)


def files(good: GoodInputs) -> Iterator[Case]:
    """Adapters, prompts and models with something wrong in them."""
    for recipe in ("generate", "evaluate", "merge"):
        for name, make in adapter_changes(good, "adapter={}").items():
            yield Case(recipe, f"adapter: {name}", good.command(recipe), make, lines=2)
    prompts = good.command("generate", "prompt=null")
    for name, content in {
        "latin-1": '{"prompt": "caf\u00e9"}\n'.encode("latin-1"),
        "not JSON": b"hello\n",
        "a list": b"[1]\n",
        "a number": b'{"prompt": 5}\n',
        "empty": b"",
        "ends with an answer": b'{"prompt": [{"role": "assistant", "content": "x"}]}\n',
        "longer than the positions": b'{"prompt": "' + b"a b " * 3000 + b'"}\n',
    }.items():
        make = _file("prompts.jsonl", content, "prompts={}")
        yield Case("generate", f"prompts: {name}", prompts, make, lines=2)
    for recipe in ("quantize", "block_expansion", "merge"):
        make = _changed(good.model, lambda f: _cut(f / "model.safetensors"), "model.path={}")
        yield Case(recipe, "weights cut", good.command(recipe), make, lines=2)

    def many_layers(folder: Path) -> None:
        _set(folder / "config.json", num_hidden_layers=10_000_000)

    make = _changed(good.model, many_layers, "model.path={}")
    config = str(good.configs["qdora_distributed"])
    for recipe in ("estimate_memory", "find_fit"):
        more = ["gpu=rtx4090"] if recipe == "find_fit" else []
        words = ["run", f"recipes/{recipe}", "--config", config, *more]
        yield Case(recipe, "ten million layers", words, make, lines=2)


def command(good: GoodInputs, config: str) -> Iterator[Case]:
    """Words of the command and of torchrun."""
    recipe = ["recipes/qdora_distributed", "--config", config]
    for words in (
        ["--nproc_per_node", "0"],
        ["--nproc_per_node", "-1"],
        ["--nproc_per_node", "two"],
        ["--nproc_per_node", "100000"],
        ["--nproc_per_node=1.5"],
        ["--nnodes", "0"],
        ["--nnodes", "2:1"],
        ["--nnodes", "two"],
        ["--max-restarts", "-1"],
        ["--max-restarts", "many"],
        ["--no-such-flag"],
        ["--nproc_per_node"],
    ):
        # argparse prints how the command is used above its line.
        yield Case("command", " ".join(words), ["run", *words, *recipe], lines=2)
    for words in (
        ["run"],
        ["run", "recipes/no_such_recipe", "--config", config],
        ["run", "recipes/qdora", "--config", config],
        ["run", config],
        ["run", str(good.rows), "--config", config],
        ["run", "/", "--config", config],
        ["cp", "recipes/no_such", "."],
        ["cp", "recipes/generate", "/nowhere/x.py"],
        ["cat", "configs/no_such"],
        ["cat", str(good.folder)],
        ["validate", "missing.yaml"],
        ["validate", str(good.rows)],
        ["validate", str(good.folder)],
        ["no_such_command"],
        [],
    ):
        shown = " ".join(words).replace(str(good.folder), "GOOD")
        yield Case("command", shown or "(no words)", words, lines=2)
