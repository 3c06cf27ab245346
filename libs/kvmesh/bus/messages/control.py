"""Commands and forecasts for workers and kvbms, and questions of operators to services."""

from typing import Literal, TypeAlias

from msgspec import Struct

from kvmesh.bus.messages.work import Retain


class Cancel(Struct, frozen=True, tag="cancel"):
    """Stop generating; idempotent."""

    request: str


class Resend(Struct, frozen=True, tag="resend"):
    """Send this request's tokens again, from generated token number `offset` on."""

    request: str
    offset: int


class Dump(Struct, frozen=True, tag="dump"):
    """Publish all blocks of a rank on the KV stream: `Cleared`, then `Stored` events.

    With `digest`, publish nothing: the reply has a digest of the blocks; with `listed` also their
    fingerprints, if these fit into a message (`kvmesh.index.fingerprints`).
    """

    rank: int
    digest: bool = False
    listed: bool = False


class Drain(Struct, frozen=True, tag="drain"):
    """Accept no new work, finish running requests, then exit."""


class Clear(Struct, frozen=True, tag="clear"):
    """Drop all blocks, but those that running requests use, which the reply then tells.

    Restricted to `tiers` if given, to `model` on a kvbm with several models, and to one namespace
    if `salt` is given, which is that salt and the `tenant` of the work that computed the blocks.
    """

    salt: int | None = None
    tiers: list[int] = []
    model: str | None = None
    tenant: str = ""


class Release(Struct, frozen=True, kw_only=True, tag="release"):
    """Release blocks of these sessions: their prompts will not be extended.

    Advisory and idempotent. Blocks shared with other live sessions or running requests stay.
    """

    sessions: list[str]
    reason: Literal["closed", "compaction", "rewrite"] = "closed"
    successor: str | None = None


class Pin(Struct, frozen=True, kw_only=True, tag="pin"):
    """Retain a prefix, given by its packed sequence hashes, for `ttl_s` seconds; a preference.

    A pin replaces an earlier one with the same id. `tenant` is charged for it.
    """

    id: str
    sequence_hashes: bytes
    ttl_s: float
    priority: int = 100
    tenant: str = ""


class Unpin(Struct, frozen=True, tag="unpin"):
    """Remove a pin."""

    id: str


class Prefetch(Struct, frozen=True, kw_only=True, tag="prefetch"):
    """Load this prompt's blocks from lower tiers into the engine by Unix time `at` (None: now).

    Up to `compute` tokens that no tier holds are computed. A prefetch ends by `Cancel` of `id`, by
    a request whose prompt shares the prefix, or `deadline_s` after `at`. `traceparent` is that of a
    traced prefetch (W3C). `conversation` is as in `Hints`.
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
    traceparent: str = ""
    conversation: int = 0


class ReturnForecast(Struct, frozen=True, array_like=True):
    """A forecast of returns to the prompt of `request`, which has ended on `rank`.

    `rates` are packed rates of return (`kvmesh.returns.rates`); ages count from the Unix time
    `since`. A later forecast for the same request replaces this one; one without any rate withdraws
    it.
    """

    request: str
    rank: int
    since: float
    rates: bytes


class ExpectReturns(Struct, frozen=True, tag="expect_returns"):
    """Expect the returns of these prompts, from a router to a kvbm. No reply is sent."""

    forecasts: list[ReturnForecast]


class LoadAdapter(Struct, frozen=True, kw_only=True, tag="load_adapter"):
    """Load a LoRA adapter within `timeout_s`: that in `folder`, a path on the worker's machine.

    Without a folder it is the one with the identity `adapter`, whose `files` other workers offer
    under that digest. It replaces a loaded adapter of the same name. A `pinned` adapter stays
    loaded; if there is no room, one that is not makes some.
    """

    name: str
    folder: str = ""
    timeout_s: float = 60.0
    adapter: str = ""
    files: str = ""
    pinned: bool = True


class TakeAdapter(Struct, frozen=True, kw_only=True, tag="take_adapter"):
    """A router wants the adapter with this identity loaded, whose `files` other workers offer.

    It replaces no other one, and is not pinned. If there is no room, an adapter that is not pinned
    and was not used for `idle_s` seconds makes some.
    """

    adapter: str
    files: str
    idle_s: float
    timeout_s: float = 60.0


class UnloadAdapter(Struct, frozen=True, kw_only=True, tag="unload_adapter"):
    """Unload a LoRA adapter once its requests have ended, and offer its files to nobody any more.

    It stays loaded if they have not ended in `timeout_s`.
    """

    name: str
    timeout_s: float = 60.0


class Serve(Struct, frozen=True, tag="serve"):
    """Serve whole requests, only prompts, or prefilled and whole requests from now on; idempotent.

    Requests that run or arrive for the earlier role end as they would have. A worker that restarts
    has the role of its settings.
    """

    serves: Literal["aggregated", "prefill", "decode"]


class Promote(Struct, frozen=True, tag="promote"):
    """Take the device, finish the start and serve: for a parked worker; idempotent until it serves.

    The reply says that the start goes on; the worker's card says when it serves.
    """


class Sleep(Struct, frozen=True, tag="sleep"):
    """Finish requests, leave the mesh, free the device, and wait parked; `Promote` wakes it.

    Idempotent while it falls asleep. The reply says that it begins to; the card says when it is.
    """


class ShowEvents(Struct, frozen=True, tag="show_events"):
    """Ask a worker for the counts of its engine's KV events; the reply is an `EventReport`."""


class MeasureImage(Struct, frozen=True, tag="measure_image"):
    """Ask a worker for the tokens that an image of this size in pixels has in a prompt."""

    width: int
    height: int


class PutImage(Struct, frozen=True, tag="put_image"):
    """Keep the file of an image for work that is about to follow; `digest` is its SHA-256."""

    digest: bytes
    data: bytes


class Ping(Struct, frozen=True, tag="ping"):
    """Liveness probe: the server replies "no responders" if the instance is gone."""


AdapterCommand: TypeAlias = LoadAdapter | UnloadAdapter
Control: TypeAlias = (
    Cancel
    | Resend
    | Drain
    | Clear
    | Release
    | Pin
    | Unpin
    | Prefetch
    | AdapterCommand
    | Serve
    | Promote
    | Sleep
    | ShowEvents
    | MeasureImage
    | PutImage
)


class NotCleared(Struct, frozen=True):
    """A tier with blocks that a `Clear` named and that prompts may still find, and the reason."""

    tier: int
    reason: str


class ControlReply(Struct, frozen=True):
    """Reply to a command: `ok` if it applied, else a reason (an unknown request, for example).

    `blocks` counts the blocks concerned, in tier 0 of a worker or in the tiers of a kvbm. `adapter`
    is the identity of the adapter that the command loaded or unloaded; `no_room`: it was not loaded
    as no other may leave now. `not_cleared` are the tiers that a `Clear` left as they are, or
    cleared in part: after an `ok` no prompt finds the blocks that it named. `digest` of a rank's
    blocks holds after all its events below `next_event` and before that one; `fingerprints` as
    requested. `tokens` are those of a measured image.
    """

    ok: bool
    reason: str = ""
    blocks: int = 0
    adapter: str = ""
    digest: int = 0
    next_event: int | None = None
    fingerprints: bytes = b""
    no_room: bool = False
    not_cleared: list[NotCleared] = []
    tokens: int = 0


class RankEvents(Struct, frozen=True, kw_only=True):
    """KV events of one rank's engine since the start, in blocks.

    `kept` reached the index, by tier; `lost` could not, by reason and tier; `unplaced` wait for an
    event that says what precedes them. `malformed` counts messages that could not be decoded.
    `limits` names what the index cannot know of the engine: `draft` or `windows`.
    """

    rank: int
    kept: list[int]
    lost: dict[str, list[int]] = {}
    unplaced: int = 0
    malformed: int = 0
    limits: list[str] = []


class EventReport(Struct, frozen=True):
    """The ranks whose KV events a worker follows; none if its engine tells its blocks itself."""

    ranks: list[RankEvents]


# --- questions of operators to routers and indexers


class ShowSpeeds(Struct, frozen=True, tag="show_speeds"):
    """Ask a router for the measured speed of every rank."""


class RankSpeed(Struct, frozen=True, kw_only=True):
    """Speed of one rank: its work in a given time over that of the median rank of its model.

    If it is an outlier, by which routing scales its cost, it has been one `since` that Unix time.
    """

    model: str
    instance: str
    rank: int
    speed: float
    since: float | None = None


class SpeedReport(Struct, frozen=True):
    """The measured ranks; one that has been idle lately, or alone in its model, is missing."""

    ranks: list[RankSpeed]


class ShowReturns(Struct, frozen=True, tag="show_returns"):
    """Ask a router for the returns that it has learned."""


class ReturnClass(Struct, frozen=True, kw_only=True):
    """Returns to the prompts whose sessions wait for the same, named as in `Outcome.waits_for`.

    Of `prompts` that ended in the class, with less weight for older ones, `returned` were read
    again, and `expected` were to be by the forecasts. `rates` are packed rates of return
    (`kvmesh.returns.rates`).
    """

    model: str
    waits: list[str]
    prompts: float
    returned: float
    expected: float
    rates: bytes


class ReturnCheck(Struct, frozen=True, kw_only=True):
    """Returns to a model's prompts within `within_s` seconds: forecast ones and observed ones."""

    model: str
    within_s: float
    expected: float
    observed: float


class RestingAgent(Struct, frozen=True, kw_only=True):
    """A session with a request that rests, for `rested_s` seconds so far, `ends_in_s` at most."""

    session: str
    owner: str
    tokens: int
    rested_s: float
    ends_in_s: float


class ActiveAgentsReport(Struct, frozen=True, kw_only=True):
    """Agents of a model: those with a place, and those that rest at this router, longest first.

    `window` is the share of the ranks' memory for contexts of active agents, None without a limit;
    `lost_share` that of recent prompts which active agents had computed and found evicted.
    """

    model: str
    active: int
    window: float | None
    lost_share: float
    resting: list[RestingAgent] = []


class ReturnsReport(Struct, frozen=True):
    """The classes of all models, at most a bounded number, of most prompts; checks of forecasts."""

    classes: list[ReturnClass]
    checks: list[ReturnCheck] = []
    agents: list[ActiveAgentsReport] = []


class ShowLearned(Struct, frozen=True, tag="show_learned"):
    """Ask a process for the reports of its learners."""


class LearnerReport(Struct, frozen=True, kw_only=True):
    """One learner of a model: what it learned from, and what it gained over its fallback.

    `learner` and `fallback` are names, `about` the part of the requests that it is about, empty
    for all. It has learned from `observations`. On `held_out` requests that it had not learned from
    yet, `measure` was `own` under the learner and `other` under the fallback; older requests weigh
    less. `gain` is relative to the fallback, positive if the learner is better. `on`: it decides
    now, for the `reason`.
    """

    model: str
    learner: str
    fallback: str
    about: str = ""
    observations: float = 0.0
    held_out: float = 0.0
    measure: str = ""
    own: float = 0.0
    other: float = 0.0
    gain: float = 0.0
    on: bool = True
    reason: str = ""


class LearnedReport(Struct, frozen=True):
    """The learners of one process, at most a bounded number."""

    learners: list[LearnerReport]


class CheckIndex(Struct, frozen=True, kw_only=True, tag="check_index"):
    """Ask an indexer to compare its blocks of one rank with those of the rank's worker, now."""

    instance: str
    rank: int


class IndexCheck(Struct, frozen=True, kw_only=True):
    """Result of a comparison, at one event id of the rank.

    `result` is "equal", "differs", "unknown" (the rank waits for a dump, or the index does not
    have it), "moved" (its events were too fast to compare at one of them) or "failed" for `reason`.
    `held` are blocks of the worker and `indexed` of the index. `missing` of the worker's are not in
    the index, and `extra` only there; both are None if the worker has too many to list.
    """

    result: Literal["equal", "differs", "unknown", "moved", "failed"]
    reason: str = ""
    held: int = 0
    indexed: int = 0
    missing: int | None = None
    extra: int | None = None
