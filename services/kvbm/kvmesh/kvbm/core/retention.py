"""Retention over all tiers: priorities from prompts, pins, and released sessions."""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import inf

from kvmesh.bus.messages import RELEASED, SUPERSEDED, Pin, Retain, owner
from kvmesh.kvbm.core.blocks.block import ARENA, Block, Copy, DropCause
from kvmesh.kvbm.core.blocks.prompt_blocks import PromptBlocks
from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.kvbm.core.returns import NodeReturns
from kvmesh.retention.budget import RetentionBudget
from kvmesh.retention.claims import DEFAULT_LEVEL, BlockRetention, RetentionWish
from kvmesh.retention.outcomes import Directive
from kvmesh.retention.pins import Pinned, PinTable
from kvmesh.retention.session_blocks import PromptTail, SessionBlocks
from kvmesh.retention.token_ranges import NO_WISH, segments, with_prefix
from kvmesh.runtime.lru import LruCache

IDLE_SESSION_S = 3600.0
MAX_SESSION_BLOCKS = 1 << 20
MAX_CLOSED = 4096
LEAD = 0


class TierRetention:
    """Applies retention to the copies in all tiers of the node."""

    def __init__(
        self, store: Store, defaults: Mapping[str, RetentionWish], returns: NodeReturns
    ) -> None:
        self._store = store
        self._returns = returns
        self._defaults = defaults
        self._sessions: defaultdict[int, SessionBlocks[bytes]] = defaultdict(
            lambda: SessionBlocks(IDLE_SESSION_S, MAX_SESSION_BLOCKS)
        )  # by part
        self._closed: LruCache[str, bool] = LruCache(MAX_CLOSED)
        self._pins: PinTable[int] = PinTable()

    @property
    def sessions(self) -> int:
        return len(self._sessions[LEAD])

    # prompts

    def wishes(self, prompt: PromptBlocks, first: int = 0) -> dict[int, RetentionWish]:
        """Retention of a prompt's blocks from `first` on, by index; plain blocks are left out."""
        size = prompt.space.layout.block_size
        requested = segments(prompt.retention, None, len(prompt) * size, size, self._defaults)
        return {
            index: segment.wish
            for segment in with_prefix(requested)
            for index in range(max(first, segment.first), segment.end or len(prompt))
        }

    def is_closed(self, session: str | None) -> bool:
        """True if the session was released and has fetched no prompt since."""
        return session in self._closed

    def reopen(self, session: str | None) -> None:
        """Reopen the session of a fetched prompt."""
        if session is not None:
            self._closed.pop(session)

    def follow(self, prompt: PromptBlocks) -> None:
        """Record a session's prompt: what it leaves goes first, or is dropped if confirmed."""
        if prompt.session is None:
            self._returns.on_prompt(prompt, [])
            return
        if self.is_closed(prompt.session):
            return
        changes = self._sessions[prompt.space.layout.part].record(
            prompt.session,
            prompt.digests,
            self._store.now,
            prompt.conversation,
            prompt.tentative,
            prompt.request,
        )
        for tail in changes.restored:
            self._doubt(tail, False)
        for tail in changes.doubted:
            self._doubt(tail, True)
        for tail in changes.dropped:
            self._drop_confirmed(tail, DropCause(SUPERSEDED, prompt.request))
        self._returns.on_prompt(prompt, [tail.prompt for tail in changes.doubted])

    def apply(
        self, prompt: PromptBlocks, wishes: Mapping[int, RetentionWish], blocks: Iterable[Block]
    ) -> None:
        """Apply a prompt's wishes and the pins along it to its blocks, in every tier."""
        tiers = self._store.tiers
        copies = [c for block in blocks for c in block.copies.values() if c.tier in tiers]
        directives: dict[int, Directive] = {}
        if wishes or any(copy.retention is not None for copy in copies):
            sessions = self._sessions[prompt.space.layout.part]
            shared = sessions.shared_blocks(prompt.digests, prompt.session, prompt.conversation)
            for copy in copies:
                wish = wishes.get(copy.block.index, NO_WISH)
                exclusive = copy.block.index >= shared
                if not wish.is_default or (exclusive and copy.retention is not None):
                    directive = _directive(directives, wish, owner(prompt.tenant))
                    self._store.claim(copy, wish, directive, exclusive)
        for directive in directives.values():
            self._store.tiers[ARENA].budget.outcomes.record_grant(directive)
        self._apply_pins(prompt, copies)

    def inherited(self, copies: Iterable[Copy]) -> list[Retain]:
        """Retention of these copies of consecutive blocks, in tokens of the prompt."""
        ranges: list[Retain] = []
        for copy in copies:
            retain = self._retain(copy) if copy.retention is not None else None
            if retain is None:
                continue
            last = ranges[-1] if ranges else None
            if last is not None and last.end == retain.start and _same_retention(last, retain):
                ranges[-1] = Retain(last.start, retain.end, last.priority, last.ttl_s)
            else:
                ranges.append(retain)
        return ranges

    def _retain(self, copy: Copy) -> Retain | None:
        if copy.retention is None:
            return None
        rank = copy.retention.eviction_rank(self._store.now)
        if rank.level < DEFAULT_LEVEL or rank.until == 0:
            return None
        size, index = copy.block.space.layout.block_size, copy.block.index
        ttl_s = None if rank.until == inf else rank.until - self._store.now
        return Retain(index * size, (index + 1) * size, rank.level, ttl_s)

    # pins

    def pin(self, pin: Pin) -> int:
        """Pin a prefix; return the number of its blocks in some tier."""
        now = self._store.now
        prompt = array("Q", pin.sequence_hashes)
        if not prompt:
            return 0
        directive = Directive(pin.tenant, pin.priority, pin.ttl_s)
        pinned = Pinned(pin.id, prompt, pin.priority, now + pin.ttl_s, directive)
        for displaced in self._pins.put(pinned):
            self._unpin(displaced)
        blocks = self._store.find_by_sequence_hash(prompt)
        for block in blocks:
            self._pin(pinned, self._local_copies(block))
        self._store.tiers[ARENA].budget.outcomes.record_grant(directive)
        return sum(block.space.is_lead for block in blocks)

    def unpin(self, name: str) -> int | None:
        """Remove a pin; return the number of its blocks, None if there is no such pin."""
        pinned = self._pins.remove(name)
        return self._unpin(pinned) if pinned is not None else None

    def _unpin(self, pinned: Pinned[int]) -> int:
        def change(budget: RetentionBudget, retention: BlockRetention, size: int) -> None:
            budget.unpin(retention, size, pinned.id)

        blocks = self._store.find_by_sequence_hash(pinned.prompt)
        for block in blocks:
            for copy in self._local_copies(block):
                self._store.tiers[copy.tier].update_retention(copy, change)
        return sum(block.space.is_lead for block in blocks)

    def _apply_pins(self, prompt: PromptBlocks, copies: list[Copy]) -> None:
        for pinned, count in self._pins.matching(prompt.sequence_hashes, self._store.now):
            self._pin(pinned, [copy for copy in copies if copy.block.index < count])

    def _pin(self, pinned: Pinned[int], copies: Iterable[Copy]) -> None:
        def change(budget: RetentionBudget, retention: BlockRetention, size: int) -> None:
            if pinned.id not in retention.pins:
                p = pinned
                budget.pin(retention, size, p.id, p.priority, p.deadline, p.directive)

        for copy in copies:
            self._store.tiers[copy.tier].update_retention(copy, change)

    # sessions

    def release(self, sessions: Iterable[str]) -> int:
        """End sessions and drop blocks that only they use; return the number of these."""
        ended = list(sessions)
        for session in ended:
            self._closed.put(session, True)
        self._returns.release(ended)
        parts, cause = self._sessions.values(), DropCause(RELEASED)
        return sum(self._drop_tails(part.release(ended), cause) for part in parts)

    def _doubt(self, tail: PromptTail[bytes], doubtful: bool) -> None:
        """Put the blocks of a tail first in the order of eviction, or back in their place."""
        for block in self._unused_blocks(tail):
            block.doubtful = doubtful
            for copy in self._local_copies(block):
                self._store.tiers[copy.tier].rerank(copy)

    def _drop_confirmed(self, tail: PromptTail[bytes], cause: DropCause) -> None:
        """Drop the unused blocks of a tail on which nothing else depends."""
        tiers = self._store.tiers.values()
        for block in self._unused_blocks(tail):
            if not any(tier.holds_child(block.digest) for tier in tiers):
                self._drop_local(block, cause)

    def _drop_tails(self, tails: Iterable[PromptTail[bytes]], cause: DropCause) -> int:
        dropped = 0
        for tail in tails:
            for block in self._unused_blocks(tail):
                dropped += self._drop_local(block, cause) and block.space.is_lead
        return dropped

    def _unused_blocks(self, tail: PromptTail[bytes]) -> Iterator[Block]:
        """The blocks of a tail that nothing uses or pins, last first."""
        for digest in reversed(tail.prompt[tail.start :]):
            block = self._store.blocks.get(digest)
            if block is not None and not _is_used(block):
                yield block

    def _local_copies(self, block: Block) -> list[Copy]:
        return [copy for copy in block.copies.values() if copy.tier in self._store.tiers]

    def _drop_local(self, block: Block, cause: DropCause) -> bool:
        """Drop a block's copies on this node; sessions of other nodes may use remote ones."""
        copies = self._local_copies(block)
        for copy in copies:
            self._store.drop(copy, cause)
        return bool(copies)


def _directive(known: dict[int, Directive], wish: RetentionWish, tenant: str) -> Directive | None:
    if wish.directive is None:
        return None
    return known.setdefault(wish.directive, Directive(tenant, wish.level, wish.ttl_s))


def _is_used(block: Block) -> bool:
    """True if a copy of the block has a user or a pin."""
    copies = block.copies.values()
    return any(
        copy.users or (copy.retention is not None and copy.retention.pins) for copy in copies
    )


def _same_retention(one: Retain, other: Retain) -> bool:
    return (one.priority, one.ttl_s) == (other.priority, other.ttl_s)
