"""Replays the streams of every API strictly, as the most careful of their clients do.

`replay` returns the answer that the events of a stream build, in the form of the whole answer. It
raises AssertionError if an event is not announced, is out of order, or contradicts an earlier one.
"""

import json
from collections.abc import Callable
from typing import Any

from support.replays.completions import chat, completions
from support.replays.messages import messages
from support.replays.responses import responses

Json = dict[str, Any]
DONE = "[DONE]"
PATHS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
}


REPLAYS: dict[str, Callable[[list[Any]], Json | None]] = {
    "chat": chat,
    "completions": completions,
    "messages": messages,
    "responses": responses,
}


def parse(text: str) -> list[Any]:
    """The events of a stream, without comments; `[DONE]` is a string."""
    assert text.endswith("\n\n"), f"the stream breaks off: {text[-200:]!r}"
    events: list[Any] = []
    for frame in text.split("\n\n")[:-1]:
        lines = [line for line in frame.split("\n") if not line.startswith(":")]
        fields = [line.partition(": ")[::2] for line in lines]
        if not fields:
            continue
        data = fields[-1][1]
        event: Any = data if data == DONE else json.loads(data)
        names = [name for name, _ in fields]
        if "type" in event and event != DONE:
            assert fields[0] == ("event", event["type"]), frame
            assert names == ["event", "data"], frame
        else:
            assert names == ["data"], frame
        events.append(event)
    return events


def replay(api: str, events: list[Any]) -> Json | None:
    """The answer that a stream of the API builds; None if it ends with an error."""
    return REPLAYS[api](events)


def check(path: str, events: list[Any]) -> None:
    """Replay the events of a stream from this path, which may have a query."""
    replay(PATHS[path.partition("?")[0]], events)


def without_form(api: str, answer: Json) -> Json:
    """A whole answer without what a stream of the API cannot tell.

    Those of chat completions say "" for no text, and nothing of the probabilities of no tokens.
    """
    if api != "chat":
        return answer
    choices = []
    for choice in answer["choices"]:
        message = {**choice["message"], "content": choice["message"]["content"] or ""}
        known = choice["logprobs"] if (choice["logprobs"] or {}).get("content") else None
        choices.append({**choice, "message": message, "logprobs": known})
    return {**answer, "choices": choices}
