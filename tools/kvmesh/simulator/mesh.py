"""A whole mesh in virtual time: clients, routers, index and engines, each the live core."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import isnan

from kvmesh.bus.messages import (
    Decision,
    Hints,
    Outcome,
    Placement,
    RouteRequest,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
    SeqProgress,
)
from kvmesh.hashing import HASH_BYTES
from kvmesh.router.placement.ticket import Ticket
from kvmesh.simulator.attempt import Attempt, target
from kvmesh.simulator.cache_accounting import CacheAccounting
from kvmesh.simulator.fleet import MODEL, SimulatedWorker, make_card
from kvmesh.simulator.index import Index
from kvmesh.simulator.options import Fault, SimulationOptions, WorkerOptions
from kvmesh.simulator.prompts import SimulatedPrompts
from kvmesh.simulator.records import Records, WorkerRecord, WorkerSpan
from kvmesh.simulator.routers import Routers
from kvmesh.simulator.virtual_clock import Action, VirtualClock
from kvmesh.worker.engines.mock.core import MockCore, MockOutput
from kvmesh.workload.model import Workload

PROGRESS_TOKENS = 64
PROGRESS_S = 2.0
SAMPLE_S = 1.0
RETRIES = 50
ANYWHERE = Placement()


class Simulation:
    """One run of a workload under one set of options. `progress` is told of each ended round."""

    def __init__(
        self,
        workload: Workload,
        options: SimulationOptions,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        options.check()
        self.workload = workload
        self.options = options
        self.records = Records(len(workload))
        self.workers: dict[str, SimulatedWorker] = {}
        self.worker_records: dict[str, WorkerRecord] = {}
        self.agenda = VirtualClock()
        self.index = Index(self.agenda, self.workers, options.network, options.seed)
        self._block_size = options.block_size
        self._ledger = CacheAccounting(workload, self.records, self._block_size)
        self._progress = progress
        self._prompts = SimulatedPrompts(workload, MODEL, self._block_size)
        self._flights: dict[str, Attempt] = {}
        self._present: dict[int, SimulatedWorker] = {}
        self._places: dict[str, int] = {}
        self._longest = max(group.core.blocks for group in options.workers) * self._block_size
        self._lives: dict[int, int] = {}
        self._groups: dict[int, WorkerOptions] = {}
        self._left = len(workload)
        if not self._left:
            self.agenda.stop()
        self._final = workload.final()
        self._waits = [len(round_.after) for round_ in workload.rounds]
        self._followers: list[list[int]] = [[] for _ in workload.rounds]
        self.routers = Routers(
            self.agenda,
            MODEL,
            options.router,
            options.replicas,
            options.seed,
            options.network.replicas,
            self.index.find,
            self._routed,
        )
        self._populate()

    def run(self) -> Records:
        """Let time pass until every round has ended."""
        with _uncollected():
            self._schedule()
            self.agenda.run()
        self.index.hear(self.agenda.now + self.options.network.kv_events)
        for worker in self.workers.values():
            self._close(worker)
        return self.records

    # --- the fleet

    def _populate(self) -> None:
        number = 0
        for group in self.options.workers:
            for _ in range(group.count):
                self._groups[number] = group
                self._join(number)
                number += 1
        for fault in self.options.faults:
            self.agenda.at(fault.time, partial(self._fault, fault))
        self.agenda.after(self.options.network.loads, self._report)
        self.agenda.after(PROGRESS_S, self._tell_progress)

    def _join(self, number: int) -> None:
        group = self._groups.get(number, self.options.workers[0])
        core = group.core
        life = self._lives.get(number, 0)
        self._lives[number] = life + 1
        card = make_card(number, life, group)
        worker = SimulatedWorker(
            self.agenda,
            card,
            MockCore(replace(core, emit_tokens=False)),
            self._delivered,
            self.index.publish,
            self.options.horizon_s,
        )
        self.workers[card.instance] = self._present[number] = worker
        self._places[card.instance] = len(self.worker_records)
        self.worker_records[card.instance] = worker.record
        self.index.join(card)
        self.routers.join(card)

    def _fault(self, fault: Fault) -> None:
        """A worker that leaves finishes its work; one that dies loses it to others."""
        if fault.kind == "join":
            self._join(fault.worker)
            return
        worker = self._present.pop(fault.worker)
        self.routers.leave(worker.instance)
        if fault.kind == "die":
            self._die(worker)
        elif worker.busy:
            worker.leaving = True
        else:
            self._remove(worker)

    def _remove(self, worker: SimulatedWorker) -> None:
        worker.alive = False
        self.index.leave(worker.card)
        self._close(worker)
        del self.workers[worker.instance]

    def _die(self, worker: SimulatedWorker) -> None:
        for request, generated in worker.progress():
            self._flights[request].generated = generated
        self._remove(worker)
        for flight in [f for f in self._flights.values() if f.instance == worker.instance]:
            self._move(flight)

    def _move(self, flight: Attempt) -> None:
        del self._flights[flight.attempt]
        self.routers.publish([SeqFree(flight.attempt)])
        flight.moved()
        self.records.moves[flight.index] += 1
        self._ask(flight)

    def _close(self, worker: SimulatedWorker) -> None:
        record, core = worker.record, worker.core
        record.busy_s, record.steps = core.counters.busy_s, core.counters.steps
        record.requests = core.counters.requests
        record.prompt_tokens = core.counters.prompt_tokens
        record.cached_tokens = core.counters.cached_tokens
        record.output_tokens = core.counters.output_tokens
        record.preemptions = core.scheduler.preemptions

    def _report(self) -> None:
        now, loads = self.agenda.now, []
        for worker in self.workers.values():
            load, samples = worker.load(), worker.record.samples
            loads.append(load)
            if not samples or now - samples[-1].time >= SAMPLE_S:
                samples.append(
                    WorkerSpan(
                        now, load.running, load.waiting, load.active_blocks, load.cached_blocks
                    )
                )
        self.routers.report(loads)
        self.agenda.after(self.options.network.loads, self._report)

    # --- clients

    def _schedule(self) -> None:
        arrivals: list[tuple[float, Action]] = []
        for index, round_ in enumerate(self.workload.rounds):
            for before in round_.after:
                self._followers[before].append(index)
            if not round_.after:
                arrivals.append((round_.at_s / self.options.speed, partial(self._arrive, index)))
        self.agenda.plan(arrivals)

    def _arrive(self, index: int) -> None:
        round_ = self.workload.rounds[index]
        self.records.arrived[index] = self.agenda.now
        if round_.input_tokens + target(round_) > self._longest:
            self._end(index, f"does not fit into {self._longest // self._block_size} blocks")
            return
        hashes = self._prompts.of(round_)
        session = self.workload.sessions[round_.session].name
        self._ask(Attempt(index, round_, hashes, session))

    def _ask(self, flight: Attempt) -> None:
        self.routers.ask(self._route_request(flight))

    def _route_request(self, flight: Attempt) -> RouteRequest:
        round_ = flight.round
        session = self.workload.sessions[round_.session]
        parent = None if session.parent is None else self.workload.sessions[session.parent].name
        self._flights[flight.attempt] = flight
        tokens, size = flight.tokens, self._block_size
        return RouteRequest(
            request=flight.attempt,
            model=MODEL,
            sequence_hashes=flight.hashes.sequence_hashes[: tokens // size * HASH_BYTES],
            tokens=tokens,
            max_tokens=round_.output_tokens - flight.generated,
            deadline_s=self.options.deadline_s,
            hints=Hints(
                priority=round_.priority,
                session=flight.session,
                parent_session=parent,
                session_final=flight.index in self._final,
                osl=None,
            ),
            placement=ANYWHERE,
        )

    def _routed(self, ticket: Ticket) -> None:
        flight = self._flights[ticket.request.request]
        result = ticket.result
        if isinstance(result, Decision):
            self._ledger.placed(flight.index, result, ticket.overlaps)
            self._place(flight, result)
            return
        del self._flights[flight.attempt]
        flight.refusals += 1
        if result is None or flight.refusals > RETRIES or result.code in ("invalid", "deadline"):
            self._end(flight.index, result.reason if result else "no answer")
            return
        flight.next_attempt()
        self.agenda.after(result.retry_after_s, partial(self._ask, flight))

    def _place(self, flight: Attempt, decision: Decision) -> None:
        index, chosen = flight.index, decision.chosen.instance
        if isnan(self.records.placed[index]):
            self.records.placed[index] = self.agenda.now
        if decision.prefill is None:
            self._submit(flight, chosen)
        else:
            flight.decoder = chosen
            self._submit(flight, decision.prefill.instance)

    def _submit(self, flight: Attempt, instance: str) -> None:
        flight.instance = instance
        self.records.worker[flight.index] = self._places[instance]
        try:
            self.workers[instance].submit(flight.request(self._prompts.salt))
        except ValueError as error:
            del self._flights[flight.attempt]
            self.routers.publish([SeqFree(flight.attempt)])
            self._end(flight.index, str(error).removeprefix(f"{flight.attempt} "))

    # --- answers

    def _delivered(self, worker: SimulatedWorker, outputs: list[MockOutput]) -> None:
        for output in outputs:
            flight = self._flights.get(output.request)
            if flight is not None:
                self._take(worker, flight, output)
        if worker.leaving and not worker.core.busy:
            self._remove(worker)

    def _take(self, worker: SimulatedWorker, flight: Attempt, output: MockOutput) -> None:
        index, records = flight.index, self.records
        if output.cached is not None:
            self.routers.publish([SeqPrefilled(flight.attempt)])
            if isnan(records.first[index]):
                records.first[index] = self.agenda.now + self.options.network.overhead
                records.prefiller[index] = self._places[worker.instance]
                records.cached[index] = sum(output.cached)
                self._ledger.computed(index)
        flight.generated = output.offset + len(output.tokens)
        if output.finish is None:
            return
        if flight.decoder and flight.generated < flight.target:
            self._hand_over(flight)
        else:
            self._finish(worker, flight, output.finish)

    def _hand_over(self, flight: Attempt) -> None:
        """Its prompt is computed; it goes on where it was meant to be decoded, KV and all."""
        decoder, flight.decoder = flight.decoder, ""
        if decoder in self.workers:
            flight.remote = flight.tokens - 1
            self._submit(flight, decoder)
        else:
            self._move(flight)

    def _tell_progress(self) -> None:
        """What clients tell the routers of answers that go on, now and then."""
        events: list[SeqEvent] = []
        for worker in self.workers.values():
            for request, generated in worker.progress():
                flight = self._flights[request]
                flight.generated = generated
                if generated - flight.told >= PROGRESS_TOKENS:
                    flight.told = generated
                    events.append(SeqProgress(request, generated))
        if events:
            self.routers.publish(events)
        self.agenda.after(PROGRESS_S, self._tell_progress)

    def _finish(self, worker: SimulatedWorker, flight: Attempt, finish: str) -> None:
        del self._flights[flight.attempt]
        index, records, now = flight.index, self.records, self.agenda.now
        self._ledger.ended(index, flight.generated)
        self.routers.publish([SeqFree(flight.attempt)])
        records.output[index] = flight.generated
        self.routers.follow(
            Outcome(
                request=flight.attempt,
                instance=worker.instance,
                time=now,
                cached_tokens=records.cached[index],
                output_tokens=flight.generated,
                ttft_s=records.first[index] - records.arrived[index],
                total_s=now - records.arrived[index],
                finish=finish,
            )
        )
        self._end(index, None)

    def _end(self, index: int, error: str | None) -> None:
        self.records.error[index] = error
        self.records.ended[index] = self.agenda.now + self.options.network.overhead
        if index in self._final:
            session = self.workload.sessions[self.workload.rounds[index].session].name
            for worker in self.workers.values():
                worker.release(session)
        self._left -= 1
        self._progress()
        for follower in self._followers[index]:
            self._waits[follower] -= 1
            if not self._waits[follower]:
                delay = self.workload.rounds[follower].at_s / self.options.speed
                self.agenda.after(delay, partial(self._arrive, follower))
        if not self._left:
            self.agenda.stop()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the search for cycles, of which a run makes none to speak of."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
