"""Bodies of the endpoints that move, keep and drop what is cached."""

import secrets
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from kvmesh.bus.messages import Sampling
from kvmesh.frontend.apis.base import Api, Headers
from kvmesh.frontend.apis.cache_ttl import Duration, Priority, seconds
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.apis.completions import Completions
from kvmesh.frontend.apis.messages.api import Messages
from kvmesh.frontend.apis.nvext import Name, Nvext
from kvmesh.frontend.apis.request_hints import apply_hints
from kvmesh.frontend.apis.responses.api import Responses
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import InvalidRequest

DAY = 86400.0
MAX_SESSIONS = 1024

Tokens = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 32)]], Meta(min_length=1)]
ApiName = Literal["chat", "completions", "messages", "responses"]
Lasting = Annotated[float, Meta(gt=0, le=DAY)]
APIS: dict[ApiName, Api] = {
    "chat": Chat(),
    "completions": Completions(),
    "messages": Messages(),
    "responses": Responses(),
}


class PromptBody(Struct, kw_only=True):
    """Which prompt is meant: the last one of a session, tokens, or what a request would hold.

    The fields of a request are those of `api`, whose other fields may be there as well.
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
    """`at` is Unix time, `deadline` seconds after it; `compute` bounds computed tokens."""

    at: Annotated[float, Meta(ge=0)] | None = None
    deadline: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    compute: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0


class PinBody(PromptBody, kw_only=True):
    """The same id again replaces; without one it stands for the prompt. `ttl` at most a day."""

    id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    ttl: Lasting | Duration = 3600.0
    priority: Priority = 100

    def ttl_s(self) -> float:
        """Raises InvalidRequest beyond a day."""
        lasting = seconds(self.ttl) if isinstance(self.ttl, str) else self.ttl
        if lasting > DAY:
            raise InvalidRequest("`ttl`: at most a day.", "ttl")
        return lasting


class UnpinBody(PromptBody, kw_only=True):
    """A pin by its id, or by its prompt."""

    model: str = ""
    id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


class ClearBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Without `tiers` all of them; with `all_tenants` everything of the model.

    What a mistyped field would have spared must not be dropped.
    """

    model: str
    tiers: Annotated[list[Annotated[int, Meta(ge=0, le=3)]], Meta(max_length=4)] = []
    all_tenants: bool = False


class ReleaseBody(Struct, kw_only=True):
    """Sessions whose prompts will not be extended; `successor` is what goes on instead."""

    sessions: Annotated[list[Name], Meta(min_length=1, max_length=MAX_SESSIONS)]
    reason: Literal["closed", "compaction", "rewrite"] = "closed"
    successor: Name | None = None


prefetch_decoder = msgspec.json.Decoder(PrefetchBody)
pin_decoder = msgspec.json.Decoder(PinBody)
unpin_decoder = msgspec.json.Decoder(UnpinBody)
clear_decoder = msgspec.json.Decoder(ClearBody)
release_decoder = msgspec.json.Decoder(ReleaseBody)


def to_request(parsed: PromptBody, body: bytes, headers: Headers) -> GenerateRequest:
    """The request that would have this prompt, with the same salt, tools and reasoning.

    For a session it has no prompt yet. Raises InvalidRequest.
    """
    given = [name for name in ("session", "tokens") if getattr(parsed, name) is not None]
    spoken = [name for name in ("messages", "input", "prompt") if getattr(parsed, name) is not None]
    if len(given) + len(spoken) != 1:
        reason = "One of `session`, `tokens`, `messages`, `input` and `prompt` is needed."
        raise InvalidRequest(reason, ["session", *given, *spoken][-1])
    if spoken:
        return APIS[parsed.api or _api(parsed)].parse(body, headers).request
    request = GenerateRequest(
        id=f"cache-{secrets.token_hex(12)}",
        model=parsed.model,
        sampling=Sampling(max_tokens=0),
        prompts=[parsed.tokens] if parsed.tokens is not None else [],
    )
    apply_hints(request, headers, parsed.nvext, parsed.session)
    return request


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
