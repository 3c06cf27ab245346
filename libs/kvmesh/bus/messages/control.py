"""Commands to workers and kvbms."""

from typing import Literal, TypeAlias

from msgspec import Struct

from kvmesh.bus.messages.work import Retain


class Cancel(Struct, frozen=True, tag="cancel"):
    """Stop generating; idempotent."""

    request: str


class Resend(Struct, frozen=True, tag="resend"):
    """Publish this request's tokens again, from the `offset`-th generated one."""

    request: str
    offset: int


class Dump(Struct, frozen=True, tag="dump"):
    """Publish everything held by a rank on the KV stream: a `Cleared`, then what is stored."""

    rank: int


class Drain(Struct, frozen=True, tag="drain"):
    """Accept nothing new, finish what runs, then exit."""


class Clear(Struct, frozen=True, tag="clear"):
    """Drop every block that no running request uses, of one namespace and in some tiers if told.

    Who holds blocks of several models drops those of `model`, or of all if that is None. A
    namespace is a `salt` and the `Work.tenant` that its blocks were computed for.
    """

    salt: int | None = None
    tiers: list[int] = []
    model: str | None = None
    tenant: str = ""


class Release(Struct, frozen=True, kw_only=True, tag="release"):
    """The prompts of these sessions will not be extended: nobody keeps blocks for them.

    Advisory and idempotent. What other live sessions or running requests share stays.
    """

    sessions: list[str]
    reason: Literal["closed", "compaction", "rewrite"] = "closed"
    successor: str | None = None


class Pin(Struct, frozen=True, kw_only=True, tag="pin"):
    """Prefer to keep a prefix (packed sequence hashes) for `ttl_s` seconds; the same id replaces.

    `tenant` is whose budget it counts against.
    """

    id: str
    sequence_hashes: bytes
    ttl_s: float
    priority: int = 100
    tenant: str = ""


class Unpin(Struct, frozen=True, tag="unpin"):
    """Forget a pin."""

    id: str


class Prefetch(Struct, frozen=True, kw_only=True, tag="prefetch"):
    """Have this prompt's blocks in engine memory at Unix time `at` (None: now), from lower tiers.

    With `compute`, up to that many tokens that no tier holds are computed. Ended by `Cancel` of
    `id`, by a request whose prompt begins alike, and `deadline_s` after `at`.
    """

    id: str
    tokens: bytes
    salt: int
    tenant: str = ""
    adapter: str | None = None
    session: str | None = None
    retention: list[Retain] = []
    at: float | None = None
    deadline_s: float = 60.0
    compute: int = 0
    rank: int = 0


class Ping(Struct, frozen=True, tag="ping"):
    """Are you there? The answer matters less than the server's "no responders"."""


Control: TypeAlias = Cancel | Resend | Drain | Clear | Release | Pin | Unpin | Prefetch


class ControlReply(Struct, frozen=True):
    """Whether the command applied (an unknown request does not), and why not.

    `blocks` is how many it concerned here, of tier 0 or in the tiers of a kvbm.
    """

    ok: bool
    reason: str = ""
    blocks: int = 0
