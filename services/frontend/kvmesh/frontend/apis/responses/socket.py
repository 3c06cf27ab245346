"""Responses over a WebSocket: the client's events, and the server's beside those of answers. Pure.

The wire form is that of OpenAI's WebSocket mode: a `response.create` has the fields of a body, and
`stream_id` names its lane.
"""

import re
import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw, Struct

from kvmesh.frontend.apis import openai
from kvmesh.frontend.apis.base import ApiCall, Headers, RequestStamp, decode, json_encode
from kvmesh.frontend.apis.responses.api import Responses
from kvmesh.frontend.apis.responses.thread import Keep, KeptConversation, KeptThread
from kvmesh.frontend.apis.turns.bodies import TurnBody
from kvmesh.frontend.errors import ApiError, InvalidRequest

CREATE, STEER = "response.create", "response.steer"
SILENT = frozenset(("response.processed",))  # events of Codex that need no answer
ENVELOPE = ("type", "stream_id")
END, DATA = b"\n\n", b"data: "  # of server-sent events
_LANE = re.compile(r"[A-Za-z0-9_.-]{1,256}")
# Fields of `client_metadata` by which Codex sends what its HTTP requests have in headers.
METADATA = {
    "session_id": "session-id",
    "thread_id": "thread-id",
    "x-codex-turn-metadata": "x-codex-turn-metadata",
    "x-codex-parent-thread-id": "x-codex-parent-thread-id",
    "x-openai-subagent": "x-openai-subagent",
    "ws_request_header_traceparent": "traceparent",
    "ws_request_header_tracestate": "tracestate",
}
TEXT, COMPRESSED, SHORT, MEDIUM = 0x81, 0x40, 126, 1 << 16  # of frames: bits, bounds of lengths
LEVEL = 1
LEAST, MOST = 1 << 10, 1 << 20  # bytes of a text that is compressed: response objects, mostly
TAIL = b"\x00\x00\xff\xff"  # of a flush, which messages leave out


class ClientEvent(Struct):
    """The part of an event that the connection needs; the fields of a body are decoded later."""

    type: Any = None
    stream_id: Any = None
    previous_response_id: Any = None
    client_metadata: Any = None
    input: Raw = Raw(b"null")

    @property
    def lane(self) -> str:
        """The lane's name, empty for the default one; raises InvalidRequest."""
        if self.stream_id is None:
            return ""
        if not isinstance(self.stream_id, str) or not _LANE.fullmatch(self.stream_id):
            reason = "`stream_id` has 1 to 256 letters, digits, underscores, hyphens and periods."
            raise InvalidRequest(reason, "stream_id", "invalid_stream_id")
        return self.stream_id

    @property
    def headers(self) -> dict[str, str]:
        """The headers that its `client_metadata` stands for."""
        found = self.client_metadata if isinstance(self.client_metadata, dict) else {}
        named = {METADATA[name]: text for name, text in found.items() if name in METADATA}
        return {name: text for name, text in named.items() if isinstance(text, str)}


_event = msgspec.json.Decoder(ClientEvent)


def client_event(data: bytes) -> ClientEvent:
    """Decode an event; raises InvalidRequest."""
    return decode(_event, data)


class SocketResponses(Responses):
    """The Responses API of one `response.create`.

    It continues `kept`, if the connection has the conversation; `keep` gets it at its end.
    """

    def __init__(self, kept: KeptConversation | None, keep: Keep) -> None:
        super().__init__(partial(KeptThread, kept=kept, keep=keep))

    def parse(
        self, body: bytes, headers: Headers, stamp: RequestStamp, turn: TurnBody | None = None
    ) -> ApiCall:
        call = super().parse(body, headers, stamp, turn)
        if call.go_on is not None:
            reason = "`background` is not supported over a WebSocket; use POST."
            raise InvalidRequest(reason, "background")
        call.request.stream = True
        call.request.ignored = [name for name in call.request.ignored if name not in ENVELOPE]
        return call


def error_event(
    error: dict[str, Any], status: int, lane: str, headers: Mapping[str, str] | None = None
) -> bytes:
    """The event of a request that was refused; `error` is the object of an HTTP response."""
    retry = {"headers": headers} if headers else {}  # Codex reads them outside of `error`
    event = {"type": "error", "status": status, "error": {**error, **retry}, **retry}
    return json_encode({**event, "stream_id": lane} if lane else event)


def refusal(error: ApiError, lane: str) -> bytes:
    """The event of an event that the connection itself refuses."""
    return error_event(openai.error_object(error)["error"], openai.status_of(error), lane)


def steer_failed(event: ClientEvent) -> bytes:
    """The answer to a `response.steer`: no engine takes input during an answer."""
    reason = "Responses are not steered; send the input with the next `response.create`."
    return json_encode(
        {
            "type": "response.steer.failed",
            "sequence_number": 0,
            "steer": {"previous_response_id": event.previous_response_id, "input": event.input},
            "error": {
                "type": "invalid_request_error",
                "code": "steering_not_supported",
                "message": reason,
            },
        }
    )


class Frames:
    """Texts as the frames of one connection, as servers send them: unmasked (RFC 6455).

    `window`: the bits of the compression that both sides have agreed on (RFC 7692), 0 for none;
    with `forget`, each message is compressed alone. Long texts are compressed, since the objects
    of a connection's responses repeat each other.
    """

    def __init__(self, window: int = 0, forget: bool = False) -> None:
        self._window = window
        self._flush = zlib.Z_FULL_FLUSH if forget else zlib.Z_SYNC_FLUSH
        self._deflate: zlib._Compress | None = None

    def of(self, events: bytes, lane: str) -> bytes:
        """A frame for each of the server-sent events, with the lane that they are of."""
        head = b'{"stream_id":"%b",' % lane.encode() if lane else b""
        frames = []
        for event in events.split(END):
            data = event.partition(DATA)[2]
            if data:
                frames.append(self.text(head + data[1:] if head else data))
        return b"".join(frames)

    def text(self, text: bytes) -> bytes:
        """The frame of a text."""
        bits = TEXT
        if self._window and LEAST <= len(text) <= MOST:
            if self._deflate is None:
                self._deflate = zlib.compressobj(LEVEL, wbits=-self._window)
            text = (self._deflate.compress(text) + self._deflate.flush(self._flush)).removesuffix(
                TAIL
            )
            bits |= COMPRESSED
        size = len(text)
        if size < SHORT:
            return bytes((bits, size)) + text
        if size < MEDIUM:
            return bytes((bits, SHORT)) + size.to_bytes(2, "big") + text
        return bytes((bits, SHORT + 1)) + size.to_bytes(8, "big") + text
