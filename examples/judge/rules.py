"""A judge with OpenAI's API that decides by rules: the same answers, the same verdicts.

It reads the prompts of `recipes/judge`, and asks of the last answer of a conversation:

    a reference is given              does the answer end in its number?
    "Name N things ..., one in ..."   has it N lines?
    "Write four sentences ..."        are they four?
    "... in one sentence."            is it one?

To other questions it has no verdict, as a judge that refuses. It is not a good judge of language:
it is there so that win rates can be checked.
"""

from __future__ import annotations

import re
import socket
import threading
from typing import Any

from qfsdp.evaluation.answers import parse_answer, same_answer

CONVERSATION = re.compile(
    r"<conversation with (?P<who>[^>]+)>(?P<turns>.*?)<end of the conversation with (?P=who)>",
    re.DOTALL,
)
REFUSAL = "I have no rule for this question."


def is_right(asked: str, reference: str, answer: str) -> bool | None:
    """Whether an answer does what was asked; None if no rule says so."""
    sentences = len(re.findall(r"[.!?]+(?:\s|$)", answer))
    if reference:
        return same_answer(parse_answer(reference), parse_answer(answer))
    if found := re.match(r"Name (\d+) things .* one in each line", asked):
        return len([line for line in answer.splitlines() if line.strip()]) == int(found[1])
    if asked.startswith("Write four sentences"):
        return sentences == 4
    if asked.endswith("in one sentence."):
        return sentences == 1
    return None


def last_turn(conversation: re.Match[str]) -> bool | None:
    """`is_right` of the last turn of a conversation in a judge's prompt."""
    turn = conversation["turns"].rpartition("### User:\n")[2]
    asked, _, answer = turn.partition(f"### {conversation['who'].capitalize()}:\n")
    asked, _, reference = asked.partition("### Reference answer:\n")
    return is_right(asked.strip(), reference.strip(), answer.strip())


def verdict(prompt: str) -> str:
    """What the judge says to a prompt with one conversation (a rating) or two (the better one)."""
    right = [last_turn(found) for found in CONVERSATION.finditer(prompt)]
    if not right or None in right:
        return REFUSAL
    if len(right) == 1:
        return f"Rating: [[{10 if right[0] else 1}]]"
    return "[[C]]" if right[0] == right[1] else "[[A]]" if right[0] else "[[B]]"


def start_judge() -> str:
    """Serves the judge from a thread of this process; returns its URL."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    async def complete(request: Request) -> Response:
        try:
            given: dict[str, Any] = await request.json()
        except ClientDisconnect:  # killed while it was asking
            return Response(status_code=400)
        message = {"role": "assistant", "content": verdict(given["messages"][-1]["content"])}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        about = {"id": "rules", "object": "chat.completion", "created": 0, "model": "rules"}
        return JSONResponse(about | {"choices": [choice]})

    listening = socket.create_server(("127.0.0.1", 0))
    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    threading.Thread(target=server.run, args=([listening],), daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
