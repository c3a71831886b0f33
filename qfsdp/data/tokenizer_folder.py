"""Reads the files of a Hugging Face tokenizer; every fault in them is one line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qfsdp.common.errors import UserError
from qfsdp.common.files import to_json
from qfsdp.data.normalizer_check import check_normalizer
from qfsdp.hub.download import local_folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer


FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")  # of an added token


def texts_in(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Name -> text, of those of the files that are there. Raises UserError: see `read_text`."""
    return {name: read_text(folder / name) for name in names if (folder / name).is_file()}


class TokenizerFolder:
    """The files `tokenizer.json`, `tokenizer_config.json` and the chat template of a folder.

    Raises:
        UserError: one of the first two is missing, or the second is not a JSON object.
    """

    def __init__(self, path: str) -> None:
        self.path = local_folder(path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (self.path / name).is_file():
                raise UserError(
                    f"tokenizer.path: {path} has no {name}; expected a Hugging Face model folder; "
                    "of older files transformers makes one: AutoTokenizer.from_pretrained(FOLDER)"
                    ".save_pretrained(FOLDER) (for a tokenizer.model also "
                    "torchtune.models.llama2.llama2_tokenizer "
                    "(sentencepiece) or torchtune.models.llama3.llama3_tokenizer (tiktoken))"
                )
        self._config = read_json(self.path / "tokenizer_config.json")

    def backend(self) -> Tokenizer:
        """The tokenizer. Raises UserError if `tokenizer.json` is damaged, or makes a short text a
        very long one."""
        from tokenizers import Tokenizer

        file = self.path / "tokenizer.json"
        check_normalizer(file)  # before it is loaded, which normalizes the added tokens
        try:
            backend = Tokenizer.from_file(str(file))
        except BaseException as error:  # Exception itself, or a panic of Rust code
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{file}: {reason}; expected the JSON of `tokenizers`") from None
        self._add_those_beside(backend)
        return backend

    def _add_those_beside(self, backend: Tokenizer) -> None:
        """Adds the tokens that only the files beside `tokenizer.json` name, as transformers does:
        edited by hand, or written by a program that left that file as it was. One that is named
        and listed nowhere is none; `HFTokenizer` refuses it."""
        from tokenizers import AddedToken

        listed, older = self._config.get("added_tokens_decoder"), self.path / "added_tokens.json"
        if listed is None and older.is_file():
            listed = {str(index): {"content": text} for text, index in read_json(older).items()}
        by_id = listed.items() if isinstance(listed, dict) else ()
        entries = [entry for _, entry in sorted(by_id, key=lambda item: (len(item[0]), item[0]))]
        named: list[Any] = list(self.token_names().values())
        named = [text for text in named if backend.token_to_id(text) is not None]
        for name in ("extra_special_tokens", "additional_special_tokens"):
            more = self._config.get(name)
            more = list(more.values()) if isinstance(more, dict) else more
            named += map(_text_of, more if isinstance(more, list) else ())
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        special, added = {text for text in named if isinstance(text, str)}, []
        for entry in [*entries, *named]:
            text = _text_of(entry)
            if isinstance(text, str) and text and text not in known:
                flags = {flag: isinstance(entry, dict) and bool(entry.get(flag)) for flag in FLAGS}
                flags["special"] |= text in special
                added.append(AddedToken(text, **flags))
                known.add(text)
        backend.add_tokens(added)  # at once: each call builds anew what finds all of them

    def texts_with(self, backend: Tokenizer, ids: dict[str, int], special: bool) -> dict[str, str]:
        """The files of the tokenizer with the new tokens that `backend` has: name -> text."""
        texts, settings = {"tokenizer.json": backend.to_str(pretty=True) + "\n"}, self._config
        listed = settings.get("added_tokens_decoder")
        if isinstance(listed, dict):
            flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
            more = {
                str(index): {"content": token, **flags, "special": special}
                for token, index in ids.items()
            }
            settings = settings | {"added_tokens_decoder": listed | more}
            texts["tokenizer_config.json"] = to_json(settings, indent=2) + "\n"
        return texts

    def token_names(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, ... -> text of the token."""
        names, given = {}, self._config
        older = self.path / "special_tokens_map.json"
        if "added_tokens_decoder" not in given and older.is_file():  # as transformers reads it
            given = given | read_json(older)
        for name, value in given.items():
            if not name.endswith("_token"):
                continue
            text = _text_of(value)
            if isinstance(text, str):
                names[name] = text
            elif text is not None and not isinstance(text, bool):  # add_bos_token is a bool
                place = f"{self.path / 'tokenizer_config.json'}: {name}"
                raise UserError(f"{place}: {str(value)[:60]!r}; expected the text of a token")
        return names

    def chat_template(self) -> tuple[str | None, str | None]:
        """The model's chat template, and the one for conversations with tools if that is another.

        The first of: the files `chat_template.jinja` and `chat_template.json`, the one in
        `tokenizer_config.json`. Where there are several named templates, transformers takes the
        one named "tool_use" for conversations with tools, and "default" for all others. Files in
        `additional_chat_templates` are named, beside `chat_template.jinja` as the default.

        Raises:
            UserError: it is not text, or there are several and none is named "default".
        """
        files = sorted((self.path / "additional_chat_templates").glob("*.jinja"))
        template: Any = [{"name": file.stem, "template": read_text(file)} for file in files]
        if (self.path / "chat_template.jinja").is_file():
            default = read_text(self.path / "chat_template.jinja")
            template = [{"name": "default", "template": default}, *template]
        if not template:
            template = self._config.get("chat_template")
            if (self.path / "chat_template.json").is_file():
                template = read_json(self.path / "chat_template.json").get("chat_template")
        with_tools = None
        if isinstance(template, list):  # several named templates
            pairs = [entry if isinstance(entry, dict) else {} for entry in template]
            named = {str(entry.get("name")): entry.get("template") for entry in pairs}
            if "default" not in named:
                raise UserError(
                    f"{self.path}: chat templates {sorted(named)} but no 'default'; "
                    "expected a default or tokenizer.chat_template"
                )
            template, with_tools = named["default"], named.get("tool_use")
        for text in (template, with_tools):
            if text is not None and not isinstance(text, str):
                kind = type(text).__name__
                raise UserError(f"{self.path}: chat_template is a {kind}; expected text")
            if text is not None and not text.strip():
                raise UserError(f"{self.path}: chat_template is empty; expected a template or none")
        return template, with_tools


def _text_of(entry: Any) -> Any:
    """The text of a token, which files write as such or with its flags."""
    return entry.get("content") if isinstance(entry, dict) else entry


def add_new_tokens(
    backend: Tokenizer, tokens: Sequence[str], special: bool, key: str
) -> dict[str, int]:
    """Adds tokens to a tokenizer: text -> id. Raises UserError: a token is empty, named twice or
    there already.

    Args:
        special: whether decoding leaves them out and the text of a message does not spell them.
        key: of the config, for messages.
    """
    from tokenizers import AddedToken

    for at, token in enumerate(tokens):
        if not token.strip() or token in tokens[:at]:
            expected = "expected different texts that are not empty"
            raise UserError(f"{key}: {token!r}; {expected}")
        if (known := backend.token_to_id(token)) is not None:
            raise UserError(f"{key}: {token!r} is token {known} already; expected new ones")
    made = [AddedToken(token, normalized=False, special=special) for token in tokens]
    (backend.add_special_tokens if special else backend.add_tokens)(made)
    vocabulary = backend.get_vocab()
    return {token: vocabulary[token] for token in tokens}


def given_template(given: str) -> tuple[str, Path]:
    """A template from the config, and its place for messages.

    Args:
        given: the path of a file, or a Jinja template itself.

    Raises:
        UserError: the file does not exist or cannot be read.
    """
    file = Path(given).expanduser()
    if os.path.isfile(file):  # Path.is_file raises OSError if the text is too long for a path
        return read_text(file), file
    if "{" in given:
        return given, Path("tokenizer.chat_template")
    raise UserError(
        f"tokenizer.chat_template: {given!r} does not exist; expected auto, chatml, plain or a "
        "file with a Jinja template"
    )


def read_text(path: Path) -> str:
    """The text of a file, without the mark of UTF-8 that some programs write before it."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(f"{path}: {reason}; expected a text file") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; UserError, which names the file, if there is none."""
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}; expected a JSON object") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: a {type(content).__name__}; expected a JSON object")
    return content


def eos_ids(folder: Path) -> set[int]:
    """The `eos_token_id` of `config.json` and `generation_config.json` in a model's folder. Raises
    UserError: a file is no JSON object, or they are no ids."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        if file.is_file():
            try:
                ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            except (OSError, ValueError, AttributeError, RecursionError):
                raise UserError(f"{file}: not readable; expected a JSON object") from None
            listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
            if not all(token is None or type(token) is int for token in listed):
                raise UserError(f"{file}: eos_token_id: {ids!r:.50}; expected ids of tokens")
            found |= {token for token in listed if token is not None and token >= 0}  # -1: none
    return found
