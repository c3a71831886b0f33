"""Well-known datasets and formats: builders that know their columns.

Most are another builder with other defaults, which a config may change like any argument:

    dataset: {_component_: qfsdp.data.alpaca_dataset, source: my.jsonl}

Where a default `source` is a hub name, none need be given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from qfsdp.data.conversations import (
    Tokenizer,
    chat_dataset,
    instruct_dataset,
    tokenize_conversations,
)
from qfsdp.data.rows import Row, load_rows, require_column
from qfsdp.data.tokenized_dataset import TokenizedDataset, Unusable

alpaca_dataset = partial(
    instruct_dataset,
    source="tatsu-lab/alpaca",
    prompt_template="{instruction}\n\n{input}",
    answer_column="output",
)
"""Columns `instruction`, `input` (may be empty) and `output`, as of Stanford's Alpaca."""

gsm8k_dataset = partial(
    instruct_dataset, source="openai/gsm8k", subset="main", prompt_column="question"
)
"""Worked grade-school maths, answers ending in `#### N` (arXiv:2110.14168)."""

orca_math_dataset = partial(
    instruct_dataset,
    source="microsoft/orca-math-word-problems-200k",
    prompt_column="question",
)
"""Maths word problems, columns `question` and `answer` (arXiv:2402.14830)."""

sql_create_context_dataset = partial(
    instruct_dataset,
    source="b-mc2/sql-create-context",
    prompt_template="{context}\n\n{question}",
)
"""A question in English about tables (`context`: their CREATE statements), answered in SQL."""

sharegpt_dataset = partial(chat_dataset, messages_column="conversations")
"""Conversations of `{"from", "value"}`."""


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
    """Conversations that are written out as text, which becomes messages again, so that they get
    the chat template of the model that is trained.

    Two forms are known, and may be mixed. Those of Llama 2 and of Guanaco (arXiv:2305.14314):

        <s>[INST] <<SYS>>\\nsystem\\n<</SYS>>\\n\\nuser [/INST] answer </s><s>[INST] ...
        ### Human: user### Assistant: answer### Human: ...

    To train on the text as it is, use `text_dataset`.

    Args:
        text_column: column with the text; others as in `chat_dataset`.

    Raises:
        UserError: the source or the column is wrong, or no row can be used.
    """
    rows = load_rows(source, split, subset, data_files, max_rows)
    require_column("text_column", text_column, rows, source)
    options = (train_on_input, train_on_last_turn_only)
    return tokenize_conversations(
        tokenizer, rows, source, lambda row: turns_of_text(row[text_column] or ""), *options
    )


openassistant_dataset = partial(guanaco_dataset, source="timdettmers/openassistant-guanaco")
"""The best-ranked conversations of OpenAssistant (arXiv:2304.07327), as Guanaco was trained on."""


def turns_of_text(text: str) -> list[Row]:
    """`{"role", "content"}` of each message; see `guanaco_dataset`.

    Raises:
        Unusable: the text has neither form.
    """
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
        system, told, rest = prompt.partition("<</SYS>>")
        if told:
            yield {"role": "system", "content": system.strip().removeprefix("<<SYS>>").strip()}
            prompt = rest
        yield {"role": "user", "content": prompt.strip()}
        answer = answer.strip().removesuffix("<s>").rstrip().removesuffix("</s>")
        yield {"role": "assistant", "content": answer.strip()}
