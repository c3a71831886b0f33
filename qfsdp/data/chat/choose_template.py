"""Which chat template a tokenizer uses: the model's, a file, or our `plain` and `chatml`.

`plain` and `chatml` are for models that have none. `templates/plain.jinja` writes, after bos where
the tokenizer puts it before texts:

    ### System:
    Be short.

    ### User:
    Hi

    ### Assistant:
    Hello</s>

with the tokenizer's eos for </s>. `templates/chatml.jinja` writes

    <|im_start|>user
    Hi<|im_end|>
    <|im_start|>assistant
    Hello<|im_end|>

If a tokenizer has no tokens <|im_start|> and <|im_end|>, these are ordinary text. Answers
then end with eos instead of <|im_end|>: generation ends at a token. Both write tools and tool calls
as JSON, calls between <tool_call> and </tool_call> as the Hermes and Qwen models do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from qfsdp.data.chat.chat_template import ChatTemplate
from qfsdp.data.tokenizer_folder import TokenizerFolder, given_template

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")

log = logging.getLogger("qfsdp")
_said: set[str] = set()


@dataclass(frozen=True)
class ChosenTemplate:
    """A chat template and where it came from.

    Fields:
        template: the template.
        of_model: whether it is the model's own.
        by_default: whether it is `plain` because the model has none.
        remark: what a user must know, said when the first conversation is written; or None.
    """

    template: ChatTemplate
    of_model: bool = False
    by_default: bool = False
    remark: str | None = None


def choose_template(
    setting: str | None,
    folder: TokenizerFolder,
    values: Mapping[str, str],
    puts_bos: bool,
    added_tokens: Collection[str],
) -> ChosenTemplate:
    """The chat template for `tokenizer.chat_template`.

    Args:
        setting: "auto" or None, "chatml", "plain", a file, or a Jinja template.
        values: variables of the template: texts of special tokens.
        puts_bos: whether the tokenizer puts bos before a text.

    Raises:
        UserError: a file is missing or is no template.
    """
    setting = setting or "auto"
    if setting not in ("auto", "chatml", "plain"):
        text, place = given_template(setting)
        return ChosenTemplate(ChatTemplate(text, values, place))
    own, with_tools = folder.chat_template() if setting == "auto" else (None, None)
    if own is not None:
        return ChosenTemplate(ChatTemplate(own, values, folder.path, with_tools), of_model=True)
    has_tokens = set(CHATML_TOKENS) <= set(added_tokens)
    name = "chatml" if setting == "chatml" else "plain"
    remark = None
    if setting == "auto":
        remark = (
            f"{folder.path} has no chat template: conversations are written as plain text with "
            '"### User:" and "### Assistant:" (tokenizer.chat_template=plain; or chatml, or a file)'
        )
    elif name == "chatml" and not has_tokens:
        remark = (
            f"{folder.path} has no tokens {' and '.join(CHATML_TOKENS)}: chatml writes "
            f"them as text, and ends answers with {values['eos_token']}"
        )
    text = own_template(name, puts_bos, has_tokens)
    template = ChatTemplate(text, values, folder.path)
    return ChosenTemplate(template, by_default=setting == "auto", remark=remark)


def own_template(name: str, puts_bos: bool, has_chatml_tokens: bool) -> str:
    """The Jinja text of `plain` or `chatml` for a tokenizer.

    Args:
        puts_bos: whether the tokenizer puts bos before a text.
        has_chatml_tokens: whether <|im_start|> and <|im_end|> are tokens.
    """
    file = Path(__file__).with_name("templates") / f"{name}.jinja"
    end = "'<|im_end|>'" if name == "chatml" and has_chatml_tokens else "eos_token"
    bos = "{{- bos_token }}\n" if puts_bos else ""
    return f"{bos}{{%- set end_of_answer = {end} %}}\n{file.read_text(encoding='utf-8')}"


def say_once(line: str) -> None:
    """Logs a warning on rank 0, once in this process."""
    if line not in _said and os.environ.get("RANK", "0") == "0":
        log.warning("%s", line)
    _said.add(line)
