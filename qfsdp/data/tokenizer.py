"""The tokenizer of a Hugging Face model folder: `tokenizer.json` and the chat template.

`HFTokenizer` has the interface of torchtune's model tokenizers (`tokenize_messages` and a call
on a sample), so it works with torchtune's dataset builders and with `qfsdp.data.conversations`.
For sentencepiece and tiktoken models use torchtune's own tokenizers. How the trained tokens are
found stands in `trained_spans.py`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from qfsdp.common.errors import UserError
from qfsdp.data.chat.chat_template import Conversation, plain_message
from qfsdp.data.chat.chat_tokenizer import ChatTokenizer, raised, spelled_as
from qfsdp.data.chat.choose_template import choose_template, say_once
from qfsdp.data.chat.special_tokens import SpecialTokens, added_tokens, turn_marks
from qfsdp.data.chat.trained_spans import TRAINED_AS, TokenizedChat
from qfsdp.data.encode import encode
from qfsdp.data.tokenizer_folder import TokenizerFolder, add_new_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SpecialText = Literal["special", "plain"]

log = logging.getLogger("qfsdp")


class HFTokenizer:
    """A `tokenizers.Tokenizer` with its special tokens and chat template.

    Attributes:
        bos_id: id of the beginning-of-sequence token. None for models without one (Qwen).
        eos_id: id of the end-of-sequence token.
        pad_id: id of the padding token. `eos_id` if the model names none.
        stop_tokens: `[eos_id]`, the form that torchtune's generation expects.
        special_tokens: text -> id of every special token.
        vocab_size: number of ids, including added tokens.
        base_vocab_size: number of ids without added tokens.
        max_seq_len: longest result of `tokenize_messages`. None means no limit.
        new_tokens: text -> id of those that `hf_tokenizer` added to the folder's.
        texts: name -> text of the tokenizer's files with them; empty without them.
        chat_template: the chat template and where it came from.
        spelled: for every message or document so far that spells a special token: the first one,
            and what became of it.
    """

    new_tokens: Mapping[str, int] = MappingProxyType({})
    texts: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        backend: Tokenizer,
        folder: TokenizerFolder,
        chat_template: str | None,
        max_seq_len: int | None,
        special_tokens_in_text: SpecialText | None = None,
    ) -> None:
        """
        Args:
            folder: names of tokens and the model's chat template.
            chat_template, special_tokens_in_text: see `hf_tokenizer`.
        """
        # Some tokenizer.json files contain truncation or padding settings.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._token_names = folder.token_names()
        self._source = folder.path
        self.max_seq_len = max_seq_len
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.base_vocab_size: int = backend.get_vocab_size(with_added_tokens=False)
        self.special_tokens = added_tokens(backend, special_only=True)
        eos_id = self._token_id("eos_token")
        if eos_id is None:
            raise UserError(
                f"{folder.path}: tokenizer_config.json names no eos_token; expected one"
            )
        self.eos_id: int = eos_id
        self.bos_id: int | None = self._token_id("bos_token")
        pad_id = self._token_id("pad_token")
        self.pad_id: int = eos_id if pad_id is None else pad_id
        self.stop_tokens = [self.eos_id]
        self._special_messages = special_tokens_in_text == "special"
        self._special_documents = special_tokens_in_text != "plain"
        self.spelled: list[str] = []
        self._before, self._after = self._added_around()
        puts_bos = bool(self._before) and self._before == [self.bos_id]
        self.chat_template = choose_template(
            chat_template, folder, self._token_names, puts_bos, added_tokens(backend)
        )
        self._marks = turn_marks(backend, self.chat_template.template)
        self._special = SpecialTokens(backend, self._marks)
        self._chats = ChatTokenizer(
            backend,
            self._special,
            self.chat_template.template,
            folder.path,
            self._special_messages,
            self._token_names.get("bos_token"),
            self.eos_id,
        )

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides ids and labels of a text or a conversation."""
        template = self.chat_template.template.fingerprint
        parts = (
            TRAINED_AS,
            *(self._backend.to_str(), self._token_names, template, self.max_seq_len),
            *(self._special_messages, self._special_documents),
        )
        return hashlib.sha256(repr(parts).encode(errors="backslashreplace")).hexdigest()

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token -> id, with added tokens."""
        found: dict[str, int] = self._backend.get_vocab()
        return found

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text has at least its length / this many tokens."""
        return max(map(len, self._backend.get_vocab()))

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

    def _added_around(self) -> tuple[list[int], list[int]]:
        """The ids that the post-processor of `tokenizer.json` puts before and after every text."""
        plain = encode(self._backend, "a").ids
        whole = self._backend.encode("a").ids
        for at in range(len(whole) - len(plain) + 1):
            if whole[at : at + len(plain)] == plain:
                return whole[:at], whole[at + len(plain) :]
        return [], []

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Ids of a text that is not a message.

        Special tokens that the text spells are special, unless `special_tokens_in_text` is "plain".

        Args:
            add_bos: begin with what the tokenizer puts before a text: bos, or nothing. A text that
                spells it, as one that a chat template has written, gets no second one.
            add_eos: end with eos, unless the text does.
        """
        token = self._special.first_in(text)
        if token is not None:
            self._note(token)
        if token is None or self._special_documents:
            ids: list[int] = encode(self._backend, text).ids
        else:
            ids = self._special.encode_plain(text)
        before = self._before if add_bos and ids[: len(self._before)] != self._before else []
        return before + ids + ([self.eos_id] if add_eos and ids[-1:] != [self.eos_id] else [])

    def encode_as_stored(self, text: str) -> list[int]:
        """Ids of a text with all special tokens that the tokenizer adds, as transformers does."""
        ids: list[int] = encode(self._backend, text).ids
        return self._before + ids + self._after

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`."""
        text: str = self._backend.decode(
            [int(index) for index in ids], skip_special_tokens=skip_special_tokens
        )
        return text

    def render(
        self,
        messages: Sequence[Any],
        add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """The conversation as text by the chat template, with special tokens as text.

        Args:
            messages: torchtune `Message` objects or `{"role": ..., "content": ...}` dicts, which
                may have more keys for the template, such as `tool_calls`.
            add_generation_prompt: append the header that the template writes before an answer.
            tools: JSON schemas of the functions that the assistant may call.

        Raises:
            UserError: the template rejects the conversation, fails or exceeds a limit.
        """
        plain = [plain_message(message) for message in messages]
        asked = Conversation(plain, (), tools, add_generation_prompt)
        text: str = raised(self.chat_template.template.render([asked])[0]).text
        return text + self._chats.form.unasked if add_generation_prompt else text

    def say_template(self) -> None:
        """Says once what a user must know of the chosen chat template; on rank 0."""
        if self.chat_template.remark is not None:
            say_once(self.chat_template.remark)

    def encode_chat(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> list[int]:
        """Ids of a conversation that the model is to answer. They end with the answer's header.

        Warns about the first message that spells a special token. Arguments and errors are those of
        `render`.
        """
        self.say_template()
        told = bool(self.spelled)
        plain = [plain_message(message) for message in messages]
        asked = Conversation(plain, tools=tools, add_generation_prompt=True)
        chat: TokenizedChat = raised(self._tokenize([asked])[0])
        if self.spelled and not told:
            log.warning("a message spells a special token: %s", self.spelled[0])
        return chat.tokens

    def _note(self, token: str) -> None:
        self.spelled.append(spelled_as(token, plain=not self._special_documents))

    @property
    def end_of_turn_id(self) -> int | None:
        """The special token that the chat template writes after an answer, or None.

        It may differ from `eos_id`: Llama 3 ends a turn with <|eot_id|> and a text with its eos.
        Where nothing ends a turn, it is the token that begins the next one (GLM's <|user|>).
        """
        end = self._chats.form.end
        return None if end is None else self._marks[end]

    def tokenize_messages(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> tuple[list[int], list[bool]]:
        """Tokenizes a conversation and marks the tokens that are *not* trained.

        Messages with `masked` false are trained. A dict without `masked` is trained if its role is
        assistant. The trained tokens of an assistant message are its text, its tool calls and the
        end-of-turn token. Its header and white space after the end-of-turn token are not trained. A
        token that crosses a border belongs to the message of its last character.

        Args:
            messages, tools: the conversation; see `render`.
            add_generation_prompt: end with the header of the answer to come, for inference.

        Returns:
            `(tokens, mask)` of equal length, cut to `max_seq_len`. `mask[i]` is True where token i
            is not trained (torchtune's convention).

        Raises:
            UserError: `render` raises it, or the template leaves out a part of the conversation.
        """
        asked = Conversation.of(messages, tools, add_generation_prompt)
        found: TokenizedChat = raised(self._cut(self._tokenize([asked])[0]))
        return found.tokens, found.mask

    def tokenize_chats(self, chats: Sequence[Mapping[str, Any]]) -> list[TokenizedChat | UserError]:
        """Tokenizes several conversations at once, which is faster.

        Args:
            chats: "messages" and maybe "tools", as in `tokenize_messages`.

        Returns:
            For each of them what `tokenize_messages` returns, or the error that it raises. After a
            template or the tokenizer has exceeded its time, the rest have that error.
        """
        asked = [Conversation.of(chat["messages"], chat.get("tools")) for chat in chats]
        return [self._cut(found) for found in self._tokenize(asked)]

    def _tokenize(self, asked: Sequence[Conversation]) -> list[TokenizedChat | UserError]:
        found = self._chats.tokenize(asked)
        self.spelled += [
            chat.spelled
            for chat in found
            if isinstance(chat, TokenizedChat) and chat.spelled is not None
        ]
        return found

    def _cut(self, found: TokenizedChat | UserError) -> TokenizedChat | UserError:
        if isinstance(found, UserError) or self.max_seq_len is None:
            return found
        tokens, mask = found.tokens[: self.max_seq_len], found.mask[: self.max_seq_len]
        return replace(found, tokens=tokens, mask=mask)

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """torchtune's transform: replaces "messages" of `sample` by "tokens" and "mask".

        At inference, torchtune asks for an answer with an empty assistant message at the end. It
        becomes the generation prompt.
        """
        result = dict(sample)
        messages = list(result.pop("messages"))
        if inference and messages:
            last = plain_message(messages[-1])
            if last["role"] == "assistant" and not last["content"]:
                messages.pop()
        result["tokens"], result["mask"] = self.tokenize_messages(
            messages, tools=result.pop("tools", None), add_generation_prompt=inference
        )
        return result


def hf_tokenizer(
    path: str,
    chat_template: str | None = "auto",
    max_seq_len: int | None = None,
    special_tokens_in_text: SpecialText | None = None,
    new_tokens: list[str] | None = None,
) -> HFTokenizer:
    """Reads the tokenizer of a Hugging Face model folder.

    Reads `tokenizer.json`, the special tokens of `tokenizer_config.json` and the chat template.

    Args:
        path: the model folder.
        chat_template: how conversations are written. "auto": by the model's chat template, or as
            "plain" if it has none. "plain": text with `### User:` and `### Assistant:`. "chatml":
            with <|im_start|> and <|im_end|>. A file with a Jinja template, or the template itself.
        max_seq_len: cut conversations to this many tokens.
        special_tokens_in_text: what becomes of text that spells a special token, such as
            "<|im_end|>" in a question. "plain": it is text like any other. "special": it is the
            special token, as in transformers, so data can end a turn and begin another. Null:
            "plain" in messages, "special" in documents (`text_dataset`, prompts without the chat
            template).
        new_tokens: texts of tokens that are added, such as `[<think>, </think>]`. Their ids follow
            the last one; a training run gives them rows. Decoding shows them.

    Raises:
        UserError: a file is missing or unreadable, or names a token that does not exist.
    """
    if max_seq_len is not None and max_seq_len < 1:
        raise UserError(f"tokenizer.max_seq_len: {max_seq_len}; expected an integer of at least 1")
    if special_tokens_in_text not in (None, "special", "plain"):
        raise UserError(
            f"tokenizer.special_tokens_in_text: {special_tokens_in_text!r}; expected special, plain"
            " or null"
        )
    of_texts = isinstance(new_tokens, list) and all(isinstance(text, str) for text in new_tokens)
    if new_tokens is not None and not (of_texts and new_tokens):
        raise UserError(f"tokenizer.new_tokens: {new_tokens!r}; expected a list of texts, or null")
    folder = TokenizerFolder(path)
    backend = folder.backend()
    added = add_new_tokens(backend, new_tokens or [], False, "tokenizer.new_tokens")
    built = HFTokenizer(backend, folder, chat_template, max_seq_len, special_tokens_in_text)
    built.new_tokens, built.texts = added, folder.texts_with(backend, added, False) if added else {}
    return built
