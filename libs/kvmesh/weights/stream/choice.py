"""The choice of the next source and chunk of a stream."""

import random
from collections.abc import Collection
from math import inf

from kvmesh.weights.stream.chunks import ChunkBoard
from kvmesh.weights.stream.options import FetchOptions
from kvmesh.weights.stream.source import SourceState

_QUIET_CHUNKS = 8.0  # times a chunk's time without a chunk of another target
QUIET_S = 0.1  # at least
ALONE = 4  # requests, so that some come while others are verified and written


class OpenRequests:
    """The sources that are asked for each chunk which has not arrived, at most two."""

    def __init__(self) -> None:
        self.doubled = 0
        self._askers: dict[int, list[SourceState]] = {}

    def __len__(self) -> int:
        return len(self._askers)

    def add(self, state: SourceState, chunk: int) -> None:
        askers = self._askers.setdefault(chunk, [])
        askers.append(state)
        self.doubled += len(askers) > 1

    def settle(self, chunk: int) -> None:
        """The chunk is there."""
        self.doubled -= max(len(self._askers.pop(chunk, ())) - 1, 0)

    def forget(self, state: SourceState, chunk: int) -> bool:
        """The source is not asked any more; True if no other is either."""
        askers = self._askers.get(chunk)
        if askers is None or state not in askers:
            return False
        askers.remove(state)
        if askers:
            self.doubled -= 1
            return False
        del self._askers[chunk]
        return True

    def slowest(
        self, state: SourceState, before: int, longest: float, now: float, pace: float
    ) -> int | None:
        """The chunk below `before` whose only request takes longest, if more than `longest` s.

        Only those that the source offers and is not asked for; `pace` is that of unknown sources.
        """
        found = None
        for chunk, askers in self._askers.items():
            if chunk < before and len(askers) == 1 and askers[0] is not state:
                left = askers[0].remaining(chunk, now, pace)
                if left > longest and state.offers(chunk):
                    longest, found = left, chunk
        return found


class SourceChoice:
    """Chooses the source that answers soonest, and its best chunk."""

    def __init__(
        self,
        board: ChunkBoard,
        requests: OpenRequests,
        sources: Collection[SourceState],
        options: FetchOptions,
        draws: random.Random,
    ) -> None:
        self._board = board
        self._requests = requests
        self._sources = sources
        self._options = options
        self._draws = draws
        self._pace: float | None = 0.0
        self._met_at = -inf  # when another target last joined or brought a chunk

    def met(self, now: float) -> None:
        """Another target has joined."""
        self._met_at = now

    def paced(self, state: SourceState, now: float) -> None:
        """A source's pace has changed as it brought a chunk, or it has left."""
        self._pace = None
        if state.has is not None and now > self._met_at:
            self._met_at = now

    def pace(self) -> float:
        """The pace of a source that is not known yet: the median of those known, or 0."""
        if self._pace is None:
            known = sorted([s.pace for s in self._sources if s.pace])
            self._pace = known[len(known) // 2] if known else 0.0
        return self._pace

    def next(self, now: float, barren: set[str]) -> tuple[SourceState, int] | None:
        """The next source and chunk; adds the sources that can serve nothing to `barren`."""
        for _, state in sorted(self._ready(now, barren), key=lambda pair: pair[0]):
            if (chunk := self._chunk(state, now)) is not None:
                return state, chunk
            barren.add(state.name)
        return None

    def _ready(self, now: float, barren: set[str]) -> list[tuple[float, SourceState]]:
        """Sources with room for a request, with about the time that its answer takes."""
        options, size, assumed = self._options, self._board.typical, self.pace()
        # a source that is far behind does not keep others from being asked
        busy = [s for s in self._sources if s.open and s.counts and not s.stalled(now, assumed)]
        partial = sum(s.has is not None for s in busy)
        seeds = [s for s in self._sources if s.has is None and s.counts and s.rests_until <= now]
        alive = any(not s.open or not s.stalled(now, assumed) for s in seeds)
        found = []
        for state in self._sources:
            if state.rests_until > now or state.name in barren or (state.spare and alive):
                continue
            if state.open:
                full = len(state.open) >= self._depth(state, len(busy))
            else:
                # one place is kept for a complete source, the only one to have what is new
                kept = seeds and state.has is not None and 1 < options.sources <= partial + 1
                full = state.counts and (len(busy) >= options.sources or bool(kept))
            if full:
                continue
            pace = state.pace or assumed
            jitter = 0.75 + self._draws.random() / 2
            found.append(((state.owed + size) * pace * jitter, state))
        return found

    def _depth(self, state: SourceState, busy: int) -> float:
        """Requests that a source may have open; one until it has answered."""
        if not state.pace:
            return 1
        if state.spare:
            return self._options.spare_depth
        wanted = self._options.depth_s / (state.pace * self._board.typical)
        alone = 2 if self._board.targets else ALONE  # one target, one source
        return min(max(wanted, 1 if busy > 1 else alone), self._options.depth)

    def _chunk(self, state: SourceState, now: float) -> int | None:
        board, options, assumed = self._board, self._options, self.pace()
        wait = (state.owed + board.typical) * (state.pace or assumed)
        others = sum([s.rate for s in self._sources if s.open and s is not state])
        skip = int(others * wait / 2 / board.typical)
        patience = min(max(_QUIET_CHUNKS * assumed * board.typical, QUIET_S), options.floor_s)
        patience = options.floor_s if state.spare else patience
        # without another target nobody else brings the chunk, and no report ends the wait
        shared = board.targets > 0 and now - self._met_at < patience
        chunk = board.choose(state, skip if skip > options.head else 0, shared)
        if chunk is not None or self._requests.doubled >= options.duplicates or not wait:
            return chunk
        before = board.first + options.head if board.unasked else board.count
        return self._requests.slowest(state, before, wait * options.gain, now, assumed)
