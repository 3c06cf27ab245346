"""Responses over a WebSocket: events, frames, and the conversations that a connection keeps."""

import json
import zlib
from typing import Any

import msgspec
import pytest
from support.stamp import STAMP

from kvmesh.frontend.apis.base import (
    AnswerSummary,
    ApiCall,
    Ending,
    RequestStamp,
    StoredTurn,
    Usage,
)
from kvmesh.frontend.apis.responses import socket
from kvmesh.frontend.apis.responses.api import Responses
from kvmesh.frontend.apis.responses.socket import Frames, SocketResponses, client_event
from kvmesh.frontend.apis.responses.thread import KeptConversation, KeptThread
from kvmesh.frontend.conversation import Text, TextDelta, ToolCall
from kvmesh.frontend.errors import ApiError, InvalidRequest

USAGE = AnswerSummary(Usage(prompt=1, cached=0, stored=0, output=1))
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]


class Conversation:
    """A lane of a connection, whose answers are the given texts."""

    def __init__(self) -> None:
        self.kept: dict[str, KeptConversation] = {}
        self.count = 0

    def ask(self, answer: str, **fields: Any) -> tuple[ApiCall, StoredTurn]:
        """The parsed request with its whole conversation, and its turn."""
        self.count += 1
        previous = fields.get("previous_response_id")
        api = SocketResponses(self.kept.get(previous or ""), self.kept.__setitem__)
        body = msgspec.json.encode({"type": "response.create", "model": "m", **fields})
        call = api.parse(body, {}, RequestStamp(f"{self.count:024x}", 1))
        assert isinstance(call.thread, KeptThread)
        call.thread.extend([], {}) if call.thread.kept else None
        call.renderer.events(0, [TextDelta(answer)], [])
        call.renderer.end(0, Ending("stop"))
        whole = call.renderer.whole(USAGE)
        turn = call.thread.turn(whole)
        call.thread.keep(whole)
        return call, turn


def texts(call: ApiCall) -> list[str]:
    blocks = [block for message in call.request.messages for block in message.blocks]
    return [
        b.text if isinstance(b, Text) else b.name for b in blocks if isinstance(b, Text | ToolCall)
    ]


def test_a_turn_continues_what_the_connection_keeps() -> None:
    lane = Conversation()
    first, _ = lane.ask("One.", input="First", instructions="Be brief.", store=False)
    assert texts(first) == ["Be brief.", "First"]
    assert first.request.stream
    previous = {"previous_response_id": first.request.id}
    second, _ = lane.ask("Two.", input="Second", instructions="Be brief.", store=False, **previous)
    assert texts(second) == ["Be brief.", "First", "One.", "Second"]
    assert second.request.memo is first.request.memo
    assert second.request.messages[:2] == first.request.messages
    assert all(
        a is b for a, b in zip(second.request.messages, first.request.messages, strict=False)
    )
    fork, _ = lane.ask("Other.", input="Third", store=False, **previous)
    assert texts(fork) == ["First", "One.", "Third"]
    assert texts(first) == ["Be brief.", "First"]


def test_a_stored_turn_has_what_was_not_stored_before_it() -> None:
    lane = Conversation()
    first, stored = lane.ask("One.", input="First")
    assert stored.previous is None
    second, _ = lane.ask("2", input="Second", store=False, previous_response_id=first.request.id)
    third, _ = lane.ask("3", input="Third", store=False, previous_response_id=second.request.id)
    last, turn = lane.ask("4", input="Fourth", previous_response_id=third.request.id)
    assert texts(last) == ["First", "One.", "Second", "2", "Third", "3", "Fourth"]
    assert turn.previous == first.request.id
    found = [json.loads(bytes(item))["content"] for item in turn.input]
    shown = [c if isinstance(c, str) else c[0]["text"] for c in found]
    assert shown == ["Second", "2", "Third", "3", "Fourth"]
    _, after = lane.ask("5", input="Fifth", previous_response_id=last.request.id)
    assert (after.previous, len(after.input)) == (last.request.id, 1)


@pytest.mark.parametrize(
    "fields", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}]
)
def test_a_preload_needs_no_input(fields: dict[str, Any]) -> None:
    call = Conversation().ask("", tools=TOOLS, **fields)[0]
    assert call.preload
    assert call.request.messages == []
    with pytest.raises(InvalidRequest):
        Conversation().ask("", tools=TOOLS)
    body = msgspec.json.encode({"model": "m", "input": "x", "background": True, **fields})
    with pytest.raises(InvalidRequest):
        Responses().parse(body, {}, STAMP)


def test_background_is_refused_and_the_envelope_is_not_listed() -> None:
    with pytest.raises(InvalidRequest) as error:
        Conversation().ask("", input="x", background=True)
    assert error.value.param == "background"
    asked = {"extra_fields": ["ignored"]}
    call, _ = Conversation().ask("", input="x", stream_id="a", other=1, nvext=asked)
    assert call.request.ignored == ["other"]


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 257, 7, ["a"]])
def test_a_lane_s_name_is_checked(name: Any) -> None:
    event = client_event(json.dumps({"type": "response.create", "stream_id": name}).encode())
    with pytest.raises(InvalidRequest) as error:
        _ = event.lane
    assert error.value.code == "invalid_stream_id"


@pytest.mark.parametrize("name", ["a", "x" * 256, "A-1_b.c"])
def test_a_lane_may_be_named(name: str) -> None:
    assert client_event(json.dumps({"stream_id": name}).encode()).lane == name
    assert client_event(b'{"stream_id": null}').lane == ""


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'"x"', b"\xff", b"[" * 10_000])
def test_what_is_no_event_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        client_event(data)


def test_metadata_of_codex_stands_for_headers_and_never_for_keys() -> None:
    metadata = {
        "thread_id": "t",
        "x-codex-turn-metadata": "{}",
        "ws_request_header_traceparent": "00-1",
        "authorization": "Bearer x",
        "x-tenant-id": "other",
        "session_id": 7,
    }
    event = client_event(json.dumps({"client_metadata": metadata}).encode())
    wanted = {"thread-id": "t", "x-codex-turn-metadata": "{}", "traceparent": "00-1"}
    assert event.headers == wanted
    assert client_event(b'{"client_metadata": "x"}').headers == {}


def parts(frames: bytes) -> list[dict[str, Any]]:
    """The texts of unmasked frames."""
    found = []
    while frames:
        assert frames[0] == 0x81
        size, start = frames[1], 2
        if size >= 126:
            start = 4 if size == 126 else 10
            size = int.from_bytes(frames[2:start], "big")
        found.append(json.loads(frames[start : start + size]))
        frames = frames[start + size :]
    return found


@pytest.mark.parametrize("size", [0, 10, 60, 70, 200, 65_500, 70_000])
@pytest.mark.parametrize("lane", ["", "main"])
def test_each_event_is_a_frame_with_its_lane(size: int, lane: str) -> None:
    events = b"".join(
        b"event: %b\ndata: %b\n\n"
        % (kind, json.dumps({"type": kind.decode(), "x": "y" * size}).encode())
        for kind in (b"a", b"b")
    )
    named = {"stream_id": lane} if lane else {}
    wanted = [{**named, "type": kind, "x": "y" * size} for kind in ("a", "b")]
    assert parts(Frames().of(b": comment\n\n" + events, lane)) == wanted
    assert Frames().of(b": keep-alive\n\n", lane) == b""


@pytest.mark.parametrize("forget", [False, True])
def test_long_texts_are_compressed_where_both_sides_agree(forget: bool) -> None:
    """A client's own library reads them, and repeated ones cost next to nothing."""
    texts = [json.dumps({"n": n, "tools": TOOLS * 40}).encode() for n in range(4)]
    frames, inflate = Frames(15, forget), zlib.decompressobj(wbits=-15)
    sizes = []
    for text in [b"{}", *texts]:
        frame = frames.text(text)
        if len(text) < 1000:
            assert frame == Frames().text(text)
            continue
        assert frame[0] == 0xC1
        body = frame[2:] if frame[1] < 126 else frame[4:]
        sizes.append(len(body))
        reader = zlib.decompressobj(wbits=-15) if forget else inflate
        assert reader.decompress(body + b"\x00\x00\xff\xff") == text
    assert max(sizes) < len(texts[0]) // 5


def test_tools_of_several_lines_stay_within_an_event() -> None:
    body = json.dumps({"model": "m", "input": "x", "tools": TOOLS}, indent=2).encode()
    for made in (body, body.replace(b"\n", b"\r\n")):
        begun = Responses().parse(made, {}, STAMP).renderer.begin()
        lines = begun.splitlines()
        assert [line.partition(b": ")[0] for line in lines] == [b"event", b"data", b""] * 2
        assert parts(Frames().of(begun, ""))[0]["response"]["tools"] == TOOLS


def test_an_error_is_an_event_with_its_status() -> None:
    late = ApiError("rate_limit", "Slow down.", code="c", retry_after=2.0)
    event = json.loads(socket.refusal(late, "main"))
    assert (event["type"], event["status"], event["stream_id"]) == ("error", 429, "main")
    assert event["error"] == {
        "message": "Slow down.",
        "type": "rate_limit_error",
        "param": None,
        "code": "c",
    }
    retried = json.loads(socket.error_event({"message": "m"}, 503, "", {"Retry-After": "1"}))
    assert retried["headers"] == retried["error"]["headers"] == {"Retry-After": "1"}
    assert "stream_id" not in retried


def test_a_steer_fails_with_its_input() -> None:
    sent = {"type": "response.steer", "previous_response_id": "resp_1", "input": [{"role": "user"}]}
    event = json.loads(socket.steer_failed(client_event(json.dumps(sent).encode())))
    assert event["error"]["code"] == "steering_not_supported"
    assert event["steer"] == {"previous_response_id": "resp_1", "input": [{"role": "user"}]}
