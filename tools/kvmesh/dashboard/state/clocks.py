"""Times that other machines have told, whose clocks may be wrong. Pure."""

MOST_OFF_S = 86400.0


def plausible(told: float, now: float) -> float:
    """The Unix time `told`; `now` in its place if they differ by more than a day, or it is none."""
    return told if abs(told - now) <= MOST_OFF_S else now
