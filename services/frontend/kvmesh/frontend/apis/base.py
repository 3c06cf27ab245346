"""What an API surface is: a pure translation between its wire form and the internal one."""

import re
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Raw, Struct

from kvmesh.frontend.conversation import AnswerEvent, GenerateRequest
from kvmesh.frontend.errors import ApiError, InvalidRequest

T = TypeVar("T")
Headers = Mapping[str, str]
json_encode = msgspec.json.Encoder().encode
_MISSING = re.compile(r"missing required field `(\w+)`")


class Usage(Struct, frozen=True):
    """Token counts as the engine knows them. Of `prompt`, `cached` tokens were read from a cache

    and the next `stored` are in one from now on, `lasting` of them for an hour or longer because
    the caller asked for it; `reasoning` is part of `output`.
    """

    prompt: int
    cached: int
    stored: int
    output: int
    reasoning: int = 0
    lasting: int = 0


class AnswerSummary(Struct, frozen=True):
    """What is known at the end: counts, and what `nvext.extra_fields` asked for."""

    usage: Usage
    nvext: dict[str, Any] | None = None


class Ending(Struct, frozen=True):
    """Why one choice ended ("stop" or "length"), and the stop string if one was met."""

    reason: str
    stop: str | None = None


class TokenLogprob(Struct, frozen=True):
    """One generated token: its text, bytes and log-probability, and the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: "list[TokenLogprob]" = []


class Renderer(Protocol):
    """The answer to one request in one API's form. Every method returns bytes ready to send.

    A streaming answer is `begin`, `started` at the first token, `events` per choice as they come,
    `end` per choice, `done`; `failed` replaces what is left. A whole answer is `events` and `end`
    (what they return is dropped) and then `whole`.
    """

    def begin(self) -> bytes: ...

    def started(self, usage: Usage) -> bytes: ...

    def events(
        self, choice: int, events: list[AnswerEvent], logprobs: list[TokenLogprob]
    ) -> bytes: ...

    def end(self, choice: int, ending: Ending) -> bytes: ...

    def done(self, summary: AnswerSummary) -> bytes: ...

    def failed(self, error: ApiError) -> bytes: ...

    def whole(self, summary: AnswerSummary) -> bytes: ...


class StoredTurn(Struct):
    """One turn of a stored conversation: JSON items that came in and went out, and its response.

    `previous` is the turn before it, `tenant` whoever may read it.
    """

    id: str
    previous: str | None
    input: list[Raw]
    output: list[Raw]
    response: Raw
    tenant: str = ""


class ConversationThread(Protocol):
    """A request's place in a stored conversation."""

    previous: str | None
    store: bool

    def extend(self, turns: list[StoredTurn]) -> None:
        """Take in the turns before this one, oldest first."""
        ...

    def turn(self, response: bytes) -> StoredTurn: ...

    def unstored(self) -> None:
        """The answer is to say that it was not stored."""
        ...


class ApiCall(Struct):
    """A parsed request with the renderer of its answer; `thread` where the API stores them."""

    request: GenerateRequest
    renderer: Renderer
    thread: ConversationThread | None = None


class Api(Protocol):
    """One API. `keepalive` is what a stream that has nothing to say sends.

    `in_order`: text, thinking and calls of an answer come back as they went out, not each by kind.
    """

    @property
    def name(self) -> str: ...

    @property
    def keepalive(self) -> bytes: ...

    @property
    def in_order(self) -> bool: ...

    def parse(self, body: bytes, headers: Headers) -> ApiCall:
        """Raises ApiError (InvalidRequest naming the field, mostly)."""
        ...

    def error(self, error: ApiError) -> tuple[int, bytes]:
        """Status and body of an answer that is only an error."""
        ...


def decode(decoder: "msgspec.json.Decoder[T]", body: bytes) -> T:
    """Decode a body, or raise InvalidRequest that names the field at fault."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _at_fault(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error


def _at_fault(text: str) -> InvalidRequest:
    reason, _, path = text.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    missing = _MISSING.search(reason)
    if missing is not None:
        path = f"{path}.{missing[1]}".lstrip(".")
    return InvalidRequest(f"`{path}`: {reason}" if path else reason, path or None)


def check_range(value: float | None, low: float, high: float, param: str) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"`{param}` must be between {low} and {high}.", param)


def as_json(value: Any) -> str:
    """Compact JSON text."""
    return json_encode(value).decode()
