"""Decode steps that are planned together and executed later."""


class DecodePlan:
    """At least one step, as spans of (number of steps, seconds of each).

    `steps` and `duration`, in seconds, are the totals of all spans.
    """

    __slots__ = ("duration", "spans", "steps")

    def __init__(self, spans: list[tuple[int, float]], steps: int, duration: float) -> None:
        self.spans = spans
        self.steps = steps
        self.duration = duration

    def until(self, elapsed: float) -> "DecodePlan":
        """The part of the plan up to the end of the step in progress after `elapsed` seconds."""
        spans: list[tuple[int, float]] = []
        total, duration = 0, 0.0
        for steps, seconds in self.spans:
            ends_here = elapsed <= steps * seconds
            count = min(steps, max(1, -int(-elapsed // seconds))) if ends_here else steps
            spans.append((count, seconds))
            total += count
            duration += count * seconds
            if ends_here:
                break
            elapsed -= steps * seconds
        return DecodePlan(spans, total, duration)
