"""Models, tokenizers and adapters by their names on the Hugging Face hub.

A config names one by a folder, or by `org/model` or `org/model@revision`; a folder wins. The
process that checks the config, or one of torchrun's ranks on each machine, works in two steps:

    with previewed(config):   config, tokenizer, index and adapters are downloaded, and the headers
        check(config)         of the weights; the recipe checks itself without any weight
    download(config)          the weights

`local_folder` says where a name is. Ranks find it in the environment (`FOLDERS`), so they need no
network and read the same commit. Files go through `huggingface_hub` into its cache, which knows
HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. Pickles and code are never downloaded.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qfsdp.common.errors import UserError
from qfsdp.common.files import free_bytes, json_object
from qfsdp.common.long_waits import long_wait
from qfsdp.common.sizes import format_size
from qfsdp.common.terminal import is_terminal
from qfsdp.config.load import get_key
from qfsdp.hub.errors import explained, is_unreachable

FOLDERS = "QFSDP_HUB_FOLDERS"  # environment variable: JSON, name -> folder
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
BESIDE_ADAPTER = (
    *("qfsdp_base.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)
SMALL_FILES = (
    *("config.json", "generation_config.json", INDEX, "qfsdp_packed.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt", "tokenizer.model"),
)
# Of a model that takes pictures: merged folders have them too.
PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
CARD = "README.md"  # has the license
HEADERS_AT_ONCE = 8  # requests
Kind = Literal["model", "tokenizer", "adapter"]
_KINDS: dict[str, Kind] = {  # config key -> what it names
    **dict.fromkeys(("model.path", "teacher.model.path"), "model"),
    "tokenizer.path": "tokenizer",
    **dict.fromkeys(("adapter", "adapter.start_from", "teacher.adapter"), "adapter"),
}
_MARKS = {"model": "config.json", "tokenizer": "tokenizer.json", "adapter": ADAPTER_FILES[0]}
_NAME = re.compile(r"([\w-][\w.-]*/[\w.-]*[\w-])(?:@([\w][\w./-]*))?", re.ASCII)
_previews: dict[Path, tuple[Repository, Path]] = {}  # folder without weights -> what it shows


def split_name(name: str) -> tuple[str, str | None] | None:
    """The repository and the revision of `org/model` or `org/model@revision`; None for a path."""
    found = _NAME.fullmatch(name)
    return (found[1], found[2]) if found else None


def name_in_address(text: str) -> str | None:
    """`org/name` of the address of a page of the hub; None: the text is no such address."""
    found = re.match(r"https?://(?:www\.)?huggingface\.co/(?:datasets/)?(\S+)", text)
    return "/".join(found[1].split("/")[:2]) if found else None


def hub_name(path: str) -> tuple[str, str | None] | None:
    """`split_name` of `path`, or None if it is a folder, which wins."""
    return None if Path(path).expanduser().exists() else split_name(path)


def local_folder(path: str | Path) -> Path:
    """The folder of a model, tokenizer or adapter: where its name on the hub was downloaded to, or
    `path` with a leading `~` expanded."""
    folder = Path(path).expanduser()
    return folder if folder.exists() else Path(_folders().get(str(path), folder))


def _folders() -> dict[str, str]:
    found: dict[str, str] = json.loads(os.environ.get(FOLDERS, "{}"))
    return found


def _set_folder(name: str, folder: Path) -> None:
    os.environ[FOLDERS] = json.dumps(_folders() | {name: str(folder)})


# ---- for the process that starts a run -----------------------------------------------------------


@contextmanager
def previewed(config: Any) -> Iterator[None]:
    """Within a `with` block every hub name of a recipe's config has a folder without weights.

    The folder has the small files, and safetensors files whose headers are those on the hub and
    whose bytes are holes. Adapters, and models that are stored quantized, are whole: their checks
    read them. So are models that are in the cache.

    Raises:
        UserError: a name is not on the hub, gated, or has no safetensors; there is no network; or
            the disk has too little space for the files.
    """
    with ExitStack() as stack:
        stack.callback(_previews.clear)
        for name, (key, kind) in _names(config).items():
            repository = _find(key, name, kind)
            folder = repository.small_files()
            missing = repository.missing(folder)
            repository.check_space(missing)
            quantized = "quantization_config" in json_object(folder / "config.json")
            if missing and kind == "model" and not quantized:
                temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="qfsdp-"))
                preview = repository.preview(folder, Path(temporary))
                _previews[preview] = repository, folder
                folder = preview
            elif missing:
                folder = repository.download(missing)
            _set_folder(name, folder)
        yield


def download(config: Any) -> None:
    """Downloads what the hub names of a recipe's config still lack.

    Ranks that torchrun started call it too: on each machine one downloads while the others wait
    for its lock, before there is a process group that could time out.

    Raises:
        UserError: see `previewed`; or the download was cut off.
    """
    for name, (key, kind) in _names(config).items():
        folder = Path(_folders().get(name, ""))
        if name not in _folders() or not (folder / _MARKS[kind]).exists():
            with _one_process():
                repository = _find(key, name, kind)
                folder = repository.small_files()
                missing = repository.missing(folder)
                repository.check_space(missing)
                _set_folder(name, repository.download(missing) if missing else folder)
        else:
            _set_folder(name, whole_folder(folder))


def whole_folder(folder: Path) -> Path:
    """The folder with weights of one that `previewed` made, which are downloaded now; any other
    folder unchanged."""
    if folder not in _previews:
        return folder
    repository, small = _previews[folder]
    missing = repository.missing(small)
    return repository.download(missing) if missing else small


def find_model_file(path: str, file: str) -> Path:
    """A small file of a model that is a folder, or a name on the hub; downloads that file only.
    Raises UserError: see `previewed`."""
    folder = local_folder(path)
    if (folder / file).exists():
        return folder / file
    return small_folder("model.path", path, "model") / file


def small_folder(key: str, name: str, kind: Kind) -> Path:
    """The folder of `name` with its small files at least; downloads them if it is on the hub.
    Raises UserError: see `previewed`."""
    folder = local_folder(name)
    if folder.exists() or hub_name(name) is None:
        return folder
    return _find(key, name, kind).small_files()


def _names(config: Any) -> dict[str, tuple[str, Kind]]:
    """Hub name -> the first key that has it, and what it names there."""
    found: dict[str, tuple[str, Kind]] = {}
    values = {key: get_key(config, key) for key in _KINDS}
    several = getattr(config, "adapters", {})  # of `recipes/serve` by name, of recipes/merge a list
    several = dict(enumerate(p.path for p in several)) if type(several) is list else several
    values |= {f"adapters.{name}": path for name, path in several.items()}
    for key, value in values.items():
        if key == "tokenizer.path":  # an argument of a component
            tokenizer = get_key(config, "tokenizer")
            ours = str(getattr(tokenizer, "path", "")).startswith("qfsdp.")
            value = tokenizer.kwargs.get("path") if ours else None
        if isinstance(value, str) and hub_name(value) is not None:
            found.setdefault(value, (key, _KINDS.get(key, "adapter")))
    return found


# ---- one repository ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repository:
    """A repository of the hub, or what the cache holds of it if the hub cannot be reached.

    Fields:
        key: the config key that names it, for messages.
        name: as typed.
        kind: what it is used as.
        sizes: file -> bytes; None if the hub cannot be reached.
        cached: the folder in the cache, if the hub cannot be reached.
    """

    key: str
    name: str
    kind: Kind
    sizes: dict[str, int] | None
    cached: Path | None = None

    def small_files(self) -> Path:
        """The folder in the cache, with all small files of this kind."""
        if self.sizes is None:
            assert self.cached is not None
            return self.cached
        of_adapter = (*ADAPTER_FILES[:1], *BESIDE_ADAPTER)
        wanted = of_adapter if self.kind == "adapter" else (*SMALL_FILES, *PROCESSORS, CARD)
        files = [file for file in wanted if file in self.sizes]
        if _MARKS[self.kind] not in files:
            what = f"{'an' if self.kind == 'adapter' else 'a'} {self.kind}"
            told = f"{self.key}: '{self.name}' on the hub has no {_MARKS[self.kind]}"
            raise UserError(f"{told}; expected {what} in Hugging Face's format")
        return self.download(files, silent=True)

    def missing(self, folder: Path) -> list[str]:
        """The weights that are not in the cache yet."""
        files = _weight_files(self.kind, folder)
        if self.kind == "model" and SINGLE in (self.sizes or {}):
            files = [SINGLE]  # transformers reads it and no index
        there = files if self.sizes is None else self.sizes
        if not files or not set(files) <= set(there):
            raise UserError(
                f"{self.key}: '{self.name}' on the hub has no safetensors weights; expected "
                f"{ADAPTER_FILES[1] if self.kind == 'adapter' else f'{SINGLE} or {INDEX}'} "
                "(pickle files can run code, and are not read)"
            )
        return [file for file in files if not (folder / file).exists()]

    def check_space(self, files: list[str]) -> None:
        """Raises UserError if the cache's disk is too small for these files."""
        cache, size = cache_folder(), sum((self.sizes or {}).get(file, 0) for file in files)
        free = free_bytes(cache)
        if free is not None and free < size:
            raise UserError(
                f"{self.key}: '{self.name}' needs {format_size(size)}, and '{cache}' has "
                f"{format_size(free)} of free space; expected more, or HF_HOME on another disk"
            )

    def download(self, files: list[str], silent: bool = False) -> Path:
        """Downloads files; those that are in the cache cost a request at most."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

        repo, revision = split_name(self.name) or (self.name, None)
        hidden = silent or not is_terminal()  # in a log file a bar is one line without an end
        if not silent:
            size = format_size(sum((self.sizes or {}).get(file, 0) for file in files))
            print(f"downloading {self.name} ({size}) to {cache_folder()}", file=sys.stderr)
        about = f"{'asking the hub for' if silent else 'downloading'} {self.name}"
        with explained(self.key, self.name, cache_folder()):
            if hidden:
                disable_progress_bars()
            try:
                with long_wait(about) if hidden else nullcontext(), _closed_bars() as bar:
                    found = snapshot_download(
                        repo, revision=revision, allow_patterns=files, tqdm_class=bar
                    )
            finally:
                if hidden:
                    enable_progress_bars()
        return Path(found)

    def preview(self, folder: Path, into: Path) -> Path:
        """Fills a folder with links to the small files, and with headers of missing weights."""
        from huggingface_hub import HfApi

        repo, missing = (split_name(self.name) or (self.name,))[0], self.missing(folder)
        for file in folder.iterdir():
            (into / file.name).symlink_to(file.resolve())

        def write(file: str) -> None:
            found = HfApi().parse_safetensors_file_metadata(repo, file, revision=folder.name)
            tensors = {
                name: {"dtype": t.dtype, "shape": t.shape, "data_offsets": t.data_offsets}
                for name, t in found.tensors.items()
            }
            _write_header(into / file, tensors)

        with (
            explained(self.key, self.name, cache_folder()),
            long_wait(f"reading the headers of {self.name}"),
            ThreadPoolExecutor(HEADERS_AT_ONCE) as pool,
        ):
            list(pool.map(write, missing))
        return into


@contextmanager
def _closed_bars() -> Iterator[type]:
    """The class of the hub's bars; closes them. `huggingface_hub` 2.4 leaves two of them open: they
    stay below all later text, and are drawn once more when the process ends."""
    from huggingface_hub.utils import tqdm

    bars: list[Any] = []

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            bars.append(self)

    try:
        yield Bar
    finally:
        for bar in bars:
            bar.close()


def cache_folder() -> Path:
    """Where `huggingface_hub` keeps its files."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _find(key: str, name: str, kind: Kind) -> Repository:
    """Asks the hub for the repository's files; takes the cache's if it cannot be reached. Raises
    UserError: neither has it."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    repo, revision = split_name(name) or (name, None)
    with explained(key, name, cache_folder()):
        try:
            with long_wait(f"asking the hub for {name}"):
                info = HfApi().model_info(repo, revision=revision, files_metadata=True)
        except Exception as error:
            mark = try_to_load_from_cache(repo, _MARKS[kind], revision=revision)
            if not is_unreachable(error) or not isinstance(mark, str):
                raise
            folder = Path(mark).parent
            files = _weight_files(kind, folder)
            if any(not (folder / file).exists() for file in files):
                raise  # an interrupted download
            return Repository(key, name, kind, None, folder)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    return Repository(key, name, kind, sizes)


def _weight_files(kind: Kind, folder: Path) -> list[str]:
    """The names of the files with weights, as the index in `folder` says if there is one."""
    if kind == "tokenizer":
        return ["tokenizer.json"]
    if kind == "adapter":
        return [ADAPTER_FILES[1]]
    try:
        listed = json.loads((folder / INDEX).read_bytes())["weight_map"].values()
        return sorted({str(file) for file in listed if "/" not in str(file)})
    except FileNotFoundError:
        return [SINGLE]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / INDEX}: not a safetensors index ({error!r})") from None


def _write_header(file: Path, tensors: dict[str, Any]) -> None:
    """Writes a safetensors file whose tensors are holes: it takes no space on disk."""
    header = json.dumps(tensors).encode()
    size = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + size)


@contextmanager
def _one_process() -> Iterator[None]:
    cache_folder().mkdir(parents=True, exist_ok=True)
    with open(cache_folder() / ".qfsdp.lock", "w") as lock:
        with suppress(OSError):  # a network file system without locks; files are renamed whole
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
