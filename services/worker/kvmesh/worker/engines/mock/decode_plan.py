"""Decode steps that are planned together and taken later, as far as time has passed by then."""


class DecodePlan:
    """Stretches of equal steps: how many, and the seconds of each. There is at least one step.

    `steps` and `duration`, in seconds, are those of all stretches together.
    """

    __slots__ = ("duration", "spans", "steps")

    def __init__(self, stretches: list[tuple[int, float]], steps: int, duration: float) -> None:
        self.spans = stretches
        self.steps = steps
        self.duration = duration

    def until(self, elapsed: float) -> "DecodePlan":
        """These steps up to the one that is under way after `elapsed` seconds, which ends yet."""
        kept: list[tuple[int, float]] = []
        total, duration = 0, 0.0
        for steps, seconds in self.spans:
            ends_here = elapsed <= steps * seconds
            taken = min(steps, max(1, -int(-elapsed // seconds))) if ends_here else steps
            kept.append((taken, seconds))
            total += taken
            duration += taken * seconds
            if ends_here:
                break
            elapsed -= steps * seconds
        return DecodePlan(kept, total, duration)
