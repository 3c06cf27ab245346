"""The choice of a rank for a request: who is eligible, at which cost, and what the policy takes."""

import math
from typing import NamedTuple

import numpy as np

from kvmesh.bus.messages import Candidate, Placement, RouteRequest, Thresholds
from kvmesh.hashing import HASH_BYTES
from kvmesh.router.config import cost_model, thresholds
from kvmesh.router.errors import InvalidRouteRequest, NoWorkers, RouterOverloaded
from kvmesh.router.placement.policy_runner import PolicyRunner
from kvmesh.router.policies.base import Policy
from kvmesh.router.scoring.candidates import Candidates, PolicyChoice, to_wire
from kvmesh.router.scoring.overlaps import Overlaps, gather
from kvmesh.router.state.active_sequences import ActiveSequences
from kvmesh.router.state.arrays import Floats, Slots, highest
from kvmesh.router.state.predicted_prefixes import PredictedPrefixes
from kvmesh.router.state.rank_speeds import RankSpeeds
from kvmesh.router.state.rank_table import RankTable, Serves
from kvmesh.router.state.unmet import Unmet
from kvmesh.settings.schema import RouterSettings


class ChosenRanks(NamedTuple):
    """The choice of the policy named `policy` among `candidates`, after `first` ones.

    With a `prefill` rank, that computes the prompt, and the chosen one generates.
    """

    policy: str
    first: Candidates
    candidates: Candidates
    choice: PolicyChoice
    prefill: Candidate | None


class RankChoice:
    """Chooses ranks by the state of a RouterCore, and changes none of it.

    `limits` are the busy thresholds.
    """

    def __init__(
        self,
        settings: RouterSettings,
        table: RankTable,
        active: ActiveSequences,
        predicted: PredictedPrefixes,
        speeds: RankSpeeds,
        policies: PolicyRunner,
    ) -> None:
        self._settings = settings
        self._table = table
        self._active = active
        self._predicted = predicted
        self._speeds = speeds
        self._policies = policies
        self.limits = thresholds(settings)
        self.take_costs()

    def take_costs(self) -> None:
        """Compute costs by the settings as they are now."""
        settings = self._settings
        self._model = cost_model(settings)
        self._prefill_model = cost_model(settings, settings.prefill_credits)
        self._decode_model = cost_model(settings, settings.decode_credits, computes=False)

    def choose(
        self,
        request: RouteRequest,
        overlaps: Overlaps | None,
        now: float,
        slots: Slots | None = None,
    ) -> ChosenRanks:
        """Choose a rank, among `slots` if given; raises RouteError if none is available."""
        first = candidates = self.candidates(request, overlaps, now, slots=slots)
        name = request.policy or self._settings.policy
        policy = self._policies.find(name)
        model = self._model.overridden(request.overrides) if request.overrides else self._model
        choice = self._policies.choose(name, policy, candidates, model)
        prefill = None
        if self._table.disaggregated:
            self._check_prefill(request.placement)
            candidates, choice, prefill = self._disaggregate(name, policy, candidates, choice)
        return ChosenRanks(name, first, candidates, choice, prefill)

    def candidates(
        self,
        request: RouteRequest,
        overlaps: Overlaps | None,
        now: float,
        serves: Serves = "all",
        slots: Slots | None = None,
    ) -> Candidates:
        """The candidates of a request; raises RouteError if none is eligible or all are busy."""
        table = self._table
        size = table.block_size
        _check(request, size)
        if slots is None:
            slots = self.eligible(request, serves)
        predicted = self._predicted.depths(request.sequence_hashes, table.size)
        shared = self._active.held_depths(request.sequence_hashes)
        prompt_blocks = -(-request.tokens // size)
        overlap, loads, max_decode = gather(
            table, slots, overlaps, predicted, shared, prompt_blocks
        )
        prefer = request.placement.prefer
        slowness, answer = self._speeds.factors(slots), None
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
            block_s=self._speeds.prompt_token_s * size,
        )

    def _answer_blocks(self, request: RouteRequest, slots: Slots, loads: Floats) -> Floats | None:
        """Blocks of prefill in the time of the answer on each rank, if all had median speed.

        `loads` are as from `gather`.
        """
        seconds, speeds = self._speeds.seconds, self._speeds
        if seconds is None:
            return None
        used = loads[1] / np.maximum(self._table.total_blocks.take(slots), 1.0)
        np.minimum(used, 1.0, out=used)
        tokens = max(request.hints.osl or 0, 0) or speeds.answer
        steps = speeds.decode_seconds(used, loads[2])
        steps *= tokens / (seconds.prompt_token * self._table.block_size)
        return steps

    def eligible(self, request: RouteRequest, serves: Serves = "all") -> Slots:
        """The slots that may run the request now; raises NoWorkers or RouterOverloaded."""
        placement, adapter = request.placement, request.adapter
        slots = self._table.eligible(placement, adapter, serves)
        if not len(slots):
            reason = self._table.why_not_eligible(placement, adapter)
            raise NoWorkers(*reason, unmet=True) if isinstance(reason, Unmet) else NoWorkers(reason)
        if self.limits != Thresholds():
            slots = self._table.below_thresholds(self.limits, slots)
            if not len(slots):
                raise RouterOverloaded("every worker is past its busy threshold", 1.0)
        return slots

    def _disaggregate(
        self, name: str, policy: Policy, candidates: Candidates, choice: PolicyChoice
    ) -> tuple[Candidates, PolicyChoice, Candidate | None]:
        """Place prefill and decode apart if the prompt is long enough and both kinds are available.

        A prompt with few uncached tokens stays on one worker, and so does every prompt while each
        prefill rank has a backlog of more than `disagg_backlog` engine steps; unless the chosen
        rank needs a handoff or the request names another worker for the prompt. Raises NoWorkers if
        it cannot get one.
        """
        request, size = candidates.request, self._table.block_size
        chosen = self._table.ranks[candidates.slots[choice.chosen]].instance
        required = self._table.needs_handoff(chosen)
        required = required or request.placement.prefill not in (None, chosen)
        uncached = request.tokens - candidates.overlap[choice.chosen].sum() * size
        if uncached < self._settings.disagg_tokens and not required:
            return candidates, choice, None
        prefill = self._candidates_for(candidates, "prefill", required)
        decode = self._candidates_for(candidates, "decode")
        if prefill is None or decode is None:
            if required:
                raise NoWorkers("no prefill worker is available, and the prompt needs one")
            return candidates, choice, None
        first = self._policies.choose(name, policy, prefill, self._prefill_model)
        second = self._policies.choose(name, policy, decode, self._decode_model)
        return decode, second, to_wire(prefill, first)[0]

    def _check_prefill(self, placement: Placement) -> None:
        """Raise NoWorkers if the worker that is to compute the prompt does not exist."""
        wanted = placement.prefill
        if wanted not in (None, placement.instance):
            serving = [card.instance for card in self._table.serving("prefill")]
            if wanted not in serving:
                reason = f"no instance of a prefill worker is called {wanted!r}"
                raise NoWorkers(reason, "prefill_worker_id", unmet=True)

    def _candidates_for(
        self, candidates: Candidates, serves: Serves, any_backlog: bool = False
    ) -> Candidates | None:
        request, table = candidates.request, self._table
        slots = table.eligible(request.placement, request.adapter, serves)
        slots = table.below_thresholds(self.limits, slots)
        if serves == "prefill" and not any_backlog:
            limit = self._settings.disagg_backlog * table.step_tokens.take(slots)
            slots = slots[(table.loads(slots)[0] <= limit) | (limit == 0)]
        if not len(slots):
            return None
        return self.candidates(request, candidates.overlaps, candidates.now, serves, slots)


def _deepest(shared: Floats, predicted: Floats | None) -> float:
    """The most leading blocks of one rank, among those of active and of predicted requests."""
    deepest = highest(shared)
    return deepest if predicted is None else max(deepest, highest(predicted))


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
