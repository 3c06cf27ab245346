"""The promises that the running workers of a group have kept, beside those modelled."""

from collections.abc import Sequence

from kvmesh.planner.capacity.queueing import ModelledEngine
from kvmesh.planner.capacity.slowdown import Comparison, Slowdown
from kvmesh.planner.core.fleets import Aim, Counts
from kvmesh.planner.core.groups.candidates import CandidateFleets
from kvmesh.planner.core.groups.planned_model import PlannedModel

# A fleet that has kept its promises for PROOF_S seconds of steady load, for FEWEST requests each,
# is large enough for this load, whatever the model says.
PROOF_S = 300.0
LATEST_S = 900.0
FEWEST = 200


class MeasuredFleet:
    """Slows modelled workers down to what real ones show; knows when those have proven enough."""

    def __init__(self, core: PlannedModel) -> None:
        self._core = core
        self._slowdown = Slowdown()

    def slowed(self, kind: ModelledEngine) -> ModelledEngine:
        """The engine as slow as it has shown."""
        return self._slowdown.slowed(kind)

    def calibrate(
        self,
        ready: Counts,
        model: CandidateFleets,
        aimed: Sequence[Aim],
        now: float,
        to_blame: bool,
    ) -> None:
        """Slow the modelled workers down while the `ready` ones keep clearly less than modelled.

        Without `to_blame`, requests wait for workers of another group, and show nothing of these.
        """
        since = self._slowdown.settled_since(ready, now)
        comparisons: list[Comparison] = []
        if since is not None and to_blame:
            traffic, promises = self._core.traffic, self._core.promises
            for aim, share in zip(aimed, model.kept(ready).shares, strict=True):
                kept = traffic.kept(aim.promise, promises, since, now)
                if aim.reachable and kept is not None:
                    comparisons.append(
                        Comparison(kept.share, kept.requests, share, aim.promise.quantile)
                    )
        self._slowdown.learn(comparisons)

    def keeps(self, aimed: Sequence[Aim], level: float, since: float, now: float) -> bool:
        """True if the fleet, unchanged since `since`, has kept all promises at the load `level`."""
        series = self._core.demand.series
        since = max(since, series.steady_since, now - LATEST_S)
        if level > series.level or now - since < PROOF_S:
            return False
        traffic, promises = self._core.traffic, self._core.promises
        measured = [(aim, traffic.kept(aim.promise, promises, since, now)) for aim in aimed]
        return all(
            kept is not None and kept.requests >= FEWEST and kept.share >= aim.promise.quantile
            for aim, kept in measured
        )
