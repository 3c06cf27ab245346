"""Bounds and times of a stream of weights."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FetchOptions:
    """Counts are at least 1, times are in seconds.

    `sources` have requests open at once, the node's own disk not counted. A target looks for
    others until it knows `known` sources, and takes up to `candidates`. A source has so many
    requests open that it needs `depth_s` for them, at least one (two if it is the only one, four if
    there is no other target either), at most `depth`; a spare one `spare_depth`. Chunks are chosen
    among the `window` ones from the first that is missing. The first `head` of those come first.

    An answer is late after `patience` times its expected time, but not before `floor_s` and not
    after `ceiling_s`; a source of unknown rate gets `first_s`. A source rests `rest_s` after its
    first failure and twice as long after each further one in a row. After `failures` in a row it
    is given up for `given_up_s`. One that is busy rests about `busy_s`, and longer in a row.

    A chunk may be requested a second time from a source that needs less than 1/`gain` of the
    remaining time of the first; `duplicates` such requests may be open.

    Bitmaps are read again after `poll_s` while they change, up to `poll_most_s` while they do not,
    and at most `poll_bytes_per_s` of them.
    """

    sources: int = 4
    known: int = 16
    candidates: int = 64
    window: int = 128
    head: int = 4
    depth: int = 16
    spare_depth: int = 4
    depth_s: float = 0.03
    patience: float = 4.0
    floor_s: float = 2.0
    ceiling_s: float = 30.0
    first_s: float = 10.0
    rest_s: float = 0.5
    busy_s: float = 0.02
    failures: int = 4
    given_up_s: float = 60.0
    gain: float = 4.0
    duplicates: int = 4
    poll_s: float = 0.02
    poll_most_s: float = 1.0
    poll_bytes_per_s: float = 8e6

    def __post_init__(self) -> None:
        counts = (self.sources, self.known, self.candidates, self.window, self.head, self.failures)
        depths = (self.depth, self.spare_depth)
        waits = (self.depth_s, self.floor_s, self.ceiling_s, self.first_s, self.rest_s)
        polls = (self.busy_s, self.poll_s, self.poll_most_s, self.poll_bytes_per_s)
        least = min(*waits, *polls, self.given_up_s)
        if min(*counts, *depths) < 1 or self.duplicates < 0 or least <= 0:
            raise ValueError("counts of a stream must be at least 1, times above 0")
        if self.patience < 1 or self.gain < 1 or self.ceiling_s < self.floor_s:
            raise ValueError("patience and gain must be at least 1, the ceiling above the floor")
