"""The instances of a mesh with their latest loads, rates and relative speeds. Pure."""

from collections import deque

from kvmesh.bus.discovery.compatibility import misfits
from kvmesh.bus.discovery.directory import READY
from kvmesh.bus.discovery.leases import REFUSED_STATE, STATE
from kvmesh.bus.messages import Instance, Load, ModelCard, Role, Starting
from kvmesh.bus.subjects import name_of
from kvmesh.router.state.rank_speeds import MeasuredSpeed, RankSpeeds

SAMPLE_S = 1.0
SAMPLES = 6  # the rates are those of the last five seconds
MOST_STARTING = 10_000
SILENT_S = 5.0  # a worker sends its load every second


class _RankLoads:
    """The latest load of a rank, and earlier ones at least SAMPLE_S apart."""

    __slots__ = ("latest", "samples", "time")

    def __init__(self, load: Load, time: float) -> None:
        self.latest, self.time = load, time
        self.samples = deque([(time, load)], maxlen=SAMPLES)

    def add(self, load: Load, time: float) -> None:
        if load.steps < self.latest.steps:
            self.samples.clear()  # the engine has started again
        self.latest, self.time = load, time
        if not self.samples or time - self.samples[-1][0] >= SAMPLE_S:
            self.samples.append((time, load))

    def since(self, now: float) -> tuple[float, Load] | None:
        """Seconds since the oldest sample, and that sample; None if none helps."""
        before, load = self.samples[0]
        if now - self.time > SILENT_S or self.time - before < SAMPLE_S / 2:
            return None
        return self.time - before, load


class FleetRow:
    """One instance. Figures are sums over the ranks of a worker, None for other roles.

    `speed` is that of its slowest rank beside the median rank of the model; if that makes it an
    outlier, it has been one for `outlier_s` seconds.
    """

    __slots__ = (
        "_base",
        "_latest",
        "_span_s",
        "instance",
        "model",
        "outlier_s",
        "role",
        "speed",
        "state",
    )

    def __init__(
        self,
        card: Instance,
        state: str,
        ranks: list[_RankLoads],
        speed: MeasuredSpeed | None,
        now: float,
    ) -> None:
        self.instance = card.instance
        self.role = str(card.role) if card.serves == "aggregated" else card.serves
        self.model = card.model.name if card.model else ""
        self.state = state
        self.speed = None if speed is None else speed.speed
        since = None if speed is None else speed.since
        self.outlier_s = None if since is None else now - since
        self._latest = [rank.latest for rank in ranks]
        spans = [span for rank in ranks if (span := rank.since(now)) is not None]
        self._base = [load for _, load in spans] if len(spans) == len(ranks) else []
        self._span_s = max((span for span, _ in spans), default=0.0)

    def _sum(self, name: str) -> int | None:
        return sum(getattr(load, name) for load in self._latest) if self._latest else None

    def _grown(self, name: str) -> int:
        before = sum(getattr(load, name) for load in self._base)
        now = sum(getattr(load, name) for load in self._latest)
        return int(max(0, now - before))

    def _rate(self, name: str) -> float | None:
        if not self._latest:
            return None
        return self._grown(name) / self._span_s if self._base else 0.0

    def _share(self, name: str) -> float | None:
        total = self._sum("total_blocks")
        return (self._sum(name) or 0) / total if total else None

    @property
    def running(self) -> int | None:
        return self._sum("running")

    @property
    def waiting(self) -> int | None:
        return self._sum("waiting")

    @property
    def kv_blocks(self) -> int | None:
        return self._sum("total_blocks")

    @property
    def kv_used(self) -> float | None:
        """Share of the KV blocks that requests use."""
        return self._share("active_blocks")

    @property
    def kv_cached(self) -> float | None:
        """Share of the KV blocks that hold cached tokens."""
        return self._share("cached_blocks")

    @property
    def reused(self) -> float | None:
        """Share of the latest prompt tokens that were found cached."""
        prompts = self._grown("prompt_tokens") if self._base else 0
        return self._grown("cached_tokens") / prompts if prompts else None

    @property
    def prompt_tokens_per_s(self) -> float | None:
        return self._rate("prompt_tokens")

    @property
    def output_tokens_per_s(self) -> float | None:
        return self._rate("output_tokens")


class FleetView:
    """Follows cards and loads; `now` is a monotonic time."""

    def __init__(self) -> None:
        self._cards: dict[str, Instance] = {}
        self._joined: dict[str, float] = {}
        self._ranks: dict[str, dict[int, _RankLoads]] = {}
        self._speeds: dict[str, RankSpeeds] = {}
        self._slots: dict[tuple[str, int], int] = {}
        self._free: list[int] = []
        self._misfits: dict[str, str] | None = None
        self._starting: dict[str, tuple[Starting, float]] = {}

    def joined(self, card: Instance, now: float) -> None:
        """Take a new or changed card."""
        self._cards[card.instance] = card
        self._starting.pop(card.instance, None)
        self._joined.setdefault(card.instance, now)
        self._misfits = None

    def left(self, card: Instance) -> None:
        """Forget an instance."""
        instance = card.instance
        self._cards.pop(instance, None)
        self._joined.pop(instance, None)
        self._misfits = None
        ranks = self._ranks.pop(instance, {})
        slots = [self._slots.pop((instance, rank)) for rank in ranks]
        for speeds in self._speeds.values():
            speeds.forget(slots)
        self._free += slots
        models = {card.model.name for card in self._cards.values() if card.model}
        self._speeds = {model: s for model, s in self._speeds.items() if model in models}

    def starting(self, worker: Starting, now: float) -> None:
        """Take the phase of a worker that has not joined yet."""
        if worker.instance in self._cards:
            return
        if worker.instance in self._starting or len(self._starting) < MOST_STARTING:
            self._starting[worker.instance] = (worker, now)

    def load(self, load: Load, now: float) -> None:
        """Take a load; one of an unknown instance, or of a rank that its card lacks, is ignored."""
        card = self._cards.get(load.instance)
        if card is None or card.model is None or card.capacity is None:
            return
        if not 0 <= load.rank < card.capacity.dp_ranks:
            return
        ranks = self._ranks.setdefault(load.instance, {})
        if (loads := ranks.get(load.rank)) is not None:
            loads.add(load, now)
        else:
            ranks[load.rank] = _RankLoads(load, now)
            slot = self._free.pop() if self._free else len(self._slots)
            self._slots[load.instance, load.rank] = slot
        speeds = self._speeds.setdefault(card.model.name, RankSpeeds())
        speeds.observe(self._slots[load.instance, load.rank], load, now)

    def rows(self, now: float) -> list[FleetRow]:
        """A row for each instance."""
        measured = {}
        for speeds in self._speeds.values():
            speeds.update(now, len(self._slots) + len(self._free))
            measured.update(speeds.measured)
        if self._misfits is None:
            self._misfits = misfits(list(self._cards.values()))
        rows = []
        for card in self._cards.values():
            ranks = self._ranks.get(card.instance, {})
            slots = (self._slots[card.instance, rank] for rank in ranks)
            found = [measured[slot] for slot in slots if slot in measured]
            state = self._state(card, ranks, now)
            slowest = min(found, key=lambda each: each.speed, default=None)
            rows.append(FleetRow(card, state, list(ranks.values()), slowest, now))
        return rows + [
            FleetRow(_future_card(worker), f"starting: {worker.phase}", [], None, now)
            for worker in self.starts(now)
        ]

    def starts(self, now: float) -> list[Starting]:
        """The latest reports of the workers that start."""
        self._starting = {
            instance: (worker, heard)
            for instance, (worker, heard) in self._starting.items()
            if now - heard < SILENT_S
        }
        return [worker for worker, _ in self._starting.values()]

    def _state(self, card: Instance, ranks: dict[int, _RankLoads], now: float) -> str:
        if card.labels.get(STATE) == REFUSED_STATE:
            return REFUSED_STATE
        if card.draining:
            return "draining"
        if self._misfits and card.instance in self._misfits:
            return "incompatible"
        state = card.labels.get(STATE, READY)
        if card.role is Role.WORKER and state == READY:
            last = [rank.time for rank in ranks.values()] or [self._joined[card.instance]]
            if now - min(last) > SILENT_S:
                return "silent"
        return state


def _future_card(worker: Starting) -> Instance:
    return Instance(
        instance=worker.instance,
        role=Role.WORKER,
        name=name_of(worker.instance),
        version="",
        started=worker.started,
        model=ModelCard(name=worker.model, context=0, block_size=0, files=""),
    )
