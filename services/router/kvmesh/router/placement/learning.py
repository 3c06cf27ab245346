"""Learners of a router, by the events of all routers: returns of prompts, speeds of ranks."""

from collections.abc import Iterator

from msgspec.structs import replace

from kvmesh.bus.messages import (
    Decision,
    LearnerReport,
    Outcome,
    ReturnForecast,
    RouteEvent,
    ToolEvent,
)
from kvmesh.returns.forecaster import ReturnForecaster
from kvmesh.router.state.rank_speeds import RankSpeeds
from kvmesh.router.state.rank_table import RankTable
from kvmesh.router.state.speed_trial import SpeedTrial
from kvmesh.settings.schema import RouterSettings


class RouterLearning:
    """The learners of one model. `time` is Unix time; `router` is this instance."""

    def __init__(
        self,
        settings: RouterSettings,
        router: str,
        table: RankTable,
        speeds: RankSpeeds,
    ) -> None:
        self._table = table
        self._speeds = speeds
        self._learns_speeds = settings.learn_speeds
        self._speed_trial = SpeedTrial(speeds)
        self.returns = ReturnForecaster(router) if settings.forecast_returns else None

    def apply(self, event: RouteEvent | ToolEvent, time: float) -> None:
        """Learn from an event of this router, a replica or a harness.

        Requests of load tests show the speeds of ranks, and nothing about agents.
        """
        load_test = _of_load_test(event)
        if isinstance(event, Outcome):
            if not load_test:
                self._speeds.observe_answer(event.output_tokens)
            self._speed_trial.on_finished(event)
        elif isinstance(event, Decision):
            slot = self._table.find_slot(event.chosen.instance, event.chosen.rank)
            self._speed_trial.on_placed(event, slot)
        if self.returns is None or load_test:
            return
        if isinstance(event, ToolEvent):
            self.returns.on_tool(event, time)
        elif isinstance(event, Outcome):
            self.returns.on_finished(event, time)
        else:
            self.returns.on_placed(event, time)

    def reports(self, model: str) -> Iterator[LearnerReport]:
        """The reports of everything that learns in this router."""
        if self._learns_speeds:
            yield from self._speed_trial.report(model)

    def with_expected_return(self, decision: Decision) -> Decision:
        """The decision with the return that was expected of the prompt that it continues."""
        expected = None if self.returns is None else self.returns.expected_return(decision)
        return decision if expected is None else replace(decision, expected=expected)

    def take_forecasts(self, time: float) -> dict[str, list[ReturnForecast]]:
        """The forecasts of returns to send, by the kvbm of the worker's node that expects them."""
        found: dict[str, list[ReturnForecast]] = {}
        if self.returns is None:
            return found
        cards = self._table.cards
        for instance, forecast in self.returns.take_forecasts(time):
            if instance in cards:
                for kvbm in self._table.nodes.cards_of(cards[instance].node):
                    if kvbm.expects_returns:
                        found.setdefault(kvbm.instance, []).append(forecast)
        return found


def _of_load_test(event: RouteEvent | ToolEvent) -> bool:
    if isinstance(event, Decision):
        return event.hints.load_test
    return isinstance(event, Outcome) and event.load_test
