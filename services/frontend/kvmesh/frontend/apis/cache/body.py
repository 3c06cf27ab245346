"""Bodies of the cache endpoints: prefetch, pins, clear and release."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from kvmesh.bus.messages import Sampling
from kvmesh.frontend.apis.base import Api, Headers, RequestStamp
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.apis.chat.body import ChatBody
from kvmesh.frontend.apis.completions import CompletionBody, Completions
from kvmesh.frontend.apis.messages.api import Messages
from kvmesh.frontend.apis.messages.body import MessagesBody
from kvmesh.frontend.apis.nvext import Name, Nvext
from kvmesh.frontend.apis.request_hints import apply_hints
from kvmesh.frontend.apis.responses.api import Responses
from kvmesh.frontend.apis.responses.body import ResponsesBody
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.retention.hints import Duration, Priority, seconds

MAX_PIN_TTL_S = 86400.0
MAX_SESSIONS = 1024
API_FIELDS = ("messages", "input", "prompt")
PROMPT_FIELDS = ("session", "tokens", *API_FIELDS)

Tokens = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 32)]], Meta(min_length=1)]
ApiName = Literal["chat", "completions", "messages", "responses"]
PinTtl = Annotated[float, Meta(gt=0, le=MAX_PIN_TTL_S)]
APIS: dict[ApiName, Api] = {
    "chat": Chat(),
    "completions": Completions(),
    "messages": Messages(),
    "responses": Responses(),
}
BODIES: dict[ApiName, type[Struct]] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "messages": MessagesBody,
    "responses": ResponsesBody,
}
MAX_SHOWN = 64


class PromptBody(Struct, kw_only=True):
    """A prompt: the last one of a session, token ids, or the prompt of a generation request.

    Fields of a generation request are those of `api`; its other fields are allowed, too.
    """

    model: str
    session: Name | None = None
    tokens: Tokens | None = None
    messages: list[Raw] | None = None
    system: str | list[Raw] | None = None
    input: str | list[Raw] | None = None
    prompt: str | list[Raw] | None = None
    tools: list[Raw] | None = None
    api: ApiName | None = None
    nvext: Nvext | None = None


class PrefetchBody(PromptBody, kw_only=True):
    """`at` is in Unix seconds, `deadline` in seconds after it; `compute` bounds computed tokens."""

    at: Annotated[float, Meta(ge=0)] | None = None
    deadline: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    compute: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0


class PinBody(PromptBody, kw_only=True):
    """Replaces a pin of the same id, by default derived from the prompt. `ttl`: up to a day."""

    id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    ttl: PinTtl | Duration = 3600.0
    priority: Priority = 100

    def ttl_s(self) -> float:
        """Seconds; raises InvalidRequest beyond a day."""
        ttl_s = seconds(self.ttl) if isinstance(self.ttl, str) else self.ttl
        if ttl_s > MAX_PIN_TTL_S:
            raise InvalidRequest("`ttl` must be at most a day.", "ttl")
        return ttl_s


class UnpinBody(PromptBody, kw_only=True):
    """A pin by its id, or by its prompt."""

    model: str = ""
    id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


class ClearBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """An empty `tiers` means all; `all_tenants` clears the whole model.

    Unknown fields are refused, so that a mistyped field does not clear more than intended.
    """

    model: str
    tiers: Annotated[list[Annotated[int, Meta(ge=0, le=3)]], Meta(max_length=4)] = []
    all_tenants: bool = False


class ReleaseBody(Struct, kw_only=True):
    """Ended sessions; `successor` is the session that continues instead."""

    sessions: Annotated[list[Name], Meta(min_length=1, max_length=MAX_SESSIONS)]
    reason: Literal["closed", "compaction", "rewrite"] = "closed"
    successor: Name | None = None


prefetch_decoder = msgspec.json.Decoder(PrefetchBody)
pin_decoder = msgspec.json.Decoder(PinBody)
unpin_decoder = msgspec.json.Decoder(UnpinBody)
clear_decoder = msgspec.json.Decoder(ClearBody)
release_decoder = msgspec.json.Decoder(ReleaseBody)


def to_request(
    parsed: PromptBody, body: bytes, headers: Headers, stamp: RequestStamp
) -> GenerateRequest:
    """A generation request of this prompt, with the same salt, tools and reasoning.

    A session's request has no prompt yet. Raises InvalidRequest.
    """
    given = [name for name in PROMPT_FIELDS if getattr(parsed, name) is not None]
    if len(given) != 1:
        names = ", ".join(f"`{name}`" for name in PROMPT_FIELDS)
        raise InvalidRequest(f"Exactly one of {names} is required.", ["session", *given][-1])
    if given[0] in API_FIELDS:
        name = parsed.api or _api(parsed)
        _refuse_unknown(body, type(parsed), BODIES[name])
        call = APIS[name].parse(body, headers, stamp)
        if call.thread is not None and call.thread.referenced([]):
            raise InvalidRequest("`input`: a prompt to cache has no item references.", "input")
        return call.request
    _refuse_unknown(body, type(parsed))
    request = GenerateRequest(
        id=f"cache-{stamp.token}",
        model=parsed.model,
        sampling=Sampling(max_tokens=0),
        prompts=[parsed.tokens] if parsed.tokens is not None else [],
    )
    apply_hints(request, headers, parsed.nvext, parsed.session)
    return request


def _refuse_unknown(body: bytes, *kinds: type[Struct]) -> None:
    """Raise InvalidRequest for a field that none of the types has: it may be mistyped."""
    known = {field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)}
    given = msgspec.json.decode(body, type=dict[str, Raw])
    for name in given:
        if name not in known:
            raise InvalidRequest(f"`{name[:MAX_SHOWN]}` is no field of this request.", name)


def _api(parsed: PromptBody) -> ApiName:
    if parsed.prompt is not None:
        return "completions"
    if parsed.input is not None:
        return "responses"
    return "messages" if parsed.system is not None or _is_anthropic(parsed.tools) else "chat"


class _Tool(Struct):
    input_schema: dict[str, Any] | None = None


def _is_anthropic(tools: list[Raw] | None) -> bool:
    try:
        found = [msgspec.json.decode(tool, type=_Tool).input_schema for tool in tools or []]
    except msgspec.MsgspecError:
        return False
    return any(schema is not None for schema in found)
