"""Exact match: the share of questions that a model answers correctly, with k-shot prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qfsdp.common.errors import InvalidField, UserError, check_bounds
from qfsdp.data import check_source
from qfsdp.data.chat.context_columns import check_columns
from qfsdp.data.chat.messages import text_of
from qfsdp.data.encode import naming
from qfsdp.data.files.json_lines import append_rows, read_rows
from qfsdp.distributed.world import World
from qfsdp.evaluation.answers import parse_answer, same_answer
from qfsdp.evaluation.batching import batches_by_length, batches_of_rank
from qfsdp.evaluation.generation import SamplingConfig, generate
from qfsdp.evaluation.intervals import Interval, wilson
from qfsdp.evaluation.prompts import Messages, chat_tokens, in_context
from qfsdp.modules.hub_models.decoder import AnyDecoder


@dataclass
class ExactMatchConfig:
    """One entry of section `exact_match`: questions and how to ask them.

    Fields:
        source: a .jsonl file of questions with answers.
        question_column, answer_column: its columns. Answers may show the calculation, as GSM8K's.
        compare: "number" compares the numbers that both answers end in; "text" compares the
            answers, ignoring case and white space around them.
        shots: number of solved examples before each question, as earlier turns of the chat.
        examples: a .jsonl file with the same columns. The examples are drawn from it at random and
            are the same for every question. Rows with an asked question are never drawn.
        seed: seed of that draw.
        system_column, history_column, tools_column: columns with what comes before a question, as
            in `qfsdp.data.instruct_dataset`. Examples have the question's system message and tools.
        system_prompt: a system message for rows without one, or null.
        max_rows: ask only the first `max_rows` questions; null asks all.
        max_new_tokens: longest answer in tokens.
        batch_size: questions that a rank answers at a time; null uses the recipe's `batch_size`.
    """

    source: str
    question_column: str = "question"
    answer_column: str = "answer"
    compare: Literal["number", "text"] = "number"
    shots: int = 0
    examples: str | None = None
    seed: int = 0
    system_column: str | None = None
    history_column: str | None = None
    tools_column: str | None = "tools"
    system_prompt: str | None = None
    max_rows: int | None = None
    max_new_tokens: int = 256
    batch_size: int | None = None

    def check(self) -> None:
        check_bounds(self, "max_rows", "max_new_tokens", "batch_size", least=1)
        check_bounds(self, "shots", "seed", least=0)
        if self.shots and self.examples is None:
            raise InvalidField("examples", None, f"a file to draw {self.shots} shots from")


@dataclass(frozen=True)
class Question:
    """A question, its correct answer, and the prompt's tokens including the examples."""

    text: str
    answer: str
    prompt: list[int]


@dataclass(frozen=True)
class ExactMatch:
    """The share of correct answers and its confidence interval."""

    accuracy: float
    interval: Interval
    right: int
    rows: int
    unanswered: int
    """Answers without a number, if numbers are compared."""


def read_questions(key: str, config: ExactMatchConfig, tokenizer: Any) -> list[Question]:
    """Reads questions and makes prompts with the chat template.

    Args:
        key: the entry's place in the config, for messages.
        tokenizer: `hf_tokenizer(...)` or one of torchtune's.

    Raises:
        UserError: a file or column is wrong, an answer has no number, there are too few examples,
            or the chat template rejects the conversation, which is named by its row.
    """
    rows = _read(f"{key}.source", config.source, config)[: config.max_rows]
    names = ("system_column", "history_column", "tools_column")
    named = {name: getattr(config, name) for name in names}
    own = {config.question_column, config.answer_column}
    check_columns(rows, config.source, named, own, f"{key}.")
    for number, row in enumerate(rows, start=1):
        if config.compare == "number" and parse_answer(row[config.answer_column]) is None:
            raise UserError(
                f"{key}.source: {config.source}, row {number}: no number in the answer "
                f"{row[config.answer_column][:60]!r}; expected a number, or compare=text"
            )
    turns: list[dict[str, Any]] = []
    for example in _draw_examples(key, config, {row[config.question_column] for row in rows}):
        turns.append(_message("user", example[config.question_column]))
        turns.append(_message("assistant", example[config.answer_column]))
    return [
        Question(
            row[config.question_column],
            row[config.answer_column],
            _prompt(f"{key}.source: {config.source}, row {number}", config, tokenizer, turns, row),
        )
        for number, row in enumerate(rows, start=1)
    ]


def _prompt(
    place: str, config: ExactMatchConfig, tokenizer: Any, turns: Messages, row: dict[str, Any]
) -> list[int]:
    """The tokens of a question after the examples in `turns`."""
    columns = (config.system_column, config.history_column, config.system_prompt)
    try:
        messages = in_context(row[config.question_column], row, *columns, shots=turns)
        with naming(place):
            return chat_tokens(tokenizer, messages, row.get(config.tools_column or ""))
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def _read(key: str, source: str, config: ExactMatchConfig) -> list[dict[str, Any]]:
    """The rows, with their two columns as text."""
    check_source(key, source)
    columns = (config.question_column, config.answer_column)
    rows = read_rows(key, source, *columns)
    for number, row in enumerate(rows, start=1):
        place = f"{key}: {source}, row {number}"
        row |= {column: _text(place, column, row[column]) for column in columns}
    return rows


def _text(place: str, column: str, value: Any) -> str:
    """The text of a value, the same as in training. Raises UserError if there is none."""
    try:
        text = text_of(value)
    except UserError as error:
        raise UserError(f"{place}: column {column!r}: {error}") from None
    if not text and not isinstance(value, str):
        raise UserError(f"{place}: nothing in column {column!r}; expected text")
    return text


def _draw_examples(key: str, config: ExactMatchConfig, asked: set[str]) -> list[dict[str, Any]]:
    if not config.shots or config.examples is None:
        return []
    pool = _read(f"{key}.examples", config.examples, config)
    pool = [row for row in pool if row[config.question_column] not in asked]
    if len(pool) < config.shots:
        raise UserError(
            f"{key}.shots: {config.shots}; expected at most {len(pool)}, the rows of "
            f"{config.examples} that are not among the questions"
        )
    return random.Random(config.seed).sample(pool, config.shots)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def exact_match(
    model: AnyDecoder,
    questions: list[Question],
    config: ExactMatchConfig,
    tokenizer: Any,
    stops: set[int],
    world: World,
    batch_size: int,
    file: Path | None = None,
    title: str = "exact match",
) -> ExactMatch:
    """Answers all questions greedily. The result is the same on every rank.

    Args:
        questions: from `read_questions`, the same on every rank. Batches of prompts of similar
            length are split over the ranks.
        stops: tokens that end an answer.
        batch_size: questions that a rank answers at a time, if `config` has no other number.
        file: a .jsonl file. Rank 0 writes one line per answered question: its row, the question,
            both answers, and whether they agree.
        title: title of the progress bar.
    """
    sampling = SamplingConfig(max_new_tokens=config.max_new_tokens)
    lengths = [len(question.prompt) for question in questions]
    batches = batches_by_length(lengths, config.batch_size or batch_size)
    results: list[dict[str, Any]] = []
    if file is not None and world.rank == 0:
        file.unlink(missing_ok=True)
    for chosen in batches_of_rank(batches, world, title):
        prompts = [questions[index].prompt for index in chosen]
        answers = generate(model, prompts, sampling, stops, world)
        mine = [
            _compare(index, questions[index], tokenizer.decode(answer), config.compare)
            for index, answer in zip(chosen, answers, strict=True)
        ]
        new = [result for of_rank in world.gather(mine) for result in of_rank]
        results += new
        if file is not None and world.rank == 0 and not append_rows(file, new):
            file = None
    right = sum(result["right"] for result in results)
    unanswered = sum(result["number"] is None for result in results if "number" in result)
    interval = wilson(right, len(results))
    return ExactMatch(right / len(results), interval, right, len(results), unanswered)


def _compare(index: int, question: Question, answer: str, compare: str) -> dict[str, Any]:
    result: dict[str, Any] = {"row": index, "question": question.text, "gold": question.answer}
    result["answer"] = answer
    if compare == "text":
        result["right"] = answer.strip().casefold() == question.answer.strip().casefold()
        return result
    number = parse_answer(answer)
    result["number"] = None if number is None else str(number)
    result["right"] = same_answer(number, parse_answer(question.answer))
    return result
