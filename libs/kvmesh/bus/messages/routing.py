"""Overlap queries to the index, placement requests to routers, and routing decisions."""

from collections.abc import Container, Iterable
from typing import TypeAlias

from msgspec import Struct

from kvmesh.bus.messages.cache import CacheAccount


class PromptBase(Struct, frozen=True, array_like=True):
    """The first `shared` blocks of a prompt are those of the prompt that ends with the hash `base`.

    The receiver stores the whole prompt under its `salt`; `base` is empty if it is sent whole.
    """

    base: bytes
    shared: int
    salt: int | None


class OverlapQuery(Struct, frozen=True, array_like=True):
    """Prompts, each as packed sequence hashes.

    `salt` is the prompts' common salt, if known: an index sharded by namespace then queries one.
    `traces` are the `traceparent` of those prompts whose requests are traced. With `bases`, one for
    each prompt, `prompts` are what follows the shared blocks.
    """

    prompts: list[bytes]
    salt: int | None = None
    traces: list[str] = []
    bases: list[PromptBase] = []


class RankKey(Struct, frozen=True, array_like=True):
    """One data-parallel rank of one worker instance."""

    instance: str
    rank: int


class Removal(Struct, frozen=True, array_like=True):
    """`blocks` blocks of a prompt, from index `first` on, that a rank has held and removed.

    `time` is in Unix seconds, `reason` as in `Removed`, as is `request`.
    """

    first: int
    blocks: int
    worker: str
    tier: int
    time: float
    reason: str
    request: str | None = None


class OverlapReply(Struct, frozen=True, array_like=True):
    """For each prompt, rows of five uint32: index into `ranks`, then blocks added by each tier.

    `lag`: the reply may be out of date by so many seconds. `removals` are those of each prompt's
    blocks after the longest overlap, in order; empty if there are none of any prompt. The removals
    since the Unix time `since` are all known; 0 if the index remembers none. `incomplete`: there is
    no reply, since the indexer lacks a base of the query; the prompts must be sent whole.
    """

    ranks: list[RankKey]
    rows: list[bytes]
    lag: float = 0.0
    removals: list[list[Removal]] = []
    since: float = 0.0
    incomplete: bool = False


class Hints(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The caller's hints about its request; docs/requests.md describes the effect of each.

    `ephemeral`: no tier below the engine stores the request's blocks. `conversation` tells the
    conversations of a session apart, 0 if unknown: its upper 32 bits identify the tools and the
    system text, its lower ones the first message of the user. `forked_from` is the session whose
    history a new session began with. `load_test`: a load generator sent the request, from which
    nothing is learned about agents.
    """

    priority: int = 0
    strict_priority: int = 0
    latency_sensitivity: float = 0.0
    osl: int | None = None
    session: str | None = None
    parent_session: str | None = None
    session_final: bool = False
    tenant: str | None = None
    fair_class: str | None = None
    ephemeral: bool = False
    conversation: int = 0
    forked_from: str | None = None
    load_test: bool = False


TAINT = "taint."  # before the name of a taint in a label
BATCH_PRIORITY = -100  # of batch requests in engines, which compute them after all others
BATCH_CLASS = "batch API"  # of requests of batches; with the space, no caller can name it


def batch_classes(configured: Iterable[str]) -> frozenset[str]:
    """The classes of batch requests: those of `router.batch_classes`, and that of the batch API."""
    return frozenset((BATCH_CLASS, *configured))


def of_class(hints: Hints, classes: Container[str]) -> bool:
    """True if the class of the request's key, or the caller's own, is among `classes`."""
    return hints.tenant in classes or hints.fair_class in classes


class Placement(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Constraints on the choice of a worker, applied before any score is computed.

    `tolerate` names taints (labels `taint.NAME`) that the request accepts, `taints` those that the
    worker must have; `prefer` maps labels `KEY=VALUE`, or keys, to weights that scale the cost of
    workers with that label. `prefill` names the worker that computes the prompt for another one.
    """

    instance: str | None = None
    rank: int | None = None
    exclude: list[str] = []
    allow: list[str] = []
    labels: dict[str, str] = {}
    tolerate: list[str] = []
    prefer: dict[str, float] = {}
    taints: list[str] = []
    prefill: str | None = None
    prefill_rank: int | None = None


class PrefetchTerms(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Terms of a prefetch, as in `Prefetch`: `compute` tokens at most, by the Unix time `at`."""

    compute: int = 0
    at: float | None = None
    deadline_s: float = 60.0


class RouteRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Request for a placement of one prompt, given by its packed sequence hashes.

    `deadline_s` bounds the wait in the router's queue, in seconds from now. `salt`, if known, saves
    queries to all shards of an index. `arrived` is the Unix time of the original arrival, for a
    request that waited in another router's queue or ran on a worker before. `prefetch` is set if
    the prompt is to be prefetched, not served. `traceparent` is that of a traced request (W3C).
    `alone`: the sender has no other request of the same instant, with which to place this one. With
    a `base`, `sequence_hashes` are what follows its first `shared` blocks, as in `PromptBase`.
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
    prefetch: PrefetchTerms | None = None
    traceparent: str = ""
    alone: bool = False
    base: bytes = b""
    shared: int = 0


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


class Elsewhere(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rank or kvbm that holds most leading `blocks` of a prompt, if it is not the chosen one.

    `reason`: "load" if the policy preferred another rank, "room" if the rank lacks free capacity,
    "busy" if it is past a threshold, "role" if it does not compute such prompts, "constraints" if
    the request's constraints exclude it, "excluded" if it refused the request or was lost with it,
    "draining", or "gone".
    """

    instance: str
    rank: int
    blocks: int
    reason: str


class PossibleHits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Leading blocks of a prompt that the mesh could have reused, when it was placed.

    `chosen`: the rank that computes the prompt holds them; `running`: requests that run hold or
    compute them; `removals` follow the longest overlap. `since` is as in `OverlapReply`.
    """

    chosen: int = 0
    running: int = 0
    elsewhere: Elsewhere | None = None
    removals: list[Removal] = []
    since: float = 0.0


class PrefixWait(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A wait of `seconds` for `request`, which computed `blocks` blocks of the same prefix.

    It did so on `rank` of the worker. `end` is "computed", "late" if it took longer than computing
    the prompt elsewhere would have, or "lost" if it ended without a first token.
    """

    request: str
    instance: str
    worker: str
    rank: int
    blocks: int
    seconds: float
    end: str


class ExpectedReturn(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The return that routers expected of the request `after`, whose prompt a new one continues.

    `after` ended at the Unix time `ended` on `rank` of `instance`, and its session waited for
    `waits`, as in `Outcome.waits_for`. `rates` are packed rates of return, of ages that count from
    `since`. `by` is "class" or "tool": as learned, or from the known end of a tool; it is empty if
    a router of version 0.2 sent nothing. `pause_s` is the pause that came.
    """

    after: str
    instance: str
    rank: int
    ended: float
    pause_s: float
    since: float
    rates: bytes
    by: str = ""
    waits: list[str] = []
    agent: str = ""


class Decision(Struct, frozen=True, kw_only=True, tag="decision", omit_defaults=True):
    """A placement and its reasons. `time` is in Unix seconds; `wait_s` is the time in the queue.

    `candidates` are the best of the `eligible` ranks, cheapest first; `prefill` is the rank that
    computes the prompt, if it differs from `chosen`. `prefetch` is set if the prompt is to be
    prefetched. `possible` is None if the index did not reply. `prefix_waits` are those for requests
    that computed the same prefix, in order; they are part of `wait_s`. `expected` is set if the
    prompt is the first to continue an earlier one.
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
    prefetch: PrefetchTerms | None = None
    possible: PossibleHits | None = None
    prefix_waits: list[PrefixWait] = []
    expected: ExpectedReturn | None = None


class ComputedAhead(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of a prompt that a speculative prefill was to compute before the request.

    They are `tokens` tokens from `first` on, after the answer to the request `after`; `used` of
    them were found cached. `differs`: the prompt is not the predicted one.
    """

    prefetch: str
    after: str
    first: int
    tokens: int
    used: int = 0
    differs: bool = False


class ShownAnswers(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Earlier answers that a prompt shows as they were generated.

    `thinking`: answers that the client had returned without their thinking; `calls`: those with
    tool calls in other words; `edited`: answers whose meaning it had changed, shown as sent.
    """

    answers: int = 0
    thinking: int = 0
    calls: int = 0
    edited: int = 0


class Outcome(Struct, frozen=True, kw_only=True, tag="outcome", omit_defaults=True):
    """Result of a placed request: `cached_tokens` as counted by the engine, times in seconds.

    `finish` is "stop", "length", "cancelled", "error" or "tool_calls", if the answer called a tool.
    `cached_tiers` are the cached tokens by tier; empty if the engine has not counted them. `cache`
    is None then, and of the further choices of a prompt.

    For accounts: `choice` is the sequence's number in its request, and `prompt_tokens` is 0 for
    another choice of the same prompt. `tenant` and `key` are names, `client` the client's own id of
    the request. `device_s` is the share of the device time of its ranks, in device seconds.
    `prepare_s` passed from the arrival to the first query of a router, `route_s` in such queries,
    of that `wait_s` in a router's queue and `index_s` for the index, all attempts together.
    `engine_wait_s` passed in the queue of the engine that computed the prompt, if it reports that.
    `agent` is the kind of the caller's agent. `waits_for` names what the session waits for before
    its next prompt, from coarse to fine, such as ["tool", "Bash", "sleep", "64s"] or ["human"];
    ["end"] if it has ended, and empty if that is not known (docs/requests.md). `shown`: earlier
    answers of the conversation in the prompt, None if none of them is stored. `conversation` is
    the short name of the session's conversation, empty of a raw prompt; `forked_from` and
    `load_test` are as in `Hints`. `alias` is the name that the client used, if it is one of several
    models. `shadow`: of a copy of its request, whose answer nobody got.
    """

    request: str
    instance: str
    time: float
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None
    total_s: float
    finish: str
    ahead: ComputedAhead | None = None
    cached_tiers: list[int] = []
    cache: CacheAccount | None = None
    model: str = ""
    tenant: str = ""
    key: str = ""
    session: str = ""
    client: str = ""
    choice: int = 0
    prompt_tokens: int = 0
    attempts: int = 1
    device_s: float = 0.0
    prepare_s: float = 0.0
    route_s: float = 0.0
    wait_s: float = 0.0
    index_s: float = 0.0
    engine_wait_s: float | None = None
    agent: str = ""
    waits_for: list[str] = []
    shown: ShownAnswers | None = None
    conversation: str = ""
    forked_from: str = ""
    load_test: bool = False
    alias: str = ""
    shadow: bool = False


RouteEvent: TypeAlias = Decision | Outcome


class Routed(Struct, frozen=True, kw_only=True, tag="routed"):
    """The chosen rank. If `prefill` is set, that rank computes the prompt first.

    `needs_handoff`: the chosen rank does not compute the prompt if that fails. `wait_s` and
    `index_s` are those of the decision.
    """

    instance: str
    rank: int
    overlap: list[int]
    decision: Decision | None = None
    prefill: RankKey | None = None
    needs_handoff: bool = False
    possible: PossibleHits | None = None
    wait_s: float = 0.0
    index_s: float = 0.0


class Refused(Struct, frozen=True, kw_only=True, tag="refused"):
    """No placement. The caller may retry after `retry_after_s` seconds.

    `code` is "no_workers", "overloaded", "deadline", "invalid" or "unavailable"; receivers treat an
    unknown code as the last. `unmet`: the request's own constraints exclude all workers. `moved`:
    this router is stopping and has dropped the request; another router must place it. `param` names
    the constraint if no wait helps: it names an instance or a rank that does not exist.
    """

    code: str
    reason: str
    retry_after_s: float = 1.0
    unmet: bool = False
    moved: bool = False
    param: str = ""


class Parked(Struct, frozen=True, kw_only=True, tag="parked"):
    """The request waits in the queue of `router`; the reply follows.

    `arrived` is the Unix time of its arrival there. Sent only for requests to a router's own
    subject, not for those to the queue group.
    """

    router: str
    arrived: float


class UnknownBase(Struct, frozen=True, kw_only=True, tag="unknown_base"):
    """The router lacks the base of the request, which must be sent whole."""


RouteReply: TypeAlias = Routed | Refused

RouteNews: TypeAlias = Parked | Routed | Refused | UnknownBase


class Thresholds(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank at or above any of these gets no new request; None sets no limit.

    `blocks_share` is active blocks over all blocks of the rank; `prefill_tokens` are tokens waiting
    for or in prefill.
    """

    blocks: int | None = None
    blocks_share: float | None = None
    prefill_tokens: int | None = None
