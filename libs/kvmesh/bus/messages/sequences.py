"""Events of active sequences, from which all routers compute the same load."""

from typing import Literal, TypeAlias

from msgspec import Struct

from kvmesh.bus.messages.routing import Placement

_PREFILL = "#prefill"


def prefill_part(request: str) -> str:
    """Return the id of a request's prefill on another rank; it ends with the request at latest."""
    return f"{request}{_PREFILL}"


def prefilled_request(name: str) -> str | None:
    """The request of which this is the id of the prefill; None for another id."""
    return name.removesuffix(_PREFILL) if name.endswith(_PREFILL) else None


class SeqAdd(Struct, frozen=True, array_like=True, tag="add"):
    """The request was placed. `overlap` is in blocks; `osl` is the expected output in tokens.

    With `waits_for`, the rank does not have the request yet: it waits in its router while that
    request computes the same prefix, and another SeqAdd follows. `priority` is that in the engine.
    """

    request: str
    instance: str
    rank: int
    sequence_hashes: bytes
    tokens: int
    overlap: int
    osl: int
    time: float
    waits_for: str = ""
    priority: int = 0


class SeqPrefilled(Struct, frozen=True, array_like=True, tag="prefilled"):
    """The first token is out: from now on the request only decodes."""

    request: str


class SeqProgress(Struct, frozen=True, array_like=True, tag="progress"):
    """The request has generated this many tokens so far."""

    request: str
    generated: int


class SeqFree(Struct, frozen=True, array_like=True, tag="free"):
    """The request has left its engine or a router's queue, for any reason."""

    request: str


class SeqWait(Struct, frozen=True, array_like=True, tag="wait"):
    """The request waits in the queue of `router` until its SeqAdd or SeqFree; the last one counts.

    The queue is ordered by tier (higher first), then by class in turn, then by `key` (lower first).
    `lane` identifies the constraints `placement` and `adapter`, which are None if there are none;
    `cost` is in uncached tokens; times are in Unix seconds.
    """

    request: str
    router: str
    lane: str
    tier: int
    fair_class: str
    key: float
    cost: int
    arrived: float
    deadline: float
    placement: Placement | None = None
    adapter: str | None = None


SeqEvent: TypeAlias = SeqAdd | SeqPrefilled | SeqProgress | SeqFree | SeqWait


class SeqBatch(Struct, frozen=True, array_like=True):
    """Changes to the set of active sequences, in order, from one process."""

    source: str
    events: list[SeqEvent]


ToolState: TypeAlias = Literal["started", "progress", "awaiting_approval", "ended"]


class ToolEvent(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A harness reports a tool of a session: that it started, goes on, ended or waits for a person.

    `call` is the id of the tool call, `tool` its name. `remaining_s` is the harness's own estimate
    of the seconds until the tool ends, from the Unix time `time` on; None if it makes none.
    """

    session: str
    event: ToolState
    time: float
    call: str = ""
    tool: str = ""
    remaining_s: float | None = None
