"""Interfaces of an API: pure translation between its wire form and the internal form."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Raw, Struct

from kvmesh.frontend.apis import faults
from kvmesh.frontend.apis.body_types import allowed_at, list_fields
from kvmesh.frontend.conversation import AnswerEvent, ConversationSummary, GenerateRequest
from kvmesh.frontend.errors import ApiError, InvalidRequest

if TYPE_CHECKING:
    from kvmesh.frontend.apis.responses.thread import KeptConversation
    from kvmesh.frontend.apis.turns.bodies import TurnBody  # which decodes with this module

T = TypeVar("T")
Headers = Mapping[str, str]
json_encode = msgspec.json.Encoder().encode
_PLACE = re.compile(r" - at (?:`key` in )?`\$(.*)`$")
_PATTERN = re.compile(r"Expected `str` matching regex '.*'")
# An escape of JSON: both halves of a character, one of them, or the start of another one.
_HALF, _LOW = rb"u[dD][89a-fA-F][0-9a-fA-F]{2}", rb"u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\%b|%b|.)" % (_LOW, _HALF), re.DOTALL)
_HALF_LENGTH = len(rb"\ud83d")
_MISSING = re.compile(r"missing required field `(\w+)`")
_any_json: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class RequestStamp(NamedTuple):
    """Identity and time of a request, made by the HTTP layer so that APIs stay pure.

    `token` is a random hex string from which all ids of the answer derive; `created` is in Unix
    seconds.
    """

    token: str
    created: int


class Usage(Struct, frozen=True):
    """Token counts reported by the engine.

    `cached` of the `prompt` tokens were read from a cache. `stored` others are cached from now on,
    `stored_1h` of them for at least an hour, as requested. `reasoning` is part of `output`.
    `diagnostics` is Anthropic's diagnosis of the cache, if the request asks for it.
    """

    prompt: int
    cached: int
    stored: int
    output: int
    reasoning: int = 0
    stored_1h: int = 0
    diagnostics: dict[str, Any] | None = None


class AnswerSummary(Struct, frozen=True):
    """Usage, and the fields that `nvext.extra_fields` requested."""

    usage: Usage
    nvext: dict[str, Any] | None = None


class Ending(Struct, frozen=True):
    """Reason for the end of one choice ("stop" or "length"), and the stop string that ended it."""

    reason: str
    stop: str | None = None


class TopLogprob(Struct, frozen=True):
    """One of the most likely tokens: its text, log-probability and bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    """One generated token as its answer's text shows it, and the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob] = []


SoFar = Callable[[], AnswerSummary]


class Renderer(Protocol):
    """The answer to one request in an API's form. Every method returns bytes ready to send.

    A stream is `begin`, with a function for the summary of the answer so far, `started` at the
    first token, `events` of a choice as they arrive, `end` of each choice, `done`; `failed`
    replaces the rest. For a whole answer, the results of `events` and `end` are dropped and `whole`
    returns the body. `logprobs` are those of the events' text.
    """

    def begin(self, so_far: SoFar | None = None) -> bytes: ...

    def started(self, usage: Callable[[], Usage]) -> bytes: ...

    def events(
        self, choice: int, events: list[AnswerEvent], logprobs: list[TokenLogprob]
    ) -> bytes: ...

    def end(self, choice: int, ending: Ending) -> bytes: ...

    def done(self, summary: AnswerSummary) -> bytes: ...

    def failed(self, error: ApiError) -> bytes: ...

    def whole(self, summary: AnswerSummary) -> bytes: ...


class StoredTurn(Struct):
    """One turn of a stored conversation: its input and output items as JSON, and its response.

    `previous` is the id of the turn before it; only `tenant` may read it. `compacted`: its output
    has a summary, which stands for all before it. `conversation` has the items before it, if it was
    added to one.
    """

    id: str
    previous: str | None
    input: list[Raw]
    output: list[Raw]
    response: Raw
    tenant: str = ""
    compacted: bool = False
    conversation: str = ""


class ConversationThread(Protocol):
    """The conversation that a request continues, and whether to store its turn.

    That is the one up to the response `previous`, or the stored `conversation`, to which the turn
    is added.

    `kept` is the conversation if the request's connection has it; it `keeps` this turn, too.
    """

    previous: str | None
    conversation: str | None
    store: bool

    @property
    def kept(self) -> "KeptConversation | None": ...

    @property
    def keeps(self) -> bool: ...

    def referenced(self, turns: list[StoredTurn]) -> Mapping[str, Collection[int]]:
        """Stored responses whose items the request or its earlier `turns` refer to, by id.

        Their output is meant, and the items of their input at these places.
        """
        ...

    def extend(self, turns: list[StoredTurn], outputs: Mapping[str, Sequence[Raw]]) -> None:
        """Prepend the earlier turns, oldest first, to the request, and resolve its references.

        `outputs` are the items of the responses referenced, without those not found.
        Raises InvalidRequest for an item that they lack.
        """
        ...

    def turn(self, response: bytes) -> StoredTurn:
        """The turn to store; `response` is the whole answer."""
        ...

    def mark_unstored(self) -> None:
        """Make the answer say that it was not stored."""
        ...

    def added(self, response: bytes) -> list[Raw]:
        """The items to add to `conversation`; `response` is the whole answer."""
        ...

    def mark_not_added(self) -> None:
        """Make the answer say that it is in no conversation."""
        ...

    def keep(self, response: bytes) -> None:
        """Keep the conversation up to this whole answer for the next request."""
        ...


class UnseenAnswer:
    """The renderer of an answer that no client sees."""

    def begin(self, so_far: SoFar | None = None) -> bytes:
        return b""

    def started(self, usage: Callable[[], Usage]) -> bytes:
        return b""

    def events(self, choice: int, events: list[AnswerEvent], logprobs: list[TokenLogprob]) -> bytes:
        return b""

    def end(self, choice: int, ending: Ending) -> bytes:
        return b""

    def done(self, summary: AnswerSummary) -> bytes:
        return b""

    def failed(self, error: ApiError) -> bytes:
        return b""

    def whole(self, summary: AnswerSummary) -> bytes:
        return b""


class ApiCall(Struct):
    """A parsed request with the renderer of its answer; `thread` if the API stores responses.

    `go_on` is set for an answer in the background, which outlives its connection and its frontend:
    it makes the renderer continue the numbers of the events at the given one. `compacted` tells the
    renderer of a summary with which the answer begins, or with True in which it consists.
    `preload`: the prompt is computed ahead, and there is no answer.
    """

    request: GenerateRequest
    renderer: Renderer
    thread: ConversationThread | None = None
    go_on: Callable[[int], None] | None = None
    compacted: Callable[[ConversationSummary, Usage, bool], None] | None = None
    preload: bool = False


class CountCall(Struct):
    """A parsed request whose prompt is counted; `thread` if the API stores responses."""

    request: GenerateRequest
    thread: ConversationThread | None = None


class Api(Protocol):
    """One API. `keepalive` is the frame of an idle stream; `id_prefix` starts the request ids.

    `in_order`: clients return the text, thinking and calls of an answer in generation order, not
    grouped by kind.
    """

    @property
    def name(self) -> str: ...

    @property
    def id_prefix(self) -> str: ...

    @property
    def keepalive(self) -> bytes: ...

    @property
    def in_order(self) -> bool: ...

    def parse(
        self, body: bytes, headers: Headers, stamp: RequestStamp, turn: "TurnBody | None" = None
    ) -> ApiCall:
        """`turn` is the body beside an earlier one.

        Raises ApiError, mostly InvalidRequest with the field.
        """
        ...


class ErrorShape(Protocol):
    """The form of an API's error responses."""

    def error(self, error: ApiError, request_id: str) -> tuple[int, bytes]:
        """Status and body."""
        ...


def decode(decoder: "msgspec.json.Decoder[T]", body: bytes, where: str = "") -> T:
    """Decode a body, or the part of one at `where`; raises InvalidRequest with the field.

    Floats without a fraction are integers where these are expected.
    """
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            return _with_integers(decoder, body, error)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), decoder.type, where) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        mended = whole_characters(body)
        if mended != body:
            return decode(decoder, mended, where)
        raise InvalidRequest(f"The body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error


def decode_part(raw: Raw | bytes, where: str) -> Any:
    """Decode a part of a body of any form; raises InvalidRequest, as for numbers out of range."""
    return decode(_any_json, bytes(raw), where)


def missing(where: str) -> InvalidRequest:
    """The error for a field that is missing or empty at `where`."""
    return InvalidRequest(f"`{where}`: missing.", where, faults.MISSING)


def whole_characters(body: bytes) -> bytes:
    r"""The JSON with `\ufffd` for each escaped half of a character, such as `\ud83d` alone.

    Clients that cut a text at a number of UTF-16 units leave one half in their history for ever.
    """
    return _ESCAPE.sub(_whole_character, body)


def _whole_character(escape: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if len(escape[0]) == _HALF_LENGTH else escape[0]


def decode_query(query: Mapping[str, str], kind: type[T]) -> T:
    """Decode the parameters of a URL; raises InvalidRequest with the parameter.

    A list has a parameter for each of its values, whose name may end in brackets.
    """
    lists, found = list_fields(kind), dict[str, Any]()
    for key, text in query.items():
        if (name := key.removesuffix("[]")) in lists:
            found.setdefault(name, []).append(text)
        else:
            found.setdefault(key, text)
    try:
        return msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), kind, "") from error


def _with_integers(
    decoder: "msgspec.json.Decoder[T]", body: bytes, fault: msgspec.ValidationError
) -> T:
    """The decoded body if whole floats are its only fault; raises the first other one."""
    for _ in range(faults.MAX_FIELDS):
        changed = faults.with_integers(body, fault)
        if changed is None:
            break
        try:
            return decoder.decode(changed)
        except msgspec.ValidationError as error:
            body, fault = changed, error
    raise fault


def _invalid(text: str, kind: Any, where: str) -> InvalidRequest:
    reason, path = (*_PLACE.split(text), "")[:2]
    code = faults.code_of(reason)
    allowed = allowed_at(kind, path)
    if allowed:
        reason = f"{_PATTERN.sub('Invalid value', reason)}; allowed: {allowed}"
    path = f"{where}{path}".lstrip(".")
    missing = _MISSING.search(reason)
    if missing is not None:
        path = f"{path}.{missing[1]}".lstrip(".")
    return InvalidRequest(f"`{path}`: {reason}" if path else reason, path or None, code)


def check_range(value: float | None, low: float, high: float, param: str) -> None:
    if value is not None and not low <= value <= high:
        noun = "decimal" if isinstance(value, float) else "integer"
        code = faults.bound_code(noun, value > high)
        raise InvalidRequest(f"`{param}` must be between {low} and {high}.", param, code)


def check_length(length: int, low: int, high: int, param: str) -> None:
    """Check the number of entries of a list; raises InvalidRequest."""
    if length < low:
        raise InvalidRequest(f"`{param}` must not be empty.", param, "empty_array")
    if length > high:
        reason = f"`{param}` has more than {high} entries."
        raise InvalidRequest(reason, param, "array_above_max_length")


def as_json(value: Any) -> str:
    """Compact JSON text."""
    return json_encode(value).decode()
