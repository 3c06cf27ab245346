"""The decision which workers load an adapter that requests ask for (ADR 60)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import NamedTuple

from kvmesh.bus.messages import AdapterFiles, AdapterHost, Instance, Placement, adapter_name
from kvmesh.router.state.rank_table import RankTable
from kvmesh.router.state.running_prefills import RunningPrefills
from kvmesh.settings.schema import RouterSettings

LOAD_S = 1.0  # of an engine, until one was measured
BYTES_PER_S = 200e6  # between workers, until a load from another worker was measured
ROOM_S = 0.5  # in which an adapter makes room
COOL_S, MAX_COOL_S = 15.0, 600.0  # after a failure, and after many
ROOM_COOL_S = 1.0  # after a worker had no room
LATE = 3.0  # times its expected time, and a load has failed
CARD_S = 5.0  # after a load, until the worker's card tells of it
CHECK_S = 0.5  # between looks at the queue of an adapter
SPREAD_S = 10.0  # between loads of an adapter on one worker more
SPREAD_GAIN = 2.0  # the queue where it is must be longer than elsewhere, by this times the load
DEMAND_S = 2.0  # for which a request is demand for its adapter
MAX_DEMANDS = 1024
_SMOOTHING = 0.3


class AdapterLoad(NamedTuple):
    """An order to a worker: load `adapter` from the copy `files`, expected to take so long.

    `cause` says why. `elsewhere`: the files are not on its node yet.
    """

    instance: str
    worker: str
    adapter: str
    files: str
    expected_s: float
    elsewhere: bool
    cause: str


@dataclass(slots=True)
class _Failed:
    until: float
    count: int
    reason: str
    no_room: bool


class _Demand(NamedTuple):
    at: float
    placement: Placement


class AdapterLoads:
    """Orders loads by the cards, the loads of ranks, and the time that earlier ones took.

    One load at a time of an adapter and on a worker. A worker that has failed is left alone for a
    while, for longer after each further failure.
    """

    def __init__(
        self, settings: RouterSettings, table: RankTable, prefills: RunningPrefills
    ) -> None:
        self._settings = settings
        self._table = table
        self._prefills = prefills
        self._version = -1
        self._files: dict[str, AdapterFiles] = {}
        self._on_its_way: dict[tuple[str, str], float] = {}  # until when, at the latest
        self._failed: dict[tuple[str, str], _Failed] = {}
        self._demand: dict[str, _Demand] = {}
        self._spread_at: dict[str, float] = {}
        self._took_s: dict[bool, float] = {}

    @property
    def active(self) -> bool:
        """True if there may be something to order."""
        return bool(self._demand)

    def note(self, adapter: str, placement: Placement, now: float) -> None:
        """A request of an adapter has come."""
        if self._settings.load_adapters:
            self._demand.pop(adapter, None)
            self._demand[adapter] = _Demand(now, placement)
            if len(self._demand) > MAX_DEMANDS:
                del self._demand[next(iter(self._demand))]

    def may_load(self, adapter: str, placement: Placement, now: float) -> bool:
        """True if a request that no worker with its adapter may run can wait for a load."""
        if not self._settings.load_adapters or adapter not in self._offered():
            return False
        return any(
            not self._is_failed(adapter, card.instance, now)
            for card, _ in self._hosts(adapter, placement)
        )

    def reason(self, adapter: str) -> str:
        """The reason of the last failure to load an adapter; empty if there was none."""
        found = [failed for (name, _), failed in self._failed.items() if name == adapter]
        return max(found, key=lambda failed: failed.until).reason if found else ""

    def missing(self, waiting: Iterable[tuple[str, Placement]], now: float) -> list[AdapterLoad]:
        """Loads to order for requests that wait, whose adapters no worker has that may run them.

        `waiting` are these adapters, once for each of their requests' constraints. A load counts
        as on its way until `ended`.
        """
        self._forget(now)
        orders = (
            self._cheapest(adapter, placement, now, inf, "no worker has it")
            for adapter, placement in waiting
        )
        return [order for order in orders if order is not None]

    def spread(self, queued: Mapping[str, float], now: float) -> list[AdapterLoad]:
        """Loads to order on one worker more, of adapters that are wanted where the queue is long.

        `queued` are the tokens of requests that wait for a rank with an adapter.
        """
        self._forget(now)
        found = []
        for adapter, demand in self._demand.items():
            if now < self._spread_at.get(adapter, 0.0):
                continue
            order = self._relief(adapter, demand.placement, queued.get(adapter, 0.0), now)
            self._spread_at[adapter] = now + (CHECK_S if order is None else SPREAD_S)
            if order is not None:
                found.append(order)
        return found

    def ended(
        self, order: AdapterLoad, reason: str, no_room: bool, seconds: float, now: float
    ) -> None:
        """A load has ended after so many seconds, for a `reason` if it has failed."""
        key = order.adapter, order.instance
        if not reason:
            self._on_its_way[key] = now + CARD_S
            self._failed.pop(key, None)
            known = self._took_s.get(order.elsewhere, seconds)
            self._took_s[order.elsewhere] = known + _SMOOTHING * (seconds - known)
            return
        self._on_its_way.pop(key, None)
        before = self._failed.get(key)
        count = 1 if before is None or before.no_room != no_room else before.count + 1
        cool_s = ROOM_COOL_S if no_room else min(COOL_S * 2 ** min(count - 1, 10), MAX_COOL_S)
        self._failed[key] = _Failed(now + cool_s, count, reason, no_room)

    # the choice

    def _relief(
        self, adapter: str, placement: Placement, queued: float, now: float
    ) -> AdapterLoad | None:
        """An order to one worker more if requests would wait longer where the adapter is."""
        slots = self._table.eligible(placement, adapter, "all").tolist()
        if not slots or adapter not in self._offered():
            return None
        wait_s = min(map(self._backlog_s, slots)) + queued * self._prefills.token_s(slots[0])
        cause = f"requests wait {wait_s:.1f} s where it is"
        return self._cheapest(adapter, placement, now, wait_s, cause)

    def _cheapest(
        self, adapter: str, placement: Placement, now: float, wait_s: float, cause: str
    ) -> AdapterLoad | None:
        """An order to the worker with the least cost, if that pays against a wait of `wait_s`."""
        files = self._offered().get(adapter)
        if files is None or any(name == adapter for name, _ in self._on_its_way):
            return None
        busy = {instance for _, instance in self._on_its_way}
        best: tuple[float, float, float, AdapterLoad] | None = None
        for card, host in self._hosts(adapter, placement):
            if card.instance in busy or self._cools(adapter, card.instance, now):
                continue
            elsewhere = all(each.adapter != adapter for each in host.files)
            load_s = self._load_s(files, elsewhere)
            queue_s = self._queue_s(card)
            if SPREAD_GAIN * load_s + queue_s >= wait_s:
                continue
            held = len(card.model.adapters) if card.model is not None else 0
            cost = load_s + queue_s + (ROOM_S if held >= host.limit else 0.0)
            order = AdapterLoad(
                *(card.instance, card.name, adapter, files.digest, load_s, elsewhere, cause)
            )
            key = round(cost, 1), held / host.limit, _draw(adapter, card.name), order
            if best is None or key < best:
                best = key
        if best is None:
            return None
        order = best[3]
        longest_s = max(self._settings.adapter_wait_s, LATE * order.expected_s)
        self._on_its_way[adapter, order.instance] = now + longest_s + CARD_S
        return order

    def _hosts(self, adapter: str, placement: Placement) -> Iterable[tuple[Instance, AdapterHost]]:
        """The workers that the constraints allow, and that could load the adapter."""
        name = adapter_name(adapter)
        for card in self._table.matching(placement):
            host, model = card.adapters, card.model
            if host is None or model is None or not host.limit:
                continue
            if len(model.adapters) >= host.limit and not host.removable:
                continue
            if not any(adapter_name(loaded) == name for loaded in model.adapters):
                yield card, host

    def _load_s(self, files: AdapterFiles, elsewhere: bool) -> float:
        known = self._took_s.get(elsewhere)
        if known is not None:
            return known
        engine_s = files.load_s or LOAD_S
        return engine_s + files.size / BYTES_PER_S if elsewhere else engine_s

    def _queue_s(self, card: Instance) -> float:
        """Seconds until the least busy rank of a worker would begin with a prompt."""
        ranks = card.capacity.dp_ranks if card.capacity is not None else 1
        slots = [self._table.find_slot(card.instance, rank) for rank in range(ranks)]
        return min((self._backlog_s(slot) for slot in slots if slot is not None), default=0.0)

    def _backlog_s(self, slot: int) -> float:
        """Seconds until a rank would begin with a prompt: its prompts, and its full batch."""
        table, cells = self._table, self._table.cells
        tokens = max(cells.prefill_tokens[slot] + cells.correction_tokens[slot], 0.0)
        seconds = tokens * self._prefills.token_s(slot)
        card = table.cards.get(table.ranks[slot].instance)
        most = card.capacity.max_sequences if card is not None and card.capacity else 0
        over = cells.requests[slot] + 1 - most
        return seconds + (table.decode_s * over / most if most and over > 0 else 0.0)

    # what is known

    def _offered(self) -> dict[str, AdapterFiles]:
        """The files that workers offer, by identity."""
        if self._version != self._table.version:
            self._version = self._table.version
            self._files = {
                files.adapter: files
                for card in self._table.cards.values()
                if card.adapters is not None
                for files in card.adapters.files
            }
        return self._files

    def _is_failed(self, adapter: str, instance: str, now: float) -> bool:
        """True if a worker has failed to load an adapter of late, not just for lack of room."""
        failed = self._failed.get((adapter, instance))
        return failed is not None and not failed.no_room and now < failed.until

    def _cools(self, adapter: str, instance: str, now: float) -> bool:
        failed = self._failed.get((adapter, instance))
        return failed is not None and now < failed.until

    def _forget(self, now: float) -> None:
        """Forget what is over: demand, loads that cards tell of or that got no reply, failures."""
        for adapter, demand in list(self._demand.items()):
            if now - demand.at > DEMAND_S:
                del self._demand[adapter]
        for key, until in list(self._on_its_way.items()):
            card = self._table.cards.get(key[1])
            loaded = card is not None and card.model is not None and key[0] in card.model.adapters
            if card is None or loaded or now >= until:
                del self._on_its_way[key]
        for key, failed in list(self._failed.items()):
            if now > failed.until + MAX_COOL_S:
                del self._failed[key]
        for adapter, at in list(self._spread_at.items()):
            if now > at:
                del self._spread_at[adapter]


def _draw(adapter: str, worker: str) -> float:
    """A number by which all routers choose the same of equal workers."""
    digest = blake2b(f"{adapter} {worker}".encode(), digest_size=6).digest()
    return int.from_bytes(digest) / 2.0**48
