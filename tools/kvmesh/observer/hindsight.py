"""Decisions of the planner in hindsight, from those that followed."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvmesh.bus.messages import ScalingDecision


@dataclass(frozen=True)
class Hindsight:
    """The time after a decision.

    `arrivals_per_s` are those one start-up time later, for which its forecast was made. Of each
    promise, `modelled` is the share that the chosen fleet would keep, and `kept` the share that was
    kept by the requests of the last minutes before the next change. Each is empty if unknown.
    """

    arrivals_per_s: float | None
    modelled: dict[str, float]
    kept: dict[str, float]

    def text(self, forecast_per_s: float) -> str:
        """One line: the forecast, and the modelled shares, beside what followed."""
        if self.arrivals_per_s is None:
            return "not known yet"
        parts = [f"arrivals {self.arrivals_per_s:.2f}/s (forecast {forecast_per_s:.2f}/s)"]
        for name, share in self.kept.items():
            modelled = f" (modelled {self.modelled[name]:.0%})" if name in self.modelled else ""
            parts.append(f"kept {share:.0%}{modelled} {name}")
        return ", ".join(parts)


def hindsight(decisions: Sequence[ScalingDecision]) -> Iterator[Hindsight]:
    """One model's decisions, in the order of their times, each in hindsight."""
    times = [decision.time for decision in decisions]
    changes = [place for place, decision in enumerate(decisions) if decision.changed]
    for place, decision in enumerate(decisions):
        startup = max((pool.startup_s for pool in decision.pools.values()), default=0.0)
        due = bisect_left(times, decision.time + startup, lo=place)
        change = bisect_right(changes, place)
        last = changes[change] if change < len(changes) else len(decisions) - 1
        wanted = {name: pool.wanted for name, pool in decision.pools.items()}
        chosen = (each.shares for each in decision.candidates if each.workers == wanted)
        came = decisions[due].signals if due < len(decisions) else {}
        yield Hindsight(
            arrivals_per_s=came.get("arrivals_per_s"),
            modelled=next(chosen, {}),
            kept=decisions[last].kept if due <= last else {},
        )
