"""A recorded answer, and bodies and frames of every API."""

import json
from typing import Any

from support import streams
from support.stamp import STAMP

from kvmesh.frontend.apis.base import AnswerSummary, Api, Ending, Renderer, Usage
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.apis.completions import Completions
from kvmesh.frontend.apis.messages.api import Messages
from kvmesh.frontend.apis.responses.api import Responses
from kvmesh.frontend.conversation import (
    AnswerEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

USAGE = Usage(prompt=50, cached=16, stored=32, output=9, reasoning=3)


ANSWER: list[AnswerEvent] = [
    ThinkingDelta("hm"),
    ThinkingDelta("m"),
    TextDelta("I look"),
    ToolCallStart("c1", "read"),
    ToolCallDelta('{"path":'),
    ToolCallDelta('"a"}'),
    ToolCallEnd(),
    TextDelta("done"),
    ToolCallStart("c2", "list"),
    ToolCallEnd(),
]


APIS: list[Api] = [Chat(), Completions(), Messages(), Responses()]


def body(api: Api, **fields: Any) -> bytes:
    prompts: dict[str, dict[str, Any]] = {
        "chat": {"messages": [{"role": "user", "content": "Hi"}]},
        "completions": {"prompt": "Hi"},
        "messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
        "responses": {"input": "Hi"},
    }
    return json.dumps({"model": "m", **prompts[api.name], **fields}).encode()


def stream(renderer: Renderer, answer: list[AnswerEvent], ending: Ending) -> list[Any]:
    """The client's events of a streamed answer, in order; they must build an answer."""
    frames = renderer.begin() + renderer.started(lambda: USAGE)
    frames += b"".join(renderer.events(0, [event], []) for event in answer)
    frames += renderer.end(0, ending) + renderer.done(AnswerSummary(USAGE))
    found = events(frames)
    assert streams.replay(NAMES[type(renderer)], found) is not None
    return found


def events(frames: bytes) -> list[Any]:
    return streams.parse(frames.decode())


def whole(api: Api, answer: list[AnswerEvent], ending: Ending) -> Any:
    renderer = api.parse(body(api), {}, STAMP).renderer
    renderer.events(0, answer, [])
    renderer.end(0, ending)
    return json.loads(renderer.whole(AnswerSummary(USAGE)))


NAMES = {type(api.parse(body(api), {}, STAMP).renderer): api.name for api in APIS}
