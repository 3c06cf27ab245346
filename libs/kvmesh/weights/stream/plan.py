"""The plan of a stream: the next chunk to request, and its source."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Literal

import numpy as np

from kvmesh.weights.stream.choice import QUIET_S, OpenRequests, SourceChoice
from kvmesh.weights.stream.chunks import ChunkBoard
from kvmesh.weights.stream.options import FetchOptions
from kvmesh.weights.stream.source import SourceState

Failure = Literal["lost", "timeout", "corrupt", "absent", "busy"]
_REFUSED = 4096  # names remembered of sources which are not asked again
_RECHECK_S = 0.05  # until an open request is compared with other sources again


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """To be sent to `source` now; the answer is late after `deadline`."""

    source: str
    chunk: int
    deadline: float


class StreamPlan:
    """Spreads the chunks of a copy over its sources, as a caller reports what happens.

    `sizes` are the chunks' bytes, in the order in which they are read. `name` is the one under
    which other targets know this one as a source: by these names, those which start together take
    different chunks from a complete source. All times are in seconds of one clock. A chunk out of
    range raises ValueError everywhere.
    """

    def __init__(self, sizes: Sequence[int], options: FetchOptions, name: str) -> None:
        """Raises ValueError for a chunk without bytes."""
        self._options = options
        self._board = ChunkBoard(sizes, options, name)
        self._random = random.Random(name)
        self._open = OpenRequests()
        self._sources: dict[str, SourceState] = {}
        self._refused: dict[str, float] = {}  # until when
        self._choice = SourceChoice(
            self._board, self._open, self._sources.values(), options, self._random
        )

    @property
    def done(self) -> bool:
        return self._board.missing == 0

    @property
    def sources(self) -> Mapping[str, SourceState]:
        """Those which may be asked, now or after a rest."""
        return MappingProxyType(self._sources)

    def present(self, chunks: Iterable[int]) -> None:
        """Chunks which the caller had before."""
        for chunk in chunks:
            self._board.check(chunk)
            self._settle(chunk)

    def join(
        self, source: str, now: float, complete: bool, local: bool = False, spare: bool = False
    ) -> bool:
        """A source that has all chunks (`complete`) or those named by `learn`.

        `local` is the node's own disk; a complete source that is `spare` is asked only for what no
        worker has. Returns False if the source is not taken: its bytes were
        wrong, it was given up a short time ago, or there are enough candidates.
        """
        if self._refused.get(source, now) > now:
            return False
        if source in self._sources:
            return True
        if len(self._sources) >= self._options.candidates and not (local or spare):
            return False
        state = SourceState(source, complete, local, spare)
        state.poll_at, state.poll_every = now, self._options.poll_s
        if local or spare:
            state.poll_at = inf
        if complete:
            self._board.completes += state.counts
        else:
            state.has = np.zeros(self._board.count, np.uint8)
            state.counted = state.has
            state.rival = True
            self._board.compete(source, 1)
            self._choice.met(now)
        self._sources[source] = state
        return True

    def learn(self, source: str, have: bytes, now: float) -> None:
        """The bitmap of a source: one byte per chunk, 0 if it lacks it.

        1: it has the chunk; 2: it is fetching it; 3: it has it and has sent it to another target
        of late. Other values count as 0, an unknown source is ignored, a wrong length raises
        ValueError. A source that joined as complete is taken to have all.
        """
        if len(have) != self._board.count:
            raise ValueError(f"a bitmap of {len(have)} bytes for {self._board.count} chunks")
        state = self._sources.get(source)
        if state is None:
            return
        changed = have != state.read
        if changed:
            state.read = have
            marks = np.frombuffer(have, np.uint8)
            state.has_sent = (marks == 3).view(np.uint8)
            if state.has is not None and state.counted is not None:
                has = ((marks == 1) | (marks == 3)).view(np.uint8)
                counted = has | (marks == 2).view(np.uint8)
                self._board.recount(state.counted, counted)
                changed = self._board.gains(has, state.has)
                state.has, state.counted = has, counted
                if has.all():
                    self._yield(state)
        options = self._options
        every = state.poll_every / 2 if changed else state.poll_every * 1.5
        chunk_s = self._choice.pace() * self._board.typical or QUIET_S
        longest = min(2 * chunk_s, options.poll_most_s)
        state.poll_every = max(min(every, longest), options.poll_s)
        if state.has is not None and not state.rival:
            state.poll_at = inf
        else:
            state.poll_at = now + max(state.poll_every, self._poll_floor())

    def leave(self, source: str) -> list[int]:
        """The source is gone; returns the chunks of its open requests."""
        state = self._sources.pop(source, None)
        if state is None:
            return []
        dropped = self._drop_all(state)
        self._choice.paced(state, -inf)
        self._yield(state)
        if state.counted is not None:
            self._board.recount(state.counted, None)
        elif state.counts:
            self._board.completes -= 1
        return dropped

    def arrived(self, source: str, chunk: int, now: float) -> bool:
        """A chunk with the right digest has come; False: it was there already.

        It counts also if the source has left or the request is not open any more.
        """
        self._board.check(chunk)
        if (state := self._sources.get(source)) is not None:
            state.answered(chunk, self._board.sizes[chunk], now)
            self._choice.paced(state, now)
            self._drop(state, chunk)
        return self._settle(chunk)

    def failed(self, source: str, chunk: int | None, reason: Failure, now: float) -> list[int]:
        """A request has failed; `chunk` None: the reading of the bitmap has.

        "lost" (the connection) and "timeout" end all requests of the source, which rests;
        "corrupt" (a wrong digest) bans it; "absent" corrects its bitmap; after "absent" and "busy"
        it rests for a short time. Returns the chunks of its other requests, which the caller ends.
        A request that is not open any more is ignored unless its bytes were wrong.
        """
        if chunk is not None:
            self._board.check(chunk)
        if reason == "corrupt":
            self._refuse(source, inf)
            return [each for each in self.leave(source) if each != chunk]
        state = self._sources.get(source)
        if state is None or (chunk is not None and chunk not in state.open):
            return []
        if chunk is not None:
            self._drop(state, chunk)
        if reason == "absent" and chunk is not None:
            self._correct(state, chunk, now)
        if reason in ("absent", "busy"):
            state.rest_busy(now, self._options, self._random.random())
            return []
        state.rest(now, self._options)
        if state.failures >= self._options.failures:
            self._refuse(source, now + self._options.given_up_s)
            return self.leave(source)
        return self._drop_all(state)

    def requests(self, now: float) -> list[ChunkRequest]:
        """The requests to send now."""
        found: list[ChunkRequest] = []
        barren: set[str] = set()
        while not self.done and (chosen := self._choice.next(now, barren)) is not None:
            state, chunk = chosen
            size = self._board.sizes[chunk]
            found.append(ChunkRequest(state.name, chunk, state.deadline(size, now, self._options)))
            state.sent(chunk, size, now)
            self._open.add(state, chunk)
            self._board.close(chunk)
        return found

    def wake_at(self, now: float) -> float | None:
        """The next time at which `requests` or `polls` may have more without a report.

        None: only a report can change anything.
        """
        if self.done:
            return None
        states = self._sources.values()
        times = [s.rests_until for s in states if s.rests_until > now]
        times += [max(s.poll_at, s.rests_until) for s in states if self._polled(s)]
        if len(self._open):
            times.append(now + _RECHECK_S)
        return max(min(times), now) if times else None

    def polls(self, now: float) -> list[str]:
        """Sources whose bitmaps the caller reads now; each is named once until `learn`.

        A source is named again some time later if neither `learn` nor `failed` follows.
        """
        due = []
        for state in self._sources.values():
            near = state.poll_at - state.poll_every / 4  # so that several are read at once
            if self._polled(state) and max(near, state.rests_until) <= now:
                state.poll_at = now + self._options.floor_s
                due.append(state.name)
        return due

    def _poll_floor(self) -> float:
        """Seconds between bitmaps of one source by the bound of their bytes."""
        return len(self._sources) * self._board.count / self._options.poll_bytes_per_s

    def _polled(self, state: SourceState) -> bool:
        """True if the source's bitmap may change in a way that matters."""
        return state.rival or (state.poll_at < inf and self._board.targets > 0)

    def _settle(self, chunk: int) -> bool:
        self._open.settle(chunk)
        return self._board.settle(chunk)

    def _drop_all(self, state: SourceState) -> list[int]:
        chunks = list(state.open)
        for chunk in chunks:
            self._drop(state, chunk)
        return chunks

    def _drop(self, state: SourceState, chunk: int) -> None:
        """The source does not fetch the chunk any more; without another it is open again."""
        state.dropped(chunk)
        if self._open.forget(state, chunk):
            self._board.reopen(chunk)

    def _correct(self, state: SourceState, chunk: int, now: float) -> None:
        """The source does not have the chunk; one that was complete is partial from now on."""
        if state.has is None or state.counted is None:
            state.has = np.ones(self._board.count, np.uint8)
            state.counted = np.zeros(self._board.count, np.uint8)
            state.complete = False
            self._board.completes -= state.counts
        has = state.has.copy()
        has[chunk] = 0
        self._board.recount(state.counted, has)
        state.has = state.counted = has
        if not state.rival:
            state.rival = True
            self._board.compete(state.name, 1)
            state.poll_at, state.poll_every = now + self._options.poll_s, self._options.poll_s

    def _yield(self, state: SourceState) -> None:
        """The source takes no chunks any more."""
        if state.rival:
            state.rival = False
            self._board.compete(state.name, -1)

    def _refuse(self, source: str, until: float) -> None:
        self._refused.pop(source, None)
        self._refused[source] = until
        if len(self._refused) > _REFUSED:
            del self._refused[next(iter(self._refused))]
