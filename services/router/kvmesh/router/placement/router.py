"""The router of one model as plain synchronous code: the live service and the simulator run it."""

import math
from operator import index
from random import Random

import numpy as np

from kvmesh.bus.errors import cause
from kvmesh.bus.messages import (
    Candidate,
    Decision,
    Instance,
    Load,
    Outcome,
    RouteEvent,
    RouteRequest,
    SeqAdd,
    SeqEvent,
    SeqFree,
    prefill_part,
)
from kvmesh.hashing import HASH_BYTES
from kvmesh.router.config import cost_model, thresholds
from kvmesh.router.errors import InvalidRouteRequest, NoWorkers, RouterConfigError, RouterOverloaded
from kvmesh.router.placement.failure_log import FailureLog
from kvmesh.router.policies.base import Kv, Policy
from kvmesh.router.policies.registry import make_policy
from kvmesh.router.scoring.candidates import Candidates, PolicyChoice, candidates
from kvmesh.router.scoring.cost import CostModel
from kvmesh.router.scoring.overlaps import Overlaps, OverlapWatch, gather
from kvmesh.router.state.active_sequences import ActiveSequences
from kvmesh.router.state.arrays import Slots
from kvmesh.router.state.engine_reports import EngineReports
from kvmesh.router.state.predicted_prefixes import PredictedPrefixes
from kvmesh.router.state.rank_speeds import RankSpeeds
from kvmesh.router.state.rank_table import UNMET, RankTable, Serves
from kvmesh.settings.schema import RouterSettings

TOLD = ("placed", "finished", "freed")  # for policies that learn
GONE_GRACE_S = 10.0  # in which a worker may come back, or its card only now arrive
IDLE_GRACE_S = 15.0  # from a placement until an idle engine proves that it is lost


class RouterCore:
    """Decides placements from what it has been told; `epoch` is the Unix time of `now` = 0."""

    def __init__(
        self, model: str, router: str, settings: RouterSettings, rng: Random, epoch: float = 0.0
    ) -> None:
        self.model = model
        self.settings = settings
        self.table = RankTable()
        self._reports = EngineReports(self.table)
        self.speeds = RankSpeeds()
        self.active = ActiveSequences(self.table, settings.sequence_ttl_s)
        self.limits = thresholds(settings)
        self._failures = FailureLog()
        self.faults = self._failures.counts
        self.epoch = epoch
        self._router = router
        self._rng = rng
        ttl = settings.predicted_ttl_s if settings.kv_events else settings.approximate_ttl_s
        self._predicted = PredictedPrefixes(ttl)
        self.watch = OverlapWatch()
        self._model = cost_model(settings)
        self._prefill_model = cost_model(settings, settings.prefill_credits)
        self._decode_model = cost_model(settings, settings.decode_credits)
        self._gone: dict[str, float] = {}
        self._policies: dict[str, Policy] = {}
        self._told: list[tuple[str, Policy]] = []
        self.policy = self._named(settings.policy)

    # facts

    def join(self, card: Instance) -> None:
        """Take in the card of a worker of this model, or of any kvbm, or a change to it."""
        self.table.join(card)

    def leave(self, instance: str) -> None:
        slots = self.table.leave(instance)
        self._predicted.forget(slots)
        self._reports.forget(slots)
        self.speeds.forget(slots)

    def report(self, load: Load, now: float) -> None:
        """Take an engine's own account of its load."""
        slot = self._reports.take(load, now)
        if slot is None:
            return
        self.speeds.take(slot, load, now)
        if not load.running + load.waiting:
            self.active.forget_idle(slot, now - IDLE_GRACE_S)

    def apply(self, event: SeqEvent, now: float) -> None:
        """Apply an active-sequence event, one's own or that of a replica."""
        if type(event) is SeqAdd:
            self._add(event, now)
            return
        self.active.apply(event, now)
        if type(event) is SeqFree:
            self._freed(event.request, now)

    def _freed(self, request: str, now: float) -> None:
        for name, policy in self._told:
            try:
                policy.freed(request, now)
            except Exception as error:
                self._note(name, "freed", error)

    def _add(self, event: SeqAdd, now: float) -> None:
        at = min(event.time - self.epoch, now)
        slot = self.active.add(event, at)
        if slot is not None and at + self.settings.sequence_ttl_s > now:
            self._predicted.add(slot, event.sequence_hashes, at)

    def follow(self, event: RouteEvent, now: float) -> None:
        """Tell the policies of a decision or an outcome, one's own or that of a replica."""
        at = min(event.time - self.epoch, now)
        for name, policy in self._told:
            try:
                if isinstance(event, Outcome):
                    policy.finished(event, at)
                else:
                    policy.placed(event, at)
            except Exception as error:
                self._note(name, "finished" if isinstance(event, Outcome) else "placed", error)

    def expire(self, now: float) -> list[str]:
        """Forget what is out of date; call about once a second. Returns the requests given up."""
        self._predicted.expire(now)
        self._forget_gone(now)
        self.speeds.update(now, self.table.size)
        for name, policy in self._policies.items():
            try:
                policy.tick(now)
            except Exception as error:
                self._note(name, "tick", error)
        lost = self.active.expire(now)
        for request in lost:
            self._freed(request, now)
        return lost

    def _forget_gone(self, now: float) -> None:
        """Drop what is on workers that have gone, a while after: nobody may ever tell its end."""
        cards, slots = self.table.cards, self.table.slot_of
        gone = {instance for instance, _ in slots if instance not in cards}
        self._gone = {instance: self._gone.get(instance, now) for instance in gone}
        for (instance, _), slot in list(slots.items()):
            if now - self._gone.get(instance, now) > GONE_GRACE_S:
                self.active.forget_idle(slot, now - GONE_GRACE_S)

    # what the policy says, which may be anyone's code; without it, what the base class says

    def admits(self, request: RouteRequest, now: float) -> bool:
        """Whether the request may be placed now, by `Policy.admits`."""
        try:
            return bool(self.policy.admits(request, now))
        except Exception as error:
            self._note(self.settings.policy, "admits", error)
            return True

    def shift(self, request: RouteRequest) -> float:
        """Seconds by which the request counts as come earlier, by `Policy.shift`."""
        try:
            return float(self.policy.shift(request))
        except Exception as error:
            self._note(self.settings.policy, "shift", error)
            return 0.0

    def learned(self) -> bytes | None:
        """What the replicas and the next start should know, by `Policy.state`."""
        try:
            return self.policy.state()
        except Exception as error:
            self._note(self.settings.policy, "state", error)
            return None

    def merge(self, router: str, state: bytes, own: bool) -> None:
        """Give the policy what `router` has learned; raises ValueError if it is unreadable."""
        try:
            self.policy.merge(router, state, own)
        except ValueError:
            raise
        except Exception as error:
            self._note(self.settings.policy, "merge", error)

    def _note(self, policy: str, call: str, error: Exception) -> None:
        self._failures.note(policy, f"policy {policy} failed in {call}()", error)

    # decisions

    def decide(
        self,
        request: RouteRequest,
        overlaps: Overlaps | None,
        now: float,
        arrived: float | None = None,
        index_s: float = 0.0,
        note: str | None = None,
    ) -> Decision:
        """Choose a rank; raises RouteError if there is none. Changes no load: see `commit`."""
        view = self.view(request, overlaps, now)
        name = request.policy or self.settings.policy
        policy = self._of_request(name)
        model = self._model.overridden(request.overrides) if request.overrides else self._model
        choice = self._choose(name, policy, view, model)
        if overlaps is not None and arrived is not None:
            self.watch.look(request.sequence_hashes, bool(overlaps.rows), now)
        prefill = None
        if self.table.splits:
            view, choice, prefill = self._split(name, policy, view, choice)
        chosen, shown = candidates(view, choice)
        return Decision(
            request=request.request,
            model=self.model,
            time=now + self.epoch,
            router=self._router,
            policy=name,
            chosen=chosen,
            candidates=shown,
            eligible=len(view),
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
        )

    def commit(self, decision: Decision, now: float) -> list[SeqAdd]:
        """Count a decision's request as active; the events tell the replicas."""
        chosen, prefill = decision.chosen, decision.prefill
        if prefill is None:
            events = [self._added(decision, decision.request, chosen, sum(chosen.overlap))]
        else:
            whole = -(-decision.tokens // max(self.table.block_size, 1))
            events = [
                self._added(decision, decision.request, chosen, whole),
                self._added(
                    decision, prefill_part(decision.request), prefill, sum(prefill.overlap)
                ),
            ]
        for event in events:
            self._add(event, now)
        self.follow(decision, now)
        return events

    def _added(self, decision: Decision, name: str, at: Candidate, overlap: int) -> SeqAdd:
        return SeqAdd(
            request=name,
            instance=at.instance,
            rank=at.rank,
            sequence_hashes=decision.sequence_hashes,
            tokens=decision.tokens,
            overlap=overlap,
            osl=max(decision.hints.osl or 0, 0),
            time=decision.time,
        )

    def view(
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
        shared = self.active.shared(request.sequence_hashes)
        whole = -(-request.tokens // size)
        overlap, loads, most = gather(table, slots, overlaps, predicted, shared, whole)
        prefer = request.placement.prefer
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
            most=most,
            slowness=self.speeds.of(slots),
        )

    def eligible(self, request: RouteRequest, serves: Serves = "all") -> Slots:
        """The slots that may take the request now; raises NoWorkers or Overloaded."""
        placement, adapter = request.placement, request.adapter
        slots = self.table.eligible(placement, adapter, serves)
        if not len(slots):
            reason = self.table.why_none(placement, adapter)
            raise NoWorkers(reason, unmet=reason == UNMET)
        if self.limits != _UNLIMITED:
            slots = self.table.under(self.limits, slots)
            if not len(slots):
                raise RouterOverloaded("every worker is past its busy threshold", 1.0)
        return slots

    def _choose(
        self, name: str, policy: Policy, view: Candidates, model: CostModel
    ) -> PolicyChoice:
        """The policy's choice, or that of `kv` if the policy fails."""
        try:
            choice = policy.choose(view, model, self._rng)
            chosen, cost = index(choice.chosen), np.asarray(choice.cost, np.float64)
            if not 0 <= chosen < len(view) or cost.shape != (len(view),):
                raise IndexError(f"chose {chosen} of {len(view)} candidates")
            return PolicyChoice(chosen, cost, None if choice.note is None else str(choice.note))
        except Exception as error:
            self._failures.note(name, f"policy {name} failed; kv decides instead", error)
            choice = _FALLBACK.choose(view, model, self._rng)
            return choice._replace(note=f"kv in place of {name}: {cause(error)}")

    def _split(
        self, name: str, policy: Policy, view: Candidates, choice: PolicyChoice
    ) -> tuple[Candidates, PolicyChoice, Candidate | None]:
        """Let one worker prefill and another decode, if the prompt is worth it and both are there.

        Short prompts and hot prefixes stay where they are, and so does everything while the
        prefill workers have more to do than `disagg_backlog` engine steps.
        """
        request, size = view.request, self.table.block_size
        uncached = request.tokens - view.overlap[choice.chosen].sum() * size
        if uncached < self.settings.disagg_tokens:
            return view, choice, None
        prefill = self._part(view, "prefill")
        decode = self._part(view, "decode")
        if prefill is None or decode is None:
            return view, choice, None
        first = self._choose(name, policy, prefill, self._prefill_model)
        second = self._choose(name, policy, decode, self._decode_model)
        return decode, second, candidates(prefill, first)[0]

    def _part(self, view: Candidates, serves: Serves) -> Candidates | None:
        request, table = view.request, self.table
        slots = table.eligible(request.placement, request.adapter, serves)
        slots = table.under(self.limits, slots)
        if serves == "prefill":
            most = self.settings.disagg_backlog * table.step_tokens.take(slots)
            slots = slots[(table.loads(slots)[0] <= most) | (most == 0)]
        if not len(slots):
            return None
        return self.view(request, view.overlaps, view.now, serves, slots)

    def _of_request(self, name: str) -> Policy:
        """A policy by name; a request may not have code loaded that nobody installed as one."""
        known = self._policies.get(name)
        if known is not None:
            return known
        if ":" in name:
            raise InvalidRouteRequest(f"{name!r} is not the name of an installed policy")
        try:
            return self._named(name)
        except RouterConfigError as error:
            raise InvalidRouteRequest(error.reason) from None

    def _named(self, name: str) -> Policy:
        policy = self._policies[name] = make_policy(name, self.settings)
        if any(getattr(type(policy), told) is not getattr(Policy, told) for told in TOLD):
            self._told.append((name, policy))
        return policy


_UNLIMITED = thresholds(RouterSettings())
_FALLBACK = Kv()


def _check(request: RouteRequest, block_size: int) -> None:
    """Raise InvalidRequest unless the request's numbers make sense."""
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
