"""The bad inputs of training, by what is wrong: keys, components, data, tokenizers, models, files.

`bad_tool_cases` has those of the other recipes and of the command itself.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.faults.bad_inputs import Case
from tests.faults.good_inputs import GoodInputs

TRAINING = "qdora_distributed"
FULL = "full_finetune_distributed"


def all_cases(good: GoodInputs) -> Iterator[Case]:
    from tests.faults.bad_recipe_cases import recipe_cases
    from tests.faults.bad_tool_cases import tool_cases

    for part in (values, components, configs, data, tokenizers, templates, models, checkpoints):
        yield from part(good)
    yield from tool_cases(good)
    yield from recipe_cases(good)


# ---- keys and values -----------------------------------------------------------------------------

VALUES = (
    "batch_size=0",
    "batch_size=-1",
    "batch_size=two",
    "batch_size=1.5",
    "batch_size=100000",
    "batch_size=1e400",
    "batch_size=null",
    "batch_size=[1,2]",
    "batch_szie=2",
    "gradient_accumulation_steps=0",
    "gradient_accumulation_steps=1000000000000",
    "max_seq_len=1",
    "max_seq_len=1000000",
    "max_steps=0",
    "max_steps=1e30",
    "epochs=0",
    "epochs=1e18",
    "seed=1208925819614629174706176",
    "seed=-1",
    "seed=abc",
    "log_every_n_steps=0",
    "clip_grad_norm=0",
    "clip_grad_norm=-1",
    "clip_grad_norm=.nan",
    "packed=maybe",
    "compile=yes please",
    "output_dir=",
    "output_dir=null",
    "output_dir=/proc/nothing",
    "output_dir=/dev/null",
    f"output_dir={'x' * 300}",
    f"output_dir={'long/' * 1000}",
    "device_memory=many",
    "device_memory=-1GiB",
    "device_memory=1KiB",
    "optimizer.lr=.inf",
    "optimizer.lr=.nan",
    "optimizer.lr=-1",
    "optimizer.lr=fast",
    "optimizer.weight_decay=.nan",
    "optimizer.betas=0.9",
    "optimizer.betas=[0.9,1.5]",
    "optimizer.eps=-1",
    "optimizer.learning_rate=1",
    "adapter.rank=0",
    "adapter.rank=-4",
    "adapter.rank=1000000",
    "adapter.alpha=.nan",
    "adapter.dropout=1.5",
    "adapter.dropout=.nan",
    "adapter.method=dorra",
    "adapter.targets=[]",
    "adapter.targets=[no_such_proj]",
    "adapter.targets=5",
    "adapter.start_from=/nowhere",
    "quantization.format=nf5",
    "quantization.block_size=0",
    "quantization.targets=[nothing]",
    "sharding.strategy=half",
    "sharding.offload_base=gpu",
    "sharding.wrap=everything",
    "sharding.replicate=3",
    "activation.checkpointing=maybe",
    "checkpoint.every_n_steps=0",
    "checkpoint.every_minutes=-1",
    "checkpoint.every_minutes=.nan",
    "checkpoint.keep_last=0",
    "checkpoint.on_failure=panic",
    "validation.eval_every=0",
    "validation.patience=-1",
    "validation.sets.heldout=5",
    "validation.sets.heldout._component_=nothing",
    "resume=/nowhere",
    "resume=5",
    "on_nonfinite=ignore",
    "distributed.timeout=-5",
    "distributed.timeout=soon",
    "global_batch_size=0",
    "global_batch_size=3",
    "lr_scheduler=cosine",
    "lr_scheduler._component_=torch.optim.AdamW",
    "model.path=",
    "model.path=/nowhere",
    "model.path=meta-llama/Llama-3-8B",
    "model.dtype=int8",
    "model=null",
    "no_such_section.key=1",
    "--batch_size=2",
    "batch_size",
    "=2",
    "~no_such_key",
    "output_dir=${nothing}",
    "output_dir=${output_dir}",
    "batch_size=[1, {",
    "batch_size=\x00",
)
"""Overrides of a config that works, each wrong by itself."""


def values(good: GoodInputs) -> Iterator[Case]:
    for word in VALUES:
        name = word if len(word) < 60 else f"{word[:20]}... ({len(word)} characters)"
        yield Case(TRAINING, repr(name)[1:-1], good.command(TRAINING, word))
    for word in (
        "optimizer.lr=.inf",
        "optimizer_in_backward=perhaps",
        "trainable.layers=[99]",
        "save_dtype=fp64",
        "quantization.format=nf4",
        "adapter.rank=4",
        "batch_size=100000",
        "validation.eval_every=x",
    ):
        yield Case(FULL, word, good.command(FULL, word))
    twice = good.command(FULL, "gradient_accumulation_steps=2", "optimizer_in_backward=true")
    yield Case(FULL, "an update in backward of two micro-batches", twice)


# ---- components ----------------------------------------------------------------------------------

COMPONENTS = {
    "metric_logger": (
        "subprocess.Popen",
        "os.system",
        "os.remove",
        "builtins.eval",
        "shutil.rmtree",
        "wandb.init",
        "torchtune.training.metric_logging.WandBLogger",
        "torchtune.training.metric_logging.TensorBoardLoger",
        "torch.optim.AdamW",
        "json.dumps",
        "antigravity.fly",
    ),
    "optimizer": ("os.getcwd", "torch.nn.Linear", "torch.optim.Adamm", "builtins.dict"),
    "lr_scheduler": ("os.getcwd", "builtins.print", "torch.optim.lr_scheduler.NoSuchLR"),
    "dataset": ("builtins.list", "os.listdir", "qfsdp.data.instruct_datasett", "json.loads"),
    "tokenizer": ("builtins.str", "qfsdp.data.no_tokenizer", "subprocess.Popen", "pathlib.Path"),
}
"""Section -> components that are not of its kind."""


def components(good: GoodInputs) -> Iterator[Case]:
    for section, paths in COMPONENTS.items():
        for path in paths:
            words = good.command(TRAINING, f"{section}={{_component_: {path}}}")
            yield Case(TRAINING, f"{section} = {path}", words)
    marker = "args=[touch,executed]"
    words = good.command(TRAINING, "metric_logger._component_=subprocess.Popen")
    yield Case(TRAINING, "a logger that starts a command", [*words, f"metric_logger.{marker}"])
    disk = "metric_logger._component_=torchtune.training.metric_logging.DiskLogger"
    yield Case(TRAINING, "a logger's unknown argument", good.command(TRAINING, disk, f"{disk}x"))
    arguments = good.command(TRAINING, disk, "metric_logger.log_dri=logs")
    yield Case(TRAINING, "a logger's misspelt argument", arguments)
    yield Case(TRAINING, "a logger without its argument", good.command(TRAINING, disk))
    yield Case(
        TRAINING,
        "a module of the user that raises",
        good.command(TRAINING, "metric_logger={_component_: broken_module.Logger}"),
        _file("broken_module.py", b"raise RuntimeError('no')\n", ""),
    )
    yield Case(
        TRAINING,
        "a module of the user with a syntax error",
        good.command(TRAINING, "dataset={_component_: broken_module.rows}"),
        _file("broken_module.py", b"def rows(:\n", ""),
    )


# ---- config files --------------------------------------------------------------------------------

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
CONFIG_FILES = {
    "empty": b"",
    "a list": b"- 1\n- 2\n",
    "a word": b"hello\n",
    "binary": bytes(range(256)),
    "latin-1": "output_dir: caf\u00e9\n".encode("latin-1"),
    "UTF-16": "output_dir: x\n".encode("utf-16"),
    "a tab": b"model:\n\tpath: x\n",
    "a key twice": b"output_dir: a\noutput_dir: b\n",
    "100,000 nested brackets": b"a: " + b"[" * 100_000,
    "references that multiply": BOMB.encode(),
    "a Python object": b"a: !!python/object/apply:os.system ['touch executed']\n",
    "no keys but one": b"seed: 1\n",
}


def configs(good: GoodInputs) -> Iterator[Case]:
    words = ["run", f"recipes/{TRAINING}"]
    for name, content in CONFIG_FILES.items():
        yield Case(TRAINING, f"config: {name}", words, _file("bad.yaml", content, "--config={}"))
    for name, more in {
        "no config": [],
        "no file after --config": ["--config"],
        "config: a folder": ["--config", str(good.folder)],
        "config: missing": ["--config", "missing.yaml"],
        "config: 300 characters": ["--config", "x" * 300],
        "config: a recipe": ["--config", "recipes/generate.py"],
        "config: of another recipe": ["--config", str(good.configs["evaluate"])],
    }.items():
        yield Case(TRAINING, name, [*words, *more])


# ---- data ----------------------------------------------------------------------------------------

ROW = {"question": "1 + 1?", "answer": "2"}
LINE = json.dumps(ROW).encode() + b"\n"
DATA_FILES: dict[str, tuple[str, bytes]] = {
    "latin-1": ("rows.jsonl", '{"question": "caf\u00e9", "answer": "2"}\n'.encode("latin-1")),
    "UTF-16": ("rows.jsonl", LINE.decode().encode("utf-16")),
    "binary": ("rows.jsonl", os.urandom(4096)),
    "blank lines only": ("rows.jsonl", b"\n" * 50),
    "empty": ("rows.jsonl", b""),
    "gzip": ("rows.jsonl", b"\x1f\x8b\x08\x00" + os.urandom(200)),
    "numbers": ("rows.jsonl", b"1\n2\n"),
    "lists": ("rows.jsonl", b"[1, 2]\n"),
    "cut in the middle": ("rows.jsonl", LINE * 5 + LINE[:20]),
    "row 30,000 is not JSON": ("rows.jsonl", LINE * 29_999 + b"{\n"),
    "100,000 nested brackets": ("rows.jsonl", b'{"question": ' + b"[" * 100_000 + b"\n"),
    "an answer that is a list": ("rows.jsonl", b'{"question": "x", "answer": ["y"]}\n'),
    "an answer that is null": ("rows.jsonl", b'{"question": "x", "answer": null}\n'),
    "no such column": ("rows.jsonl", b'{"q": "x", "a": "y"}\n'),
    "only empty answers": ("rows.jsonl", b'{"question": "x", "answer": ""}\n'),
    "CSV with binary": ("rows.csv", b"question,answer\n" + os.urandom(100)),
    "CSV with a ragged row": ("rows.csv", b'question,answer\na,b\n"c,d,e\n'),
    "broken Parquet": ("rows.parquet", b"PAR1" + os.urandom(100) + b"PAR1"),
    "JSON that is a word": ("rows.json", b'"hello"'),
    "an unknown suffix": ("rows.docx", LINE),
}
MESSAGES = {
    "a text": '"hello"',
    "a number": "5",
    "numbers": "[1, 2]",
    "no messages": "[]",
    "no role": '[{"content": "x"}, {"role": "assistant", "content": "y"}]',
    "an unknown role": '[{"role": "king", "content": "x"}, {"role": "assistant", "content": "y"}]',
    "an object for content": (
        '[{"role": "user", "content": {"a": 5}}, {"role": "assistant", "content": "y"}]'
    ),
    "no answer": '[{"role": "user", "content": "x"}]',
}


def data(good: GoodInputs) -> Iterator[Case]:
    words = good.command(TRAINING)
    for name, (file, content) in DATA_FILES.items():
        make = _file(file, content, "dataset.source={}")
        yield Case(TRAINING, f"data: {name}", words, make, lines=2)
    chat = good.command(TRAINING, "dataset={_component_: qfsdp.data.chat_dataset}")
    for name, text in MESSAGES.items():
        line = f'{{"messages": {text}}}\n'.encode()
        make = _file("rows.jsonl", line, "dataset.source={}")
        yield Case(TRAINING, f"messages: {name}", chat, make, lines=2)
    for name, word in {
        "data: missing": "dataset.source=missing.jsonl",
        "data: a folder without files": "dataset.source=.",
        "data: 300 characters": f"dataset.source={'x' * 300}.jsonl",
        "data: a device": "dataset.source=/dev/zero",
        "data: no such split": "dataset.split=tset",
        "data: a broken slice": "dataset.split=train[abc]",
        "data: no rows": "dataset.max_rows=0",
        "data: a prompt template without {prompt}": "dataset.prompt_template=hello",
        "data: a prompt template that fails": "dataset.prompt_template={question",
    }.items():
        yield Case(TRAINING, name, good.command(TRAINING, word), lines=2)


# ---- tokenizers and templates --------------------------------------------------------------------


def tokenizers(good: GoodInputs) -> Iterator[Case]:
    words = good.command(TRAINING)
    extra = {"id": 60_000, "content": "<extra>", "special": True, "normalized": False}
    extra |= {"single_word": False, "lstrip": False, "rstrip": False}

    def beyond(folder: Path) -> None:
        _edit_json(
            folder / "tokenizer.json", lambda t: t["added_tokens"].append(extra | {"id": 49152})
        )
        rows = folder / "beyond.jsonl"
        rows.write_text('{"question": "x", "answer": "<extra>"}\n')

    def dropped(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()

    changes: dict[str, Callable[[Path], None]] = {
        "no tokenizer.json": dropped,
        "tokenizer.json cut": lambda f: _cut(f / "tokenizer.json"),
        "tokenizer.json binary": lambda f: _write(f / "tokenizer.json", os.urandom(999)),
        "tokenizer.json empty": lambda f: _write(f / "tokenizer.json", b""),
        "tokenizer_config.json cut": lambda f: _cut(f / "tokenizer_config.json"),
        "tokenizer_config.json a list": lambda f: _write(f / "tokenizer_config.json", b"[]"),
        "eos_token a number": lambda f: _set(f / "tokenizer_config.json", eos_token=5),
        "eos_token unknown": lambda f: _set(f / "tokenizer_config.json", eos_token="<nothing>"),
        "chat_template a number": lambda f: _set(f / "tokenizer_config.json", chat_template=5),
    }
    for name, change in changes.items():
        yield Case(TRAINING, name, words, _changed(good.model, change, "model.path={}"))
    make = _changed(good.model, beyond, "model.path={}", "dataset.source={}/beyond.jsonl")
    special = good.command(TRAINING, "tokenizer.special_tokens_in_text=special")
    yield Case(TRAINING, "an id beyond the embedding", special, make, lines=2)
    small = _changed(good.model, lambda f: _smaller(f, 1000), "model.path={}")
    yield Case(TRAINING, "a tokenizer larger than the embedding", words, small)


TEMPLATES = {
    "not a template": "{% for %}",
    "a division by zero": "{{ 1 // 0 }}",
    "an include": "{% include 'x' %}",
    "an import": "{% import 'os' as os %}",
    "a recursive macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "two macros in a ring": (
        "{% macro f(n) %}{% for i in [1, 2] %}{{ f(n + 1) }}{% endfor %}{% endmacro %}{{ f(0) }}"
    ),
    "a loop of 10**9": "{% for i in range(10**9) %}{% endfor %}",
    "three loops of 10**4": (
        "{% for i in range(10**4) %}{% for j in range(10**4) %}{% for k in range(10**4) %}"
        "{% endfor %}{% endfor %}{% endfor %}"
    ),
    "a text of 10 GB": "{{ 'a' * 10**10 }}",
    "a list of 10**10": "{{ ([0] * 10**10)|length }}",
    "a tower of powers": "{{ 10**10**10 }}",
    "a wide format": "{{ '%99999999999d' % 1 }}",
    "a centred text": "{{ 'x'|center(10**10) }}",
    "a text that doubles": (
        "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}"
        "{% endfor %}{{ n.s }}"
    ),
    "internals": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "an undefined function": "{{ run('touch executed') }}",
    "its own error": "{{ raise_exception('never') }}",
    "no text at all": "",
    "no message in it": "hello",
}


def templates(good: GoodInputs) -> Iterator[Case]:
    for name, template in TEMPLATES.items():

        def change(folder: Path, template: str = template) -> None:
            _set(folder / "tokenizer_config.json", chat_template=template)

        make = _changed(good.model, change, "model.path={}")
        yield Case(TRAINING, f"template: {name}", good.command(TRAINING), make, lines=2)


# ---- models --------------------------------------------------------------------------------------

MODEL_SETTINGS: dict[str, dict[str, Any]] = {
    "ten million layers": {"num_hidden_layers": 10_000_000},
    "no layers": {"num_hidden_layers": 0},
    "layers as text": {"num_hidden_layers": "two"},
    "a vocabulary of 10**12": {"vocab_size": 10**12},
    "a negative vocabulary": {"vocab_size": -5},
    "heads that do not divide": {"num_attention_heads": 5},
    "no heads": {"num_attention_heads": 0},
    "key heads that do not divide": {"num_key_value_heads": 3},
    "head_dim 0": {"head_dim": 0},
    "an odd head_dim": {"head_dim": 15},
    "hidden_size 10**15": {"hidden_size": 10**15},
    "rope_theta 0": {"rope_theta": 0},
    "rope_theta negative": {"rope_theta": -1.0},
    "eps as text": {"rms_norm_eps": "small"},
    "eps not finite": {"rms_norm_eps": float("nan")},
    "an unknown rope": {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
    "a rope without factor": {"rope_scaling": {"rope_type": "linear"}},
    "an unknown family": {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
    "an unknown activation": {"hidden_act": "wiggle"},
    "other weights": {"intermediate_size": 256},
    "no positions": {"max_position_embeddings": 0},
}


def models(good: GoodInputs) -> Iterator[Case]:
    for name, changes in MODEL_SETTINGS.items():

        def change(folder: Path, changes: dict[str, Any] = changes) -> None:
            _set(folder / "config.json", **changes)

        make = _changed(good.model, change, "model.path={}")
        yield Case(TRAINING, f"model: {name}", good.command(TRAINING), make)
    weights = "model.safetensors"
    files: dict[str, Callable[[Path], None]] = {
        "config.json cut": lambda f: _cut(f / "config.json"),
        "config.json a list": lambda f: _write(f / "config.json", b"[]"),
        "config.json binary": lambda f: _write(f / "config.json", os.urandom(99)),
        "no weights": lambda f: (f / weights).unlink(),
        "weights cut": lambda f: _cut(f / weights),
        "weights empty": lambda f: _write(f / weights, b""),
        "weights binary": lambda f: _write(f / weights, os.urandom(999)),
        "a header of 2**60 bytes": lambda f: _write(f / weights, struct.pack("<Q", 2**60)),
        "a pickle for weights": lambda f: shutil.move(f / weights, f / "pytorch_model.bin"),
        "an index of missing files": lambda f: _write(
            f / "model.safetensors.index.json", b'{"weight_map": {"lm_head.weight": "missing"}}'
        ),
    }
    for name, change_file in files.items():
        make = _changed(good.model, change_file, "model.path={}")
        yield Case(TRAINING, f"model: {name}", good.command(TRAINING), make)


# ---- checkpoints and adapters --------------------------------------------------------------------


def checkpoints(good: GoodInputs) -> Iterator[Case]:
    newest = Path("checkpoints") / "step_00000004"
    words = good.command(TRAINING, "max_steps=8")
    changes: dict[str, Callable[[Path], None]] = {
        "the newest has no .metadata": lambda f: (f / "state" / ".metadata").unlink(),
        "the newest .metadata is cut": lambda f: _cut(f / "state" / ".metadata"),
        "facts.json cut": lambda f: _cut(f / "facts.json"),
        "facts.json a list": lambda f: _write(f / "facts.json", b"[]"),
        "facts.json of another kind": lambda f: _write(f / "facts.json", b'{"step": "four"}'),
        "no state": lambda f: shutil.rmtree(f / "state"),
        "tensors cut": lambda f: _cut(next((f / "state").glob("*.distcp"))),
        "a byte changed": lambda f: _flip(next((f / "state").glob("*.distcp"))),
    }
    for name, change in changes.items():
        make = _changed(good.run, lambda f, c=change: c(f / newest), f"resume={{}}/{newest}")
        # A changed byte is found after the line that the model is loaded.
        yield Case(TRAINING, f"resume: {name}", words, make, lines=2)
    other = {
        "resume: other settings": ["resume=auto", f"output_dir={good.run}", "batch_size=4"],
        "resume: another adapter": ["resume=auto", f"output_dir={good.run}", "adapter.rank=8"],
        "resume: a file": [f"resume={good.rows}"],
        "resume: an empty folder": ["resume=."],
        "output_dir: of another run": [f"output_dir={good.run}"],
    }
    for name, more in other.items():
        yield Case(TRAINING, name, [*words, *more])
    for name, make in adapter_changes(good, "adapter.start_from={}").items():
        yield Case(TRAINING, f"start_from: {name}", good.command(TRAINING), make)


def adapter_changes(good: GoodInputs, word: str) -> dict[str, Callable[[Path], Sequence[str]]]:
    """What is wrong with an adapter -> `make` of a case."""
    weights, config = "adapter_model.safetensors", "adapter_config.json"
    changes: dict[str, Callable[[Path], object]] = {
        "weights cut": lambda f: _cut(f / weights),
        "weights missing": lambda f: (f / weights).unlink(),
        "one NaN": lambda f: _poison(f / weights),
        "config cut": lambda f: _cut(f / config),
        "config a list": lambda f: _write(f / config, b"[]"),
        "an unknown kind": lambda f: _set(f / config, peft_type="MAGIC"),
        "rank as text": lambda f: _set(f / config, r="four"),
        "another rank": lambda f: _set(f / config, r=7),
    }
    return {name: _changed(good.run / "adapter", change, word) for name, change in changes.items()}


# ---- changing files ------------------------------------------------------------------------------


def _file(name: str, content: bytes, word: str) -> Callable[[Path], Sequence[str]]:
    """Writes one file; `{}` in the word is its path."""

    def make(folder: Path) -> list[str]:
        (folder / name).write_bytes(content)
        return [word.format(folder / name)] if word else []

    return make


def _changed(
    source: Path, change: Callable[[Path], object], *words: str
) -> Callable[[Path], Sequence[str]]:
    """Copies a folder and changes the copy; `{}` in a word is its path."""

    def make(folder: Path) -> list[str]:
        copy = folder / "copy"
        shutil.copytree(source, copy)
        change(copy)
        return [word.format(copy) for word in words]

    return make


def _write(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def _cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 2 // 3])


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _edit_json(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    tree = json.loads(file.read_text())
    edit(tree)
    file.write_text(json.dumps(tree))


def _set(file: Path, **changes: Any) -> None:
    _edit_json(file, lambda tree: tree.update(changes))


def _poison(file: Path) -> None:
    """Makes the last number of a safetensors file NaN, fp32."""
    content = file.read_bytes()
    file.write_bytes(content[:-4] + struct.pack("<f", float("nan")))


def _smaller(folder: Path, rows: int) -> None:
    """Cuts the embedding to `rows` rows; the model has nothing but zeros."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    _set(folder / "config.json", vocab_size=rows)
    with safe_open(folder / "model.safetensors", "np") as tensors:
        kept = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    kept = {
        name: value[:rows].copy() if "embed_tokens" in name else value
        for name, value in kept.items()
    }
    save_file(kept, folder / "model.safetensors")
