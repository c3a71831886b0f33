"""A small Hugging Face hub on 127.0.0.1, for tests and for trying hub names without a network.

    python -m tests.hub_server FOLDER --name org/model [--port 8800]
    HF_ENDPOINT=http://127.0.0.1:8800 HF_HOME=cache tune run ... model.path=org/model

It serves folders as repositories, with ranges, commits and gates, and takes uploads: the parts of
the hub's HTTP interface that `huggingface_hub` uses.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import tempfile
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT_CHARACTERS = 40
PIECE = 1 << 16


@dataclass
class Repository:
    """What the server has of a repository.

    Fields:
        revisions: branch or tag -> folder.
        token: that a client must send; None: public.
        gated: everybody may know that it exists.
        private: as created by a client.
    """

    revisions: dict[str, Path] = field(default_factory=dict)
    token: str | None = None
    gated: bool = False
    private: bool = True

    def folder(self, revision: str) -> Path | None:
        for name, folder in self.revisions.items():
            if revision in (name, commit_of(folder)):
                return folder
        return None


def commit_of(folder: Path) -> str:
    """The commit of a folder: a hash of its path."""
    return hashlib.sha256(str(folder).encode()).hexdigest()[:COMMIT_CHARACTERS]


class HubServer:
    """A hub in a thread of this process; a context manager.

    Attributes:
        repositories: name -> repository.
        requests: "METHOD path" of every request.
        served: file name -> bytes of its content that were sent.
        cuts: file name -> after how many bytes the connection is cut, one cut for each number.
        uploads_fail: answer 500 to commits.
        url: for HF_ENDPOINT.
    """

    def __init__(self, port: int = 0) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.served: dict[str, int] = {}
        self.cuts: dict[str, list[int]] = {}
        self.uploads_fail = False
        self.blobs: dict[str, bytes] = {}
        self.lock = threading.Lock()
        hub = self

        class BoundHandler(Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", port), BoundHandler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, name: str, folder: Path, revision: str = "main", **options: Any) -> Repository:
        """Serves a folder as a revision of a repository."""
        repository = self.repositories.setdefault(name, Repository(**options))
        repository.revisions[revision] = folder
        return repository

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.01)

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers one client."""

    server_hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        with self.server_hub.lock:
            self.server_hub.requests.append(f"{self.command} {path}")
        routes = [
            (r"/api/whoami-v2", self.who),
            (r"/api/validate-yaml", lambda _: self.json({"errors": [], "warnings": []})),
            (r"/api/repos/create", self.create),
            (r"/api/datasets/.*", lambda _: self.error(401, "RepoNotFound")),
            (r"/api/models/([^/]+/[^/]+)/preupload/.*", self.preupload),
            (r"/api/models/([^/]+/[^/]+)/commit/.*", self.commit),
            (r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", self.tree),
            (r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", self.info),
            (r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self.batch),
            (r"/lfs/([0-9a-f]+)", self.blob),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.file),
        ]
        self.body = body
        for pattern, route in routes:
            if found := re.fullmatch(pattern, path):
                return route(found)
        self.error(404, "EntryNotFound")

    # ---- answers ---------------------------------------------------------------------------------

    def json(self, content: Any, status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    @property
    def token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    # ---- downloads -------------------------------------------------------------------------------

    def opened(self, name: str, revision: str | None, file: bool) -> Path | None:
        """The folder of a revision; None after an error was sent."""
        repository = self.server_hub.repositories.get(name)
        allowed = repository and (repository.token in (None, self.token))
        if repository is None or (not allowed and not repository.gated):
            return self.error(401 if not self.token else 404, "RepoNotFound")
        if file and not allowed:
            return self.error(403 if self.token else 401, "GatedRepo")
        folder = repository.folder(revision or "main")
        if folder is None:
            return self.error(404, "RevisionNotFound")
        return folder

    def info(self, found: re.Match[str]) -> None:
        if folder := self.opened(found[1], found[2], file=False):
            siblings = [
                {"rfilename": name, "size": size, "blobId": commit_of(folder / name)}
                for name, size in files_of(folder).items()
            ]
            self.json({"id": found[1], "sha": commit_of(folder), "siblings": siblings})

    def tree(self, found: re.Match[str]) -> None:
        if folder := self.opened(found[1], found[2], file=False):
            self.json(
                [
                    {"type": "file", "path": name, "size": size, "oid": commit_of(folder / name)}
                    for name, size in files_of(folder).items()
                ]
            )

    def file(self, found: re.Match[str]) -> None:
        if not (folder := self.opened(found[1], found[2], file=True)):
            return
        path = folder / found[3]
        if not path.is_file():
            return self.error(404, "EntryNotFound")
        size = path.stat().st_size
        start, stop = 0, size
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, stop = int(wanted[1]), min(size, int(wanted[2] or size - 1) + 1)
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{commit_of(path)}"')
        self.send_header("X-Repo-Commit", commit_of(folder))
        self.end_headers()
        if self.command != "HEAD":
            self.send_bytes(path, start, stop)

    def send_bytes(self, path: Path, start: int, stop: int) -> None:
        hub = self.server_hub
        # Only a request for a whole file is cut, or for its rest; a header is not.
        whole = stop == path.stat().st_size and hub.cuts.get(path.name)
        cut = hub.cuts[path.name].pop(0) if whole else None
        with open(path, "rb") as stream:
            stream.seek(start)
            left = stop - start if cut is None else min(cut, stop - start)
            while left and (piece := stream.read(min(PIECE, left))):
                self.wfile.write(piece)
                with hub.lock:
                    hub.served[path.name] = hub.served.get(path.name, 0) + len(piece)
                left -= len(piece)
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    # ---- uploads ---------------------------------------------------------------------------------

    def who(self, _: re.Match[str]) -> None:
        if not self.token:
            return self.error(401, "Unauthorized")
        role = "read" if self.token.startswith("read") else "write"
        auth = {"type": "access_token", "accessToken": {"role": role, "displayName": "t"}}
        self.json({"type": "user", "name": "me", "orgs": [{"name": "org"}], "auth": auth})

    def create(self, _: re.Match[str]) -> None:
        wanted = json.loads(self.body)
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        if name in self.server_hub.repositories:
            return self.json({"error": "exists", "url": f"{self.server_hub.url}/{name}"}, 409)
        made = Repository({"main": Path(tempfile.mkdtemp())}, token=self.token)
        made.private = wanted.get("private", wanted.get("visibility") == "private")
        self.server_hub.repositories[name] = made
        self.json({"url": f"{self.server_hub.url}/{name}", "name": name, "id": name})

    def preupload(self, _: re.Match[str]) -> None:
        files = json.loads(self.body)["files"]
        self.json(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith("tensors") else "regular",
                        "shouldIgnore": False,
                        "oid": None,
                    }
                    for file in files
                ]
            }
        )

    def batch(self, _: re.Match[str]) -> None:
        objects = json.loads(self.body)["objects"]
        for entry in objects:
            href = f"{self.server_hub.url}/lfs/{entry['oid']}"
            entry["actions"] = {"upload": {"href": href}}
        self.json({"transfer": "basic", "objects": objects})

    def blob(self, found: re.Match[str]) -> None:
        self.server_hub.blobs[found[1]] = self.body
        self.json({})

    def commit(self, found: re.Match[str]) -> None:
        repository = self.server_hub.repositories.get(found[1])
        if repository is None or self.server_hub.uploads_fail:
            return self.error(403, "Forbidden")
        for line in self.body.decode().splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                content = base64.b64decode(entry["value"]["content"])
            elif entry["key"] == "lfsFile":
                content = self.server_hub.blobs[entry["value"]["oid"]]
            elif entry["key"] == "deletedFile":
                (repository.revisions["main"] / entry["value"]["path"]).unlink()
                continue
            else:
                continue
            (repository.revisions["main"] / entry["value"]["path"]).write_bytes(content)
        url = f"{self.server_hub.url}/{found[1]}/commit/{'1' * COMMIT_CHARACTERS}"
        self.json({"commitUrl": url, "commitOid": "1" * COMMIT_CHARACTERS})


def files_of(folder: Path) -> dict[str, int]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a model folder")
    parser.add_argument("--name", default="org/model", help="its name on this hub")
    parser.add_argument("--port", type=int, default=8800)
    args = parser.parse_args()
    hub = HubServer(args.port)
    hub.add(args.name, args.folder.expanduser().resolve())
    print(f"{args.name}: HF_ENDPOINT={hub.url}", flush=True)
    hub.serve()


if __name__ == "__main__":
    main()
