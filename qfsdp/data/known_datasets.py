"""Builders for well-known datasets, with the right columns as defaults.

Most are `instruct_dataset` or `chat_dataset` with other defaults. A config can change each of them:

    dataset: {_component_: qfsdp.data.alpaca_dataset, source: my.jsonl}

Where the default `source` is a hub name, the config need not give one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from qfsdp.data.chat.messages import text_of
from qfsdp.data.conversations import (
    Tokenizer,
    chat_dataset,
    instruct_dataset,
    tokenize_conversations,
)
from qfsdp.data.files.rows import Row, load_rows, require_column
from qfsdp.data.reading import reads_rows
from qfsdp.data.tokenized_dataset import TokenizedDataset, Unusable

alpaca_dataset = partial(
    instruct_dataset,
    source="tatsu-lab/alpaca",
    prompt_template="{instruction}\n\n{input}",
    answer_column="output",
)
"""Stanford's Alpaca: columns `instruction`, `input` (may be empty) and `output`."""

gsm8k_dataset = partial(
    instruct_dataset, source="openai/gsm8k", subset="main", prompt_column="question"
)
"""Grade-school maths problems. Answers end in `#### N` (arXiv:2110.14168)."""

orca_math_dataset = partial(
    instruct_dataset, source="microsoft/orca-math-word-problems-200k", prompt_column="question"
)
"""Maths word problems: columns `question` and `answer` (arXiv:2402.14830)."""

sql_create_context_dataset = partial(
    instruct_dataset, source="b-mc2/sql-create-context", prompt_template="{context}\n\n{question}"
)
"""Questions about tables, answered in SQL. `context` has the CREATE statements."""

sharegpt_dataset = partial(chat_dataset, messages_column="conversations")
"""Conversations in ShareGPT's format: messages are `{"from", "value"}`."""


@reads_rows
def guanaco_dataset(
    tokenizer: Tokenizer,
    *,
    source: str = "mlabonne/guanaco-llama2-1k",
    split: str = "train",
    subset: str | None = None,
    data_files: str | None = None,
    text_column: str = "text",
    train_on_input: bool = False,
    train_on_last_turn_only: bool = False,
    max_rows: int | None = None,
) -> TokenizedDataset:
    """Conversations stored as text with the marks of another chat template.

    The text is split into messages, so the chat template of the trained model is used. It may have
    the form of Llama 2 or of Guanaco (arXiv:2305.14314), also within one dataset:

        <s>[INST] <<SYS>>\\nsystem\\n<</SYS>>\\n\\nuser [/INST] answer </s><s>[INST] ...
        ### Human: user### Assistant: answer### Human: ...

    Use `text_dataset` to train on the text as it is.

    Args:
        text_column: column with the text. Other arguments are those of `chat_dataset`.

    Raises:
        UserError: the source or the column is wrong, or no row can be used.
    """
    rows = load_rows(source, split, subset, data_files, max_rows)
    require_column("text_column", text_column, rows, source)
    options = (train_on_input, train_on_last_turn_only)
    return tokenize_conversations(
        tokenizer, rows, source, lambda row: turns_of_text(text_of(row[text_column])), *options
    )


openassistant_dataset = partial(guanaco_dataset, source="timdettmers/openassistant-guanaco")
"""The best conversations of OpenAssistant (arXiv:2304.07327), the training data of Guanaco."""


def turns_of_text(text: str) -> list[Row]:
    """The messages `{"role", "content"}` of a conversation stored as text. Raises Unusable: the
    text has neither form of `guanaco_dataset`."""
    if "[INST]" in text:
        return list(_inst_turns(text))
    start, *parts = re.split(r"### (Human|Assistant):", text)
    if start.strip() or not parts:
        raise Unusable("neither [INST] nor ### Human: at its start")
    names = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": names[who], "content": said.strip()}
        for who, said in zip(parts[::2], parts[1::2], strict=True)
    ]


def _inst_turns(text: str) -> Iterator[Row]:
    start, *turns = text.split("[INST]")
    if start.strip() not in ("", "<s>"):
        raise Unusable("text before the first [INST]")
    for turn in turns:
        prompt, closed, answer = turn.partition("[/INST]")
        if not closed:
            raise Unusable("an [INST] that is not closed")
        system, end_mark, rest = prompt.partition("<</SYS>>")
        if end_mark:
            yield {"role": "system", "content": system.strip().removeprefix("<<SYS>>").strip()}
            prompt = rest
        yield {"role": "user", "content": prompt.strip()}
        answer = answer.strip().removesuffix("<s>").rstrip().removesuffix("</s>")
        yield {"role": "assistant", "content": answer.strip()}
