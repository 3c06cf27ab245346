"""Decides what the prompts of an engine compute and what they load, from measured speeds."""

from collections.abc import Callable
from operator import attrgetter

from kvmesh.blocks.overlapped_load import SLOWEST
from kvmesh.worker.enginecore.backward_load import BackwardLoad, LoadBatch
from kvmesh.worker.enginecore.block_manager import BlockManager
from kvmesh.worker.enginecore.sequence import Sequence

BATCH_S = 0.02
FIRST_BATCH = 4
STEP_TOKENS = 512  # a step takes at least as long as computing so many tokens
LEAVE_TO_LINK = 2.0
RECHECK_S = 0.001
RETRY_S = 20.0  # a batch over a link that is left alone shows if it has become faster
_SORT_KEY = attrgetter("sort_key")


class BackwardLoads:
    """The sequences of an engine whose blocks are loaded while they are computed.

    The link loads one batch at a time, for the sequence that is scheduled first. `token_s` and
    `block_s` are the measured seconds to compute a token and to load a block, `step_s` those of the
    last step that only decoded; 0 if unknown.
    `promote(sequence, tokens)` is called when the next `tokens` of a sequence have arrived.
    """

    def __init__(
        self, block_size: int, blocks: BlockManager, promote: Callable[[Sequence, int], None]
    ) -> None:
        self.token_s = 0.0
        self.block_s = 0.0
        self.step_s = 0.0
        self.sequences: list[Sequence] = []
        self.recheck_at = -1.0
        self._size = block_size
        self._blocks = blocks
        self._promote = promote
        self._moving: LoadBatch | None = None
        self._tried_at = -RETRY_S

    def pays_lookup(self, tokens: int, decoding: int) -> bool:
        """True unless computing `tokens` takes less than the step that waiting for a reply costs.

        An engine that decodes nothing waits for the reply only.
        """
        return not (decoding and self.token_s and tokens * self.token_s <= self.step_s)

    def begin(self, sequence: Sequence, now: float) -> BackwardLoad:
        """Start the load of the blocks after those that a sequence has computed."""
        load = BackwardLoad(sequence.computed // self._size, sequence.computed, now)
        sequence.arriving = load
        self.sequences.append(sequence)
        return load

    def stop(self, sequence: Sequence, load: BackwardLoad) -> None:
        """Load nothing more; what is on its way is of no use any more."""
        if sequence.arriving is load:
            self._abandon(sequence, load)
        load.stop()

    def end(self, sequence: Sequence) -> None:
        """End the load of a sequence; its private blocks keep those that have arrived."""
        load = sequence.arriving
        if load is None:
            return
        self.stop(sequence, load)
        sequence.arriving = None
        sequence.ahead_blocks = 0
        self.sequences.remove(sequence)

    # the link

    def next_batch(self, now: float) -> tuple[Sequence, LoadBatch] | None:
        """Start the next batch, with blocks allocated for it; None if the link is in use.

        The caller loads the blocks and calls `finish`.
        """
        if self._moving is not None:
            return None
        limit = max(1, int(BATCH_S / self.block_s)) if self.block_s else FIRST_BATCH
        for sequence in sorted(self.sequences, key=_SORT_KEY):
            load = sequence.arriving
            if load is None or load.batch is not None:
                continue
            chosen = self._useful(load, limit, now)
            if chosen is None:
                continue
            first, end = chosen
            if not self._blocks.allocate(end - first, sequence.request.id):
                load.stop()
                continue
            sequence.private_blocks += end - first
            sequence.ahead_blocks += end - first
            self._moving = load.start(first, end, now)
            self._tried_at = now
            return sequence, self._moving
        return None

    def finish(self, sequence: Sequence, batch: LoadBatch, valid: int) -> None:
        """Record the end of a batch, of which only the last `valid` blocks can be used."""
        if self._moving is batch:
            self._moving = None
        unused = len(batch) - (0 if batch.abandoned else valid)
        if unused:
            self._blocks.free_private(unused)
        load = sequence.arriving
        if batch.abandoned or load is None:
            return
        sequence.private_blocks -= unused
        sequence.ahead_blocks -= unused
        load.arrive(valid)

    def _useful(self, load: BackwardLoad, limit: int, now: float) -> tuple[int, int] | None:
        """The next blocks to load, unless computing gets there first.

        None, too, if the link saves less in all than the step costs that follows the load, and over
        a link so slow that it saves hardly anything.
        """
        block_s, slowest_s = self.block_s, SLOWEST * self._size * self.token_s
        if block_s > slowest_s > 0.0 and now < self._tried_at + RETRY_S:
            return None
        front = -(-load.front // self._size)
        chosen = load.next_range(front, limit)
        if chosen is None or not self.token_s:
            return chosen
        rest_s = load.left_between(front, load.end) * block_s
        step_s = STEP_TOKENS * self.token_s
        idle = now >= load.front_at
        if idle and rest_s > step_s and self._saved_s(rest_s) < step_s:
            return None
        first, end = chosen
        computing = max(0.0, load.front_at - now) + (end * self._size - load.front) * self.token_s
        return chosen if (end - first) * block_s <= computing else None

    def _saved_s(self, loading_s: float) -> float:
        """The time that computing is shorter if blocks that load so long are loaded, too."""
        block_s = self._size * self.token_s
        return loading_s * block_s / (block_s + self.block_s) * block_s / self.block_s

    # the engine

    def take_arrived(self, sequence: Sequence, now: float) -> None:
        """Let a sequence continue behind the blocks that have arrived; end a load that is over."""
        load = sequence.arriving
        if load is None:
            return
        front, rest = divmod(sequence.computed, self._size)
        taken = 0 if rest else load.take_arrived(front)
        if taken:
            sequence.ahead_blocks -= taken
            self._count(sequence, load.tiers_of(front, taken))
            self._promote(sequence, taken * self._size)
            load.front = sequence.computed
            sequence.ready_at = now
        if load.is_over(-(-sequence.computed // self._size)):
            self.end(sequence)

    def chunk(self, sequence: Sequence, now: float, busy: bool) -> int:
        """Tokens of a sequence to compute next, if the engine has the time; 0 to wait for blocks.

        A `busy` engine has others to compute or decode.
        """
        load = sequence.arriving
        computed = sequence.computed
        if load is None:
            return sequence.length - computed
        front = -(-computed // self._size)
        boundary = load.boundary(front)
        batch = load.batch
        if boundary * self._size == computed:
            if batch is None or batch.first > front:
                return 0  # blocks that the node is still looking for
            if self._awaits(load, batch, computed, now):
                return 0
            self._abandon(sequence, load)
            return self.chunk(sequence, now, busy)
        edge = boundary if boundary >= 0 else load.end
        left = load.left_between(front, edge)
        if not left or (batch is None and self._useful(load, 1, now) is None):
            return (boundary * self._size if boundary >= 0 else sequence.length) - computed
        span = edge * self._size - computed
        return self._share(sequence, load, left * self._size, span, now, busy)

    def _share(
        self,
        sequence: Sequence,
        load: BackwardLoad,
        open_tokens: int,
        span: int,
        now: float,
        busy: bool,
    ) -> int:
        """The part of the next `span` tokens to compute, of which `open_tokens` can be loaded."""
        token_s = self.token_s
        if not token_s:
            return 0
        block_s = self._block_seconds(now)
        per_token = block_s / self._size
        queued = self._queued(sequence) * block_s
        loading = queued + open_tokens * per_token
        computing = open_tokens * token_s
        if self._is_stuck(load, computing, now):
            return span
        soon = loading <= STEP_TOKENS * token_s or loading * LEAVE_TO_LINK <= computing
        if soon or (busy and loading <= computing):
            load.waits_since = now if load.waits_since < 0.0 else load.waits_since
            self._recheck(now + max(computing / 4, RECHECK_S))
            return 0
        load.waits_since = -1.0
        meets = (open_tokens * per_token + queued) / (token_s + per_token)
        blocks_left = max(0, int((open_tokens - meets) / self._size))
        return max(1, min(span, span - blocks_left * self._size))

    def _awaits(self, load: BackwardLoad, batch: LoadBatch, computed: int, now: float) -> bool:
        """True while blocks on their way arrive sooner than they would be computed."""
        if not self.token_s:
            return True
        if load.waits_since < 0.0:
            load.waits_since = now
        computing = (batch.end * self._size - computed) * self.token_s
        until = load.waits_since + computing
        due = batch.started + len(batch) * self.block_s
        if now >= until or due - now > computing:
            return False
        self._recheck(until)
        return True

    def _is_stuck(self, load: BackwardLoad, computing: float, now: float) -> bool:
        """True if the link is no longer to be waited for.

        Either its batch takes longer than computing it, or it has been idle for as long as
        `computing` takes.
        """
        moving = self._moving
        if moving is None:
            return 0.0 <= load.waits_since < now - computing
        expected = 2 * self.block_s + self._size * self.token_s
        return now - moving.started > len(moving) * expected

    def _block_seconds(self, now: float) -> float:
        """Seconds to load a block: as measured, or longer if the batch on its way takes longer."""
        moving = self._moving
        waited = (now - moving.started) / len(moving) if moving is not None else 0.0
        return max(self.block_s, waited)

    def _queued(self, sequence: Sequence) -> int:
        """Blocks that the link loads before those of a sequence."""
        queued = 0
        for other in self.sequences:
            if other.sort_key < sequence.sort_key and other.arriving is not None:
                queued += self._left(other.arriving)
        return queued

    def _left(self, load: BackwardLoad) -> int:
        return load.left_between(load.front // self._size, load.end)

    def _recheck(self, at: float) -> None:
        if self.recheck_at < 0.0 or at < self.recheck_at:
            self.recheck_at = at

    def _abandon(self, sequence: Sequence, load: BackwardLoad) -> None:
        blocks = load.abandon()
        sequence.private_blocks -= blocks
        sequence.ahead_blocks -= blocks

    def _count(self, sequence: Sequence, tiers: bytes) -> None:
        """Count tokens of the prompt as cached in the tiers that they came from."""
        if sequence.cached_reported:
            return
        cached = sequence.cached if sequence.cached is not None else [0]
        for tier in tiers:
            while len(cached) <= tier:
                cached.append(0)
            cached[tier] += self._size
        sequence.cached = cached
