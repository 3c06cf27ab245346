"""Hints in the body of a request to vLLM's own server, in `vllm_xargs`; pure, without vLLM."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvmesh.bus.messages import Retain
from kvmesh.hashing import salt
from kvmesh.retention.hints import (
    RETAIN_PRIORITY,
    CacheMark,
    Duration,
    Priority,
    Retention,
    seconds,
    to_directives,
)
from kvmesh.worker.adapters.request_origin import RequestOrigin

Name = Annotated[str, Meta(min_length=1, max_length=256)]
MAX_BYTES = 65536
DURATION_FORM = 'a duration is a whole number with a unit, such as "30s", "5m", "2h" or "1d"'


class HintError(ValueError):
    """A hint is malformed; the message is for its caller."""


class PinHint(Struct, frozen=True, forbid_unknown_fields=True):
    """Pin the prompt under an id for `ttl`; a later pin with the id replaces it."""

    id: Name
    ttl: Duration = "1h"
    priority: Priority = 100

    @property
    def ttl_s(self) -> float:
        return seconds(self.ttl)


class RequestHint(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Retention that one request asks for; the fields are those of the mesh's `nvext`.

    `cache_control` retains the whole prompt. `session` names the conversation: its next prompts
    supersede this one. With `final` the session is released when the request ends. Blocks of an
    `ephemeral` request are not written to lower tiers.
    """

    cache_control: CacheMark | None = None
    retention: Retention | None = None
    pin: PinHint | None = None
    session: Name | None = None
    final: bool = False
    ephemeral: bool = False


_decoder = msgspec.json.Decoder(RequestHint)


def plain_fault(error: msgspec.MsgspecError | ValueError) -> str:
    """The fault of a body in words: its field, the reason, and the form of a duration."""
    reason, _, path = str(error).partition(" - at `$")
    field = path.strip("`.")
    if field.rpartition(".")[2] == "ttl":
        reason = DURATION_FORM
    return f"`{field}`: {reason}" if field else reason


def parse_hint(value: Any) -> RequestHint:
    """The hint in `vllm_xargs.kvmesh`, a JSON text; raises HintError."""
    if not isinstance(value, str):
        raise HintError("`vllm_xargs.kvmesh` must be a string with JSON")
    if len(value) > MAX_BYTES:
        raise HintError(f"the hint is longer than {MAX_BYTES} characters")
    try:
        hint = _decoder.decode(value)
        to_directives(hint.retention)
    except (msgspec.MsgspecError, ValueError) as error:
        raise HintError(plain_fault(error)) from error
    return hint


def hinted_origin(
    hint: RequestHint,
    request: str,
    prompt_tokens: int,
    *,
    cache_salt: str = "",
    adapter: str = "",
    session: str | None = None,
) -> RequestOrigin:
    """The origin of a request from outside a mesh; its `cache_salt` is the tenant.

    `session` is vLLM's own `session_id`, which the hint's overrides.
    """
    ranges, decode = to_directives(hint.retention)
    if hint.cache_control is not None:
        mark = Retain(0, None, RETAIN_PRIORITY, hint.cache_control.ttl_s(), explicit=True)
        ranges = [mark, *ranges]
    return RequestOrigin(
        request=request,
        salt=namespace(cache_salt, adapter),
        prompt_tokens=prompt_tokens,
        adapter=adapter,
        tenant=cache_salt,
        session=hint.session or session,
        retention=ranges,
        decode=decode,
        ephemeral=hint.ephemeral,
        tentative=hint.ephemeral,
    )


def namespace(cache_salt: str, adapter: str = "") -> int:
    """The salt of the blocks of a `cache_salt` and an adapter."""
    return salt("", adapter, cache_salt)


def outcome_report(retain: Retain, outcome: str) -> dict[str, Any]:
    """A directive with its outcome, as responses report it."""
    return {
        "start": retain.start,
        "end": retain.end,
        "priority": retain.priority,
        "duration_s": retain.ttl_s,
        "outcome": outcome,
    }
