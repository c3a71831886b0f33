"""What goes into a model and comes out, as text: prompts to tokens, tokens to whole characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qfsdp.cli.errors import UserError
from qfsdp.data.tokenizer import HFTokenizer

Messages = list[dict[str, str]]
"""`{"role": ..., "content": ...}` each."""


def chat_tokens(tokenizer: Any, messages: Messages) -> list[int]:
    """A conversation that is to be answered, as tokens: by the model's chat template, with the
    header of the answer at its end.

    Args:
        tokenizer: `hf_tokenizer(...)`, or one of torchtune's.

    Raises:
        UserError: there is no chat template, or it refuses this conversation.
    """
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.encode_chat(messages)
    from torchtune.data import Message

    told: list[Any] = [Message(m["role"], m["content"]) for m in messages]  # type: ignore[arg-type]
    told.append(Message("assistant", ""))  # torchtune's way to ask for an answer
    return list(tokenizer({"messages": told}, inference=True)["tokens"])


def prompt_tokens(
    tokenizer: Any, prompt: str | Messages, chat_template: bool, system_prompt: str | None
) -> list[int]:
    """A prompt as tokens.

    Args:
        prompt: what a user says, or a whole conversation.
        chat_template: whether the prompt is a turn of a chat; else it is text to be continued, with
            the model's beginning-of-text token before it.
        system_prompt: a message at the start of the chat, or None.

    Raises:
        UserError: as `chat_tokens`; or the prompt is not one, ends with an answer, or has a system
            message beside `system_prompt`.
    """
    if not chat_template:
        if not isinstance(prompt, str):
            raise UserError("a list of messages needs the chat template; set chat_template=true")
        return list(tokenizer.encode(prompt, add_bos=True, add_eos=False))
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    roles = []
    if isinstance(messages, list):
        roles = [m.get("role") if isinstance(m, dict) else None for m in messages]
    if not roles or not all(isinstance(role, str) for role in roles):
        raise UserError('expected a text, or a list of {"role": ..., "content": ...}')
    if roles[-1] == "assistant":
        raise UserError("the last message is the assistant's; expected one to be answered")
    if system_prompt is not None:
        if "system" in roles:
            raise UserError("a system message of its own beside system_prompt; give one of them")
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return chat_tokens(tokenizer, messages)


def stop_ids(tokenizer: Any, folder: str | Path) -> set[int]:
    """The tokens that end an answer: the tokenizer's own, those of `config.json` and
    `generation_config.json` in the model's folder, and the one that ends a turn of the chat."""
    found: set[int | None] = set(tokenizer.stop_tokens)
    for name in ("config.json", "generation_config.json"):
        file = Path(folder).expanduser() / name
        if file.is_file():
            try:
                ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            except (ValueError, AttributeError):
                raise UserError(f"{file}: not a JSON object") from None
            found |= set(ids) if isinstance(ids, list) else {ids}
    if isinstance(tokenizer, HFTokenizer):
        found.add(tokenizer.end_of_turn_id)
    return {token for token in found if token is not None}
