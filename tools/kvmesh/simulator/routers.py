"""Simulated router replicas: the router's own core and queue, synchronised after a delay."""

from collections.abc import Callable
from functools import partial
from math import inf
from random import Random

from kvmesh.bus.discovery.peer_choice import Peers
from kvmesh.bus.messages import (
    Decision,
    Instance,
    Load,
    Outcome,
    ReturnForecast,
    RouteEvent,
    RouteRequest,
    SeqAdd,
    SeqEvent,
    ToolEvent,
)
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.scoring.overlaps import Overlaps
from kvmesh.router.waiting.queue import PlacementQueue, QueueActions
from kvmesh.router.waiting.ticket import Ticket
from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.virtual_clock import VirtualClock

TICK_S = 0.25
SWEEP_S = 1.0
Find = Callable[[bytes], Overlaps | None]
OnResult = Callable[[Ticket], None]
OnSequences = Callable[[list[SeqEvent]], None]
OnRoute = Callable[[RouteEvent, float], None]
OnForecasts = Callable[[str, list[ReturnForecast]], None]


class RouterReplica:
    """One router: core and queue."""

    def __init__(self, number: int, model: str, settings: RouterSettings, rng: Random) -> None:
        self.name = f"router-{number}"
        self.core = RouterCore(model, self.name, settings, rng)
        self.queue = PlacementQueue(self.core, self.name)
        self.gathers = False  # until the queue is asked to place what it gathered


class SimulatedRouters:
    """All replicas; requests go to the one whose turn it is.

    `on_sequences` and `on_route`, if set, receive what routers and frontends publish;
    `on_forecasts` the forecasts of returns for each worker.
    `find` queries the index; `on_result` receives each ticket with its result. A replica applies
    its own sequence events at once, those of other replicas after `delay` seconds.
    """

    def __init__(
        self,
        clock: VirtualClock,
        model: str,
        settings: RouterSettings,
        count: int,
        seed: int,
        delay: float,
        find: Find,
        on_result: OnResult,
        on_forecasts: OnForecasts,
    ) -> None:
        self._clock = clock
        self._find = find
        self._on_result = on_result
        self._on_forecasts = on_forecasts
        self._delay = delay
        self._queries_index = settings.kv_events
        self._gather_s = settings.gather_s
        self.on_sequences: OnSequences | None = None
        self.on_route: OnRoute | None = None
        self.replicas = [
            RouterReplica(n, model, settings, _rng(settings, seed, n)) for n in range(count)
        ]
        self._named = {replica.name: replica for replica in self.replicas}
        self._turns = Peers(inf)
        for name in self._named:
            self._turns.joined(name)
        clock.after(TICK_S, self._tick)
        clock.after(SWEEP_S, self._sweep)

    def join(self, card: Instance) -> None:
        for replica in self.replicas:
            replica.core.join(card)

    def leave(self, instance: str) -> None:
        for replica in self.replicas:
            replica.core.leave(instance)

    def report(self, loads: list[Load]) -> None:
        now = self._clock.now
        for replica in self.replicas:
            report = replica.core.apply_load
            for load in loads:
                report(load, now)

    def route(self, request: RouteRequest) -> None:
        """Route a request; `on_result` receives its ticket, now or after a wait in the queue."""
        now = self._clock.now
        replica = self._named[self._turns.choose_at(now) or self.replicas[0].name]
        ticket = Ticket(request, now, overlaps=self._overlaps(request))
        self._apply(replica, replica.queue.submit(ticket, now))
        if replica.queue.gathering and not replica.gathers:
            replica.gathers = True
            self._clock.after(self._gather_s, partial(self._place_gathered, replica))

    def _place_gathered(self, replica: RouterReplica) -> None:
        replica.gathers = False
        self._apply(replica, replica.queue.place_gathered(self._clock.now))

    def publish(self, events: list[SeqEvent]) -> None:
        """Apply sequence events of frontends, then place queued requests that now fit."""
        now = self._clock.now
        if self.on_sequences is not None:
            self.on_sequences(events)
        for replica in self.replicas:
            apply = replica.queue.apply
            for event in events:
                apply(event, now)
        self._place_ready()

    def follow(self, event: RouteEvent) -> None:
        if self.on_route is not None:
            self.on_route(event, self._clock.now)
        for replica in self.replicas:
            replica.core.apply_route_event(event, self._clock.now)
            replica.core.learn(event, self._clock.now)
            if isinstance(event, Outcome):
                self._send_forecasts(replica)

    def tool(self, event: ToolEvent) -> None:
        """A harness reports a tool."""
        for replica in self.replicas:
            replica.core.learn(event, self._clock.now)
            self._send_forecasts(replica)

    def _send_forecasts(self, replica: RouterReplica) -> None:
        for instance, forecasts in replica.core.take_forecasts(self._clock.now).items():
            self._on_forecasts(instance, forecasts)

    @property
    def waiting(self) -> int:
        return self.replicas[0].queue.waiting

    def _overlaps(self, request: RouteRequest) -> Overlaps | None:
        return (
            self._find(request.sequence_hashes)
            if self._queries_index and request.sequence_hashes
            else None
        )

    def _place_ready(self) -> None:
        for replica in self.replicas:
            if not replica.queue.is_empty:
                self._apply(replica, replica.queue.place_ready(self._clock.now))

    def _apply(self, origin: RouterReplica, actions: QueueActions) -> None:
        if actions.events:
            if self.on_sequences is not None:
                self.on_sequences(actions.events)
            self._broadcast(origin, actions.events)
        for ticket in actions.done:
            if isinstance(ticket.result, Decision):
                self.follow(ticket.result)
            self._on_result(ticket)

    def _broadcast(self, origin: RouterReplica, events: list[SeqEvent]) -> None:
        for replica in self.replicas:
            if replica is not origin:
                self._clock.after(self._delay, partial(self._receive, replica, events))
            elif not all(isinstance(event, SeqAdd) for event in events):  # applied by the queue
                self._clock.after(0.0, partial(self._receive, replica, events, own=True))

    def _receive(self, replica: RouterReplica, events: list[SeqEvent], own: bool = False) -> None:
        for event in events:
            replica.queue.apply(event, self._clock.now, own)
        if not replica.queue.is_empty:
            self._apply(replica, replica.queue.place_ready(self._clock.now))

    def _tick(self) -> None:
        now = self._clock.now
        for replica in self.replicas:
            queue = replica.queue
            if queue.is_empty:
                continue
            self._apply(replica, queue.expire(now))
            for ticket in queue.due_for_rescore(now):
                fresh = self._overlaps(ticket.request)
                self._apply(replica, queue.rescore(ticket, fresh, now))
            self._apply(replica, queue.place_ready(now))
        self._clock.after(TICK_S, self._tick)

    def _sweep(self) -> None:
        for replica in self.replicas:
            replica.core.expire(self._clock.now)
        self._clock.after(SWEEP_S, self._sweep)


def _rng(settings: RouterSettings, seed: int, number: int) -> Random:
    """The replica's random generator; a seed in the router's settings takes precedence."""
    return Random(f"{seed} router {number}" if settings.seed is None else settings.seed)
