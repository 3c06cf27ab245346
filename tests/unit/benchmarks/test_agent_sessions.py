"""The recorded sessions of agents, and how a replay finds its ids."""

import json
import re
from typing import Any

import pytest
from agent_sessions import PLACEHOLDER, Session, answer_ids, script, sessions
from support.conversations import outline, predecessor

SESSIONS = sessions()
PRIVATE = re.compile(r"/tmp/pytest|/work/|-tmp-pytest|Bearer |sk-of-the-tests")


@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.name)
def test_a_recording_can_be_replayed_anywhere(session: Session) -> None:
    texts = {json.loads(line)["text"] for line in script().decode().splitlines()}
    for index, request in enumerate(session.requests):
        body = bytes(request.body).decode()
        assert not PRIVATE.search(body + json.dumps(request.headers))
        assert request.answer in texts
        answered = {int(found[0][1:].partition(".")[0]) for found in PLACEHOLDER.finditer(body)}
        assert all(before < index for before in answered)
    bodies = [json.loads(bytes(request.body)) for request in session.requests]
    outlines = [outline(body) for body in bodies]
    found = [predecessor(outlines, index) for index in range(len(bodies))]
    assert found == [request.previous for request in session.requests]


def test_there_are_sessions_of_every_client() -> None:
    names = {session.name.partition("-")[0] for session in SESSIONS}
    assert names >= {"claude", "codex", "opencode", "pi", "qwen", "continue"}


@pytest.mark.parametrize("form", ["whole", "streamed"])
def test_ids_are_counted_by_their_key(form: str) -> None:
    one, two = "call_" + "1" * 24, "call_" + "2" * 24
    answer = {"id": "chatcmpl-" + "0" * 24, "calls": [{"call_id": one}, {"call_id": two}]}
    text = json.dumps(answer)
    content = text if form == "whole" else f"data: {text}\n\ndata: {text}\n\ndata: [DONE]\n\n"
    assert answer_ids(3, content.encode()) == {
        "⟦3.id.0⟧": answer["id"],
        "⟦3.call_id.0⟧": one,
        "⟦3.call_id.1⟧": two,
    }


def test_a_request_continues_the_one_whose_answer_it_returns() -> None:
    ask = {"role": "user", "content": "Hi"}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    made = {"role": "assistant", "content": "Well", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    side = {"messages": [{"role": "user", "content": "A title, please"}]}
    first, second = {"messages": [ask]}, {"messages": [ask, made, result]}
    dropped = {"messages": [ask, {**made, "content": None}, result]}
    other = {"messages": [ask, {**made, "tool_calls": [{**call, "id": "c2"}]}, result]}
    last = {"messages": [*dropped["messages"], {"role": "assistant", "content": "So"}, ask]}
    bodies: list[dict[str, Any]] = [
        first,
        side,
        second,
        last,
        other,
        {"messages": [ask], "tools": [{"name": "f"}]},
    ]
    outlines = [outline(body) for body in bodies]
    found = [predecessor(outlines, index) for index in range(len(bodies))]
    assert found == [None, None, 0, 2, 0, None]
