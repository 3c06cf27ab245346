"""Placement decisions for one model, as synchronous code that service and simulator share."""

import math
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
from msgspec.structs import replace

from kvmesh.bus.messages import (
    BATCH_PRIORITY,
    Candidate,
    Decision,
    Instance,
    LearnerReport,
    Load,
    Outcome,
    PrefixWait,
    ReturnForecast,
    RouteEvent,
    RouteRequest,
    SeqAdd,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
    ToolEvent,
    of_class,
    prefill_part,
    prefilled_request,
)
from kvmesh.hashing import HASH_BYTES
from kvmesh.learning.learner import Learner
from kvmesh.returns.forecaster import ReturnForecaster
from kvmesh.router.config import cost_model, thresholds
from kvmesh.router.errors import InvalidRouteRequest, NoWorkers, RouterOverloaded
from kvmesh.router.placement.policy_runner import PolicyRunner
from kvmesh.router.policies.base import Policy
from kvmesh.router.scoring.candidates import Candidates, PolicyChoice, to_wire
from kvmesh.router.scoring.overlaps import Overlaps, OverlapWatch, gather
from kvmesh.router.scoring.possible_hits import possible_hits
from kvmesh.router.state.active_sequences import ActiveSequences
from kvmesh.router.state.arrays import Floats, Slots
from kvmesh.router.state.engine_reports import EngineReports
from kvmesh.router.state.predicted_prefixes import PredictedPrefixes
from kvmesh.router.state.rank_speeds import RankSpeeds
from kvmesh.router.state.rank_table import RankTable, Serves
from kvmesh.router.state.running_prefills import RunningPrefills
from kvmesh.router.state.speed_trial import SpeedTrial
from kvmesh.router.state.unmet import Unmet
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
        self._speed_trial = SpeedTrial(self.speeds)
        self.active = ActiveSequences(self.table, settings.sequence_ttl_s)
        self.limits = thresholds(settings)
        self.epoch = epoch
        self._router = router
        ttl = settings.predicted_ttl_s if settings.kv_events else settings.approximate_ttl_s
        self._predicted = PredictedPrefixes(ttl, settings.sequence_ttl_s)
        self.prefills = RunningPrefills(settings.sequence_ttl_s)
        self._batch_classes = frozenset(settings.batch_classes)
        self.overlap_watch = OverlapWatch()
        self._model = cost_model(settings)
        self._prefill_model = cost_model(settings, settings.prefill_credits)
        self._decode_model = cost_model(settings, settings.decode_credits, computes=False)
        self._gone_since: dict[str, float] = {}
        self.policies = PolicyRunner(settings, rng)
        self.returns = ReturnForecaster(router) if settings.forecast_returns else None
        within = self._returns_within if self.returns is not None else None
        self.policies.default.follow(within, self.speeds)

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
        if isinstance(event, Outcome):
            self.speeds.observe_answer(event.output_tokens)
            self._speed_trial.on_finished(event)
        elif isinstance(event, Decision):
            slot = self.table.find_slot(event.chosen.instance, event.chosen.rank)
            self._speed_trial.on_placed(event, slot)
        self._learn_returns(event, now)

    def _learn_returns(self, event: RouteEvent | ToolEvent, now: float) -> None:
        if self.returns is None:
            return
        if isinstance(event, ToolEvent):
            self.returns.on_tool(event, now + self.epoch)
        elif isinstance(event, Outcome):
            self.returns.on_finished(event, now + self.epoch)
        else:
            self.returns.on_placed(event, now + self.epoch)

    def learned(self) -> Iterator[LearnerReport]:
        """The reports of everything that learns in this router."""
        learners: list[Learner] = [self.returns] if self.returns is not None else []
        if self.settings.learn_speeds:
            learners.append(self._speed_trial)
        learners += self.policies.learners
        for learner in learners:
            yield from learner.report(self.model)

    def with_expected_return(self, decision: Decision) -> Decision:
        """The decision with the return that was expected of the prompt that it continues."""
        expected = None if self.returns is None else self.returns.expected_return(decision)
        return decision if expected is None else replace(decision, expected=expected)

    def _returns_within(
        self, session: str, seconds: float, now: float
    ) -> tuple[float, bool] | None:
        assert self.returns is not None
        return self.returns.returns_within(session, seconds, now + self.epoch)

    def take_forecasts(self, now: float) -> dict[str, list[ReturnForecast]]:
        """The forecasts of returns to send, by the instance that expects them.

        That is the worker that computed the prompt, and the kvbm of its node.
        """
        found: dict[str, list[ReturnForecast]] = {}
        if self.returns is None:
            return found
        self.returns.set_capacity(int(self.table.total_blocks.sum()))
        cards = self.table.cards
        for instance, forecast in self.returns.take_forecasts(now + self.epoch):
            if instance in cards:
                card = cards[instance]
                for each in (card, *self.table.nodes.cards_of(card.node)):
                    if each.expects_returns:
                        found.setdefault(each.instance, []).append(forecast)
        return found

    def expire(self, now: float) -> list[str]:
        """Drop expired state; call about once a second. Returns the requests given up as lost."""
        self._predicted.expire(now)
        self.prefills.expire(now)
        self._drop_gone(now)
        if self.settings.learn_speeds:
            self.speeds.update(now, self.table.size)
        self.policies.tick(now)
        lost = self.active.expire(now)
        for request in lost:
            self.policies.on_freed(request, now)
        return lost

    def _drop_gone(self, now: float) -> None:
        """Drop requests of departed workers after a grace time: their end may be unpublished."""
        cards, slots = self.table.cards, self.table.slot_of
        gone = {instance for instance, _ in slots if instance not in cards}
        self._gone_since = {instance: self._gone_since.get(instance, now) for instance in gone}
        for (instance, _), slot in list(slots.items()):
            if now - self._gone_since.get(instance, now) > GONE_GRACE_S:
                self.active.drop_stale(slot, now - GONE_GRACE_S)

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
        candidates = self.candidates(request, overlaps, now, slots=slots)
        name = request.policy or self.settings.policy
        policy = self.policies.find(name)
        model = self._model.overridden(request.overrides) if request.overrides else self._model
        choice = self.policies.choose(name, policy, candidates, model)
        if overlaps is not None and arrived is not None:
            self.overlap_watch.observe(request.sequence_hashes, bool(overlaps.rows), now)
        prefill, first = None, candidates
        if self.table.disaggregated:
            candidates, choice, prefill = self._disaggregate(name, policy, candidates, choice)
        chosen, shown = to_wire(candidates, choice)
        serves: Serves = "all" if prefill is None else "prefill"
        return Decision(
            request=request.request,
            model=self.model,
            time=now + self.epoch,
            router=self._router,
            policy=name,
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
            note=note or choice.note,
            prefetch=request.prefetch,
            possible=possible_hits(first, prefill or chosen, serves),
            prefix_waits=list(prefix_waits),
        )

    def commit(self, decision: Decision, now: float) -> list[SeqAdd]:
        """Count a decision's request as active; returns the events for the replicas."""
        events = self._add_events(decision)
        for event in events:
            self._add(event, now)
        self.apply_route_event(decision, now)
        return events

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

    def candidates(
        self,
        request: RouteRequest,
        overlaps: Overlaps | None,
        now: float,
        serves: Serves = "all",
        slots: Slots | None = None,
    ) -> Candidates:
        """The candidates of a request; raises RouteError if none is eligible or all are busy."""
        table = self.table
        size = table.block_size
        _check(request, size)
        if slots is None:
            slots = self.eligible(request, serves)
        predicted = self._predicted.depths(request.sequence_hashes, table.size)
        shared = self.active.held_depths(request.sequence_hashes)
        prompt_blocks = -(-request.tokens // size)
        overlap, loads, max_decode = gather(
            table, slots, overlaps, predicted, shared, prompt_blocks
        )
        prefer = request.placement.prefer
        slowness, answer = self.speeds.factors(slots), None
        if slowness is not None and serves != "prefill":
            answer = self._answer_blocks(request, slots, loads)
        return Candidates(
            request=request,
            now=now,
            prompt=request.tokens / size,
            slots=slots,
            overlap=overlap,
            prefill=loads[0],
            decode=loads[1],
            requests=loads[2],
            table=table,
            overlaps=overlaps,
            preference=table.preference(prefer, slots) if prefer else None,
            max_decode=max_decode,
            slowness=slowness,
            running=_deepest(shared, predicted),
            answer=answer,
        )

    def _answer_blocks(self, request: RouteRequest, slots: Slots, loads: Floats) -> Floats | None:
        """Blocks of prefill in the time of the answer on each rank, if all had median speed.

        `loads` are as from `gather`.
        """
        seconds, speeds = self.speeds.seconds, self.speeds
        if seconds is None:
            return None
        used = loads[1] / np.maximum(self.table.total_blocks.take(slots), 1.0)
        np.minimum(used, 1.0, out=used)
        tokens = max(request.hints.osl or 0, 0) or speeds.answer
        steps = speeds.decode_seconds(used, loads[2])
        steps *= tokens / (seconds.prompt_token * self.table.block_size)
        return steps

    def eligible(self, request: RouteRequest, serves: Serves = "all") -> Slots:
        """The slots that may run the request now; raises NoWorkers or RouterOverloaded."""
        placement, adapter = request.placement, request.adapter
        slots = self.table.eligible(placement, adapter, serves)
        if not len(slots):
            reason = self.table.why_not_eligible(placement, adapter)
            raise NoWorkers(*reason, unmet=True) if isinstance(reason, Unmet) else NoWorkers(reason)
        if self.limits != _UNLIMITED:
            slots = self.table.below_thresholds(self.limits, slots)
            if not len(slots):
                raise RouterOverloaded("every worker is past its busy threshold", 1.0)
        return slots

    def _disaggregate(
        self, name: str, policy: Policy, candidates: Candidates, choice: PolicyChoice
    ) -> tuple[Candidates, PolicyChoice, Candidate | None]:
        """Place prefill and decode apart if the prompt is long enough and both kinds are available.

        A prompt with few uncached tokens stays on one worker, and so does every prompt while each
        prefill rank has a backlog of more than `disagg_backlog` engine steps; unless the chosen
        rank needs a handoff. Raises NoWorkers if it cannot get one.
        """
        request, size = candidates.request, self.table.block_size
        slot = candidates.slots[choice.chosen]
        required = self.table.needs_handoff(self.table.ranks[slot].instance)
        uncached = request.tokens - candidates.overlap[choice.chosen].sum() * size
        if uncached < self.settings.disagg_tokens and not required:
            return candidates, choice, None
        prefill = self._candidates_for(candidates, "prefill", required)
        decode = self._candidates_for(candidates, "decode")
        if prefill is None or decode is None:
            if required:
                raise NoWorkers("no prefill worker is available, and the decode workers need one")
            return candidates, choice, None
        first = self.policies.choose(name, policy, prefill, self._prefill_model)
        second = self.policies.choose(name, policy, decode, self._decode_model)
        return decode, second, to_wire(prefill, first)[0]

    def _candidates_for(
        self, candidates: Candidates, serves: Serves, any_backlog: bool = False
    ) -> Candidates | None:
        request, table = candidates.request, self.table
        slots = table.eligible(request.placement, request.adapter, serves)
        slots = table.below_thresholds(self.limits, slots)
        if serves == "prefill" and not any_backlog:
            limit = self.settings.disagg_backlog * table.step_tokens.take(slots)
            slots = slots[(table.loads(slots)[0] <= limit) | (limit == 0)]
        if not len(slots):
            return None
        return self.candidates(request, candidates.overlaps, candidates.now, serves, slots)


def _deepest(shared: Floats, predicted: Floats | None) -> float:
    """The most leading blocks of one rank, among those of active and of predicted requests."""
    deepest = float(shared.max(initial=0.0))
    return deepest if predicted is None else max(deepest, float(predicted.max(initial=0.0)))


_UNLIMITED = thresholds(RouterSettings())


def _check(request: RouteRequest, block_size: int) -> None:
    """Raise InvalidRouteRequest if a number of the request is invalid."""
    size, tokens, prefer = len(request.sequence_hashes), request.tokens, request.placement.prefer
    if size % HASH_BYTES:
        raise InvalidRouteRequest("the sequence hashes are not whole 64-bit numbers")
    if not 0 < request.deadline_s < math.inf:
        raise InvalidRouteRequest(f"a deadline of {request.deadline_s} s")
    if not 0 <= request.hints.latency_sensitivity <= 1:
        raise InvalidRouteRequest("latency_sensitivity is not between 0 and 1")
    if prefer and not all(map(math.isfinite, prefer.values())):
        raise InvalidRouteRequest("a preference is not a finite number")
    if tokens < 1:
        raise InvalidRouteRequest(f"a prompt of {tokens} tokens")
    if size // HASH_BYTES * block_size > tokens:
        blocks = size // HASH_BYTES
        raise InvalidRouteRequest(f"{blocks} blocks of {block_size} do not fit {tokens} tokens")
