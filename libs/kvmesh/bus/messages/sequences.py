"""Active sequences: events that keep the load views of all routers equal."""

from typing import TypeAlias

from msgspec import Struct

from kvmesh.bus.messages.routing import Placement


def prefill_part(request: str) -> str:
    """The name of a request on a rank that only prefills it; it ends with the request at latest."""
    return f"{request}#prefill"


class SeqAdd(Struct, frozen=True, array_like=True, tag="add"):
    """A request was placed. `overlap` is blocks already held; `osl` expected output tokens."""

    request: str
    instance: str
    rank: int
    sequence_hashes: bytes
    tokens: int
    overlap: int
    osl: int
    time: float


class SeqPrefilled(Struct, frozen=True, array_like=True, tag="prefilled"):
    """Its first token is out: it loads the engine with decoding only."""

    request: str


class SeqProgress(Struct, frozen=True, array_like=True, tag="progress"):
    """It has generated this many tokens so far."""

    request: str
    generated: int


class SeqFree(Struct, frozen=True, array_like=True, tag="free"):
    """It has left its engine, for whatever reason, or does not wait for one any more."""

    request: str


class SeqWait(Struct, frozen=True, array_like=True, tag="wait"):
    """It waits in the queue of `router`, until its SeqAdd or SeqFree. Sent again, it replaces.

    Its place is by tier (higher first), then by class in turn, then by `key` (lower first).
    `lane` stands for its constraints, `placement` and `adapter`, which are left out where there are
    none; `cost` is its uncached tokens; times are Unix seconds.
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
