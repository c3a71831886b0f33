"""The server, through OpenAI's own client, against `recipes/generate`."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qfsdp.checkpoint.adapter_files import save_adapter
from qfsdp.checkpoint.saved_template import TEMPLATE_FILE
from qfsdp.checkpoint.weights.load import ModelConfig
from qfsdp.data import hf_tokenizer
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.evaluation.generation import SamplingConfig, generate
from qfsdp.evaluation.inference_model import load_for_inference
from qfsdp.evaluation.prompts import prompt_tokens, stop_ids
from qfsdp.evaluation.serving.served import LimitsConfig
from qfsdp.modules.adapters.config import AdapterConfig
from qfsdp.modules.quantized_linear import QuantizationConfig
from tests.evaluation.server_load import CLIENT_S, Load, memory
from tests.models import adapted_model, cpu_world, randomize_adapters
from tests.tiny import ROOT, write_tiny_model_with_tokenizer
from tests.waiting import LIMIT_S

openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

NEW = 12
USER_AND_ANSWER = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ASKED = ["Why? ", "Tell me a story. ", "Zażółć? ", "2 + 2 = "]


@pytest.fixture(scope="module")
def model_dir(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model_with_tokenizer(tmp_path_factory.mktemp("tiny") / "model", smollm2_dir)


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A DoRA adapter and a LoRA adapter of another rank."""
    folders = {}
    for name, config in (("dora", AdapterConfig("dora", 2)), ("lora", AdapterConfig("lora", 4))):
        model = adapted_model(model_dir, config, format="none")
        randomize_adapters(model)
        folders[name] = tmp_path_factory.mktemp(name)
        save_adapter(model, config, str(model_dir), folders[name], cpu_world())
    return folders


class Server:
    """A server in a process of its own."""

    def __init__(self, *words: str, files: int | None = None, **environment: str) -> None:
        command = [sys.executable, "-m", "qfsdp.cli.command", "serve", "port=0", *words]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])} | environment
        if files is not None:
            command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self.said: list[str] = []
        assert self.process.stderr is not None
        found = None
        while found is None:
            line = self.process.stderr.readline()
            assert line, "".join(self.said)
            self.said.append(line)
            found = re.search(r"at http://127.0.0.1:(\d+)/v1", line)
        self.port, self.started = int(found[1]), len(self.said)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.said += list(self.process.stderr)

    def client(self, **options: Any) -> Any:
        given = {"api_key": "none", "max_retries": 0, "timeout": LIMIT_S} | options
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", **given)

    def post(self, body: bytes, path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
        """Status and JSON of a request whose headers and body need not be valid."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        given = {"Content-Type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        connection.request("POST", path, body, given)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(LIMIT_S)


@pytest.fixture(scope="module")
def server(
    model_dir: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of a model and adapters; the adapter `strict` has a chat template for users and
    answers only."""
    strict = tmp_path_factory.mktemp("strict") / "adapter"
    shutil.copytree(adapters["lora"], strict)
    (strict / TEMPLATE_FILE).write_text(USER_AND_ANSWER)
    words = [f"model.path={model_dir}", "model.dtype=fp32", "limits.prompt_tokens=100"]
    words += [f"adapters.{name}={folder}" for name, folder in adapters.items()]
    words += [f"adapters.strict={strict}"]
    words += [f"limits.client_seconds={CLIENT_S}", "limits.running=8", "limits.waiting=32"]
    found = Server(*words, "limits.body=20KB", "limits.new_tokens=200", QFSDP_EAGER_KERNELS="1")
    yield found
    assert found.end() in (0, -signal.SIGINT), found.said  # uvicorn may pass the signal on


class Oracle:
    """What `recipes/generate` answers, one prompt at a time."""

    def __init__(self, folder: Path, adapter: Path | None) -> None:
        self.tokenizer, self.world = hf_tokenizer(str(folder)), cpu_world()
        config = ModelConfig(str(folder), "fp32")
        given = (QuantizationConfig(), adapter and str(adapter), ShardingConfig("ddp"), self.world)
        self.model = load_for_inference(config, *given)
        self.stops = stop_ids(self.tokenizer, folder)

    def __call__(self, prompt: Any, chat: bool = True, **sampling: Any) -> str:
        tokens = prompt_tokens(self.tokenizer, prompt, chat, None)
        asked = SamplingConfig(**{"max_new_tokens": NEW} | sampling)
        (answer,) = generate(self.model, [tokens], asked, self.stops, self.world)
        return str(self.tokenizer.decode(answer))


@pytest.fixture(scope="module")
def oracles(model_dir: Path, adapters: dict[str, Path]) -> dict[str, Oracle]:
    os.environ["QFSDP_EAGER_KERNELS"] = "1"
    names: dict[str, Path | None] = {"model": None, **adapters}
    return {name: Oracle(model_dir, adapter) for name, adapter in names.items()}


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_models(server: Server) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["model", "dora", "lora", "strict"]
    assert client.models.retrieve("dora").id == "dora"
    with pytest.raises(openai.NotFoundError, match="'none' does not exist"):
        client.models.retrieve("none")


@pytest.mark.parametrize(
    "model", ["dora", *(pytest.param(name, marks=pytest.mark.long) for name in ("model", "lora"))]
)
def test_answers_are_those_of_generate(
    model: str, server: Server, oracles: dict[str, Oracle]
) -> None:
    client, oracle = server.client(), oracles[model]
    chat = [{"role": "system", "content": "Be short."}, *said("Why?")]
    for messages in (said("Why?"), chat):
        given: Any = {"model": model, "messages": messages, "max_tokens": NEW}
        found = client.chat.completions.create(**given)
        assert found.choices[0].message.content == oracle(messages)
        assert found.choices[0].finish_reason == "length"
        assert found.usage.completion_tokens == NEW
        prompt = len(prompt_tokens(oracle.tokenizer, messages, True, None))
        assert found.usage.prompt_tokens == prompt
        assert found.usage.total_tokens == prompt + NEW
    found = client.completions.create(model=model, prompt="Once upon", max_tokens=NEW)
    assert found.choices[0].text == oracle("Once upon", chat=False)
    ids = oracle.tokenizer.encode("Once upon", add_eos=False)
    found = client.completions.create(model=model, prompt=ids, max_tokens=NEW)
    assert found.choices[0].text == oracle("Once upon", chat=False)


@pytest.mark.long
def test_models_differ(oracles: dict[str, Oracle]) -> None:
    assert len({oracle("Why?") for oracle in oracles.values()}) == 3


@pytest.mark.long
def test_sampled_answers_are_those_of_generate(server: Server, oracles: dict[str, Oracle]) -> None:
    client, sampling = server.client(), {"temperature": 0.9, "top_p": 0.8}
    texts = []
    for seed in (3, 4):
        found = client.chat.completions.create(
            model="dora", messages=said("Why?"), max_tokens=NEW, seed=seed, **sampling
        )
        texts.append(found.choices[0].message.content)
        assert texts[-1] == oracles["dora"]("Why?", seed=seed, **sampling)
    asked = dict(model="dora", messages=said("Why?"), max_tokens=NEW, **sampling)
    texts += [client.chat.completions.create(**asked).choices[0].message.content for _ in "12"]
    assert len(set(texts)) == 4  # without a seed each answer is another


def test_a_stream(server: Server, oracles: dict[str, Oracle]) -> None:
    """Pieces come as they are made: the first long before the last."""
    chunks = list(
        server.client().chat.completions.create(
            model="lora",
            messages=said("Zażółć?"),
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *pieces, last = chunks
    assert pieces[0].choices[0].delta.role == "assistant" and len(pieces) > 10
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == oracles["lora"]("Zażółć?", max_new_tokens=40)
    reasons = [piece.choices[0].finish_reason for piece in pieces]
    assert reasons == [None] * (len(pieces) - 1) + ["length"]
    assert last.choices == [] and last.usage.completion_tokens == 40
    text = "".join(
        chunk.choices[0].text
        for chunk in server.client().completions.create(
            model="lora", prompt="Once", max_tokens=NEW, stream=True
        )
    )
    assert text == oracles["lora"]("Once", chat=False)


@pytest.mark.long
def test_32_requests_at_once(server: Server, oracles: dict[str, Oracle]) -> None:
    """Of three models, of different lengths, streamed and not: each answer is that of its prompt
    alone."""
    client = server.client()

    asked: list[tuple[str, str, int]] = []
    for number in range(32):
        text = ASKED[number % 4] * (1 + number % 5)
        asked.append((["model", "dora", "lora"][number % 3], text, 3 + number % 16))

    def ask(number: int) -> str:
        model, text, new = asked[number]
        given: Any = {"model": model, "messages": said(text), "max_tokens": new}
        if number % 2:
            chunks = client.chat.completions.create(stream=True, **given)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return str(client.chat.completions.create(**given).choices[0].message.content)

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(32)))
    for found, (model, text, new) in zip(answers, asked, strict=True):
        assert found == oracles[model](text, max_new_tokens=new)


@pytest.mark.long
def test_stop_strings(server: Server, oracles: dict[str, Oracle]) -> None:
    whole = oracles["model"]("Why?", max_new_tokens=40)
    for stop in (whole[10:14], whole[7], [whole[20:30], "nowhere"]):
        ends = [stop] if isinstance(stop, str) else stop
        expected = whole[: min(at for end in ends if (at := whole.find(end)) >= 0)]
        given: Any = {"model": "model", "messages": said("Why?"), "max_tokens": 40, "stop": stop}
        found = server.client().chat.completions.create(**given).choices[0]
        assert (found.message.content, found.finish_reason) == (expected, "stop")
        chunks = server.client().chat.completions.create(stream=True, **given)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": "gpt"}, "model: 'gpt' does not exist; expected one of model, dora, lora, strict"),
    ({"max_tokens": 0}, "max_tokens: 0 is not valid; expected an integer from 1 to 200"),
    ({"max_tokens": 201}, "max_tokens: 201 is not valid; expected an integer from 1 to 200"),
    ({"max_tokens": "5"}, 'max_tokens: "5" is not valid'),
    ({"temperature": -1}, "temperature: -1 is not valid; expected a number from 0 to 2"),
    ({"temperature": "hot"}, 'temperature: "hot" is not valid'),
    ({"top_p": 0}, "top_p: 0 is not valid"),
    ({"seed": 1.5}, "seed: 1.5 is not valid"),
    ({"n": 2}, "n: 2 is not valid; expected 1"),
    ({"logprobs": 3}, "logprobs: 3 is not valid"),
    ({"logprobs": 0}, "logprobs: 0 is not valid; expected false"),
    ({"stop": ["a"] * 5}, "stop: .* expected up to 4 texts"),
    ({"stop": ""}, 'stop: "" is not valid'),
    ({"stop": 3}, "stop: 3 is not valid"),
    ({"stream": "yes"}, 'stream: "yes" is not valid'),
    ({"stream_options": 1}, "stream_options: 1 is not valid"),
    ({"temprature": 1}, "temprature: unknown field"),
    ({"messages": said("a")}, "messages: unknown field"),
    ({"prompt": None}, "prompt: null is not valid; expected one text, or one list of token ids"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [49152]}, "prompt: prompt: token id 49152"),
    ({"prompt": [-1]}, "prompt: token id -1"),
    ({"prompt": "\ud800"}, "not valid JSON"),
    ({"prompt": [5] * 101}, "prompt: 101 tokens; expected 1 to 100"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:24] for _, message in BAD])
def test_mistakes(changes: dict[str, Any], message: str, server: Server) -> None:
    given = {"model": "model", "prompt": "Why?", "max_tokens": 2} | changes
    status, answer = server.post(json.dumps(given).encode())
    assert status == (404 if "model" in changes else 400)
    assert re.search(message, answer["error"]["message"]), answer
    assert answer["error"].keys() == {"message", "type", "param", "code"}


def test_mistakes_in_conversations(server: Server) -> None:
    for messages, message in (
        ([], "messages: \\[\\] is not valid"),
        (
            [{"role": "user", "text": "a"}],
            "is not valid; expected a list of messages with role and",
        ),
        (["hi"], "expected a text, or a list of"),
        ([{"role": "king", "content": "a"}], "role 'king'"),
        (said("a") + [{"role": "assistant", "content": "b"}], "the last message is the assistant"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "content that is not text"),
    ):
        given: Any = {"model": "model", "messages": messages, "max_tokens": 2}
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            server.client().chat.completions.create(**given)
        assert caught.value.param == "messages"


CALL = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": "{}"}}
LEFT_OUT: dict[str, tuple[list[dict[str, Any]], str]] = {
    "system": (
        [{"role": "system", "content": "Answer in French."}, *said("a")],
        "the content of message 1 of 2 \\(system\\)",
    ),
    "developer": (
        [{"role": "developer", "content": "Answer in French."}, *said("a")],
        "the content of message 1 of 2 \\(system\\)",
    ),
    "tool": (
        [*said("a"), {"role": "tool", "tool_call_id": "1", "content": "18 degrees"}],
        "the content of message 2 of 2 \\(tool\\)",
    ),
    "tool call": (
        [*said("a"), {"role": "assistant", "content": None, "tool_calls": [CALL]}, *said("b")],
        "tool calls \\(weather\\) of message 2 of 3 \\(assistant\\)",
    ),
    "reasoning": (
        [
            *said("a"),
            {"role": "assistant", "content": "b", "reasoning_content": "since c"},
            *said("d"),
        ],
        "reasoning_content of message 2 of 3 \\(assistant\\)",
    ),
}


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_messages_that_the_template_leaves_out(kind: str, server: Server) -> None:
    messages, what = LEFT_OUT[kind]
    for stream in (False, True):
        body = {"model": "strict", "messages": messages, "max_tokens": 2, "stream": stream}
        status, answer = server.post(json.dumps(body).encode(), "/v1/chat/completions")
        assert status == 400, answer
        error = answer["error"]
        assert re.search(f"the chat template leaves out {what}", error["message"]), error
        assert len(error["message"].splitlines()) == 1
        assert (error["type"], error["param"]) == ("invalid_request_error", "messages")
        assert error.keys() == {"message", "type", "param", "code"}
    body = {"model": "strict", "messages": said("a"), "max_tokens": 2}
    assert server.post(json.dumps(body).encode(), "/v1/chat/completions")[0] == 200


def test_requests_that_are_none(server: Server) -> None:
    assert server.post(b"{")[0] == 400
    assert server.post(b"[]")[0] == 400
    assert server.post(b"[" * 15000)[0] == 400
    assert server.post(b'{"a": "' + b"x" * 20_001 + b'"}')[0] == 413
    assert server.post(b"{}", Content_Type="text/plain")[0] == 415
    assert server.post(b"{}", Host="rebound.example")[0] == 403
    for path, status in (("/v1/models", 405), ("/nothing", 404)):
        found, answer = server.post(b"{}", path)
        assert (found, answer["error"]["type"]) == (status, "invalid_request_error")


def test_clients_that_send_too_slowly(server: Server) -> None:
    """Each gets an error if it has sent something, and its connection ends; a refused body is not
    read without end."""
    found = asyncio.run(Load(server.port, "model").slow())
    statuses = {kind: status for kind, (status, _) in found.items()}
    assert statuses == {
        **{"nothing": 0, "headers": 408, "body": 408, "chunks": 408},
        **{"refused body": 413, "second request": 400},
    }
    assert all(seconds >= CLIENT_S for _, seconds in found.values())


def test_requests_are_counted_and_not_connections(server: Server) -> None:
    """80 idle connections take no place; of 80 requests at once 8 run, 32 wait, the rest gets
    429."""
    load = Load(server.port, "model")

    async def ask() -> tuple[dict[int, int], int]:
        idle = [await load.open() for _ in range(80)]
        statuses, (single, _) = await load.burst(80), await load.ask()
        for _, writer in idle:
            writer.close()
        return statuses, single

    statuses, single = asyncio.run(ask())
    assert statuses.keys() <= {200, 429} and statuses[200] >= 40 and single == 200


def test_clients_that_go_are_no_errors(server: Server) -> None:
    """In their headers, in their body, in their answer: the server says nothing, and goes on."""
    load, said = Load(server.port, "model"), len(server.said)
    asyncio.run(load.going(12))
    assert asyncio.run(load.many(4)) == {200: 4}
    assert server.said[said:] == []


HEAD = b"Host: localhost\r\nContent-Type: application/json\r\n"
NO_HTTP: dict[str, tuple[bytes, int]] = {
    "nothing of HTTP": (b"\x16\x03\x01\x00\r\n\r\n", 400),
    "no host": (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "another host": (b"GET /v1/models HTTP/1.1\r\nHost: [\r\n\r\n", 403),
    "large headers": (b"GET / HTTP/1.1\r\n" + HEAD + b"X: " + b"x" * 40_000 + b"\r\n\r\n", 431),
    "a length that is none": (b"POST / HTTP/1.1\r\n" + HEAD + b"Content-Length: -1\r\n\r\n", 400),
    "an encoding": (b"POST / HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 501),
    "a large length": (
        b"POST /v1/completions HTTP/1.1\r\n" + HEAD + b"Content-Length: 99999999\r\n\r\n",
        413,
    ),
    "a chunk that is none": (
        b"POST /v1/completions HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\nZ\r\n",
        400,
    ),
    "a packed body": (
        b"POST /v1/completions HTTP/1.1\r\n" + HEAD + b"Content-Encoding: gzip\r\n\r\n",
        415,
    ),
    "NaN": (
        b"POST /v1/completions HTTP/1.1\r\n" + HEAD + b'Content-Length: 11\r\n\r\n{"seed":NaN}',
        400,
    ),
    "another method": (b"OPTIONS /v1/completions HTTP/1.1\r\n" + HEAD + b"\r\n", 405),
    "HTTP/1.0": (b"GET /v1/models HTTP/1.0\r\n\r\n", 200),
}


@pytest.mark.parametrize("kind", NO_HTTP)
def test_bytes_that_are_no_request(kind: str, server: Server) -> None:
    """Refused in OpenAI's form (`Load.answer` checks it)."""
    data, status = NO_HTTP[kind]
    assert asyncio.run(Load(server.port, "model").raw(data))[0] == status


def test_a_long_prompt_does_not_keep_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too long for certain is refused before it is tokenized; while other long prompts are
    tokenized, short ones pass."""
    from qfsdp.evaluation.serving import api
    from qfsdp.evaluation.serving.requests import ApiError, Asked

    begun, go_on, tokenized = threading.Event(), threading.Event(), []

    def tokens(tokenizer: Any, prompt: str, *_: Any) -> list[int]:
        if len(prompt) > api.LONG:
            begun.set()
            assert go_on.wait(LIMIT_S)
        tokenized.append(len(prompt))
        return [1]

    monkeypatch.setattr(api, "prompt_tokens", tokens)
    config = SimpleNamespace(max_position_embeddings=4096, vocab_size=9)
    model = SimpleNamespace(
        tokenizer=SimpleNamespace(longest_token=20), decoder=SimpleNamespace(config=config)
    )
    served = SimpleNamespace(models={"m": model}, limits=LimitsConfig(), positions=4096)
    here = api.Api(served)  # type: ignore[arg-type]

    async def ask(length: int) -> list[int]:
        return await here._tokens(Asked("m", "x" * length, SamplingConfig(), False), "prompt")

    async def all_of_them() -> None:
        with pytest.raises(ApiError, match="prompt: at least 5000 tokens; expected 1 to 4095"):
            await ask(100_000)
        long = [asyncio.create_task(ask(length)) for length in (50_000, 60_000, 70_000)]
        await asyncio.to_thread(begun.wait, LIMIT_S)
        await asyncio.gather(*(ask(10) for _ in range(20)))
        assert tokenized == [10] * 20
        go_on.set()
        await asyncio.gather(*long)

    asyncio.run(all_of_them())
    assert tokenized[20:] == [50_000, 60_000, 70_000]


@pytest.mark.long
def test_load(model_dir: Path) -> None:
    """Idle sockets beside working clients, requests at once, memory, large prompts, and a client
    that does not read; with few files that the process may open."""
    words = [f"model.path={model_dir}", "model_name=m", "limits.client_seconds=10"]
    server = Server(*words, QFSDP_EAGER_KERNELS="1")
    load, process = Load(server.port, "m"), server.process.pid
    try:
        assert asyncio.run(load.idle(500, 50, 100))["statuses"].keys() == {200}
        statuses = asyncio.run(load.burst(200))
        assert statuses.keys() == {200, 429} and statuses[200] >= 96
        asyncio.run(load.many(320))  # fills what is kept between requests
        before = memory(process)
        assert asyncio.run(load.many(160)) == {200: 160}
        assert memory(process) < before + 16
        assert asyncio.run(load.large("<|im_end|>" * 90_000))["statuses"] == [400] * 4
        assert asyncio.run(load.deaf(server.process.pid, 8)) == 0
        assert server.said[server.started :] == []
    finally:
        server.end()


@pytest.mark.long
def test_few_files_and_an_end_in_an_answer(smollm2_dir: Path, tmp_path: Path) -> None:
    """With 200 files, 500 idle sockets do not keep others out. The end of the server breaks a long
    answer off with status 503."""
    folder = tmp_path / "model"
    write_tiny_model_with_tokenizer(folder, smollm2_dir, max_position_embeddings=2048)
    words = [f"model.path={folder}", "model_name=m", f"limits.client_seconds={CLIENT_S}"]
    server = Server(*words, QFSDP_EAGER_KERNELS="1", files=200)
    load = Load(server.port, "m")
    try:
        assert asyncio.run(load.idle(500, 4, 8))["statuses"][200] >= 8

        async def end() -> tuple[int, dict[str, Any]]:
            asked = asyncio.create_task(load.ask(max_tokens=1024, prompt="a"))
            await load.ask(max_tokens=1)
            server.process.send_signal(signal.SIGINT)
            return await asked

        status, answer = asyncio.run(end())
        assert status == 200 or (status, answer["error"]["type"]) == (503, "server_error")
        assert server.process.wait(LIMIT_S) in (0, -signal.SIGINT)
        assert "Traceback" not in "".join(server.said)
    finally:
        server.process.kill()


@pytest.mark.long
def test_a_client_that_goes_frees_its_row(model_dir: Path, adapters: dict[str, Path]) -> None:
    """With one row and no place to wait, the next request is served only if the row is free."""
    words = [f"model.path={model_dir}", "limits.running=1", "limits.waiting=1"]
    server = Server(*words, "model_name=m", "limits.new_tokens=240", QFSDP_EAGER_KERNELS="1")
    try:
        _cut_connections(server)
    finally:
        server.end()


def _cut_connections(server: Server) -> None:
    client = server.client()
    given: Any = {"model": "m", "prompt": "b", "max_tokens": 1}
    for stream in (True, False):
        running, refused = _two_and_a_refusal(server, client, given, stream)
        assert refused.status_code == 429 and refused.response.headers["retry-after"] == "1"
        for connection in running:
            connection.close()
        until = time.monotonic() + LIMIT_S
        while True:  # the server learns of it within a round
            try:
                client.completions.create(**given)
                break
            except openai.RateLimitError:
                assert time.monotonic() < until


def _two_and_a_refusal(
    server: Server, client: Any, given: dict[str, Any], stream: bool
) -> tuple[list[socket.socket], Any]:
    """One request that runs, one that waits, and how a third is refused.

    On a busy machine both may be over before the third comes; then it is answered, and two others
    are sent.
    """
    text = json.dumps({"model": "m", "prompt": "a", "max_tokens": 240, "stream": stream})
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        running = []
        for _ in range(2):
            running.append(socket.create_connection(("127.0.0.1", server.port)))
            running[-1].sendall((head + text).encode())
            if stream and len(running) == 1:
                running[0].recv(100)  # the answer has begun
        try:
            client.completions.create(**given)
        except openai.RateLimitError as error:
            return running, error
        for connection in running:
            connection.close()
    raise AssertionError("never refused")


@pytest.mark.long
def test_a_key_and_a_limit_of_time(model_dir: Path) -> None:
    words = [f"model.path={model_dir}", "model_name=m", "limits.seconds=0.2"]
    server = Server(*words, QFSDP_API_KEY="sesame", QFSDP_EAGER_KERNELS="1")
    try:
        for key in ("sesam", "sésame", "Bearer sesame"):
            status, answer = server.post(b"{}", Authorization=f"Bearer {key}")
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert server.post(b"{}", Authorization="bearer  sesame")[0] == 400  # the body is wrong
        client = server.client(api_key="sesame")
        assert [model.id for model in client.models.list()] == ["m"]
        given: Any = {"model": "m", "prompt": "a " * 20, "max_tokens": 200}
        with pytest.raises(openai.APIStatusError, match="no answer within 0.2 s") as caught:
            client.completions.create(**given)
        assert caught.value.status_code == 408
        with pytest.raises(openai.APIError, match="no answer within 0.2 s"):
            list(client.completions.create(stream=True, **given))
        assert client.completions.create(model="m", prompt="a", max_tokens=1).choices
    finally:
        server.end()
