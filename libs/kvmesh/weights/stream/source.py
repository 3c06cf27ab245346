"""One source of a stream: its rate, its open requests, its rests."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvmesh.weights.stream.options import FetchOptions

Bits = NDArray[np.uint8]  # one byte per chunk, 0 or 1

_WEIGHT = 0.25  # of a new sample of the pace
_STALLED, _STALLED_S = 8.0, 1.0  # times a chunk's time, and at least
_OUTLIER = 4.0  # a sample counts as at most so many times slower or faster than the pace


@dataclass(frozen=True, slots=True)
class _Sent:
    at: float
    ahead: int  # bytes which the source owes, this request's included
    size: int


@dataclass(eq=False, slots=True)
class SourceState:
    """`has` is None for a source that was complete when it joined; `pace` (s/byte) 0 if unknown.

    `open` maps chunks to requests. A source rests until `rests_until`. A `spare` one is asked only
    for what no other source can give.
    """

    name: str
    complete: bool
    local: bool
    spare: bool = False
    has: Bits | None = None
    counted: Bits | None = None  # chunks it has or is fetching, as counted for rarity
    rival: bool = False  # it takes chunks from the same sources
    pace: float = 0.0
    taken: int = 0  # bytes arrived from it
    failures: int = 0  # in a row
    busies: int = 0  # in a row
    rests_until: float = 0.0
    poll_at: float = 0.0
    read: bytes = b""  # its bitmap
    has_sent: Bits | None = None  # chunks that it has sent to others
    poll_every: float = 0.0
    owed: int = 0
    open: dict[int, _Sent] = field(default_factory=dict)
    _last: float = 0.0

    @property
    def counts(self) -> bool:
        """True for a worker."""
        return not (self.local or self.spare)

    @property
    def rate(self) -> float:
        """Bytes/s as measured; 0 if nothing has arrived yet."""
        return 1 / self.pace if self.pace else 0.0

    def offers(self, chunk: int) -> bool:
        return self.has is None or bool(self.has[chunk])

    def sent_before(self, chunk: int) -> bool:
        """True if it has sent the chunk to another target of late."""
        return self.has_sent is not None and bool(self.has_sent[chunk])

    def sent(self, chunk: int, size: int, now: float) -> None:
        self.owed += size
        self.open[chunk] = _Sent(now, self.owed, size)

    def dropped(self, chunk: int) -> None:
        """A request is over, with or without an answer."""
        if (sent := self.open.pop(chunk, None)) is not None:
            self.owed -= sent.size

    def answered(self, chunk: int, size: int, now: float) -> None:
        """Measures the pace, from the previous answer or the request, whichever was later."""
        self.taken += size
        self.failures = self.busies = 0
        if (sent := self.open.get(chunk)) is not None:
            sample = max(now - max(sent.at, self._last), 1e-6) / size
            if self.pace:
                sample = min(max(sample, self.pace / _OUTLIER), self.pace * _OUTLIER)
                self.pace += _WEIGHT * (sample - self.pace)
            else:
                self.pace = sample
        self._last = now
        self.dropped(chunk)

    def remaining(self, chunk: int, now: float, assumed: float) -> float:
        """Seconds until an open request's answer; once overdue, as long again as it is overdue."""
        sent = self.open[chunk]
        pace = self.pace or assumed
        due = sent.at + sent.ahead * pace
        return due - now if due > now else now - due + sent.size * pace

    def stalled(self, now: float, assumed: float) -> bool:
        """True if the first open request should have been answered long ago."""
        sent = next(iter(self.open.values()))
        wait = _STALLED * sent.size * (self.pace or assumed)
        return now > max(sent.at, self._last) + max(wait, _STALLED_S)

    def deadline(self, size: int, now: float, options: FetchOptions) -> float:
        """The time at which the answer to a request of `size` bytes, sent now, is late."""
        if not self.pace:
            return now + options.first_s
        wait = options.patience * (self.owed + size) * self.pace
        return now + min(max(wait, options.floor_s), options.ceiling_s)

    def rest(self, now: float, options: FetchOptions) -> None:
        """After a failure: the rests double."""
        self.failures += 1
        self.rests_until = now + min(options.rest_s * 2 ** (self.failures - 1), options.ceiling_s)

    def rest_busy(self, now: float, options: FetchOptions, chance: float) -> None:
        """After a refusal for load: a random time (`chance` 0 to 1), longer each time in a row."""
        self.busies += 1
        longest = min(options.busy_s * 2 ** min(self.busies, 16), options.poll_most_s)
        self.rests_until = now + longest * (0.5 + chance / 2)
