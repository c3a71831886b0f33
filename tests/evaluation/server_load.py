"""A server under load that is not friendly: idle sockets, bursts, slow senders, those that go.

    python -m tests.evaluation.server_load [--answers 500] [--requests 2000]

Starts `qfsdp serve` with a tiny random model and prints a line for each kind. All traffic goes to
127.0.0.1 and is bounded in number and time.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.waiting import LIMIT_S

CLIENT_S = 1.0  # the servers' limits.client_seconds


class Load:
    """Requests to a server on this machine's `port`; `model` is a model of it."""

    def __init__(self, port: int, model: str) -> None:
        self._port, self._model = port, model

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)

    def head(self, length: int | str, path: str = "/v1/completions") -> bytes:
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()

    def body(self, **changes: Any) -> bytes:
        given = {"model": self._model, "prompt": "Why?", "max_tokens": 4, **changes}
        return json.dumps(given).encode()

    async def ask(self, **changes: Any) -> tuple[int, dict[str, Any]]:
        """Status and JSON of the answer to one request on a connection of its own."""
        body = self.body(**changes)
        return await self.raw(self.head(len(body)) + body)

    async def raw(self, data: bytes) -> tuple[int, dict[str, Any]]:
        """The answer to bytes; (0, {}) if the connection ends without one."""
        reader, writer = await self.open()
        try:
            writer.write(data)
            return await self.answer(reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            return 0, {}
        finally:
            writer.close()

    async def answer(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(head.partition("content-length: ")[2].split("\r\n")[0])
        found: dict[str, Any] = json.loads(await reader.readexactly(length))
        if "error" in found:
            assert found["error"].keys() == {"message", "type", "param", "code"}, found
        status = int(head.split()[1])
        assert (status in (429, 503)) == ("retry-after" in head), head
        return status, found

    async def end_of(self, reader: asyncio.StreamReader, since: float) -> float:
        """Seconds from `since` to the end of a connection."""
        with suppress(ConnectionError):
            while await reader.read(65536):
                pass
        return time.monotonic() - since

    async def idle(self, sockets: int, clients: int, answers: int) -> dict[str, Any]:
        """Sockets that send nothing (opened again when the server closes them) while clients ask
        until so many requests are answered with 200."""
        until = time.monotonic() + LIMIT_S
        statuses: collections.Counter[int] = collections.Counter()
        took: list[float] = []

        async def sit() -> None:
            while True:
                with suppress(OSError):
                    reader, writer = await self.open()
                    await self.end_of(reader, 0)
                    writer.close()

        async def work() -> None:
            while statuses[200] < answers and time.monotonic() < until:
                begin = time.monotonic()
                statuses[(await self.ask())[0]] += 1
                took.append(time.monotonic() - begin)

        sitting = [asyncio.create_task(sit()) for _ in range(sockets)]
        await asyncio.gather(*(work() for _ in range(clients)))
        for task in sitting:
            task.cancel()
        return {"statuses": dict(statuses), "slowest": round(max(took), 2)}

    async def burst(self, count: int) -> dict[int, int]:
        """Statuses of requests that come at once."""
        found = await asyncio.gather(*(self.ask(max_tokens=16) for _ in range(count)))
        return dict(collections.Counter(status for status, _ in found))

    async def many(self, count: int, at_once: int = 16) -> dict[int, int]:
        """Statuses of requests one after the other."""
        free = asyncio.Semaphore(at_once)

        async def one(number: int) -> int:
            async with free:
                return (await self.ask(prompt=f"{number} is", seed=number, temperature=1))[0]

        return dict(collections.Counter(await asyncio.gather(*map(one, range(count)))))

    async def drip(self, data: bytes, rest: bytes) -> tuple[int, float]:
        """Sends `data`, then one byte of `rest` at a time; the status and when the connection
        ended."""
        reader, writer = await self.open()
        begin = time.monotonic()

        async def send() -> None:
            with suppress(ConnectionError):
                writer.write(data)
                for at in range(len(rest)):
                    await asyncio.sleep(CLIENT_S / 8)
                    writer.write(rest[at : at + 1])

        sending = asyncio.create_task(send())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (ConnectionError, asyncio.IncompleteReadError):
            head = b"HTTP/1.1 0"
        seconds = await self.end_of(reader, begin)
        sending.cancel()
        writer.close()
        return int(head.split()[1]), seconds

    async def slow(self) -> dict[str, tuple[int, float]]:
        """Status (0: none) and seconds of senders that are too slow."""
        rest, first = b"x" * 1000, self.head(1000)
        kinds = {
            "nothing": (b"", b""),
            "headers": (b"POST /v1/completions HTTP/1.1\r\nX-A: ", rest),
            "body": (first, rest),
            "chunks": (first.replace(b"Content-Length: 1000", b"Transfer-Encoding: chunked"), rest),
            "refused body": (self.head(10**9), rest),
            "second request": (self.head(2) + b"{}POST /v1/mod", rest),
        }
        found = await asyncio.gather(*(self.drip(*given) for given in kinds.values()))
        return {kind: (status, round(s, 1)) for kind, (status, s) in zip(kinds, found, strict=True)}

    async def large(self, text: str, count: int = 4) -> dict[str, Any]:
        """Statuses of large prompts, and how long the slowest ordinary request took meanwhile."""
        body = json.dumps({"model": self._model, "messages": [{"role": "user", "content": text}]})
        data = self.head(len(body), "/v1/chat/completions") + body.encode()
        large = [asyncio.create_task(self.raw(data)) for _ in range(count)]
        took: list[float] = []
        while not took or not all(task.done() for task in large):
            begin = time.monotonic()
            assert (await self.ask(max_tokens=1))[0] == 200
            took.append(time.monotonic() - begin)
        return {"statuses": [task.result()[0] for task in large], "slowest": round(max(took), 2)}

    async def deaf(self, process: int, count: int) -> int:
        """Connections that ask without end and read nothing: how many the server keeps."""
        before = len(list(Path(f"/proc/{process}/fd").iterdir()))
        request = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000

        async def one() -> None:
            _, writer = await self.open()
            with suppress(ConnectionError):
                while True:
                    writer.write(request)
                    await writer.drain()
            writer.close()

        await asyncio.gather(*(one() for _ in range(count)))
        return max(0, len(list(Path(f"/proc/{process}/fd").iterdir())) - before)

    async def going(self, count: int) -> None:
        """Clients that close in their headers, in their body, and before and in their answer."""
        body = self.body(max_tokens=64, stream=True)
        whole = self.head(len(body)) + body
        for number in range(count):
            _, writer = await self.open()
            writer.write(whole[: (30, len(whole) - 9, len(whole), len(whole))[number % 4]])
            await writer.drain()
            await asyncio.sleep(0.02 * (number % 2))
            writer.transport.abort()


def memory(process: int) -> float:
    """Resident MB of a process."""
    text = Path(f"/proc/{process}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1e3


def main() -> None:
    from tests.conftest import cache_dir, prepare_model
    from tests.evaluation.test_serving import Server
    from tests.tiny import write_tiny_model_with_tokenizer

    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=500)
    parser.add_argument("--requests", type=int, default=2000)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp()) / "model"
    write_tiny_model_with_tokenizer(folder, prepare_model(cache_dir()))
    words = [f"model.path={folder}", "model_name=m", f"limits.client_seconds={CLIENT_S}"]
    server = Server(*words, QFSDP_EAGER_KERNELS="1")
    load = Load(server.port, "m")
    try:
        print("500 idle sockets, 50 clients:", asyncio.run(load.idle(500, 50, args.answers)))
        print("200 requests at once:", asyncio.run(load.burst(200)))
        asyncio.run(load.many(200))
        sizes = [memory(server.process.pid)]
        for _ in range(4):
            print("requests:", asyncio.run(load.many(args.requests // 4)))
            sizes.append(memory(server.process.pid))
        print("resident MB:", sizes)
        print(f"slow, limit {CLIENT_S} s (status, end after s):", asyncio.run(load.slow()))
        print("4 texts of 900 KB:", asyncio.run(load.large("<|im_end|>" * 90_000)))
        print("4 texts of 300 KB:", asyncio.run(load.large("<|im_end|>" * 30_000)))
        print("clients that never read, left:", asyncio.run(load.deaf(server.process.pid, 8)))
        asyncio.run(load.going(40))
        print("clients that go: then", asyncio.run(load.many(4)))
    finally:
        server.end()
        print("the server said:", "".join(server.said[server.started :]) or "nothing more")


if __name__ == "__main__":
    main()
