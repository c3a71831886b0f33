"""Names of the Hugging Face hub against a server of our own: downloads, errors, resumed ones."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants
from tqdm import tqdm

from qfsdp.checkpoint.compatibility import _content
from qfsdp.checkpoint.weights.folder import ModelWeights
from qfsdp.common import files
from qfsdp.common.errors import UserError
from qfsdp.config.component import Component
from qfsdp.hub import download as hub
from qfsdp.hub.download import download, local_folder, split_name
from qfsdp.hub.errors import explained
from qfsdp.hub.upload import push_later, push_results
from qfsdp.launch.start import checked as check_and_download
from tests.hub_server import HubServer, files_of
from tests.tiny import write_tiny_model

NAME = "org/tiny"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two files, and what must not be downloaded beside it."""
    folder = write_tiny_model(tmp_path_factory.mktemp("served") / "tiny", shards=2)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "preprocessor_config.json").write_text("{}")  # of pictures: a merged folder has it
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "consolidated.safetensors").write_bytes(b"a second copy")
    return folder


@pytest.fixture
def server(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub that serves `model` as `NAME`; `huggingface_hub` asks it and has an empty cache."""
    with HubServer() as found:
        # huggingface_hub has read the environment already.
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv(hub.FOLDERS, "{}")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        found.add(NAME, model)
        yield found


def config(name: str = NAME, **more: Any) -> Any:
    return SimpleNamespace(model=SimpleNamespace(path=name), **more)


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def weights_of(served: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in served.items() if name.startswith("model-")}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("org/model", ("org/model", None)),
        ("org/model.v1@refs/pr/1", ("org/model.v1", "refs/pr/1")),
        *((path, None) for path in ("model", "/a/b", "./a", "~/a", "a/b/c", "a/", "../b", "a/b@")),
    ],
)
def test_a_hub_name_is_org_and_model(path: str, expected: Any) -> None:
    assert split_name(path) == expected


def test_the_check_runs_before_the_weights_are_downloaded(server: HubServer, model: Path) -> None:
    seen = []

    def check(_: Any) -> None:
        weights = ModelWeights(NAME)
        seen.append({n: (t.dtype, t.shape) for n, t in weights.plain.items()})
        # The header comes with the first 100 KB of a file, no more.
        assert all(size <= 100_001 for size in weights_of(server.served).values())

    check_and_download(check, config())
    of_folder = ModelWeights(model)
    assert seen == [{n: (t.dtype, t.shape) for n, t in of_folder.plain.items()}]
    folder = local_folder(NAME)
    assert ModelWeights(NAME).fingerprint == of_folder.fingerprint
    assert names_in(folder) == {
        *("config.json", "tokenizer.json", "model.safetensors.index.json"),
        "preprocessor_config.json",
        *(f"model-0000{n}-of-00002.safetensors" for n in (1, 2)),
    }


def test_without_a_terminal_a_download_has_no_bar(server: HubServer, capsys: Any) -> None:
    """A bar in a log file is one long line."""
    check_and_download(lambda _: None, config())
    printed = capsys.readouterr().err
    assert printed.startswith(f"downloading {NAME} (") and printed.count("\n") == 1
    assert "\r" not in printed and "%" not in printed


def test_no_bar_of_a_download_stays_open(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It would stand below the bar of the run, and be drawn again at its end."""
    monkeypatch.setattr(hub, "is_terminal", lambda: True)
    monkeypatch.setenv("TQDM_POSITION", "-1")  # its bars, though this is no terminal
    opened: list[Any] = []
    start = tqdm.__init__

    def opening(bar: Any, *args: Any, **kwargs: Any) -> None:
        opened.append(bar)
        start(bar, *args, **kwargs)

    monkeypatch.setattr(tqdm, "__init__", opening)
    check_and_download(lambda _: None, config())
    assert "Fetching 2 files" in capsys.readouterr().err
    assert len(opened) > 2 and all(bar.disable for bar in opened)  # closed ones are disabled


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_cache_without_locks(
    number: int, server: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of some network and FUSE file systems: `huggingface_hub` has other locks for the first."""

    def no_lock(descriptor: Any, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_lock)
    if number != errno.ENOSYS:
        with pytest.raises(UserError, match=r"cannot be locked in .*; expected HF_HOME on a file"):
            check_and_download(lambda _: None, config())
        return
    check_and_download(lambda _: None, config())
    name = "model-00001-of-00002.safetensors"
    assert (local_folder(NAME) / name).read_bytes() == (model / name).read_bytes()


def test_certificates_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What httpx raises has no name of a file."""
    monkeypatch.setenv("SSL_CERT_FILE", f"{tmp_path}/no.pem")
    told = f"SSL_CERT_FILE: '{tmp_path}/no.pem' is no file"
    with pytest.raises(UserError, match=told), explained("model.path", NAME, tmp_path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def test_a_mistake_costs_no_download(server: HubServer) -> None:
    def check(_: Any) -> None:
        raise UserError("dataset.source: 'x.jsonl' does not exist")

    with pytest.raises(UserError, match="dataset.source"):
        check_and_download(check, config())
    assert all(size <= 100_001 for size in weights_of(server.served).values())


def test_a_fingerprint_within_the_check_reads_the_weights(server: HubServer, model: Path) -> None:
    """`resume` compares weights by content, before the run starts."""
    found = []
    check_and_download(lambda _: found.append(ModelWeights(NAME).fingerprint), config())
    assert found == [ModelWeights(model).fingerprint]


def test_other_files_in_the_cache_do_not_change_a_run(server: HubServer) -> None:
    """`resume` compares the content of what a config names."""
    found = []
    check_and_download(lambda _: found.append(_content("model.path", NAME)), config())
    found.append(_content("model.path", NAME))
    (local_folder(NAME) / "README.md").write_text("downloaded by another program")
    found.append(_content("model.path", NAME))
    assert found[0]["model.path"].startswith("content ")
    assert found == found[:1] * 3


def test_every_key_takes_a_name(server: HubServer, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        for file in hub.ADAPTER_FILES:
            (tmp_path / name / file).write_text(name)
        server.add(f"org/{name}", tmp_path / name)
    tokenizer = Component("qfsdp.data.hf_tokenizer", {"path": NAME})
    check_and_download(
        lambda _: None,
        SimpleNamespace(tokenizer=tokenizer, adapter=SimpleNamespace(start_from="org/first")),
    )
    assert names_in(local_folder("org/first")) == set(hub.ADAPTER_FILES)
    assert local_folder(NAME).joinpath("tokenizer.json").exists()
    assert weights_of(server.served) == {}
    check_and_download(lambda _: None, SimpleNamespace(adapter="org/second"))
    assert (local_folder("org/second") / hub.ADAPTER_FILES[1]).read_text() == "second"


def test_a_quantized_model_is_there_for_its_check(
    server: HubServer, model: Path, tmp_path: Path
) -> None:
    """Layouts have parts that are read, not only listed."""
    quantized = tmp_path / "quantized"
    shutil.copytree(model, quantized)
    content = json.loads((model / "config.json").read_text()) | {"quantization_config": {}}
    (quantized / "config.json").write_text(json.dumps(content))
    server.add("org/quantized", quantized)
    sizes = []
    check_and_download(lambda _: sizes.append(weights_of(server.served)), config("org/quantized"))
    assert sizes == [weights_of(files_of(quantized))]


def test_a_cached_model_is_not_downloaded_again(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_and_download(lambda _: None, config())
    server.served.clear()
    check_and_download(lambda _: ModelWeights(NAME), config())
    assert server.served == {}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.requests.clear()
    check_and_download(lambda _: ModelWeights(NAME), config())
    assert server.requests == []


def test_a_folder_of_that_name_wins(
    server: HubServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, NAME)
    check_and_download(lambda _: ModelWeights(NAME), config())
    assert server.requests == []
    assert local_folder(NAME) == Path(NAME)


def test_a_revision_is_another_model(server: HubServer, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", seed=1)
    server.add(NAME, other, "v2")
    check_and_download(lambda _: None, config(f"{NAME}@v2"))
    assert ModelWeights(f"{NAME}@v2").fingerprint == ModelWeights(other).fingerprint


def test_a_gated_model_says_what_to_do(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = server.repositories[NAME]
    repository.gated, repository.token = True, "hf_open"
    with pytest.raises(UserError, match="is gated, and cannot be read without a token.*HF_TOKEN"):
        check_and_download(lambda _: None, config())
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UserError, match="is gated, and cannot be read with this token"):
        check_and_download(lambda _: None, config())
    monkeypatch.setenv("HF_TOKEN", "hf_open")
    check_and_download(lambda _: None, config())
    assert ModelWeights(NAME).plain


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/none", "model.path: 'org/none' is no folder, and .* has no such repository; .*"),
        (f"{NAME}@v9", "has no revision 'v9' on the hub; expected a branch, a tag or a commit"),
        ("org/pickles", "has no safetensors weights; .*pickle files can run code"),
        ("org/empty", "has no config.json; expected a model in Hugging Face's format"),
    ],
)
def test_what_is_not_there_is_one_line(
    name: str, expected: str, server: HubServer, model: Path, tmp_path: Path
) -> None:
    for repository, kept in (("pickles", ["config.json", "pytorch_model.bin"]), ("empty", [])):
        (tmp_path / repository).mkdir()
        for file in kept:
            shutil.copy(model / file, tmp_path / repository)
        server.add(f"org/{repository}", tmp_path / repository)
    with pytest.raises(UserError, match=expected) as error:
        check_and_download(lambda _: None, config(name))
    assert "\n" not in str(error.value)


def test_offline_or_without_a_network_is_one_line(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(UserError, match="cannot be reached .*; expected a network, or a folder"):
        check_and_download(lambda _: None, config())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set; .*`hf download org/tiny`"):
        check_and_download(lambda _: None, config())


def test_a_disk_that_is_too_small_is_found_first(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        files.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20, total=0, used=0)
    )
    with pytest.raises(UserError, match=r"needs .* MiB, and .* has 1.00 MiB of free space"):
        check_and_download(lambda _: None, config())
    assert weights_of(server.served) == {}


def test_a_cut_connection_goes_on_where_it_was(
    server: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = 1 << 16
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", piece)  # 10 MB, more than this file
    name = "model-00001-of-00002.safetensors"
    size = (model / name).stat().st_size
    with hub.previewed(config()):
        server.served.clear()
        server.cuts[name] = [size // 2]
        download(config())
    assert ModelWeights(NAME).fingerprint == ModelWeights(model).fingerprint
    assert size <= server.served[name] < size + piece  # half, and the rest by a range


def test_after_a_failure_only_the_missing_file_is_downloaded(
    server: HubServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    with hub.previewed(config()):
        server.served.clear()
        server.cuts[second] = [0] * 9  # more often than it is tried again
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
        with pytest.raises(UserError, match="the same command goes on"):
            download(config())
    server.cuts.clear()
    check_and_download(lambda _: None, config())
    assert server.served[first] == (model / first).stat().st_size  # once
    assert ModelWeights(NAME).fingerprint == ModelWeights(model).fingerprint


def test_two_ranks_of_torchrun_share_one_download(server: HubServer, model: Path) -> None:
    """Without a process that checks the config: what `torchrun recipes/X.py` does."""
    threads = [threading.Thread(target=download, args=(config(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ModelWeights(NAME).fingerprint == ModelWeights(model).fingerprint
    for name, size in weights_of(server.served).items():
        assert size == (model / name).stat().st_size


@pytest.mark.parametrize(
    ("name", "token", "expected"),
    [
        ("tuned", "hf_write", "push_to_hub: 'tuned' is not valid; expected org/name"),
        ("me/tuned@main", "hf_write", "push_to_hub: 'me/tuned@main' is not valid"),
        ("me/tuned", None, "needs a token; expected a token that may write: `hf auth login`"),
        ("me/tuned", "read_only", "the token of 'me' may only read"),
        ("you/tuned", "hf_write", "cannot write to 'you'; expected one of me, org"),
    ],
)
def test_a_wrong_push_is_found_before_the_download(
    name: str, token: str | None, expected: str, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=expected):
        check_and_download(lambda _: None, config(push_to_hub=name))
    assert all(size <= 100_001 for size in weights_of(server.served).values())
    assert "me/tuned" not in server.repositories


def test_a_pushed_model_replaces_an_earlier_push(
    server: HubServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would load one file before an index, and an adapter's base before both."""
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    pushed = tmp_path / "pushed"
    write_tiny_model(pushed, seed=1)
    for name in ("adapter_config.json", "adapter_model.safetensors", "notes.txt"):
        (pushed / name).write_text("{}")
    server.add("me/tuned", pushed)
    push_later("me/tuned", model)
    push_results()
    assert names_in(pushed) == names_in(model) | {"notes.txt"}
