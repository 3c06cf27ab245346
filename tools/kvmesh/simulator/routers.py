"""The simulated router replicas: the live router's own core and queue, kept in step by delay."""

from collections.abc import Callable
from functools import partial
from random import Random

from kvmesh.bus.messages import Decision, Instance, Load, RouteEvent, RouteRequest, SeqAdd, SeqEvent
from kvmesh.router.placement.queue import PlacementQueue, QueueActions
from kvmesh.router.placement.router import RouterCore
from kvmesh.router.placement.ticket import Ticket
from kvmesh.router.scoring.overlaps import Overlaps
from kvmesh.settings.schema import RouterSettings
from kvmesh.simulator.virtual_clock import VirtualClock

TICK_S = 0.25
SWEEP_S = 1.0
Find = Callable[[bytes], Overlaps | None]
Done = Callable[[Ticket], None]


class Replica:
    """A core with its queue."""

    def __init__(self, number: int, model: str, settings: RouterSettings, rng: Random) -> None:
        self.name = f"router-{number}"
        self.core = RouterCore(model, self.name, settings, rng)
        self.dispatcher = PlacementQueue(self.core, self.name)


class Routers:
    """All replicas; each request goes to one of them in turn, as in a queue group.

    `find` asks the index, `done` takes every ticket that has its answer. What one replica does,
    the others learn `delay` seconds later; its own queue entries come back to it just so.
    """

    def __init__(
        self,
        agenda: VirtualClock,
        model: str,
        settings: RouterSettings,
        count: int,
        seed: int,
        delay: float,
        find: Find,
        done: Done,
    ) -> None:
        self._agenda = agenda
        self._find = find
        self._done = done
        self._delay = delay
        self._asks_index = settings.kv_events
        self._turn = 0
        self.replicas = [Replica(n, model, settings, _rng(settings, seed, n)) for n in range(count)]
        agenda.after(TICK_S, self._tick)
        agenda.after(SWEEP_S, self._sweep)

    def join(self, card: Instance) -> None:
        for replica in self.replicas:
            replica.core.join(card)

    def leave(self, instance: str) -> None:
        for replica in self.replicas:
            replica.core.leave(instance)

    def report(self, loads: list[Load]) -> None:
        now = self._agenda.now
        for replica in self.replicas:
            report = replica.core.apply_load
            for load in loads:
                report(load, now)

    def ask(self, request: RouteRequest) -> None:
        """Route a request; `done` gets its ticket, now or after a wait in the queue."""
        replica = self.replicas[self._turn]
        self._turn = (self._turn + 1) % len(self.replicas)
        now = self._agenda.now
        ticket = Ticket(request, now, overlaps=self._overlaps(request))
        self._carry_out(replica, replica.dispatcher.submit(ticket, now))

    def publish(self, events: list[SeqEvent]) -> None:
        """Progress of active sequences, as the frontend tells it; may let waiting ones go."""
        now = self._agenda.now
        for replica in self.replicas:
            apply = replica.dispatcher.apply
            for event in events:
                apply(event, now)
        self._pump()

    def follow(self, event: RouteEvent) -> None:
        for replica in self.replicas:
            replica.core.apply_route_event(event, self._agenda.now)

    @property
    def waiting(self) -> int:
        return self.replicas[0].dispatcher.waiting

    def _overlaps(self, request: RouteRequest) -> Overlaps | None:
        return (
            self._find(request.sequence_hashes)
            if self._asks_index and request.sequence_hashes
            else None
        )

    def _pump(self) -> None:
        for replica in self.replicas:
            if replica.dispatcher.waiting:
                self._carry_out(replica, replica.dispatcher.place_ready(self._agenda.now))

    def _carry_out(self, origin: Replica, steps: QueueActions) -> None:
        if steps.events:
            self._spread(origin, steps.events)
        for ticket in steps.done:
            if isinstance(ticket.result, Decision):
                self.follow(ticket.result)
            self._done(ticket)

    def _spread(self, origin: Replica, events: list[SeqEvent]) -> None:
        for replica in self.replicas:
            if replica is not origin:
                self._agenda.after(self._delay, partial(self._hear, replica, events))
            elif not all(isinstance(event, SeqAdd) for event in events):  # known there already
                self._agenda.after(0.0, partial(self._hear, replica, events))

    def _hear(self, replica: Replica, events: list[SeqEvent]) -> None:
        for event in events:
            replica.dispatcher.apply(event, self._agenda.now)
        if replica.dispatcher.waiting:
            self._carry_out(replica, replica.dispatcher.place_ready(self._agenda.now))

    def _tick(self) -> None:
        now = self._agenda.now
        for replica in self.replicas:
            dispatcher = replica.dispatcher
            if not dispatcher.waiting:
                continue
            self._carry_out(replica, dispatcher.expire(now))
            for ticket in dispatcher.due_for_rescore(now):
                fresh = self._overlaps(ticket.request)
                self._carry_out(replica, dispatcher.rescore(ticket, fresh, now))
            self._carry_out(replica, dispatcher.place_ready(now))
        self._agenda.after(TICK_S, self._tick)

    def _sweep(self) -> None:
        for replica in self.replicas:
            replica.core.expire(self._agenda.now)
        self._agenda.after(SWEEP_S, self._sweep)


def _rng(settings: RouterSettings, seed: int, number: int) -> Random:
    """As a live router makes it if its settings have a seed."""
    return Random(f"{seed} router {number}" if settings.seed is None else settings.seed)
