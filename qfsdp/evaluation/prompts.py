"""Turns prompts into tokens, and finds the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.data.chat.context_columns import history_of, system_of, with_system
from qfsdp.data.chat.messages import as_messages, as_tools
from qfsdp.data.files.rows import Row
from qfsdp.data.tokenizer import HFTokenizer
from qfsdp.data.tokenizer_folder import eos_ids

Messages = list[dict[str, Any]]
"""`{"role": ..., "content": ...}` each, in one of the forms of `qfsdp.data.chat.messages`."""


def chat_tokens(tokenizer: Any, messages: Messages, tools: Any = None) -> list[int]:
    """The tokens of a conversation by the chat template, ending with the answer's header.

    Args:
        tokenizer: `hf_tokenizer(...)` or one of torchtune's.
        tools: the functions that the model may call: a list of JSON schemas, JSON text, or None.

    Raises:
        UserError: a message or a tool is wrong, or the chat template rejects the conversation.
    """
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.encode_chat(as_messages(messages), as_tools(tools))
    from torchtune.data import Message

    turns: list[Any] = [Message(m["role"], m["content"]) for m in messages]  # type: ignore[arg-type]
    turns.append(Message("assistant", ""))  # asks torchtune for the header of an answer
    return list(tokenizer({"messages": turns}, inference=True)["tokens"])


def prompt_tokens(
    tokenizer: Any,
    prompt: str | Messages,
    chat_template: bool,
    system_prompt: str | None,
    tools: Any = None,
) -> list[int]:
    """The tokens of a prompt.

    Args:
        prompt: the text of a user's message, or a whole conversation.
        chat_template: use the chat template. If false, the prompt is text for the model to
            continue, after its beginning-of-text token.
        system_prompt: a system message for the start of the chat, or None.
        tools: as in `chat_tokens`.

    Raises:
        UserError: `chat_tokens` raises it, the prompt has the wrong type, ends with an answer, or
            has a system message although `system_prompt` is given.
    """
    if not chat_template:
        if not isinstance(prompt, str):
            raise UserError("a list of messages; expected text, or chat_template=true")
        return list(tokenizer.encode(prompt, add_bos=True, add_eos=False))
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    roles = []
    if isinstance(messages, list):
        roles = [m.get("role") if isinstance(m, dict) else None for m in messages]
    if not roles or not all(isinstance(role, str) for role in roles):
        raise UserError('expected a text, or a list of {"role": ..., "content": ...}')
    if roles[-1] == "assistant":
        raise UserError("the last message is the assistant's; expected a message to answer")
    if system_prompt is not None:
        if "system" in roles:
            raise UserError("a system message and system_prompt; expected only one of them")
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return chat_tokens(tokenizer, messages, tools)


def in_context(
    prompt: str | Messages,
    row: Row,
    system_column: str | None,
    history_column: str | None,
    system_prompt: str | None = None,
    shots: Messages | None = None,
) -> Messages:
    """A row's prompt as messages, with what comes before it, as in training.

    Args:
        system_column, history_column, system_prompt: as in `qfsdp.data.instruct_dataset`.
        shots: solved examples, after the system message and before the row's earlier turns.

    Raises:
        UserError: a column holds something else.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    turns = [*(shots or []), *as_messages(history_of(row, history_column)), *messages]
    turns = with_system(system_of(row, system_column) or system_prompt, turns)
    return [{key: value for key, value in turn.items() if key != "masked"} for turn in turns]


def stop_ids(tokenizer: Any, folder: str | Path) -> set[int]:
    """The tokens that end an answer.

    These are the tokenizer's stop tokens, the `eos_token_id` of `config.json` and
    `generation_config.json` in the model's folder, and the chat template's end-of-turn token.
    """
    found = {*tokenizer.stop_tokens, *eos_ids(Path(folder).expanduser())}
    if isinstance(tokenizer, HFTokenizer) and tokenizer.end_of_turn_id is not None:
        found.add(tokenizer.end_of_turn_id)
    return found


def special_stops(tokenizer: Any, stops: Sequence[str]) -> set[int]:
    """The stop strings that are special tokens: the text of an answer is without them."""
    special = getattr(tokenizer, "special_tokens", {})
    return {special[text] for text in stops if text in special}
