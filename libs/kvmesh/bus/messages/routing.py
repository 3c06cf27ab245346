"""Overlap queries to the index, placement requests to routers, and routing decisions."""

from typing import TypeAlias

from msgspec import Struct


class OverlapQuery(Struct, frozen=True, array_like=True):
    """Prompts, each as packed sequence hashes.

    `salt`, if they share one and it is known, spares an index divided by namespace asking around.
    """

    prompts: list[bytes]
    salt: int | None = None


class RankKey(Struct, frozen=True, array_like=True):
    """One data-parallel rank of one worker instance."""

    instance: str
    rank: int


class OverlapReply(Struct, frozen=True, array_like=True):
    """For each prompt, rows of five uint32: place in `ranks`, then blocks added by each tier."""

    ranks: list[RankKey]
    rows: list[bytes]
    lag: float = 0.0


class Hints(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the caller said about its request; see docs/requests.md for each field's effect."""

    priority: int = 0
    strict_priority: int = 0
    latency_sensitivity: float = 0.0
    osl: int | None = None
    session: str | None = None
    parent_session: str | None = None
    session_final: bool = False
    tenant: str | None = None
    fair_class: str | None = None


class Placement(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Constraints on the choice of a worker; they bind before any score is computed.

    `tolerate` names taints (labels `taint.NAME`) that do not matter to this request; `prefer`
    maps `KEY=VALUE` labels to weights that scale the cost of the workers which carry them.
    """

    instance: str | None = None
    rank: int | None = None
    exclude: list[str] = []
    allow: list[str] = []
    labels: dict[str, str] = {}
    tolerate: list[str] = []
    prefer: dict[str, float] = {}


class RouteRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where should this prompt run? `sequence` is its packed sequence hashes.

    `deadline_s` bounds the wait in the router's queue, in seconds from now. `salt`, if known,
    spares a divided index asking around. `arrived` is the Unix time of its place in the queue, for
    one that has had a place before: in the queue of another router, or with a worker.
    """

    request: str
    model: str
    sequence_hashes: bytes
    tokens: int
    max_tokens: int
    deadline_s: float
    adapter: str | None = None
    hints: Hints = Hints()
    placement: Placement = Placement()
    policy: str | None = None
    overrides: dict[str, float] = {}
    explain: bool = False
    salt: int | None = None
    arrived: float | None = None


class Candidate(Struct, frozen=True, kw_only=True):
    """One eligible rank at the instant of a decision. Loads and costs in blocks."""

    instance: str
    worker: str
    rank: int
    overlap: list[int]
    prefill: float
    decode: float
    requests: int
    cost: float


class Decision(Struct, frozen=True, kw_only=True, tag="decision", omit_defaults=True):
    """Why a request went where it went. `time` is Unix seconds; `wait_s` its time in the queue.

    `candidates` are the best of the `eligible` ranks, cheapest first; `prefill` is the rank that
    computes the prompt, where that is another one than `chosen`.
    """

    request: str
    model: str
    time: float
    router: str
    policy: str
    chosen: Candidate
    candidates: list[Candidate]
    tokens: int
    sequence_hashes: bytes
    max_tokens: int
    block_size: int = 0
    eligible: int = 0
    prefill: Candidate | None = None
    hints: Hints = Hints()
    wait_s: float = 0.0
    index_s: float = 0.0
    attempt: int = 0
    note: str | None = None


class Outcome(Struct, frozen=True, kw_only=True, tag="outcome", omit_defaults=True):
    """What came of a decision: `cached_tokens` as the engine counted them, times in seconds."""

    request: str
    instance: str
    time: float
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None
    total_s: float
    finish: str


RouteEvent: TypeAlias = Decision | Outcome


class Routed(Struct, frozen=True, kw_only=True, tag="routed"):
    """The chosen rank; the caller dispatches to it, after `prefill` has done the prompt if set."""

    instance: str
    rank: int
    overlap: list[int]
    decision: Decision | None = None
    prefill: RankKey | None = None


class Refused(Struct, frozen=True, kw_only=True, tag="refused"):
    """No placement. `retry_after_s` is when it is worth trying again.

    `code` is "no_workers", "overloaded", "deadline", "invalid" or "unavailable"; one that is not
    known means the last. `unmet`: there are workers, and the request's own constraints exclude them
    all. `moved`: this router stops and has forgotten the request; another one is to place it.
    """

    code: str
    reason: str
    retry_after_s: float = 1.0
    unmet: bool = False
    moved: bool = False


class Parked(Struct, frozen=True, kw_only=True, tag="parked"):
    """The request waits in the queue of `router`; the answer follows.

    `arrived` is the Unix time of its place there. Only who asks a router by its instance is told.
    """

    router: str
    arrived: float


RouteReply: TypeAlias = Routed | Refused

RouteNews: TypeAlias = Parked | Routed | Refused


class Thresholds(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank at or past any of these takes no new request; None does not limit.

    `blocks_share` is active blocks over all blocks of the rank, `prefill_tokens` tokens that wait
    for or are in prefill.
    """

    blocks: int | None = None
    blocks_share: float | None = None
    prefill_tokens: int | None = None


class BanditStats(Struct, frozen=True, kw_only=True):
    """What one router has learned: sums over the outcomes of its own decisions, old ones decayed.

    `gram` is the sum of x xᵀ, row by row, and `moment` that of x y, over contexts x and values y;
    `offsets` maps a rank, or a rank and a prefix family, to count and sum of its residuals.
    """

    count: float
    gram: list[float]
    moment: list[float]
    offsets: dict[str, tuple[float, float]]
