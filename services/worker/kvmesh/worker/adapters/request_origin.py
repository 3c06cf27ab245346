"""Fields of a request that kvmesh's connectors in vLLM receive, in its `kv_transfer_params`."""

from math import inf
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kvmesh.bus.messages import Retain, Work
from kvmesh.hashing import TOKEN_BYTES
from kvmesh.worker.enginecore.retention_request import is_tentative

KEY = "kvmesh"
MAX_RANGES = 4096
MAX_NAME = 256


class OriginError(ValueError):
    """The origin of a request is invalid."""


class RequestOrigin(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields of a request that determine the identity and retention of its blocks; see `Work`.

    `prompt_tokens` excludes tokens generated before a migration. `traceparent` is that of a traced
    request. A `tentative` prompt says nothing about earlier ones of its session.
    """

    request: str
    salt: int
    prompt_tokens: int = 0
    adapter: str = ""
    tenant: str = ""
    session: str | None = None
    priority: int = 0
    retention: list[Retain] = []
    decode: Retain | None = None
    traceparent: str = ""
    ephemeral: bool = False
    conversation: int = 0
    tentative: bool = False

    @property
    def ranges(self) -> list[Retain]:
        """Retention of the prompt, then that of the output."""
        if self.decode is None:
            return self.retention
        return [*self.retention, replace(self.decode, start=self.prompt_tokens, end=None)]


def origin_of_work(work: Work) -> RequestOrigin:
    """The origin of work from the mesh."""
    return RequestOrigin(
        request=work.request,
        salt=work.salt,
        prompt_tokens=len(work.tokens) // TOKEN_BYTES - work.generated,
        adapter=work.adapter or "",
        tenant=work.tenant,
        session=work.session,
        priority=work.priority,
        retention=work.retention,
        decode=work.decode,
        traceparent=work.traceparent,
        ephemeral=work.ephemeral,
        conversation=work.conversation,
        tentative=is_tentative(work),
    )


def origin_params(work: Work) -> dict[str, Any]:
    """`kv_transfer_params` with the origin of work."""
    return {KEY: msgspec.to_builtins(origin_of_work(work))}


def request_origin(request: Any) -> RequestOrigin | None:
    """The origin of a vLLM `Request`; None for a request from outside the mesh.

    Raises OriginError: callers of a server may send anything.
    """
    params = (request.kv_transfer_params or {}).get(KEY)
    if params is None:
        return None
    try:
        origin = msgspec.convert(params, RequestOrigin)
    except msgspec.ValidationError as error:
        raise OriginError(str(error)) from error
    if len(origin.request) > MAX_NAME:
        raise OriginError(f"its id has more than {MAX_NAME} characters")
    if not 0 <= origin.salt < 1 << 64:
        raise OriginError(f"salt {origin.salt} is not an unsigned integer of 64 bits")
    if not 0 <= origin.conversation < 1 << 64:
        raise OriginError(f"conversation {origin.conversation} is no unsigned integer of 64 bits")
    if not 0 <= origin.prompt_tokens <= request.num_tokens:
        raise OriginError(f"prompt_tokens {origin.prompt_tokens} exceeds the prompt")
    if len(origin.retention) > MAX_RANGES or not all(map(_is_valid, origin.ranges)):
        raise OriginError("a range of retention is invalid")
    return origin


def _is_valid(retain: Retain) -> bool:
    return (
        retain.start >= 0
        and (retain.end is None or retain.end >= retain.start)
        and -1 <= retain.priority <= 100
        and (retain.ttl_s is None or 0 <= retain.ttl_s < inf)
    )
