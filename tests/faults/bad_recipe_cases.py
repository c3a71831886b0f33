"""The bad inputs of preference tuning, sweeps, reports, servers, judges and exports."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.faults.bad_input_cases import _changed, _cut, _file, _write, adapter_changes
from tests.faults.bad_inputs import Case
from tests.faults.good_inputs import GoodInputs

DPO = "dpo_distributed"
WORDS: dict[str, tuple[str, ...]] = {
    DPO: (
        "loss=5",
        "loss=sigmiod",
        "loss={_component_: sigmiod}",
        "loss={_component_: subprocess.Popen, args: [touch, executed]}",
        "loss={_component_: sigmoid, beta: -1}",
        "loss={_component_: sigmoid, beta: .nan}",
        "loss={_component_: sigmoid, beta: high}",
        "loss={_component_: sigmoid, bta: 0.1}",
        "loss={_component_: robust, label_smoothing: 0.7}",
        "loss={_component_: ipo, beta: 0}",
        "loss=kto",
        "loss=[]",
        "loss=null",
        "reference=me",
        "reference=none",
        "reference=null",
        "reference_logprobs=sometimes",
        "reference_logprobs={rows}/x",
        "dataset={_component_: qfsdp.data.instruct_dataset, source: {rows}}",
        "dataset.source={rows}",
        "dataset.chosen_column=better",
        "dataset.prompt_column=null",
        "dataset.rejected_column=chosen",
        "dataset.streaming=true",
        "dataset._component_=qfsdp.data.kto_dataset",
        "max_seq_len=1",
        "packed=true max_seq_len=3",
        "adapter.start_from=/nowhere reference=start",
        "validation.sets.held={_component_: qfsdp.data.instruct_dataset, source: {rows}}",
        "validation.metric=held/rewards/accuracy",
        "batch_size=0",
        "optimizer.lr=.inf",
        "learning_rate=1",
        "resume={good}",
    ),
    "chat": (
        "adapter=/nowhere",
        "adapter={rows}",
        "sampling.temperature=-1",
        "sampling.max_new_tokens=0",
        "model.path=/nowhere",
        "model.dtype=fp8",
        "quantization.format=gguf",
        "tokenizer=null",
        "tokenizer.chat_template=/nowhere.jinja",
        "no_such_key=1",
    ),
    "serve": (
        "port=-1",
        "port=65536",
        "port=eight",
        "port=1.5",
        "host=no.such.host.invalid",
        "host=300.1.1.1",
        "host=",
        "host=8.8.8.8",
        "api_key=",
        "adapters.mine=/nowhere",
        "adapters.model={run}/adapter",
        "adapters.mine=null",
        "adapters=[a]",
        "limits.running=0",
        "limits.body=lots",
        "limits.body=0",
        "limits.seconds=0",
        "limits.seconds=.nan",
        "limits.prompt_tokens=-5",
        "sampling.top_p=0",
        "model.path=/nowhere",
        "no_such_key=1",
    ),
    "export": (
        "adapter=/nowhere",
        "adapter=null",  # the base is to be quantized, for no adapter
        "adapter=null format=lora",
        "format=onnx",
        "gguf_type=q9_9",
        "gguf_type=q4_0 output_dir=/proc/x",
        "output_dir={rows}",
        "format=w4a16 group_size=0",
        "format=w4a16 group_size=7",
        "format=w4a16 output_dir={good}",
        "format=w4a16 max_file_bytes=0",
        "format=w4a16 dtype=fp32",
        "format=lora output_dir={good}",
        "model.path=/nowhere",
        "quantization.format=int4",
    ),
    "judge": (
        "judge.url=127.0.0.1:8000",
        "judge.url=ftp://x",
        "judge.url=http://",
        "judge.url=null",
        "judge.max_tokens=0",
        "judge.temperature=.nan",
        "judge.temperature=-1",
        "judge.temperature=warm",
        "judge.key_variable=5",
        "candidates={}",
        "candidates.b.model=x",
        "candidates.b=null",
        "baseline=c",
        "baseline=a single=false",
        "single=maybe",
        "questions=/nowhere.jsonl",
        "questions={rows}",
        "questions={good}",
        "max_questions=0",
        "in_flight=0",
        "request_timeout=0",
        "request_timeout=.inf",
        "output_dir=/proc/x",
        "output_dir={rows}",
        "judge.model=x",  # nobody listens at its address
    ),
    "sweep": (
        "config=/nowhere",
        "config=llama3_8b_qdro",
        "config={rows}",
        "config={model}/config.json",
        "mode=guess",
        "overrides=[batch_size]",
        "overrides=[batch_szie=2]",
        "overrides=batch_size=2",
        "grid=null",
        "grid={}",
        "grid=[1]",
        "grid.batch_size=[]",
        "grid.batch_size=5",
        "grid.batch_size=[1,1]",
        "grid.batch_size=[0]",
        "grid.batch_szie=[1]",
        "grid.method={A: 5}",
        "grid.method={A: {adapter.rnak: 4}}",
        "points=[5]",
        "points=[{}]",
        "points=[{batch_size: x}]",
        "grid.gpu=[rtx9999]",
        "grid.world_size=[0]",
        "grid.world_size=[100000]",
        "grid.seed=" + str(list(range(200))) + " grid.batch_size=" + str(list(range(1, 200))),
        "world_size=0",
        "gpu=rtx9999",
        "prices=/nowhere.yaml",
        "prices={rows}",
        "prices={model}/config.json",
        "published=/nowhere.yaml",
        "published={rows}",
        "evaluation=evaluate",
        "mode=run evaluation=/nowhere.yaml",
        "mode=run evaluation={rows}",
        "mode=run evaluation={good}/evaluate.yaml evaluation_overrides=[batch_szie=1]",
        "mode=run evaluation={good}/evaluate.yaml evaluation_overrides=[text.text.file=/nowhere]",
        "mode=steps steps=0",
        "mode=steps warmup=-1",
        "mode=steps world_size=64",
        "mode=steps grid.gpu=[h100]",
        "samples=0",
        "output_dir=/proc/x",
        "output_dir={rows}",
    ),
}
"""Recipe -> overrides of its good config, each line wrong by itself."""


def recipe_cases(good: GoodInputs) -> Iterator[Case]:
    places = {"{rows}": good.rows, "{good}": good.folder, "{model}": good.model, "{run}": good.run}
    for recipe, lines in WORDS.items():
        for line in lines:
            words = split_words(line)
            for name, path in places.items():
                words = [word.replace(name, str(path)) for word in words]
            name = line if len(line) < 100 else f"{line[:60]}... ({len(line)} characters)"
            yield Case(recipe, name, good.command(recipe, *words), lines=2)
    yield from preferences(good)
    yield from exports(good)
    yield from questions(good)
    yield from reports(good)
    yield from sweeps(good)
    for recipe, word in {"chat": "adapter={}", "serve": "adapters.mine={}"}.items():
        for name, make in adapter_changes(good, word).items():
            yield Case(recipe, f"adapter: {name}", good.command(recipe), make, lines=2)
    taken = socket.socket()  # open until the process ends
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    busy = f"port={taken.getsockname()[1]}"
    TAKEN.append(taken)
    yield Case("serve", "a port that is taken", good.command("serve", busy), lines=2)


TAKEN: list[socket.socket] = []


def split_words(line: str) -> list[str]:
    """Splits at spaces outside of brackets."""
    words, depth = [""], 0
    for sign in line:
        depth += (sign in "[{") - (sign in "]}")
        if sign == " " and not depth:
            words.append("")
        else:
            words[-1] += sign
    return words


PAIR = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}
PAIRS: dict[str, object] = {
    "an object for the better answer": PAIR | {"chosen": {"a": 1}},
    "a null answer": PAIR | {"rejected": None},
    "equal answers": PAIR | {"rejected": "2"},
    "no prompt": PAIR | {"prompt": ""},
    "no rejected": {"prompt": "x", "chosen": "y"},
    "messages with an unknown role": PAIR | {"chosen": [{"role": "king", "content": "x"}]},
    "messages without content": PAIR | {"chosen": [{"role": "assistant"}]},
    "a row that is a list": [1, 2],
    "a surrogate": PAIR | {"chosen": "\ud800"},
}


def preferences(good: GoodInputs) -> Iterator[Case]:
    for name, row in PAIRS.items():
        content = json.dumps(row).encode() + b"\n"
        make = _file("pairs.jsonl", content, "dataset.source={}")
        yield Case(DPO, f"pairs: {name}", good.command(DPO), make, lines=2)
    kto = good.command(DPO, "dataset={_component_: qfsdp.data.kto_dataset}", "loss=kto")
    for name, labels in {
        "all labels true": [True, True],
        "a label that is a word": ["yes", "no"],
        "a label that is null": [None, True],
    }.items():
        rows = ({"prompt": "x", "completion": f"y{n}", "label": v} for n, v in enumerate(labels))
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        make = _file("rows.jsonl", content, "dataset.source={}")
        yield Case(DPO, f"kto: {name}", kto, make, lines=2)
    for name, make in adapter_changes(good, "adapter.start_from={}").items():
        yield Case(DPO, f"start_from: {name}", good.command(DPO), make, lines=2)


def exports(good: GoodInputs) -> Iterator[Case]:
    for name, make in adapter_changes(good, "adapter={}").items():
        yield Case("export", f"adapter: {name}", good.command("export"), make, lines=2)
    changes: dict[str, Callable[[Path], object]] = {
        "weights cut": lambda f: _cut(f / "model.safetensors"),
        "tokenizer.json cut": lambda f: _cut(f / "tokenizer.json"),
        "tokenizer.json a list": lambda f: _write(f / "tokenizer.json", b"[]"),
        "no tokenizer": lambda f: [file.unlink() for file in f.glob("tokenizer*")],
    }
    for name, change in changes.items():
        make = _changed(good.model, change, "model.path={}")
        yield Case("export", f"model: {name}", good.command("export"), make, lines=2)


QUESTION = {"question_id": 1, "category": "x", "turns": ["Hello?"]}
QUESTIONS: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)),
    "no turns": json.dumps(QUESTION | {"turns": []}).encode(),
    "turns that are a text": json.dumps(QUESTION | {"turns": "x"}).encode(),
    "turns of numbers": json.dumps(QUESTION | {"turns": [1]}).encode(),
    "too many references": json.dumps(QUESTION | {"reference": ["a", "b"]}).encode(),
    "an id twice": (json.dumps(QUESTION) + "\n").encode() * 2,
}


def questions(good: GoodInputs) -> Iterator[Case]:
    for name, content in QUESTIONS.items():
        make = _file("questions.jsonl", content, "questions={}")
        yield Case("judge", f"questions: {name}", good.command("judge"), make, lines=2)

    def broken(folder: Path) -> Sequence[str]:
        (folder / "judged").mkdir()
        (folder / "judged" / "exchanges.jsonl").write_text("hello\n")
        return []

    yield Case("judge", "exchanges of something else", good.command("judge"), broken, lines=2)


def reports(good: GoodInputs) -> Iterator[Case]:
    run, report = str(good.run), ["run", "recipes/report"]
    for words in (
        [],
        ["/nowhere"],
        [str(good.rows)],
        [str(good.model)],
        [run, "output=page.pdf"],
        [run, "output=/proc/x.html"],
        [run, "evaluations=[/nowhere.json]"],
        [run, f"evaluations=[{good.rows}]"],
        [run, f"evaluations=[{good.model}/config.json]"],
        [run, "evaluations=5"],
        [run, "titel=x"],
        [run, "estimate=perhaps"],
        ["runs=5"],
    ):
        shown = " ".join(words).replace(str(good.folder), "GOOD")
        yield Case("report", shown or "(no words)", [*report, *words], lines=2)
    content = {"level": 0.95, "results": [{"section": "loss", "name": "x", "value": "high"}]}
    make = _file("broken.json", json.dumps(content).encode(), "evaluations=[{}]")
    yield Case("report", "an evaluation of something else", [*report, run], make, lines=2)


def sweeps(good: GoodInputs) -> Iterator[Case]:
    price = b"rtx4090: {usd_per_hour: 0.4, date: 2026-09-20, source: x}\n"
    for name, content in {
        "empty": b"",
        "a negative price": price.replace(b"0.4", b"-1"),
        "a price that is no number": price.replace(b"0.4", b".nan"),
        "no date": b"rtx4090: {usd_per_hour: 0.4, source: x}\n",
        "an unknown GPU": price.replace(b"4090", b"9999"),
        "not YAML": b"a: [",
    }.items():
        make = _file("prices.yaml", content, "prices={}")
        yield Case("sweep", f"prices: {name}", good.command("sweep"), make, lines=2)
    for name, content in {
        "empty": b"",
        "a word": b"hello\n",
        "no figures": b"- {source: x, date: 2024-03-01, setup: x, memory: reserved}\n",
        "an unknown kind of memory": (
            b"- {source: x, date: 2024-03-01, setup: x, memory: some, figures: "
            b"[{point: {batch_size: 1}, memory_gib: 1}]}\n"
        ),
    }.items():
        make = _file("published.yaml", content, "published={}")
        yield Case("sweep", f"published: {name}", good.command("sweep"), make, lines=2)
