"""The load of one prompt's blocks from the last to the first, while it is computed from the first.

After "Compute Or Load KV Cache? Why Not Both?" (arXiv 2410.03065): the two meet where their speeds
have it, so neither engine nor link waits for the other.
"""


class LoadBatch:
    """Blocks `first` to `end` - 1 of a prompt, on their way since `started`.

    An `abandoned` batch is of no use any more: its blocks of memory are freed once it has ended.
    """

    __slots__ = ("abandoned", "end", "first", "started")

    def __init__(self, first: int, end: int, started: float) -> None:
        self.first = first
        self.end = end
        self.started = started
        self.abandoned = False

    def __len__(self) -> int:
        return self.end - self.first


class BackwardLoad:
    """Blocks of a prompt from `first` on that can be loaded, up to `end` as far as it is known.

    While more are `pending`, the prompt is not computed beyond `end`. `front` tokens are computed,
    or will be at the end of the step in progress, by about `front_at`. `batch` is on its way. The
    prompt `waits_since` then for blocks, or -1.
    """

    def __init__(self, first: int, front: int, now: float) -> None:
        self.first = first
        self.end = first
        self.pending = True
        self.front = front
        self.front_at = now
        self.batch: LoadBatch | None = None
        self.waits_since = -1.0
        self._tiers = bytearray()
        self._left: list[tuple[int, int]] = []
        self._arrived: list[tuple[int, int]] = []

    def extend(self, tiers: bytes) -> None:
        """Record that the next `len(tiers)` blocks, which came from these tiers, can be loaded."""
        if tiers:
            self._left.append((self.end, self.end + len(tiers)))
            self._tiers += tiers
            self.end += len(tiers)

    def stop(self) -> None:
        """Load nothing more than what is on its way."""
        self.pending = False
        self._left.clear()

    def left_between(self, front: int, end: int) -> int:
        """Blocks from `front` to `end` - 1 that are neither loaded nor on their way."""
        spans = [min(last, end) - max(first, front) for first, last in self._left]
        return sum([span for span in spans if span > 0])

    def next_range(self, front: int, limit: int) -> tuple[int, int] | None:
        """The last blocks that are left, at most `limit` and none before `front`."""
        if not self._left:
            return None
        first, end = self._left[-1]
        first = max(first, front, end - limit)
        return (first, end) if first < end else None

    def start(self, first: int, end: int, now: float) -> LoadBatch:
        """Record that blocks of `next_range` are on their way."""
        start, _ = self._left.pop()
        if start < first:
            self._left.append((start, first))
        self.batch = LoadBatch(first, end, now)
        return self.batch

    def arrive(self, valid: int) -> None:
        """Record that the batch has arrived; only its last `valid` blocks can be used.

        If that is not all, the blocks before them are to be computed.
        """
        batch = self.batch
        if batch is None:
            return
        self.batch = None
        self.waits_since = -1.0
        if valid < len(batch):
            self._left = [(first, end) for first, end in self._left if first > batch.first]
        if valid:
            self._arrived.append((batch.end - valid, batch.end))
            self._arrived.sort()

    def abandon(self) -> int:
        """Give up the batch on its way; return the number of its blocks."""
        batch, self.batch = self.batch, None
        self.waits_since = -1.0
        if batch is None:
            return 0
        batch.abandoned = True
        return len(batch)

    def take_arrived(self, front: int) -> int:
        """Take the arrived blocks that follow the first `front` ones; return their number."""
        taken = 0
        while self._arrived and self._arrived[0][0] <= front + taken:
            first, end = self._arrived.pop(0)
            taken += end - first
        return taken

    def tiers_of(self, first: int, count: int) -> bytes:
        """The tiers of `count` blocks from `first` on."""
        return bytes(self._tiers[first - self.first : first - self.first + count])

    def boundary(self, front: int) -> int:
        """The first block from `front` on that is not to be computed now; -1 if there is none."""
        found = self.end if self.pending else -1
        if self._arrived:
            found = self._arrived[0][0]
        batch = self.batch
        if batch is not None and (found < 0 or batch.first < found):
            found = batch.first
        return found if found < 0 else max(found, front)

    def is_over(self, front: int) -> bool:
        """True if nothing can be gained any more for a prompt with `front` computed blocks."""
        if self.pending or self.batch is not None or self._arrived:
            return False
        return not self.left_between(front, self.end)
