"""Retention over all tiers: what prompts ask for their blocks, pins, and the ends of sessions."""

from array import array
from collections.abc import Iterable, Mapping
from math import inf

from kvmesh.bus.messages import Pin, Retain, owner
from kvmesh.kvbm.core.blocks.block import ARENA, Block, Copy
from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.kvbm.core.transfers.prompt_blocks import PromptBlocks
from kvmesh.retention.budget import RetentionBudget
from kvmesh.retention.claims import DEFAULT_LEVEL, BlockRetention, RetentionWish
from kvmesh.retention.outcomes import Directive
from kvmesh.retention.pins import Pinned, PinTable
from kvmesh.retention.session_blocks import PromptTail, SessionBlocks
from kvmesh.retention.token_ranges import NO_WISH, segments, with_prefix
from kvmesh.runtime.lru import LruCache

IDLE_SESSION_S = 3600.0
MOST_SESSION_BLOCKS = 1 << 20
MOST_CLOSED = 4096


class TierRetention:
    """Which blocks are kept, how dearly and for whom."""

    def __init__(self, store: Store, defaults: Mapping[str, RetentionWish]) -> None:
        self._store = store
        self._defaults = defaults
        self._sessions: SessionBlocks[bytes] = SessionBlocks(IDLE_SESSION_S, MOST_SESSION_BLOCKS)
        self._closed: LruCache[str, bool] = LruCache(MOST_CLOSED)
        self._pins: PinTable[int] = PinTable()

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    # prompts

    def wishes(self, prompt: PromptBlocks, first: int = 0) -> dict[int, RetentionWish]:
        """What is asked for its blocks from `first` on, by index, unless nothing is."""
        size = prompt.space.layout.block_size
        asked = segments(prompt.retention, None, len(prompt) * size, size, self._defaults)
        return {
            index: segment.wish
            for segment in with_prefix(asked)
            for index in range(max(first, segment.first), segment.end or len(prompt))
        }

    def is_closed(self, session: str | None) -> bool:
        """Whether the session has been released and not been heard of since."""
        return session in self._closed

    def reopen(self, session: str | None) -> None:
        """A prompt of the session begins."""
        if session is not None:
            self._closed.pop(session)

    def follow(self, prompt: PromptBlocks) -> None:
        """A session has this prompt now: what of its last one it leaves, nobody keeps."""
        if prompt.session is not None and not self.is_closed(prompt.session):
            left = self._sessions.record(prompt.session, prompt.digests, self._store.now)
            self._forget(left)

    def ask(
        self, prompt: PromptBlocks, wishes: Mapping[int, RetentionWish], blocks: Iterable[Block]
    ) -> None:
        """Keep a prompt's blocks as it wishes, and as pins do, in every tier that has them."""
        tiers = self._store.tiers
        copies = [c for block in blocks for c in block.copies.values() if c.tier in tiers]
        directives: dict[int, Directive] = {}
        if wishes or any(copy.keep is not None for copy in copies):
            shared = self._sessions.shared_blocks(prompt.digests, prompt.session)
            for copy in copies:
                wish = wishes.get(copy.block.index, NO_WISH)
                alone = copy.block.index >= shared
                if not wish.is_default or (alone and copy.keep is not None):
                    directive = _directive(directives, wish, owner(prompt.tenant))
                    self._store.claim(copy, wish, directive, alone)
        for directive in directives.values():
            self._store.tiers[ARENA].promises.outcomes.record_grant(directive)
        self._ask_for_pins(prompt, copies)

    def inherited(self, copies: Iterable[Copy]) -> list[Retain]:
        """What the blocks of these copies, which follow each other, are kept for."""
        found: list[Retain] = []
        for copy in copies:
            retain = self._retain(copy) if copy.keep is not None else None
            if retain is None:
                continue
            last = found[-1] if found else None
            if last is not None and last.end == retain.start and _alike(last, retain):
                found[-1] = Retain(last.start, retain.end, last.priority, last.ttl_s)
            else:
                found.append(retain)
        return found

    def _retain(self, copy: Copy) -> Retain | None:
        if copy.keep is None:
            return None
        standing = copy.keep.eviction_rank(self._store.now)
        if standing.level < DEFAULT_LEVEL or standing.until == 0:
            return None
        size, index = copy.block.space.layout.block_size, copy.block.index
        ttl_s = None if standing.until == inf else standing.until - self._store.now
        return Retain(index * size, (index + 1) * size, standing.level, ttl_s)

    # pins

    def pin(self, pin: Pin) -> int:
        """Prefer to keep a prefix; returns how many of its blocks are in some tier."""
        now = self._store.now
        prompt = array("Q", pin.sequence_hashes)
        if not prompt:
            return 0
        directive = Directive(pin.tenant, pin.priority, pin.ttl_s)
        pinned = Pinned(pin.id, prompt, pin.priority, now + pin.ttl_s, directive)
        for over in self._pins.put(pinned):
            self._unpin(over)
        blocks = self._store.named(prompt)
        for block in blocks:
            self._pin(pinned, self._here(block))
        self._store.tiers[ARENA].promises.outcomes.record_grant(directive)
        return len(blocks)

    def unpin(self, name: str) -> int | None:
        """Forget a pin; returns how many blocks it concerned, None if there is no such."""
        pinned = self._pins.remove(name)
        return self._unpin(pinned) if pinned is not None else None

    def _unpin(self, pinned: Pinned[int]) -> int:
        def forget(promises: RetentionBudget, keep: BlockRetention, size: int) -> None:
            promises.unpin(keep, size, pinned.id)

        blocks = self._store.named(pinned.prompt)
        for block in blocks:
            for copy in self._here(block):
                self._store.tiers[copy.tier].change(copy, forget)
        return len(blocks)

    def _ask_for_pins(self, prompt: PromptBlocks, copies: list[Copy]) -> None:
        for pinned, count in self._pins.matching(prompt.sequence_hashes, self._store.now):
            self._pin(pinned, [copy for copy in copies if copy.block.index < count])

    def _pin(self, pinned: Pinned[int], copies: Iterable[Copy]) -> None:
        def ask(promises: RetentionBudget, keep: BlockRetention, size: int) -> None:
            if pinned.id not in keep.pins:
                p = pinned
                promises.pin(keep, size, p.id, p.priority, p.deadline, p.directive)

        for copy in copies:
            self._store.tiers[copy.tier].change(copy, ask)

    # ends

    def release(self, sessions: Iterable[str]) -> int:
        """Forget sessions and what only they use; returns how many blocks that was."""
        ended = list(sessions)
        for session in ended:
            self._closed.put(session, True)
        return self._forget(self._sessions.release(ended))

    def _forget(self, tails: Iterable[PromptTail[bytes]]) -> int:
        gone = 0
        for tail in tails:
            for digest in reversed(tail.prompt[tail.start :]):
                block = self._store.blocks.get(digest)
                if block is not None and not _is_wanted(block):
                    gone += self._drop_here(block)
        return gone

    def _here(self, block: Block) -> list[Copy]:
        return [copy for copy in block.copies.values() if copy.tier in self._store.tiers]

    def _drop_here(self, block: Block) -> bool:
        """Drop it from this node; sessions of other nodes may use what is remote."""
        here = self._here(block)
        for copy in here:
            self._store.drop(copy)
        return bool(here)


def _directive(known: dict[int, Directive], wish: RetentionWish, tenant: str) -> Directive | None:
    if wish.directive is None:
        return None
    return known.setdefault(wish.directive, Directive(tenant, wish.level, wish.ttl_s))


def _is_wanted(block: Block) -> bool:
    """Whether somebody uses or has pinned it."""
    copies = block.copies.values()
    return any(copy.users or (copy.keep is not None and copy.keep.pins) for copy in copies)


def _alike(one: Retain, other: Retain) -> bool:
    return (one.priority, one.ttl_s) == (other.priority, other.ttl_s)
