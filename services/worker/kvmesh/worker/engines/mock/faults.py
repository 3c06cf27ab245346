"""Injected faults, counted in engine steps so that a test can repeat them."""

from dataclasses import dataclass


class InjectedCrash(Exception):
    """The engine crashes at this step on purpose."""

    def __init__(self, step: int) -> None:
        super().__init__(f"injected crash at step {step}")
        self.step = step


@dataclass(frozen=True)
class Faults:
    """Faults by the step at which they begin; 0 is never.

    From `crash_step` on the engine is dead, at `hang_step` a step never ends, from `slow_step` on
    steps take `slow_factor` times as long, and every `lose_every`-th batch of KV events is lost on
    the way out of the engine.
    """

    crash_step: int = 0
    hang_step: int = 0
    slow_step: int = 0
    slow_factor: float = 10.0
    lose_every: int = 0

    def check_crash(self, step: int) -> None:
        """Raise InjectedCrash if the engine crashes in `step`."""
        if self.crash_step and step >= self.crash_step:
            raise InjectedCrash(step)

    def hangs(self, step: int) -> bool:
        return bool(self.hang_step) and step >= self.hang_step

    def slowdown(self, step: int) -> float:
        """The factor by which `step` is slower than normal."""
        return self.slow_factor if self.slow_step and step >= self.slow_step else 1.0

    def loses(self, batch: int) -> bool:
        """True if the `batch`-th batch of events (from 1) is lost."""
        return bool(self.lose_every) and batch % self.lose_every == 0
