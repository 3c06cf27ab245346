"""Fields of a request that kvmesh's connectors in vLLM receive, in its `kv_transfer_params`."""

from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kvmesh.bus.messages import Retain, Work
from kvmesh.hashing import TOKEN_BYTES

KEY = "kvmesh"


class RequestOrigin(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields of a request that determine the identity and retention of its blocks; see `Work`.

    `prompt_tokens` excludes tokens generated before a migration.
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
    )


def origin_params(work: Work) -> dict[str, Any]:
    """`kv_transfer_params` with the origin of work."""
    return {KEY: msgspec.to_builtins(origin_of_work(work))}


def request_origin(request: Any) -> RequestOrigin | None:
    """The origin of a vLLM `Request`; None for a request from outside the mesh."""
    params = (request.kv_transfer_params or {}).get(KEY)
    return msgspec.convert(params, RequestOrigin) if params is not None else None
