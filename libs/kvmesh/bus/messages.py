"""Every message on the bus, as a msgspec struct encoded with msgpack.

Compatibility: decoders ignore unknown fields and new fields carry defaults, so services of two
versions run side by side. Messages on the token and event paths are arrays (`array_like`), which
grow at the end only. Hash and token arrays are packed little-endian buffers (uint64 and uint32):
they go from the wire to the native core without a Python object per element.
"""

from enum import StrEnum
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

# --- discovery ---------------------------------------------------------------------------------


class Role(StrEnum):
    """What a process does; the first part of its key in the instances bucket."""

    FRONTEND = "frontend"
    ROUTER = "router"
    INDEXER = "indexer"
    WORKER = "worker"
    KVBM = "kvbm"


class ModelCard(Struct, frozen=True, kw_only=True):
    """What a worker serves. Sizes in tokens and blocks; `files` is a digest in the model store.

    `structural_tags`: the engine follows `Guided` of that kind. The rest is what workers of one
    model must agree on (`kvmesh.bus.compatibility`), empty if not known: the version of the hashes
    of blocks, digests of the tokenizer, of the chat template and of config.json, the revision of
    the weights, and how the engine lays KV out, in words.
    """

    name: str
    context: int
    block_size: int
    files: str
    adapters: list[str] = []
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    images: bool = False
    structural_tags: bool = False
    hash_version: int = 0
    tokenizer: str = ""
    template: str = ""
    config: str = ""
    revision: str = ""
    kv_layout: str = ""


class Capacity(Struct, frozen=True, kw_only=True):
    """Limits of one engine: KV blocks per rank, and what one scheduling step may hold."""

    blocks: int
    max_sequences: int
    max_batched_tokens: int
    dp_ranks: int = 1
    tier_blocks: list[int] = []


class NodeStore(Struct, frozen=True, kw_only=True):
    """The block tiers of one node, on the card of its kvbm. Sizes in bytes, for tiers 1, 2 and 3.

    `directory` is where the node's workers find the arena and put their locks; `models` lists what
    it holds blocks of: a model's place in it is its rank in KV events. `tier_blocks` says how many
    blocks of all models together each tier can have; it is empty if that is not known. `endpoint`
    describes, to whoever uses the same transport, how the arena is read from other nodes. If blocks
    are shared with other nodes, `layouts` are those of its workers by model, in words, and `key` is
    the fingerprint of the key that names them.
    """

    directory: str
    tier_bytes: list[int]
    tier_blocks: list[int] = []
    models: list[str] = []
    endpoint: dict[str, Any] = {}
    layouts: dict[str, list[str]] = {}
    key: str = ""


class Instance(Struct, frozen=True, kw_only=True):
    """One process on the mesh: the value of its lease. `name` stays over restarts.

    `started` is when it joined, by the clock of the NATS server, in Unix seconds. `node` names the
    machine whose memory and disks it can reach. `warnings` are what the process sees to be wrong on
    the mesh while it goes on serving.
    """

    instance: str
    role: Role
    name: str
    version: str
    started: float
    model: ModelCard | None = None
    capacity: Capacity | None = None
    engine: str | None = None
    serves: str = "aggregated"
    draining: bool = False
    endpoint: str | None = None
    labels: dict[str, str] = {}
    node: str = ""
    store: NodeStore | None = None
    warnings: list[str] = []


# --- KV events ---------------------------------------------------------------------------------


class Stored(Struct, frozen=True, array_like=True, tag="stored"):
    """Consecutive blocks now held after `parent` (an engine hash; None at the root of a prompt).

    `engine` and `local` are packed uint64, one per block; `salt` seeds the chain at the root.
    In a dump, blocks whose parent is held no longer name its sequence hash as `previous` instead.
    """

    tier: int
    parent: int | None
    engine: bytes
    local: bytes
    salt: int = 0
    previous: int | None = None


class Removed(Struct, frozen=True, array_like=True, tag="removed"):
    """Blocks no longer held, by engine hash (packed uint64)."""

    tier: int
    engine: bytes


class Cleared(Struct, frozen=True, array_like=True, tag="cleared"):
    """The rank holds nothing any more (in `tier`, or in all). Starts every full dump."""

    tier: int | None = None


KvEvent: TypeAlias = Stored | Removed | Cleared


class KvBatch(Struct, frozen=True, array_like=True):
    """Events of one rank, coalesced over a few milliseconds.

    Event ids are gap-free per (instance, rank): this batch holds `first` … `first + len - 1`. One
    whose acknowledgement was lost may come twice in a row; a gap means that events were lost.
    """

    worker: str
    instance: str
    rank: int
    first: int
    time: float
    events: list[KvEvent]


# --- overlap and route queries -----------------------------------------------------------------


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


# --- active sequences --------------------------------------------------------------------------


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


def owner(tenant: str) -> str:
    """Whose budget a tenant's blocks, pins and prefetches count against.

    A tag is that of an owner, or that and, behind a slash, that of a part of it.
    """
    return tenant.partition("/")[0]


def prefill_part(request: str) -> str:
    """The name of a request on a rank that only prefills it; it ends with the request at latest."""
    return f"{request}#prefill"


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


# --- work and tokens ---------------------------------------------------------------------------


class Guided(Struct, frozen=True, kw_only=True):
    """Constrained decoding: a JSON schema, a regular expression, a grammar or a set of choices."""

    kind: Literal["json_object", "json_schema", "regex", "grammar", "choice", "structural_tag"]
    value: str


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to generate. Names and meanings are those of the OpenAI and vLLM APIs."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    guided: Guided | None = None


class Retain(Struct, frozen=True, array_like=True):
    """How dearly tokens `start` to `end` (None: all that follow) of a prompt are kept.

    `priority` is 0 to 100, and what has the highest is evicted last (TensorRT-LLM's meaning and
    default). `ttl_s` counts from each use; None is no deadline. `kind` says what the tokens are:
    "system", "conversation", "tool", "thinking" or "decode". A caller asked for `explicit` ones
    and is told what came of them.
    """

    start: int
    end: int | None = None
    priority: int = 35
    ttl_s: float | None = None
    kind: str = "conversation"
    explicit: bool = False


class Work(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence for an engine. `tokens` is the packed uint32 prompt.

    The last `generated` tokens of the prompt were generated earlier, by a worker that was lost;
    `sampling` speaks of the whole answer, those tokens included, and chunks count from its start.
    `turn` is how many answers of the conversation come before this one. `handoff` is what the
    engine's own KV connector needs to fetch KV that another engine left; with `prefill` the prompt
    alone is computed and its KV left, and the chunk that ends it says in its `handoff` where.
    `tenant` is the tag that isolates its blocks from others', of which `owner` pays for them: no
    two tenants have the same one, while `salt`, with its 64 bits, only finds blocks.
    `retention` speaks of the prompt, later entries win, and `decode` of what will be generated.
    With `base`, a request whose prompt the worker keeps, the prompt is the first `shared` tokens of
    that one and then `tokens`.
    """

    request: str
    frontend: str
    tokens: bytes
    sampling: Sampling
    salt: int = 0
    adapter: str | None = None
    rank: int = 0
    priority: int = 0
    generated: int = 0
    session: str | None = None
    turn: int = 0
    handoff: dict[str, Any] | None = None
    tenant: str = ""
    parent_session: str | None = None
    retention: list[Retain] = []
    decode: Retain | None = None
    prefill: bool = False
    base: str = ""
    shared: int = 0


class WorkReply(Struct, frozen=True, kw_only=True):
    """The worker's immediate answer; tokens follow on the frontend's subject when accepted.

    `status` is "accepted", "busy", "draining", "invalid" or "incomplete"; with one that is not
    known the work is not taken. With `kept` the prompt may be the `base` of later work, until an
    answer is "incomplete": then it is not there any more, and the work must be offered whole. With
    `checking` a chunk follows once the engine has taken it, or refused it.
    """

    status: str
    reason: str = ""
    kept: bool = False
    checking: bool = False


class Chunk(Struct, array_like=True):
    """New tokens of one request, the first of them its `offset`-th (from 0) generated token.

    The first chunk carries `cached` (prompt tokens not computed, per tier); the last one `finish`
    ("stop", "length", "abort" or "error") and, for errors, `error`; that of a prefill for another
    engine also `handoff`, for the `Work` of the one that goes on. `retention` comes with `cached`:
    for each explicit `Retain` of the prompt "honoured", "clipped" or "unsupported". `decode` comes
    with `finish` and says the same of an explicit `Work.decode`. With `invalid` the request was
    refused after it had been accepted, and no worker will take it.
    """

    request: str
    offset: int
    tokens: list[int]
    finish: str | None = None
    error: str | None = None
    cached: list[int] | None = None
    logprobs: list[dict[int, float]] | None = None
    handoff: dict[str, Any] | None = None
    retention: list[str] | None = None
    decode: str | None = None
    invalid: bool = False


class StepOutput(Struct, array_like=True):
    """All that one engine step produced for one frontend."""

    instance: str
    chunks: list[Chunk]


# --- control and load --------------------------------------------------------------------------


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


class SessionQuery(Struct, frozen=True):
    """To all frontends: the last prompt of a session, from whoever knows it; others say nothing."""

    model: str
    session: str


class KeyUse(Struct, frozen=True, array_like=True):
    """The use of an API key's limits. `key` is the hash of its secret.

    `requests` and `tokens` were taken by one frontend since it began, `running` are its sequences
    now. What is owed has still to come in at the key's rates, whoever took it.
    """

    key: str
    requests: int
    tokens: int
    running: int
    owed_requests: float = 0.0
    owed_tokens: float = 0.0


class LimitUse(Struct, frozen=True):
    """One frontend to all others: what it lets its callers use, and for how long it has told so.

    `asks` them to say all in turn.
    """

    frontend: str
    uses: list[KeyUse] = []
    age: float = 0.0
    asks: bool = False


class SessionPrompt(Struct, frozen=True):
    """The last prompt of a session: packed uint32 tokens, and the adapter that it was for."""

    tokens: bytes
    adapter: str | None = None


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


class Load(Struct, frozen=True, kw_only=True):
    """Forward-pass metrics of one rank. Blocks and tokens now; counters since the start.

    `step_s` is the mean of the last steps. `busy_s` is the time in steps, 0 where the engine does
    not tell it, and `computed_tokens` the prompt tokens computed, both since the start.
    """

    instance: str
    rank: int
    running: int
    waiting: int
    active_blocks: int
    cached_blocks: int
    total_blocks: int
    prefill_tokens: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests: int
    preemptions: int = 0
    aborted: int = 0
    step_s: float = 0.0
    busy_s: float = 0.0
    computed_tokens: int = 0


# --- codecs ------------------------------------------------------------------------------------

encode = msgspec.msgpack.Encoder().encode
