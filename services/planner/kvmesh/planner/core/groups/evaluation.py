"""Candidate fleets of a group, and the promises that they would keep at the load to come."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.planner.capacity.queueing import ModelledEngine, RequestShape
from kvmesh.planner.core.fleets import Aim, aims, part_of, relative_speeds
from kvmesh.planner.core.groups.candidates import CandidateFleets
from kvmesh.planner.core.groups.measured_fleet import MeasuredFleet
from kvmesh.planner.core.groups.planned_model import PlannedModel
from kvmesh.planner.core.pool_view import PoolView
from kvmesh.planner.core.promises import Promise
from kvmesh.planner.core.scenario import scenario

SURE_SHAPES = 200  # fewer requests of a part of the window do not prove that less suffices


@dataclass(frozen=True)
class FleetEvaluation:
    """Candidate fleets for the load to come, and for it with the caches of new workers cold.

    `speeds` are the capacities of a worker of each pool, `sure` says that the requests suffice as
    a proof.
    """

    model: CandidateFleets
    cold: CandidateFleets
    aimed: Sequence[Aim]
    speeds: list[float]
    sure: bool


class FleetEvaluator:
    """Evaluates the fleets of the pools of `views`, which serve the roles `serves`.

    `unreachable` are the promises that even an idle worker cannot keep, at the last evaluation.
    """

    def __init__(self, core: PlannedModel, views: list[PoolView], serves: tuple[str, ...]) -> None:
        self._core = core
        self._views = views
        self._serves = serves
        self.unreachable: set[str] = set()
        self.measured = MeasuredFleet(core)

    @property
    def splits(self) -> bool:
        """True if prompts are computed by other workers than those that decode."""
        return any(view.pool.serves == "prefill" and view.wanted for view in self._core.pools)

    def shapes(self, level: float, proven: bool, cold: bool = False) -> list[RequestShape]:
        """The latest requests that these pools serve, at the load `level`; few are repeated if
        `proven`, since none others came."""
        fewest = SURE_SHAPES if proven else 0
        shapes = scenario(self._core.traffic, self._core.demand.series, level, fewest, cold)
        return part_of(shapes, self._serves, self.splits, self._core.options.disagg_tokens)

    def evaluate(
        self, now: float, level: float, shapes: list[RequestShape], proven: bool, to_blame: bool
    ) -> FleetEvaluation:
        """Candidate fleets on `shapes`, which arrive at `level`; some pool's engines are known."""
        reference = next(kind for view in self._views if (kind := view.kind()) is not None)
        kinds = [self.measured.slowed(view.kind() or reference) for view in self._views]
        speeds = relative_speeds(kinds, shapes)
        aimed = self._aims(shapes, kinds)
        model = CandidateFleets(shapes, kinds, aimed)
        unwarmed = self.shapes(level, proven, cold=True)
        cold = model
        if unwarmed != shapes:
            cold = CandidateFleets(unwarmed, kinds, self._aims(unwarmed, kinds))
        ready = tuple(len(view.ready) for view in self._views)
        self.measured.calibrate(ready, cold, aimed, now, to_blame)
        return FleetEvaluation(model, cold, aimed, speeds, proven or len(shapes) >= SURE_SHAPES)

    def _promises(self) -> list[Promise]:
        promises = self._core.promises
        if "prefill" in self._serves:
            return [promise for promise in promises if promise.metric != "itl"]
        return promises

    def _aims(self, shapes: Sequence[RequestShape], kinds: Sequence[ModelledEngine]) -> list[Aim]:
        found = aims(shapes, kinds, self._promises())
        self.unreachable = {str(aim.promise) for aim in found if not aim.reachable}
        return found
