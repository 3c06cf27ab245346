"""A whole mesh in virtual time: clients, routers, index and engines over the live cores."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil, isnan

from msgspec.structs import replace as replace_card

from kvmesh.bus.messages import (
    Decision,
    Hints,
    Instance,
    Outcome,
    Placement,
    ReturnForecast,
    Role,
    RouteRequest,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
    SeqProgress,
    WorkerState,
)
from kvmesh.hashing import HASH_BYTES
from kvmesh.router.waiting.ticket import Ticket
from kvmesh.simulator.active_round import ActiveRound, output_limit
from kvmesh.simulator.cache_accounting import CacheAccounting
from kvmesh.simulator.clients.harness import Harness
from kvmesh.simulator.clients.speculation import SpeculatingFrontends
from kvmesh.simulator.fleet import MODEL, SimulatedWorker, make_card
from kvmesh.simulator.fleet_control import FleetControl, FleetHooks
from kvmesh.simulator.index import EventPublisher, SimulatedIndex
from kvmesh.simulator.nodes.fleet import SimulatedNodes
from kvmesh.simulator.nodes.options import NodeOptions
from kvmesh.simulator.options import Fault, SimulationOptions
from kvmesh.simulator.prompts import SimulatedPrompts
from kvmesh.simulator.records import LoadSample, Records, WorkerRecord
from kvmesh.simulator.routers import SimulatedRouters
from kvmesh.simulator.virtual_clock import Action, VirtualClock
from kvmesh.worker.engines.mock.core import MockCore, MockOutput
from kvmesh.workload.collection import uncollected
from kvmesh.workload.model import Round, Workload

PROGRESS_TOKENS = 64
PROGRESS_S = 2.0
SAMPLE_S = 1.0
RETRIES = 50
ANYWHERE = Placement()


class Simulation:
    """One run of a workload under one set of options; `progress` is called after each round."""

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
        self.clock = VirtualClock()
        self._publishers: dict[str, EventPublisher] = {}
        self.index = SimulatedIndex(self.clock, self._publishers, options.network, options.seed)
        self._block_size = options.block_size
        self._accounting = CacheAccounting(workload, self.records, self._block_size)
        self._progress = progress
        self._prompts = SimulatedPrompts(workload, MODEL, self._block_size)
        self._active: dict[str, ActiveRound] = {}
        self._live: dict[int, SimulatedWorker] = {}
        self._numbers: dict[str, int] = {}
        self._group_of: dict[str, int] = {}
        self._max_tokens = max(group.core.blocks for group in options.workers) * self._block_size
        self._incarnations: dict[int, int] = {}
        self._groups: dict[int, int] = {}
        self._parked: dict[str, Instance] = {}
        self._remaining = ceil(len(workload) * options.ended_share)
        if not self._remaining:
            self.clock.stop()
        self._final = workload.final_rounds()
        self._harness = Harness(workload)
        self.speculation = SpeculatingFrontends(
            workload,
            self._prompts,
            self.workers,
            self._harness,
            self._block_size,
            options.speculative_prefill,
            options.speculative_tokens,
        )
        self._unfinished_before = [len(round_.after) for round_ in workload.rounds]
        self._successors: list[tuple[int, ...]] = [()] * len(workload)
        self.routers = SimulatedRouters(
            self.clock,
            MODEL,
            options.router,
            options.replicas,
            options.seed,
            options.network.replicas,
            self.index.find,
            self._on_routed,
            self._on_forecasts,
        )
        self.fleet = FleetControl(
            self.clock,
            options.workers,
            options.startup_s,
            options.promotion,
            FleetHooks(self._add, self._leave, self._switch, self._park, self._unpark, self._wake),
        )
        self.nodes: SimulatedNodes | None = None
        if options.nodes is not None:
            self.nodes = self._add_nodes(options.nodes)
        self._autoscaler = None if options.autoscaler is None else options.autoscaler()
        if self._autoscaler is not None:
            self.routers.on_sequences = self._autoscaler.on_sequences
            self.routers.on_route = self._autoscaler.on_route
        self._populate()

    def _add_nodes(self, options: NodeOptions) -> SimulatedNodes:
        nodes = SimulatedNodes(MODEL, self.clock, self.index, options, self._block_size)
        for node in nodes.nodes:
            self._publishers[node.instance] = node
            self.index.join(node.card)
            self.routers.join(node.card)
        return nodes

    @uncollected()
    def run(self) -> Records:
        """Advance the clock until every round has ended."""
        self._schedule()
        self.clock.run()
        self.index.receive(self.clock.now + self.options.network.kv_events)
        for worker in self.workers.values():
            self._complete_record(worker)
            self.fleet.removed(worker.instance, self._group_index(worker))
        self.fleet.close()
        return self.records

    # --- the fleet

    def _populate(self) -> None:
        for index, group in enumerate(self.options.workers):
            for _ in range(group.count):
                self.fleet.joined(index, self._add(index), 0.0)
            for _ in range(group.parked):
                self.fleet.wait(index)
        for fault in self.options.faults:
            self.clock.at(fault.time, partial(self._fault, fault))
        self.clock.after(self.options.network.loads, self._report_loads)
        self.clock.after(PROGRESS_S, self._report_progress)
        if self._autoscaler is not None:
            self.clock.after(self._autoscaler.interval_s, self._scale)

    def _scale(self) -> None:
        """Let the autoscaler decide."""
        assert self._autoscaler is not None
        self.fleet.apply(self._autoscaler.decide(self.clock.now, self.fleet.wanted))
        self.clock.after(self._autoscaler.interval_s, self._scale)

    def _tell(self, card: Instance, state: WorkerState, group: int) -> None:
        """Tell the autoscaler of a worker, for which one on standby may be promoted."""
        if self._autoscaler is None:
            return
        self._autoscaler.on_worker(card, state, group, self.clock.now)
        if state in (WorkerState.DRAINING, WorkerState.STANDBY):
            self.clock.after(0.0, self._promote)

    def _promote(self) -> None:
        if self._autoscaler is not None:
            for instance in self._autoscaler.promote(self.clock.now):
                self.fleet.promote(instance)

    def _add(self, group: int) -> SimulatedWorker:
        """Add a worker of a group under the next free number."""
        return self._join(self._new_number(group))

    def _new_number(self, group: int) -> int:
        number = max(self._incarnations, default=-1) + 1
        self._groups[number], self._incarnations[number] = group, 0
        return number

    def _park(self, group: int, asleep: str) -> str:
        """Let a worker wait, that which was instance `asleep` or a new one; its next instance."""
        number = _number_of(asleep) if asleep else self._new_number(group)
        card = make_card(number, self._incarnations[number], self.options.workers[group])
        card = replace_card(
            card, role=Role.PARKED, model=None, parked_for=MODEL, asleep=bool(asleep),
            started=self.clock.now,
        )  # fmt: skip
        self._parked[card.instance] = card
        self._tell(card, card.state, group)
        return card.instance

    def _unpark(self, instance: str) -> None:
        card = self._parked.pop(instance)
        self._tell(card, WorkerState.GONE, self._groups[_number_of(instance)])

    def _wake(self, instance: str, promoted_s: float) -> SimulatedWorker:
        return self._join(_number_of(instance), promoted_s)

    def _leave(self, worker: SimulatedWorker) -> None:
        """Take a worker out of routing; it goes once its requests have ended."""
        number = next(n for n, each in self._live.items() if each is worker)
        del self._live[number]
        self.fleet.leaving(worker)
        self.routers.leave(worker.instance)
        card = replace_card(worker.card, draining=True)
        self._tell(card, card.state, self._group_index(worker))
        if worker.busy:
            worker.draining = True
        else:
            self._remove(worker)

    def _switch(self, worker: SimulatedWorker, group: int) -> None:
        """Give a worker the role of a group; requests that run end as they would have."""
        worker.group = self.options.workers[group]
        worker.card = replace_card(worker.card, serves=worker.group.serves)
        self._group_of[worker.instance] = group
        self.routers.join(worker.card)
        self._tell(worker.card, worker.card.state, group)

    def _group_index(self, worker: SimulatedWorker) -> int:
        return self._group_of[worker.instance]

    def _join(self, number: int, promoted_s: float = 0.0) -> SimulatedWorker:
        index = self._groups.get(number, 0)
        group = self.options.workers[index]
        core = group.core
        incarnation = self._incarnations.get(number, 0)
        self._incarnations[number] = incarnation + 1
        place = number if group.node is None else group.node
        node = "" if self.nodes is None else self.nodes.of_worker(place).node
        card = make_card(number, incarnation, group, node)
        if promoted_s:
            card = replace_card(card, startup_s=self.options.startup_s, promoted_s=promoted_s)
        worker = SimulatedWorker(
            self.clock,
            card,
            MockCore(replace(core, emit_tokens=False), f"{self.options.seed} {card.name}"),
            self._on_outputs,
            self.index.publish,
            self.options.horizon_s,
            group,
        )
        self.workers[card.instance] = self._live[number] = worker
        self._publishers[card.instance] = worker
        if self.nodes is not None:
            attachment = worker.attachment = self.nodes.attach(worker, place)
            self._accounting.kvbm_of[card.instance] = attachment.node.instance
        self._group_of[card.instance] = index
        self._numbers[card.instance] = len(self.worker_records)
        self.worker_records[card.instance] = worker.record
        self.index.join(card)
        self.routers.join(card)
        self._tell(card, card.state, index)
        return worker

    def _fault(self, fault: Fault) -> None:
        """Apply a fault: a leaving worker finishes its requests, those of a dead one migrate."""
        if fault.kind == "join":
            began = self.clock.now
            worker = self._join(fault.worker)
            self.fleet.joined(self._group_index(worker), worker, began)
            return
        worker = self._live[fault.worker]
        if fault.kind == "leave":
            self._leave(worker)
            return
        del self._live[fault.worker]
        home = self.fleet.leaving(worker)
        self.routers.leave(worker.instance)
        if self._autoscaler is not None:
            self.fleet.restart(home)
            self.clock.after(0.0, self._promote)
        self._die(worker)

    def _remove(self, worker: SimulatedWorker) -> None:
        worker.alive = False
        self.index.leave(worker.card)
        self.fleet.removed(worker.instance, self._group_index(worker))
        self._tell(worker.card, WorkerState.GONE, self._group_index(worker))
        self._complete_record(worker)
        if self.nodes is not None:
            self.nodes.detach(worker.instance)
        del self.workers[worker.instance], self._publishers[worker.instance]

    def _die(self, worker: SimulatedWorker) -> None:
        for request, generated in worker.progress():
            self._active[request].generated = generated
        self._remove(worker)
        for active in [a for a in self._active.values() if a.instance == worker.instance]:
            self._migrate(active)

    def _migrate(self, active: ActiveRound) -> None:
        del self._active[active.attempt_id]
        self.routers.publish([SeqFree(active.attempt_id)])
        active.migrate()
        self.records.migrations[active.index] += 1
        self._route(active)

    def _complete_record(self, worker: SimulatedWorker) -> None:
        record, core = worker.record, worker.core
        record.busy_s, record.steps = core.counters.busy_s, core.counters.steps
        record.requests = core.counters.requests
        record.prompt_tokens = core.counters.prompt_tokens
        record.cached_tokens = core.counters.cached_tokens
        record.output_tokens = core.counters.output_tokens
        record.preemptions = core.scheduler.preemptions

    def _report_loads(self) -> None:
        now, loads = self.clock.now, []
        for worker in self.workers.values():
            load, samples = worker.load(), worker.record.samples
            loads.append(load)
            if not samples or now - samples[-1].time >= SAMPLE_S:
                samples.append(
                    LoadSample(
                        now, load.running, load.waiting, load.active_blocks, load.cached_blocks
                    )
                )
        self.routers.report(loads)
        if self._autoscaler is not None:
            self._autoscaler.on_loads(loads, now)
        self.clock.after(self.options.network.loads, self._report_loads)

    # --- clients

    def _schedule(self) -> None:
        arrivals: list[tuple[float, Action]] = []
        for index, round_ in enumerate(self.workload.rounds):
            for before in round_.after:
                self._successors[before] += (index,)
            if not round_.after:
                arrivals.append((round_.at_s / self.options.speed, partial(self._arrive, index)))
        self.clock.plan(arrivals)

    def _arrive(self, index: int) -> None:
        round_ = self.workload.rounds[index]
        self.records.arrived[index] = self.clock.now
        if round_.input_tokens + output_limit(round_) > self._max_tokens:
            self._end(index, f"does not fit into {self._max_tokens // self._block_size} blocks")
            return
        hashes = self._prompts.hashes(round_)
        if self.options.speculative_prefill != "off":
            self.speculation.begin(index, hashes, self.clock.now)
        session = self.workload.sessions[round_.session].name
        self._route(ActiveRound(index, round_, hashes, session))

    def _is_batch(self, round_: Round) -> bool:
        return round_.fair_class in self.options.router.batch_classes

    def _deadline_s(self, round_: Round) -> float:
        router = self.options.router
        return router.batch_timeout_s if self._is_batch(round_) else self.options.deadline_s

    def _route(self, active: ActiveRound) -> None:
        self.routers.route(self._route_request(active))

    def _route_request(self, active: ActiveRound) -> RouteRequest:
        round_ = active.round
        session = self.workload.sessions[round_.session]
        parent = None if session.parent is None else self.workload.sessions[session.parent].name
        self._active[active.attempt_id] = active
        tokens, size = active.tokens, self._block_size
        return RouteRequest(
            request=active.attempt_id,
            model=MODEL,
            sequence_hashes=active.hashes.sequence_hashes[: tokens // size * HASH_BYTES],
            tokens=tokens,
            max_tokens=round_.output_tokens - active.generated,
            deadline_s=self._deadline_s(round_),
            hints=Hints(
                priority=round_.priority,
                fair_class=round_.fair_class or None,
                session=active.session,
                parent_session=parent,
                session_final=active.index in self._final,
                osl=round_.osl or None,
            ),
            placement=ANYWHERE,
        )

    def _on_routed(self, ticket: Ticket) -> None:
        active = self._active[ticket.request.request]
        result = ticket.result
        if isinstance(result, Decision):
            self._accounting.on_placed(active.index, result, ticket.overlaps)
            self._dispatch(active, result)
            return
        del self._active[active.attempt_id]
        active.rejections += 1
        if result is None or active.rejections > RETRIES or result.code in ("invalid", "deadline"):
            self._end(active.index, result.reason if result else "no result")
            return
        active.next_attempt()
        self.clock.after(result.retry_after_s, partial(self._route, active))

    def _dispatch(self, active: ActiveRound, decision: Decision) -> None:
        index, chosen = active.index, decision.chosen.instance
        if isnan(self.records.placed[index]):
            self.records.placed[index] = self.clock.now
        if decision.prefill is None:
            self._submit(active, chosen)
        else:
            active.decoder = chosen
            self._submit(active, decision.prefill.instance)

    def _submit(self, active: ActiveRound, instance: str) -> None:
        active.instance = instance
        self.records.worker[active.index] = self._numbers[instance]
        try:
            batch = self._is_batch(active.round)
            request = active.request(self._prompts.salt, self._block_size, batch)
            self.workers[instance].submit(request)
        except ValueError as error:
            del self._active[active.attempt_id]
            self.routers.publish([SeqFree(active.attempt_id)])
            self._end(active.index, str(error).removeprefix(f"{active.attempt_id} "))

    # --- outputs

    def _on_outputs(self, worker: SimulatedWorker, outputs: list[MockOutput]) -> None:
        for output in outputs:
            active = self._active.get(output.request)
            if active is not None:
                self._on_output(worker, active, output)
        if worker.draining and not worker.core.busy:
            self._remove(worker)

    def _on_output(self, worker: SimulatedWorker, active: ActiveRound, output: MockOutput) -> None:
        index, records = active.index, self.records
        if output.cached is not None:
            self.routers.publish([SeqPrefilled(active.attempt_id)])
            if isnan(records.first_token[index]):
                records.first_token[index] = self.clock.now + self.options.network.overhead
                records.prefiller[index] = self._numbers[worker.instance]
                records.cached[index] = sum(output.cached)
                records.tiers[index] = output.cached
                self._accounting.on_prefilled(index)
                self.speculation.prefilled(index, records.cached[index])
        active.generated = output.offset + len(output.tokens)
        if output.finish is None:
            return
        if active.decoder and active.generated < active.output_limit:
            self._hand_off(active)
        else:
            self._finish(worker, active, output.finish)

    def _hand_off(self, active: ActiveRound) -> None:
        """Hand a prefilled sequence off to its decode worker, with its KV."""
        decoder, active.decoder = active.decoder, ""
        if decoder in self.workers:
            active.remote = active.tokens - 1
            self._submit(active, decoder)
        else:
            self._migrate(active)

    def _report_progress(self) -> None:
        """Publish the progress of decoding sequences, as frontends do."""
        events: list[SeqEvent] = []
        for worker in self.workers.values():
            for request, generated in worker.progress():
                active = self._active[request]
                active.generated = generated
                if generated - active.reported >= PROGRESS_TOKENS:
                    active.reported = generated
                    events.append(SeqProgress(request, generated))
        if events:
            self.routers.publish(events)
        self.clock.after(PROGRESS_S, self._report_progress)

    def _finish(self, worker: SimulatedWorker, active: ActiveRound, finish: str) -> None:
        del self._active[active.attempt_id]
        index, records, now = active.index, self.records, self.clock.now
        self._accounting.on_finished(index, active.generated)
        self.routers.publish([SeqFree(active.attempt_id)])
        records.output[index] = active.generated
        self.routers.follow(
            Outcome(
                request=active.attempt_id,
                instance=worker.instance,
                time=now,
                cached_tokens=records.cached[index],
                output_tokens=active.generated,
                ttft_s=records.first_token[index] - records.arrived[index],
                total_s=now - records.arrived[index],
                finish=finish,
                agent=self._harness.agent(index),
                waits_for=self._harness.waits_for(index),
            )
        )
        if self.options.tool_events:
            for report in self._harness.reports(index, now, self.options.speed):
                self.clock.at(report.time, partial(self.routers.tool, report))
        self._speculate(worker, active, finish)
        self._end(index, None)

    def _speculate(self, worker: SimulatedWorker, active: ActiveRound, finish: str) -> None:
        """Have the start of the session's next prompt computed, as frontends do if asked."""
        mode = self.options.speculative_prefill
        if mode == "off" or active.index in self._final or finish == "abort":
            return
        if worker.card.serves == "aggregated" and not worker.draining:
            instance = worker.instance
            self.speculation.ended(active.index, instance, active.generated, self.clock.now)

    def _on_forecasts(self, instance: str, forecasts: list[ReturnForecast]) -> None:
        if self.nodes is not None:
            self.nodes.expect_returns(instance, forecasts)

    def _end(self, index: int, error: str | None) -> None:
        self.records.error[index] = error
        self.records.ended[index] = self.clock.now + self.options.network.overhead
        if index in self._final:
            session = self.workload.sessions[self.workload.rounds[index].session].name
            for worker in self.workers.values():
                worker.release(session)
            if self.nodes is not None:
                self.nodes.release(session)
        self._remaining -= 1
        self._progress()
        for successor in self._successors[index]:
            self._unfinished_before[successor] -= 1
            if not self._unfinished_before[successor]:
                delay = self.workload.rounds[successor].at_s / self.options.speed
                self.clock.after(delay, partial(self._arrive, successor))
        if not self._remaining:
            self.clock.stop()


def _number_of(instance: str) -> int:
    """The number of the worker of an instance."""
    return int(instance.partition(".")[0].rpartition("-")[2])
