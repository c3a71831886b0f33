"""The tokenizer of a Hugging Face model folder: `tokenizer.json` and the chat template.

`HFTokenizer` has the interface of torchtune's model tokenizers (`tokenize_messages` and a call
on a sample), so it works with torchtune's dataset builders and with `qfsdp.data.conversations`.
For sentencepiece and tiktoken models use torchtune's own tokenizers.

How it finds the trained tokens: a chat template is a program and can write anything. But if the
rendered first k messages are the beginning of the whole text, message k ends where they end. So the
whole conversation is rendered once and tokenized once, which gives the ids that inference sees.
The borders of messages are then looked up by character:

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
    |--- messages[:1] rendered with the generation prompt -|-- trained -|
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from qfsdp.cli.errors import UserError

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer


class HFTokenizer:
    """A `tokenizers.Tokenizer` with its special tokens and chat template.

    Attributes:
        bos_id: id of the beginning-of-sequence token. None for models without one (Qwen).
        eos_id: id of the end-of-sequence token.
        pad_id: id of the padding token. `eos_id` if the model names none.
        stop_tokens: `[eos_id]`, the form that torchtune's generation expects.
        special_tokens: text -> id of every special token.
        vocab_size: number of ids, including added tokens.
        max_seq_len: longest result of `tokenize_messages`. None means no limit.
    """

    def __init__(
        self,
        backend: Tokenizer,
        token_names: Mapping[str, str],
        chat_template: str | None,
        max_seq_len: int | None,
        source: Path,
    ) -> None:
        """
        Args:
            token_names: `bos_token`, `eos_token`, ... -> text of the token.
            source: the model folder, for messages.
        """
        # Some tokenizer.json files contain truncation or padding settings.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._token_names = dict(token_names)
        self._template = _compile_template(chat_template, source) if chat_template else None
        self._source = source
        self.max_seq_len = max_seq_len
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens: dict[str, int] = {
            token.content: index
            for index, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        eos_id = self._token_id("eos_token")
        if eos_id is None:
            raise UserError(f"{source}: tokenizer_config.json names no eos_token; expected one")
        self.eos_id: int = eos_id
        self.bos_id: int | None = self._token_id("bos_token")
        pad_id = self._token_id("pad_token")
        self.pad_id: int = eos_id if pad_id is None else pad_id
        self.stop_tokens = [self.eos_id]

    def _token_id(self, name: str) -> int | None:
        text = self._token_names.get(name)
        if text is None:
            return None
        index: int | None = self._backend.token_to_id(text)
        if index is None:
            raise UserError(
                f"{self._source}: {name} {text!r} is not a token; expected one of tokenizer.json"
            )
        return index

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Ids of plain text, with bos (if the model has one) and eos."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        bos = [self.bos_id] if add_bos and self.bos_id is not None else []
        return bos + ids + ([self.eos_id] if add_eos else [])

    def encode_as_stored(self, text: str) -> list[int]:
        """Ids of plain text with the special tokens that `tokenizer.json` adds.

        transformers encodes text this way.
        """
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`."""
        text: str = self._backend.decode(
            [int(index) for index in ids], skip_special_tokens=skip_special_tokens
        )
        return text

    def render(self, messages: Sequence[Any], add_generation_prompt: bool = False) -> str:
        """The conversation as text by the chat template, with special tokens as text.

        Args:
            messages: torchtune `Message` objects or `{"role": ..., "content": ...}` dicts.
            add_generation_prompt: append the header that the template writes before an answer.

        Raises:
            UserError: there is no chat template, or the template rejects the conversation.
        """
        from jinja2 import TemplateError

        if self._template is None:
            raise UserError(
                f"{self._source}: no chat template in tokenizer_config.json or "
                "chat_template.jinja; expected one there or as tokenizer.chat_template"
            )
        try:
            return self._template.render(
                messages=[_plain_message(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._token_names,
            )
        except TemplateError as error:
            raise UserError(
                f"{self._source}: the chat template rejects the conversation: {error}"
            ) from error

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        """Ids of a conversation that the model is to answer. They end with the answer's header.

        Arguments and errors are those of `render`.
        """
        text = self.render(messages, add_generation_prompt=True)
        return self.encode(text, add_bos=False, add_eos=False)

    @property
    def end_of_turn_id(self) -> int | None:
        """The special token that the chat template writes after an answer, or None.

        It may differ from `eos_id`: Llama 3 ends a turn with <|eot_id|> and a text with its eos.
        """
        if self._template is None:
            return None
        answer = {"role": "assistant", "content": "An answer."}
        text = self.render([{"role": "user", "content": "A question."}, answer])
        after = text.rpartition(answer["content"])[2].lstrip()
        ends = [token for token in self.special_tokens if after.startswith(token)]
        return self.special_tokens[max(ends, key=len)] if ends else None

    def tokenize_messages(
        self, messages: Sequence[Any], *, add_generation_prompt: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Tokenizes a conversation and marks the tokens that are *not* trained.

        Messages with `masked` false are trained. A dict without `masked` is trained if its role is
        assistant. The trained tokens of an assistant message are its text and the end-of-turn
        token. Its header and white space after the end-of-turn token are not trained. A token that
        crosses a border belongs to the message of its last character. An assistant message at the
        start of a conversation trains its header too.

        Args:
            messages: the conversation; see `render`.
            add_generation_prompt: end with the header of the answer to come, for inference.

        Returns:
            `(tokens, mask)` of equal length, cut to `max_seq_len`. `mask[i]` is True where token i
            is not trained (torchtune's convention).

        Raises:
            UserError: `render` raises it, or the template rewrites earlier turns, so a trained
                message cannot be found in the text.
        """
        text = self.render(messages, add_generation_prompt)
        encoding = self._backend.encode(text, add_special_tokens=False)
        # One extra slot, never trained: an empty token at offset 0 reads index -1.
        trained = bytearray(len(text) + 1)
        for start, stop in self._trained_spans(messages, text):
            trained[start:stop] = b"\1" * (stop - start)
        # The last character decides: byte-level tokenizers may leave the leading space out of a
        # token's offsets.
        mask = [not trained[stop - 1] for _, stop in encoding.offsets]
        return encoding.ids[: self.max_seq_len], mask[: self.max_seq_len]

    def _trained_spans(self, messages: Sequence[Any], text: str) -> list[tuple[int, int]]:
        """The trained character ranges of `text`, the rendered conversation."""

        def end_of(index: int) -> int:
            """Where message `index` ends, including the header of an answer that follows."""
            if index == len(messages) - 1:
                return len(text)
            answer_follows = _plain_message(messages[index + 1])["role"] == "assistant"
            part = self.render(messages[: index + 1], add_generation_prompt=answer_follows)
            if not text.startswith(part):
                raise UserError(
                    f"{self._source}: the chat template rewrites earlier turns, so message "
                    f"{index + 1} of {len(messages)} cannot be found; expected training on the "
                    "last turn only, or another tokenizer.chat_template"
                )
            return len(part)

        spans = []
        for index, message in enumerate(messages):
            if _is_masked(message):
                continue
            start = end_of(index - 1) if index else 0
            stop = end_of(index)
            ended = text[:stop].rstrip()
            if ended.endswith(tuple(self.special_tokens)):
                stop = max(start, len(ended))
            spans.append((start, stop))
        return spans

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """torchtune's transform: replaces "messages" of `sample` by "tokens" and "mask".

        At inference, torchtune asks for an answer with an empty assistant message at the end. It
        becomes the generation prompt.
        """
        result = dict(sample)
        messages = list(result.pop("messages"))
        if inference and messages:
            last = _plain_message(messages[-1])
            if last["role"] == "assistant" and not last["content"]:
                messages.pop()
        result["tokens"], result["mask"] = self.tokenize_messages(
            messages, add_generation_prompt=inference
        )
        return result


def hf_tokenizer(
    path: str, chat_template: str | None = None, max_seq_len: int | None = None
) -> HFTokenizer:
    """Reads the tokenizer of a Hugging Face model folder.

    Reads `tokenizer.json`, the special tokens of `tokenizer_config.json` and the chat template.
    The chat template is the first of: the argument `chat_template`, the files
    `chat_template.jinja` and `chat_template.json`, the one in `tokenizer_config.json`. A tokenizer
    without a chat template can encode plain text only.

    Args:
        path: the model folder.
        chat_template: a Jinja template, or the path of a file that ends in `.jinja`.
        max_seq_len: cut conversations to this many tokens.

    Raises:
        UserError: a file is missing or unreadable, or names a token that does not exist.
    """
    from tokenizers import Tokenizer

    folder = Path(path).expanduser()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise UserError(
                f"tokenizer.path: {path} has no {name}; expected a Hugging Face model folder (for "
                "a tokenizer.model use torchtune.models.llama2.llama2_tokenizer (sentencepiece) "
                "or torchtune.models.llama3.llama3_tokenizer (tiktoken))"
            )
    config = _read_json(folder / "tokenizer_config.json")
    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise UserError(
            f"{folder / 'tokenizer.json'}: not readable: {error}; expected tokenizers JSON"
        ) from error
    token_names = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            token_names[name] = text
    return HFTokenizer(
        backend,
        token_names,
        _find_template(folder, config, chat_template),
        max_seq_len,
        source=folder,
    )


def _find_template(folder: Path, config: dict[str, Any], given: str | None) -> str | None:
    if given is not None:
        if not given.endswith(".jinja"):
            return given
        if not Path(given).expanduser().is_file():
            raise UserError(f"tokenizer.chat_template: {given} does not exist; expected a file")
        return Path(given).expanduser().read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template: Any = config.get("chat_template")
    if (folder / "chat_template.json").is_file():
        template = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry["name"]: entry["template"] for entry in template}
        if "default" not in named:
            raise UserError(
                f"{folder}: chat templates {sorted(named)} but no 'default'; "
                "expected a default or tokenizer.chat_template"
            )
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise UserError(f"{folder}: chat_template is a {type(template).__name__}; expected text")
    return template


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: a {type(content).__name__}; expected a JSON object")
    return content


def _plain_message(message: Any) -> dict[str, str]:
    """A torchtune `Message` or a dict as `{"role", "content"}` with text content."""
    if isinstance(message, Mapping):
        role, content = message.get("role"), message.get("content")
    else:
        role = message.role
        content = None if message.contains_media else message.text_content
    if not isinstance(role, str) or not isinstance(content, str):
        raise UserError(f"message {message!r}; expected a role and text content")
    # torchtune calls the result of a tool call "ipython", chat templates call it "tool".
    return {"role": "tool" if role == "ipython" else role, "content": content}


def _is_masked(message: Any) -> bool:
    if isinstance(message, Mapping):
        return bool(message.get("masked", message.get("role") != "assistant"))
    return bool(message.masked)


def _compile_template(source_text: str, source: Path) -> Template:
    """Compiles a chat template with the functions that Hugging Face templates may call."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks answers for other trainers. Here only its body counts."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja's own filter escapes HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(source_text)
    except TemplateSyntaxError as error:
        raise UserError(f"{source}: chat template, line {error.lineno}: {error.message}") from error
