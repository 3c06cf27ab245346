"""The fleet that the planner wants, the answers of those who start and stop workers, and wakes."""

from msgspec import Struct

from kvmesh.bus.messages.discovery import Capacity, ModelCard


class DesiredFleet(Struct, frozen=True, kw_only=True):
    """The number of workers wanted in each pool; `revision` rises with every change.

    `stop` are the names of the workers to stop first where a pool shrinks. `planner` is the
    instance that wrote it, `time` the Unix time.
    """

    revision: int
    pools: dict[str, int]
    stop: list[str] = []
    planner: str = ""
    time: float = 0.0


class FleetReport(Struct, frozen=True, kw_only=True):
    """The answer of an operator, which starts and stops workers, to a `DesiredFleet`.

    `pools` are the numbers of workers that it runs or is starting now; `error` is the reason why it
    could not do all. `workers` are the names of each pool's workers, the next one that it would
    stop of its own choice at the end; empty if it does not know names.
    """

    revision: int
    pools: dict[str, int]
    error: str = ""
    workers: dict[str, list[str]] = {}


class IdleModel(Struct, frozen=True, kw_only=True):
    """A model that may have no worker: its requests wait for one, and frontends post `Wake`s.

    The planner stores it before the last worker may leave, and keeps it while the pool's least size
    is 0, so workers may run. `card` and `capacity` are those of the model's workers, `since` the
    Unix time of the entry. The files of `card` must be in the model store.
    """

    card: ModelCard
    capacity: Capacity | None = None
    since: float = 0.0
    planner: str = ""


class Wake(Struct, frozen=True, kw_only=True):
    """Requests of an idle model wait in one frontend for a worker; repeated while they do.

    `request` is the id of the one that has waited longest. `waiting` counts the sequences, `tokens`
    those of their prompts. `time` is the Unix time.
    """

    model: str
    frontend: str
    request: str
    waiting: int
    tokens: int
    time: float


class FleetCandidate(Struct, frozen=True, kw_only=True):
    """A fleet that the planner considered: workers by pool, and what it would keep.

    `shares` are the shares of requests that would keep each promise, `quantiles` the promised
    quantiles in seconds, both by promise; `busy` is the share of time that its workers step.
    """

    workers: dict[str, int]
    cost: float
    shares: dict[str, float]
    quantiles: dict[str, float]
    busy: float = 0.0


class PoolPlan(Struct, frozen=True, kw_only=True):
    """One pool in a decision: workers ready, starting, wanted before and from now on.

    `startup_s` is the learned start-up time; `failed` counts workers that never became ready.
    """

    ready: int
    starting: int
    before: int
    wanted: int
    startup_s: float
    failed: int = 0


class ScalingDecision(Struct, frozen=True, kw_only=True):
    """A decision of the planner about one model, with its reasons; `time` in Unix seconds.

    `signals` are the inputs: arrivals per second now and forecast, waiting requests and tokens,
    mean lengths. `kept` are the shares of the requests of the last minutes that kept each promise.
    `unreachable` are promises that even an idle worker cannot keep.
    """

    model: str
    time: float
    planner: str
    reason: str
    changed: bool
    pools: dict[str, PoolPlan]
    signals: dict[str, float]
    kept: dict[str, float]
    candidates: list[FleetCandidate] = []
    stop: list[str] = []
    unreachable: list[str] = []
    cost: float = 0.0
    connector: str = ""
