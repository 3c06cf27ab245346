"""Placement decisions for one model, as synchronous code that service and simulator share."""

from collections.abc import Sequence
from random import Random

from msgspec.structs import replace

from kvmesh.bus.messages import (
    BATCH_PRIORITY,
    Candidate,
    Decision,
    Instance,
    Load,
    PrefixWait,
    ReturnForecast,
    RouteEvent,
    RouteRequest,
    SeqAdd,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
    ToolEvent,
    batch_classes,
    of_class,
    prefill_part,
    prefilled_request,
)
from kvmesh.returns.forecaster import ReturnChance, ReturnForecaster
from kvmesh.router.placement.adapter_loads import AdapterLoads
from kvmesh.router.placement.choice import RankChoice
from kvmesh.router.placement.learning import RouterLearning
from kvmesh.router.placement.policy_runner import PolicyRunner
from kvmesh.router.scoring.candidates import to_wire
from kvmesh.router.scoring.overlaps import Overlaps, OverlapWatch
from kvmesh.router.scoring.possible_hits import possible_hits
from kvmesh.router.state.active_sequences import ActiveSequences
from kvmesh.router.state.arrays import Slots
from kvmesh.router.state.engine_reports import EngineReports
from kvmesh.router.state.predicted_prefixes import PredictedPrefixes
from kvmesh.router.state.rank_speeds import RankSpeeds
from kvmesh.router.state.rank_table import RankTable, Serves
from kvmesh.router.state.running_prefills import RunningPrefills
from kvmesh.settings.schema import RouterSettings

GONE_GRACE_S = 10.0  # for a worker to return, or for its card to arrive
IDLE_GRACE_S = 15.0  # after a placement, an idle engine means that the request is lost


class RouterCore:
    """Decides placements from cards, loads and events; `epoch` is the Unix time of `now` = 0."""

    def __init__(
        self, model: str, router: str, settings: RouterSettings, rng: Random, epoch: float = 0.0
    ) -> None:
        self.model = model
        self.settings = settings
        self.table = RankTable(model)
        self._reports = EngineReports(self.table)
        self.speeds = RankSpeeds()
        self.active = ActiveSequences(self.table, settings.sequence_ttl_s)
        self.epoch = epoch
        self._router = router
        ttl = settings.predicted_ttl_s if settings.kv_events else settings.approximate_ttl_s
        self._predicted = PredictedPrefixes(ttl, settings.sequence_ttl_s)
        self.prefills = RunningPrefills(settings.sequence_ttl_s)
        self.adapters = AdapterLoads(settings, self.table, self.prefills)
        self._batch_classes = batch_classes(settings.batch_classes)
        self.overlap_watch = OverlapWatch()
        self._gone_since: dict[str, float] = {}
        self.policies = PolicyRunner(settings, rng)
        self.choice = RankChoice(
            settings, self.table, self.active, self._predicted, self.speeds, self.policies
        )
        self.learning = RouterLearning(settings, router, self.table, self.speeds)
        forecaster = self.learning.returns
        returns = None if forecaster is None else _Returns(self, forecaster)
        self.policies.default.follow(returns, self.speeds)

    # inputs

    def join(self, card: Instance) -> None:
        """Add or update the card of a worker of this model, or of any kvbm."""
        self.table.join(card)

    def leave(self, instance: str) -> None:
        slots = self.table.leave(instance)
        self._predicted.forget(slots)
        self.prefills.forget(slots)
        self._reports.forget(slots)
        self.speeds.forget(slots)

    def apply_load(self, load: Load, now: float) -> None:
        """Apply an engine's load report."""
        slot = self._reports.apply(load, now)
        if slot is None:
            return
        self.speeds.observe(slot, load, now)
        if not load.running + load.waiting:
            self.active.drop_stale(slot, now - IDLE_GRACE_S)

    def apply(self, event: SeqEvent, now: float) -> None:
        """Apply an active-sequence event of this router or a replica."""
        if type(event) is SeqAdd:
            self._add(event, now)
            return
        self.active.apply(event, now)
        if type(event) is SeqPrefilled:
            self._end_prefill(event.request, now, computed=True)
        elif type(event) is SeqFree:
            computed = not self.settings.kv_events or self.ends_prefill(event)
            self._end_prefill(event.request, now, computed)
            self.prefills.end_wait(event.request)
            self.prefills.end_wait(prefill_part(event.request))
            self.policies.on_freed(event.request, now)

    def ends_prefill(self, event: SeqEvent) -> bool:
        """True if the prompt of a request has been computed, perhaps on another rank than its."""
        if type(event) is not SeqFree:
            return type(event) is SeqPrefilled
        return prefilled_request(event.request) in self.active

    def _end_prefill(self, request: str, now: float, computed: bool) -> None:
        for name in (request, prefill_part(request)):
            if computed:
                self._predicted.computed(name, now)
                self.prefills.computed(name, now)
            else:
                self._predicted.lost(name)
                self.prefills.drop(name)

    def _add(self, event: SeqAdd, now: float) -> None:
        at = min(event.time - self.epoch, now)
        table, waited = self.table, False
        size = max(table.block_size, 1)
        found = table.find_slot(event.instance, event.rank)
        own = max(event.tokens - event.overlap * size, 0)
        if event.waits_for:
            if event.request not in self.active or self.prefills.waits(event.request):
                self.prefills.wait(event, found, own, now)
        else:
            waited = self.prefills.end_wait(event.request)
            if waited:  # it may compute more than it would have after its wait
                self.active.withdraw(event.request)
        ahead = 0.0 if found is None else self._backlog(found)
        slot = self.active.add(event, at)
        if slot is not None and not waited:
            table.record_prompt(slot, event.tokens / size)
        if event.waits_for or at + self.settings.sequence_ttl_s <= now:
            return
        if slot is not None:
            self._predicted.add(event.request, slot, event.sequence_hashes, at)
            self.prefills.start(event, slot, ahead + own, at)

    def _backlog(self, slot: int) -> float:
        """Prompt tokens that a rank has yet to compute."""
        cells = self.table.cells
        return max(cells.prefill_tokens[slot] + cells.correction_tokens[slot], 0.0)

    def apply_route_event(self, event: RouteEvent, now: float) -> None:
        """Pass a decision or outcome, of this router or a replica, to the policies that learn."""
        self.policies.apply_route_event(event, min(event.time - self.epoch, now))

    def learn(self, event: RouteEvent | ToolEvent, now: float) -> None:
        """Pass an event of this router, a replica or a harness to what learns from all of them."""
        self.learning.apply(event, now + self.epoch)

    def take_forecasts(self, now: float) -> dict[str, list[ReturnForecast]]:
        """The forecasts of returns to send, by the instance that expects them."""
        return self.learning.take_forecasts(now + self.epoch)

    def expire(self, now: float) -> list[str]:
        """Drop expired state; call about once a second. Returns the requests given up as lost."""
        self._predicted.expire(now)
        self.prefills.expire(now)
        # Drop requests of departed workers after a grace time: their end may be unpublished
        cards, slots = self.table.cards, self.table.slot_of
        gone = {instance for instance, _ in slots if instance not in cards}
        self._gone_since = {instance: self._gone_since.get(instance, now) for instance in gone}
        for (instance, _), slot in list(slots.items()) if gone else ():
            if now - self._gone_since.get(instance, now) > GONE_GRACE_S:
                self.active.drop_stale(slot, now - GONE_GRACE_S)
        if self.settings.learn_speeds:
            self.speeds.update(now, self.table.size)
        self.policies.tick(now)
        lost = self.active.expire(now)
        for request in lost:
            self.policies.on_freed(request, now)
        return lost

    # decisions

    def decide(
        self,
        request: RouteRequest,
        overlaps: Overlaps | None,
        now: float,
        arrived: float | None = None,
        index_s: float = 0.0,
        note: str | None = None,
        slots: Slots | None = None,
        prefix_waits: Sequence[PrefixWait] = (),
    ) -> Decision:
        """Choose a rank, among `slots` if given; raises RouteError if none is available.

        `commit` counts its load.
        """
        found = self.choice.choose(request, overlaps, now, slots)
        candidates, prefill = found.candidates, found.prefill
        if overlaps is not None and arrived is not None:
            self.overlap_watch.observe(request.sequence_hashes, bool(overlaps.rows), now)
        chosen, shown = to_wire(candidates, found.choice)
        serves: Serves = "all" if prefill is None else "prefill"
        return Decision(
            request=request.request,
            model=self.model,
            time=now + self.epoch,
            router=self._router,
            policy=found.policy,
            chosen=chosen,
            candidates=shown,
            eligible=len(candidates),
            prefill=prefill,
            tokens=request.tokens,
            sequence_hashes=request.sequence_hashes,
            max_tokens=request.max_tokens,
            block_size=self.table.block_size,
            hints=request.hints,
            wait_s=0.0 if arrived is None else max(now - arrived - index_s, 0.0),
            index_s=index_s,
            attempt=len(request.placement.exclude),
            note=note or found.choice.note,
            prefetch=request.prefetch,
            possible=possible_hits(found.first, prefill or chosen, serves),
            prefix_waits=list(prefix_waits),
        )

    def commit(self, decision: Decision, now: float) -> list[SeqAdd]:
        """Count a decision's request as active; returns the events for the replicas."""
        events = self._add_events(decision)
        for event in events:
            self._add(event, now)
        self.apply_route_event(decision, now)
        return events

    def sent(self, event: SeqAdd, now: float) -> SeqAdd:
        """A committed prompt that was held is sent to its rank now, which begins to compute it.

        Returns its event for the replicas, which learn from it how long ranks take.
        """
        table = self.table
        slot = table.find_slot(event.instance, event.rank)
        if slot is not None and event.request in self.prefills:
            elsewhere = table.cells.held_tokens[slot] + self.prefills.waiting_tokens(slot)
            own = max(event.tokens - event.overlap * max(table.block_size, 1), 0)
            work = max(self._backlog(slot) - elsewhere, float(own))
            self.prefills.start(event, slot, work, now)
        return replace(event, time=now + self.epoch)

    def reserve(self, decision: Decision, leader: str, now: float) -> list[SeqAdd]:
        """Count a request on its rank while it waits for `leader` to compute its prefix.

        Returns the events for the replicas; `withdraw` ends it.
        """
        events = [replace(event, waits_for=leader) for event in self._add_events(decision)]
        for event in events:
            self._add(event, now)
        return events

    def withdraw(self, request: str) -> None:
        """Count a request that waits for a prefix on no rank any more, before it is placed."""
        self.active.withdraw(request)

    def give_up_prefill(self, request: str) -> None:
        """Expect nothing any more of a prompt that takes too long to compute."""
        self._predicted.lost(request)
        self._predicted.lost(prefill_part(request))
        self.prefills.drop(request)
        self.prefills.drop(prefill_part(request))

    def recompute_s(self, decision: Decision, rank: Candidate) -> float:
        """Seconds in which another rank would compute the prompt; this one, if it is the only one.

        The best of those that the decision names, with its backlog, by measured speeds. Those of a
        prompt that is computed apart only generate.
        """
        size, found = self.table.block_size, []
        blocks = -(-decision.tokens // size)
        for other in decision.candidates if decision.prefill is None else ():
            slot = self.table.find_slot(other.instance, other.rank)
            if slot is not None and (other.instance, other.rank) != (rank.instance, rank.rank):
                work = other.prefill + max(blocks - sum(other.overlap), 0)
                found.append(work * size * self.prefills.token_s(slot))
        if found:
            return min(found)
        slot = self.table.find_slot(rank.instance, rank.rank)
        return 0.0 if slot is None else decision.tokens * self.prefills.token_s(slot)

    def _add_events(self, decision: Decision) -> list[SeqAdd]:
        chosen, prefill = decision.chosen, decision.prefill
        if prefill is None:
            events = [self._add_event(decision, decision.request, chosen, sum(chosen.overlap))]
        else:
            prompt_blocks = -(-decision.tokens // max(self.table.block_size, 1))
            events = [
                self._add_event(decision, decision.request, chosen, prompt_blocks),
                self._add_event(
                    decision, prefill_part(decision.request), prefill, sum(prefill.overlap)
                ),
            ]
        return events

    def _add_event(self, decision: Decision, name: str, at: Candidate, overlap: int) -> SeqAdd:
        return SeqAdd(
            request=name,
            instance=at.instance,
            rank=at.rank,
            sequence_hashes=decision.sequence_hashes,
            tokens=decision.tokens,
            overlap=overlap,
            osl=max(decision.hints.osl or 0, 0),
            time=decision.time,
            priority=self._engine_priority(decision),
        )

    def _engine_priority(self, decision: Decision) -> int:
        """The priority in engines; a prefetch has that of batch requests here, as it may wait."""
        if decision.prefetch is not None or of_class(decision.hints, self._batch_classes):
            return BATCH_PRIORITY
        return decision.hints.priority


class _Returns:
    """A router's forecasts, at the times of its policies."""

    def __init__(self, core: RouterCore, forecaster: ReturnForecaster) -> None:
        self._core = core
        self._forecaster = forecaster
        self.tools = forecaster.tools

    def within(self, session: str, seconds: float, now: float) -> ReturnChance | None:
        return self._forecaster.returns_within(session, seconds, now + self._core.epoch)
