"""Let a model judge the answers of others: single ratings, or pairs in both orders (MT-bench).

    tune run recipes/judge --config configs/judge.yaml \\
        candidates.base.url=http://127.0.0.1:8000/v1 candidates.base.model=base \\
        candidates.tuned.url=http://127.0.0.1:8000/v1 candidates.tuned.model=mine \\
        baseline=base judge.url=http://127.0.0.1:8000/v1 judge.model=base

Candidates and judge are models behind OpenAI-compatible endpoints, such as `qfsdp serve`. Each
candidate answers every question, turn by turn; the judge rates every answer from 1 to 10, and
compares each candidate with the baseline, in both orders. Under `output_dir`:

    exchanges.jsonl   every request and its answer
    results.json      scores and win rates with 95 % intervals, and what was not counted

Interrupted, the same command goes on: no exchange of the file is asked for again.
"""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qfsdp.examples.judge.exchanges import EndpointConfig, Exchanges
from qfsdp.examples.judge.questions import Question, generated_questions, read_questions
from qfsdp.examples.judge.verdicts import (
    Games,
    Ratings,
    Turn,
    pair_messages,
    rating,
    single_messages,
    winner,
)

from qfsdp.checkpoint.lock import FolderLock
from qfsdp.common.errors import InvalidField, UserError, check_bounds
from qfsdp.common.files import write_json
from qfsdp.common.printable import printable
from qfsdp.common.terminal import bar
from qfsdp.launch.ranks import check_one_process
from qfsdp.launch.start import launch


@dataclass
class Config:
    """Keys of the YAML file and the command line; each section documents its own keys."""

    output_dir: str  # exchanges and results; a run in it goes on
    judge: EndpointConfig
    candidates: dict[str, EndpointConfig] = field(default_factory=dict)  # by name
    baseline: str | None = None  # the candidate that the others are compared with; null: none is
    single: bool = True  # rate every answer from 1 to 10
    questions: str | None = None  # a .jsonl file in MT-bench's format; null: 40 of ours
    max_questions: int | None = None  # the first ones; null: all
    in_flight: int = 8  # requests at a time
    request_timeout: float = 300.0  # seconds for a whole request, tried up to three times

    def check(self) -> None:
        check_bounds(self, "in_flight", "max_questions", least=1)
        if not 0 < self.request_timeout < float("inf"):
            raise InvalidField("request_timeout", self.request_timeout, "seconds above 0")
        if not self.candidates:
            raise InvalidField("candidates", {}, "at least one, such as candidates.mine.url=...")
        names = ", ".join(self.candidates)
        if self.baseline is not None and self.baseline not in self.candidates:
            raise InvalidField("baseline", self.baseline, f"a candidate ({names}), or null")
        if not self.single and (self.baseline is None or len(self.candidates) < 2):
            raise InvalidField("single", False, "true, or a baseline and another candidate")


def check(cfg: Config) -> None:
    """Finds mistakes outside the config file, before anything is asked."""
    check_one_process()
    if importlib.util.find_spec("openai") is None:
        raise UserError("judge: openai is not installed; expected `pip install openai`")
    questions_of(cfg)
    try:
        Path(cfg.output_dir).expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output_dir: '{cfg.output_dir}': {error.strerror}") from None


def questions_of(cfg: Config) -> list[Question]:
    made = cfg.questions is None
    found = generated_questions() if made else read_questions("questions", str(cfg.questions))
    return found[: cfg.max_questions]


class Trial:
    """All answers and verdicts of a run.

    Fields:
        ratings: of every candidate; games: of every candidate but the baseline.
        empty: answers without text, by candidate: refusals of the API, or nothing said.
    """

    def __init__(self, cfg: Config, exchanges: Exchanges) -> None:
        self._cfg, self._exchanges = cfg, exchanges
        self.ratings = {name: Ratings() for name in cfg.candidates if cfg.single}
        others = [name for name in cfg.candidates if name != cfg.baseline]
        self.games = {name: Games() for name in others if cfg.baseline is not None}
        self.empty = dict.fromkeys(cfg.candidates, 0)

    async def run(self, question: Question) -> None:
        """Asks all candidates one question, and the judge about their answers."""
        names = list(self._cfg.candidates)
        said = await asyncio.gather(*(self._answers(name, question) for name in names))
        turns = dict(zip(names, said, strict=True))
        for count in range(1, len(question.turns) + 1):
            for name in self.ratings:
                messages = single_messages(turns[name][:count])
                verdict = await self._judged(messages)
                self.ratings[name].add(question.id, rating(verdict))
            for name, games in self.games.items():
                mine, base = turns[name][:count], turns[str(self._cfg.baseline)][:count]
                both = (self._judged(pair_messages(*pair)) for pair in ((mine, base), (base, mine)))
                as_first, as_second = await asyncio.gather(*both)
                games.add(question.id, winner(as_first), winner(as_second))

    async def _answers(self, name: str, question: Question) -> list[Turn]:
        messages: list[dict[str, str]] = []
        turns = []
        for at, asked in enumerate(question.turns):
            messages = [*messages, {"role": "user", "content": asked}]
            key = f"candidates.{name}"
            answer = await self._exchanges.ask(key, self._cfg.candidates[name], messages)
            self.empty[name] += not answer.strip()
            messages = [*messages, {"role": "assistant", "content": answer}]
            reference = question.references[at] if question.references else ""
            turns.append(Turn(asked, answer, reference))
        return turns

    async def _judged(self, messages: list[dict[str, str]]) -> str:
        return await self._exchanges.ask("judge", self._cfg.judge, messages)

    def results(self) -> dict[str, Any]:
        """Scores and win rates by candidate, as written to results.json."""
        found: dict[str, Any] = {"baseline": self._cfg.baseline, "empty_answers": self.empty}
        found["ratings"] = {}
        for name, ratings in self.ratings.items():
            mean, interval = ratings.score()
            counts = {"questions": len(ratings.by_question), "no_verdict": ratings.no_verdict}
            found["ratings"][name] = {"mean": mean, "interval": interval, **counts}
        found["games"] = {}
        for name, games in self.games.items():
            rate, interval = games.rate()
            places = {"first": games.first, "second": games.second}
            found["games"][name] = {
                "win_rate": rate,
                "interval": interval,
                "win_rate_by_place": {at: _mean(points) for at, points in places.items()},
                "questions": len(games.points),
                **{key: getattr(games, key) for key in COUNTS},
            }
        return found


COUNTS = ("wins", "losses", "ties", "contradictions", "no_verdict")


def _mean(points: list[float]) -> float | None:
    return sum(points) / len(points) if points else None


def table(results: dict[str, Any]) -> str:
    """The results as lines of text."""
    lines = []
    for name, row in results["ratings"].items():
        counted = f"{row['questions']} questions, {row['no_verdict']} answers without a verdict"
        rated = "no rating"
        if row["interval"] is not None:
            low, high = row["interval"]
            rated = f"{row['mean']:.2f} of 10, {low:.2f} to {high:.2f}"
        lines.append(f"{name}: {rated} ({counted})")
    for name, row in results["games"].items():
        counts = ", ".join(f"{row[key]} {key.replace('_', ' ')}" for key in COUNTS)
        won = "no verdict"
        if row["interval"] is not None:
            low, high = row["interval"]
            places = row["win_rate_by_place"].items()
            shown = " and ".join(f"{at} {rate:.0%}" for at, rate in places if rate is not None)
            won = f"wins {row['win_rate']:.1%} ({low:.1%} to {high:.1%}); shown {shown}"
        lines.append(f"{name} against {results['baseline']}: {won}; {counts}")
    return "\n".join(lines)


async def run_all(cfg: Config, questions: list[Question], exchanges: Exchanges) -> Trial:
    """Runs all questions; after an error the others are cancelled, and what was said is kept."""
    trial = Trial(cfg, exchanges)
    with bar(total=len(questions), desc="questions") as shown:

        async def one(question: Question) -> None:
            await trial.run(question)
            shown.update()

        tasks = [asyncio.create_task(one(question)) for question in questions]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    return trial


def main(cfg: Config) -> None:
    folder = Path(cfg.output_dir).expanduser()
    questions = questions_of(cfg)
    with FolderLock(folder, "output_dir"):
        exchanges = Exchanges(folder / "exchanges.jsonl", cfg.in_flight, cfg.request_timeout)
        trial = asyncio.run(run_all(cfg, questions, exchanges))
        results = trial.results()
        write_json(folder / "results.json", results)
    print(printable(table(results)))
    print(f"{exchanges.sent} exchanges, {exchanges.known} known before: {folder}/exchanges.jsonl")


if __name__ == "__main__":
    launch(__file__, Config, check, main, one_process=True)
