"""The time of each rank's devices, shared out among the sequences that the rank has."""


class _RankClock:
    """`share` is the device time that a sequence has received since it and the rank began."""

    __slots__ = ("at", "live", "share")

    def __init__(self) -> None:
        self.live = 0
        self.share = 0.0
        self.at = 0.0

    def advance(self, now: float) -> float:
        if self.live:
            self.share += max(now - self.at, 0.0) / self.live
        self.at = now
        return self.share


class DeviceTime:
    """Divides the time of a rank equally among its live sequences, at every instant.

    The shares of all sequences add up to the time during which the rank had any, so they can be
    added up by tenant or session. Equal shares need nothing of the engine but the start and the end
    of each sequence. `devices` is the number of devices of a rank, by which time counts.
    """

    def __init__(self, devices: int = 1) -> None:
        self.devices = devices
        self._ranks: dict[int, _RankClock] = {}

    def begin(self, rank: int, now: float) -> float:
        """Add a sequence; return its start, for `since` and `end`."""
        clock = self._ranks.setdefault(rank, _RankClock())
        start = clock.advance(now)
        clock.live += 1
        return start

    def since(self, rank: int, start: float, now: float) -> float:
        """Device seconds of a live sequence so far."""
        return (self._ranks[rank].advance(now) - start) * self.devices

    def end(self, rank: int, start: float, now: float | None = None) -> float:
        """Remove a sequence; return its device seconds until `now`, or until the last event."""
        clock = self._ranks[rank]
        share = clock.share if now is None else clock.advance(now)
        clock.live -= 1
        return (share - start) * self.devices
