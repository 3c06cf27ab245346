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


class Replacement(Struct, frozen=True, kw_only=True):
    """An order to the operator that runs the process `name`: put a new process in its place.

    `order` identifies it. `program` is the environment, or its Python interpreter, of another
    installation on the operator's machine; empty: its own. `by` says who ordered it, `time` the
    Unix time.
    """

    name: str
    order: str
    program: str = ""
    by: str = ""
    time: float = 0.0


class ReplacementReport(Struct, frozen=True, kw_only=True):
    """The state of an order: `error` is the reason why the new process does not serve.

    `ended`: the operator has nothing more to do; after an error, the former program runs again.
    """

    name: str
    order: str
    ended: bool = False
    error: str = ""


class RollRecord(Struct, frozen=True, kw_only=True):
    """A roll of the processes of `service`, from which another command can go on.

    `started` is the Unix time of its beginning. `to` is the wanted program or image, empty for the
    present one. `before` are the instances that it replaces, by name. `stopped` is the reason why
    it has stopped, and it has `ended` once all are replaced.
    """

    service: str
    started: float
    to: str = ""
    before: dict[str, str] = {}
    stopped: str = ""
    ended: bool = False
    by: str = ""


class AliasTarget(Struct, frozen=True):
    """A model, or an adapter, that serves a share of an alias's sessions, by its weight."""

    model: str
    weight: float = 1.0


class ModelAlias(Struct, frozen=True, kw_only=True):
    """A name under which clients reach several models; `by` set it at the Unix time `time`.

    `before` are the targets that it had before the last change, none if it was new, and
    `shadows_before` the shadows. `shadows` get copies of the requests of some sessions, whose
    answers are thrown away; their weight is the percentage of sessions.
    """

    name: str
    targets: list[AliasTarget]
    by: str = ""
    time: float = 0.0
    before: list[AliasTarget] = []
    shadows: list[AliasTarget] = []
    shadows_before: list[AliasTarget] = []


class SettingChange(Struct, frozen=True, kw_only=True):
    """A change of one setting: `by` made it at the Unix time `time`.

    `value` is its text, as on a command line; None: the value with which each process started.
    """

    name: str
    value: str | None
    by: str
    time: float


class ChangedSettings(Struct, frozen=True, kw_only=True):
    """The settings of a service that were changed in the running mesh, by `SECTION.KEY`.

    `changes` are the latest ones, oldest first.
    """

    values: dict[str, str]
    changes: list[SettingChange] = []


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

    `startup_s` is the learned start-up time, `promotion_s` that of a promotion, 0 without parked
    workers; `parked` workers wait, parked or asleep; `asleep` are to sleep in place of being
    stopped, and `may_wait` is the number that the settings permit. `rise` is the most workers that
    were added within one start-up time in the last hours.
    `failed` counts workers that never became ready.
    `step_times` names the model of its workers' step times, "none", "profile" or "fit", `samples`
    counts those of live steps, and `profile_factor` is the measured time over that of the profile.
    Times that hold for the next planner too, in Unix seconds, 0 if never: `manual_at` of the last
    change by hand, `changed_at` of the last change of the pools that serve the same part of
    requests, and `blocked_at` of the last start that was given up.
    """

    ready: int
    starting: int
    before: int
    wanted: int
    startup_s: float
    failed: int = 0
    step_times: str = "none"
    samples: int = 0
    profile_factor: float = 1.0
    parked: int = 0
    asleep: int = 0
    may_wait: int = 0
    rise: int = 0
    promotion_s: float = 0.0
    manual_at: float = 0.0
    changed_at: float = 0.0
    blocked_at: float = 0.0


class SwitchedRole(Struct, frozen=True, kw_only=True):
    """A worker that is to serve the role of pool `target` instead of that of `source`."""

    instance: str
    source: str
    target: str


class ScalingDecision(Struct, frozen=True, kw_only=True):
    """A decision of the planner about one model, with its reasons; `time` in Unix seconds.

    `signals` are the inputs: arrivals per second now and forecast, waiting requests and tokens,
    mean lengths. `kept` are the shares of the requests of the last minutes that kept each promise.
    `unreachable` are promises that even an idle worker cannot keep. `switches` are workers that
    change their roles; the numbers of the pools hold after that. `sleep` are instances that sleep.
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
    switches: list[SwitchedRole] = []
    sleep: list[str] = []
