"""Every stream of every API builds the answer that a request without a stream gets."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stamp import STAMP
from support.streams import DONE, parse, replay, without_form
from unit.frontend.apis.answers import ANSWER, APIS, USAGE, body

from kvmesh.frontend.apis.base import AnswerSummary, Api, Ending, Renderer, TokenLogprob, TopLogprob
from kvmesh.frontend.apis.chat.api import Chat
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
from kvmesh.frontend.errors import ContextExceeded, Overloaded

SUMMARY = AnswerSummary(USAGE, {"worker": "w"})
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "chat": [{}, {"logprobs": True, "top_logprobs": 1}],
    "completions": [{}, {"logprobs": 1}, {"echo": True}],
    "messages": [
        {},
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        {"diagnostics": {"previous_message_id": None}},
    ],
    "responses": [
        {},
        {"include": ["message.output_text.logprobs"]},
        {"reasoning": {"effort": "high", "summary": "auto"}},
    ],
}
CASES = [(api, fields) for api in APIS for fields in SETTINGS[api.name]]
TEXTS = st.text('ab{}"\\\n\u20ac\U0001f600 ', min_size=1, max_size=4)


@st.composite
def calls(draw: st.DrawFn, custom: bool) -> list[AnswerEvent]:
    """One call, whose arguments may break off."""
    number = draw(st.integers(0, 10**9))
    space = draw(st.sampled_from([None, "fs"]))
    start = ToolCallStart(f"call_{number}", "read", space, custom)
    pieces = draw(st.lists(TEXTS, max_size=3)) if custom else draw(st.sampled_from(ARGUMENTS))
    return [start, *map(ToolCallDelta, pieces), ToolCallEnd()]


ARGUMENTS = [["{}"], ['{"path"', ': "a"}'], ['{"a": [1, ', "2]", "}"], ['{"text": "\u20ac"}']]


def answers(api: Api) -> st.SearchStrategy[list[AnswerEvent]]:
    """Answers with thinking, text and calls in any order, with distinct ids of calls."""
    texts: st.SearchStrategy[list[AnswerEvent]]
    texts = st.lists(st.builds(TextDelta, TEXTS), min_size=1, max_size=3)
    if api.name == "completions":
        return texts
    thinking = st.lists(st.builds(ThinkingDelta, TEXTS), min_size=1, max_size=3)
    called = calls(custom=False) | (calls(custom=True) if api.name != "messages" else st.nothing())
    parts = st.lists(thinking | texts | called, max_size=5)
    return parts.filter(distinct).map(lambda found: [event for part in found for event in part])


def distinct(parts: list[Any]) -> bool:
    ids = [event.id for part in parts for event in part if isinstance(event, ToolCallStart)]
    return len(ids) == len(set(ids))


def cut(answer: list[AnswerEvent]) -> list[AnswerEvent]:
    """The answer without the end of its last part, as a limit of tokens leaves it."""
    return answer[:-1] if answer and isinstance(answer[-1], ToolCallEnd) else answer


def renderer(api: Api, stream: bool, fields: dict[str, Any]) -> Renderer:
    asked = (
        {"stream_options": {"include_usage": True}} if api.name in ("chat", "completions") else {}
    )
    sent = {**fields, **(asked if stream else {}), "stream": stream}
    return api.parse(body(api, **sent), {}, STAMP).renderer


def logprobs(renders: Any, event: AnswerEvent) -> list[TokenLogprob]:
    """The probability of a text's token, if the request asks for it."""
    wanted = getattr(renders, "_with_logprobs", True) and isinstance(event, TextDelta)
    return [TokenLogprob("t", -0.5, [116], [TopLogprob("t", -0.5, [116])])] if wanted else []


def batches(answer: list[AnswerEvent], sizes: Iterator[int]) -> Iterator[list[AnswerEvent]]:
    while answer:
        size = next(sizes)
        yield answer[:size]
        answer = answer[size:]


def frames(renders: Renderer, answer: list[AnswerEvent], sizes: Iterator[int]) -> bytes:
    sent = renders.begin() + renders.started(lambda: USAGE)
    for batch in batches(answer, sizes):
        given_with = [entry for event in batch for entry in logprobs(renders, event)]
        sent += renders.events(0, batch, given_with)
    return sent


@given(st.sampled_from(CASES), st.data())
def test_a_stream_builds_the_whole_answer(
    case: tuple[Api, dict[str, Any]], data: st.DataObject
) -> None:
    api, fields = case
    answer = data.draw(answers(api))
    ending = data.draw(st.sampled_from([Ending("stop"), Ending("length"), Ending("stop", "STOP")]))
    answer = cut(answer) if ending.reason == "length" else answer
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    summary = data.draw(st.sampled_from([SUMMARY, AnswerSummary(USAGE)]))
    if summary.nvext is not None:
        fields = {**fields, "nvext": {"extra_fields": ["worker_id"]}}
    streamed, whole = renderer(api, True, fields), renderer(api, False, fields)
    sent = frames(streamed, answer, iter(sizes * 99)) + streamed.end(0, ending)
    sent += streamed.done(summary)
    frames(whole, answer, iter(sizes * 99))
    whole.end(0, ending)
    expected = json.loads(whole.whole(summary))
    assert replay(api.name, parse(sent.decode())) == without_form(api.name, expected)


@given(st.sampled_from(CASES), st.data())
def test_a_stream_that_fails_can_be_followed_to_its_end(
    case: tuple[Api, dict[str, Any]], data: st.DataObject
) -> None:
    api, fields = case
    answer = data.draw(answers(api))
    answer = answer[: data.draw(st.integers(0, len(answer)))]
    streamed = renderer(api, True, fields)
    sent = frames(streamed, answer, iter([1] * 99)) if answer else streamed.begin()
    sent += streamed.failed(data.draw(st.sampled_from([Overloaded("x"), ContextExceeded(9, 1, 5)])))
    assert replay(api.name, parse(sent.decode())) is None


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
@pytest.mark.parametrize("count", [2, 3])
def test_the_choices_of_a_stream_are_apart(api: Api, count: int) -> None:
    if api.name not in ("chat", "completions"):
        return
    streamed, whole = (renderer(api, stream, {"n": count}) for stream in (True, False))
    sent = streamed.begin() + streamed.started(lambda: USAGE)
    for event in ANSWER:
        for choice in range(count):
            sent += streamed.events(choice, [event], [])
            whole.events(choice, [event], [])
    for choice in range(count):
        ended = streamed.end(choice, Ending("stop"))
        assert b'"finish_reason":"stop"' in ended or b'"finish_reason":"tool_calls"' in ended
        sent += ended
        whole.end(choice, Ending("stop"))
    sent += streamed.done(AnswerSummary(USAGE))
    expected = without_form(api.name, json.loads(whole.whole(AnswerSummary(USAGE))))
    assert replay(api.name, parse(sent.decode())) == expected


def test_thinking_is_the_content_or_the_summary_of_reasoning() -> None:
    for fields, field in (({}, "content"), ({"reasoning": {"summary": "auto"}}, "summary")):
        streamed = renderer(Responses(), True, fields)
        sent = frames(streamed, ANSWER[:2], iter([1] * 9)) + streamed.end(0, Ending("stop"))
        built = replay("responses", parse((sent + streamed.done(AnswerSummary(USAGE))).decode()))
        assert built is not None
        reasoning = built["output"][0]
        texts = {
            name: [part["text"] for part in reasoning[name]] for name in ("content", "summary")
        }
        assert texts == {"content": [], "summary": [], field: ["hmm"]}
        assert reasoning["encrypted_content"]


def test_what_has_ended_before_a_limit_is_complete() -> None:
    streamed = renderer(Responses(), True, {})
    sent = frames(streamed, ANSWER, iter([1] * 99)) + streamed.end(0, Ending("length"))
    built = replay("responses", parse((sent + streamed.done(AnswerSummary(USAGE))).decode()))
    assert built is not None
    assert built["status"] == "incomplete"
    assert {item.get("status", "completed") for item in built["output"]} == {"completed"}


@pytest.mark.parametrize("arguments", ['{"path": "a', '{"path": "a"}'])
def test_an_answer_ends_for_a_call_only_if_that_is_whole(arguments: str) -> None:
    """A model may end within a call, or without the syntax that ends it."""
    whole = arguments.endswith("}")
    answer: list[AnswerEvent] = [
        TextDelta("I look"),
        ToolCallStart("c1", "read"),
        ToolCallDelta(arguments),
    ]
    built = {}
    for api in (Messages(), Responses()):
        streamed = renderer(api, True, {})
        sent = frames(streamed, answer, iter([1] * 9)) + streamed.end(0, Ending("stop"))
        built[api.name] = replay(
            api.name, parse((sent + streamed.done(AnswerSummary(USAGE))).decode())
        )
    message, response = built["messages"], built["responses"]
    assert message is not None
    assert response is not None
    assert message["stop_reason"] == ("tool_use" if whole else "end_turn")
    assert response["output"][1]["status"] == ("completed" if whole else "incomplete")


# --- the checker itself ------------------------------------------------------------------------


@pytest.mark.parametrize("api", [Chat(), Messages(), Responses()], ids=lambda api: api.name)
def test_no_event_may_be_missing_or_repeated(api: Api) -> None:
    """A stream with one event less, twice, or (but in chat) before the one ahead is another's."""
    streamed = renderer(api, True, {})
    sent = frames(streamed, ANSWER, iter([1] * 99)) + streamed.end(0, Ending("stop"))
    events = parse((sent + streamed.done(SUMMARY)).decode())
    built = replay(api.name, events)
    for place, event in enumerate(events):
        before, after = events[:place], events[place + 1 :]
        changes = [before + after, [*before, event, event, *after]]
        if api.name != "chat" and after:
            changes.append([*before, after[0], event, *after[1:]])
        for changed in changes:
            assert rebuilt(api.name, numbered(changed)) != built, event


def numbered(events: list[Any]) -> list[Any]:
    """The events with sequence numbers without gaps, so that these alone do not tell."""
    return [
        event if event == DONE or "sequence_number" not in event else event | {"sequence_number": n}
        for n, event in enumerate(events)
    ]


def rebuilt(name: str, events: list[Any]) -> Any:
    try:
        return replay(name, events)
    except (AssertionError, KeyError, ValueError):
        return "refused"


@pytest.mark.parametrize("api", [Chat(), Messages(), Responses()], ids=lambda api: str(api.name))
def test_a_finished_call_is_sent_with_its_last_token(api: Api) -> None:
    """The frame of that token has the end of the call: the client need not wait for another one."""
    renderer = api.parse(body(api, stream=True), {}, STAMP).renderer
    renderer.begin()
    renderer.events(0, [ToolCallStart("c1", "read"), ToolCallDelta('{"path":')], [])
    sent = parse(renderer.events(0, [ToolCallDelta('"a"}'), ToolCallEnd()], []).decode())
    text = json.dumps(sent)
    if api.name == "responses":
        assert sent[-1]["type"] == "response.output_item.done"
        assert json.loads(sent[-1]["item"]["arguments"]) == {"path": "a"}
    elif api.name == "messages":
        assert sent[-1] == {"type": "content_block_stop", "index": 0}
    else:
        assert json.dumps('"a"}')[1:-1] in json.loads(json.dumps(text))
