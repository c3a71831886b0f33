"""Builders of preference data, and presets for well-known data sets.

    dataset: {_component_: qfsdp.data.preference_dataset, source: pairs.jsonl}

Only answers are trained. Reading, caches and mixtures are those of `qfsdp.data.conversations`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

from qfsdp.common.errors import UserError
from qfsdp.data.chat.context_columns import check_columns
from qfsdp.data.chat.messages import text_of
from qfsdp.data.conversations import Tokenizer, prompt_columns
from qfsdp.data.files.rows import Row, load_rows, require_column
from qfsdp.data.preferences.rows import (
    Columns,
    PreferenceRows,
    class_of,
    labelled,
    pair_of,
    with_label,
)
from qfsdp.data.preferences.tokenized import Number, Preferences
from qfsdp.data.reading import current, reads_rows
from qfsdp.data.tokenized_dataset import Sample, Unusable, one_by_one, tokenize_rows
from qfsdp.data.tokenizer import HFTokenizer


@reads_rows
def preference_dataset(
    tokenizer: Tokenizer,
    *,
    source: str,
    split: str = "train",
    subset: str | None = None,
    data_files: str | None = None,
    prompt_column: str | None = "prompt",
    chosen_column: str = "chosen",
    rejected_column: str = "rejected",
    margin_column: str | None = None,
    system_column: str | None = None,
    history_column: str | None = None,
    system_prompt: str | None = None,
    tools_column: str | None = "tools",
    prompt_template: str | None = None,
    max_rows: int | None = None,
) -> Preferences:
    """Prompts with a better and a worse answer.

    An answer is text, or a list of messages in a format of `chat_dataset`, also as JSON text: the
    answer alone or the whole dialogue. Of whole dialogues the common beginning is the prompt. Skips
    rows with an empty or without a prompt, with equal answers, with prompts that differ, or with
    roles that do not alternate. One log line counts them.

    Args:
        tokenizer, source, split, subset, data_files, max_rows: as in `instruct_dataset`.
        prompt_column: column with the prompt, text or messages. Null: the answers' columns have
            whole dialogues, as messages or as text with `\\n\\nHuman:` and `\\n\\nAssistant:`. A
            prompt may be such a text too, up to the answer's `\\n\\nAssistant:`.
        chosen_column, rejected_column: columns with the better and the worse answer.
        margin_column: column with a number, by how much the chosen answer is better, for reward
            models: scores are to differ by more than it.
        system_column: column with a system message.
        history_column: column with the turns before the prompt: pairs, messages, or JSON text of
            them. They are not trained.
        system_prompt: a system message for rows without one.
        tools_column: as in `chat_dataset`.
        prompt_template: makes the prompt from columns, such as "{instruction} {input}".

    Raises:
        UserError: the source, a column or a message is wrong, or no row can be used.
    """
    before = (system_column, history_column, tools_column, system_prompt)
    columns = Columns(prompt_column, prompt_template, *before)
    own = {"chosen_column": chosen_column, "rejected_column": rejected_column}
    own |= {} if margin_column is None else {"margin_column": margin_column}
    to_chats = partial(
        pair_of, columns=columns, chosen_column=chosen_column, rejected_column=rejected_column
    )
    rows = _rows(columns, own, source, split, subset, data_files, max_rows)
    work = PreferenceRows(_uncut(tokenizer), to_chats, margin_column=margin_column)
    number: Number | None = None if margin_column is None else "margin"
    return Preferences(tokenize_rows(rows, source, work), True, source, number)


@reads_rows
def kto_dataset(
    tokenizer: Tokenizer,
    *,
    source: str,
    split: str = "train",
    subset: str | None = None,
    data_files: str | None = None,
    prompt_column: str | None = "prompt",
    completion_column: str = "completion",
    label_column: str = "label",
    system_column: str | None = None,
    history_column: str | None = None,
    system_prompt: str | None = None,
    tools_column: str | None = "tools",
    prompt_template: str | None = None,
    max_rows: int | None = None,
) -> Preferences:
    """Prompts with one answer and a label, true for a good answer, for KTO (arXiv:2402.01306).

    Args:
        tokenizer, source, split, subset, data_files, max_rows: as in `instruct_dataset`.
        prompt_column, system_column, history_column: as in `preference_dataset`.
        system_prompt, tools_column, prompt_template: as in `preference_dataset`.
        completion_column: column with the answer.
        label_column: column with true or false, or 1 or 0.

    Raises:
        UserError: the source, a column, a message or a label is wrong, or no row can be used.
    """
    before = (system_column, history_column, tools_column, system_prompt)
    columns = Columns(prompt_column, prompt_template, *before)
    own = {"completion_column": completion_column, "label_column": label_column}
    to_chats = partial(
        labelled, columns=columns, answer_column=completion_column, label_column=label_column
    )
    rows = _rows(columns, own, source, split, subset, data_files, max_rows)
    work = PreferenceRows(_uncut(tokenizer), to_chats, label_column)
    return Preferences(tokenize_rows(rows, source, work), paired=False, source=source)


@reads_rows
def class_dataset(
    tokenizer: Any,
    *,
    source: str,
    split: str = "train",
    subset: str | None = None,
    data_files: str | None = None,
    text_column: str = "text",
    label_column: str = "label",
    classes: list[str] | None = None,
    max_rows: int | None = None,
) -> Preferences:
    """Texts with their class, for `head.classes` of recipes/reward_distributed.

    A text is tokenized as transformers does without a chat template: with bos if the tokenizer puts
    it before texts, without eos. What is longer than `max_seq_len` loses its end. Skips rows with
    less than two tokens.

    Args:
        tokenizer, source, split, subset, data_files, max_rows: as in `instruct_dataset`.
        text_column: column with the text.
        label_column: column with the number of the class, from 0, or its name.
        classes: the names, in the order of their numbers; null: the column has numbers.

    Raises:
        UserError: the source, a column or a label is wrong, or no row can be used.
    """
    own = {"text_column": text_column, "label_column": label_column}
    rows = _rows(Columns(tools=None), own, source, split, subset, data_files, max_rows)

    def samples_of(row: Row) -> Iterator[Sample]:
        tokens = list(tokenizer.encode(text_of(row[text_column]), add_bos=True, add_eos=False))
        if len(tokens) < 2:
            raise Unusable("less than two tokens")
        yield tokens, with_label(tokens, class_of(row, label_column, classes))

    samples = tokenize_rows(rows, source, one_by_one(samples_of, tokenizer))
    return Preferences(samples, False, source, "class")


hh_dataset = partial(preference_dataset, source="Anthropic/hh-rlhf", prompt_column=None)
"""Anthropic's helpful and harmless dialogues (arXiv:2204.05862): whole dialogues as text."""

ultrafeedback_dataset = partial(
    preference_dataset, source="HuggingFaceH4/ultrafeedback_binarized", split="train_prefs"
)
"""UltraFeedback, binarized (arXiv:2310.01377, 2310.16944): whole dialogues as messages."""

orca_pairs_dataset = partial(
    preference_dataset,
    source="Intel/orca_dpo_pairs",
    prompt_column="question",
    system_column="system",
)
"""Orca's answers against a smaller model's: `system`, `question`, `chosen`, `rejected`."""


def _rows(columns: Columns, own: dict[str, str], source: str, *of_source: Any) -> Any:
    """The rows of a source, which have all columns."""
    if current().streaming:
        raise UserError("dataset.streaming: true; expected false: preference data is not streamed")
    rows = load_rows(source, *of_source)
    given = "" if columns.prompt is None else columns.prompt
    key, prompts = prompt_columns(given, columns.template)
    prompts = list(filter(None, prompts))
    for name, column in (*own.items(), *((key, prompt) for prompt in prompts)):
        require_column(name, column, rows, source)
    optional = {"system_column": columns.system, "history_column": columns.history}
    optional |= {"tools_column": columns.tools} | ({"prompt_template": None} if prompts else {})
    check_columns(rows, source, optional, {*own.values(), *prompts})
    return rows


def _uncut(tokenizer: Any) -> Any:
    """The tokenizer without `max_seq_len`, which would cut the ends of answers only."""
    if isinstance(tokenizer, HFTokenizer):
        tokenizer.say_template()
    uncut = copy.copy(tokenizer)
    if getattr(uncut, "max_seq_len", None) is not None:
        uncut.max_seq_len = None
    return uncut
