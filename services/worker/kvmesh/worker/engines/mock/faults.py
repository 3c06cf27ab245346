"""Failures on purpose: what goes wrong, counted in engine steps so that a test can repeat it."""

from dataclasses import dataclass


class InjectedCrash(Exception):
    """The engine was told to die here."""

    def __init__(self, step: int) -> None:
        super().__init__(f"injected crash at step {step}")
        self.step = step


@dataclass(frozen=True)
class Faults:
    """Each one begins with the given step; 0 is never.

    From `crash_step` on the engine is dead, from `hang_step` on a step never ends, from `slow_step`
    on steps take `slow_factor` times as long, and the KV events of every `lose_every`-th step that
    has any are lost on the way out of the engine.
    """

    crash_step: int = 0
    hang_step: int = 0
    slow_step: int = 0
    slow_factor: float = 10.0
    lose_every: int = 0

    def check_crash(self, step: int) -> None:
        """Raise InjectedCrash if the engine dies in `step`."""
        if self.crash_step and step >= self.crash_step:
            raise InjectedCrash(step)

    def hangs(self, step: int) -> bool:
        return bool(self.hang_step) and step >= self.hang_step

    def slowdown(self, step: int) -> float:
        """How many times longer than normal `step` takes."""
        return self.slow_factor if self.slow_step and step >= self.slow_step else 1.0

    def loses(self, batch: int) -> bool:
        """Whether the `batch`-th batch of events (from 1) is lost."""
        return bool(self.lose_every) and batch % self.lose_every == 0
