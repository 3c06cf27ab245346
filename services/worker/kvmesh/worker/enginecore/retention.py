"""What callers ask for the blocks of one rank: claims on runs, pins, and who uses what.

Runs are cut where what is asked for changes. Where nobody asks for anything there is nothing here:
no run has a `BlockRetention`, and eviction goes by recency.
"""

import logging
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from kvmesh.bus.messages import Pin, owner
from kvmesh.retention.budget import RetentionBudget
from kvmesh.retention.claims import (
    MOST_LEVEL,
    PLAIN,
    PLAIN_LEVEL,
    BlockRetention,
    EvictionRank,
    RetentionWish,
)
from kvmesh.retention.eviction_pool import EvictionPool
from kvmesh.retention.outcomes import Directive, DirectiveOutcome
from kvmesh.retention.pins import Pinned, PinTable
from kvmesh.retention.session_blocks import PromptTail, SessionBook
from kvmesh.retention.token_ranges import (
    DEFAULTS,
    RetentionSegment,
)
from kvmesh.worker.enginecore.counters import RetentionState
from kvmesh.worker.enginecore.radix_tree import BlockRun, RadixTree
from kvmesh.worker.enginecore.retention_request import NO_RETENTION, RetentionRequest

log = logging.getLogger(__name__)
PINNED = RetentionWish(MOST_LEVEL)


@dataclass(frozen=True, kw_only=True)
class RetentionOptions:
    """`budget` is the share of all blocks that one tenant may have kept because it asked so.

    `defaults` are what is asked for each kind of token where nobody says. Sessions without a
    request for `session_idle_s` seconds are forgotten, as are promises without an end for blocks
    that were not used for so long; and the oldest sessions, where all prompts together have more
    than `session_blocks` names per block of the rank.
    """

    budget: float = 0.5
    session_idle_s: float = 3600.0
    session_blocks: int = 64
    defaults: Mapping[str, RetentionWish] = field(default_factory=lambda: DEFAULTS)


class RetentionManager:
    """Claims, pins and sessions of a rank with `capacity` blocks.

    `cut` takes blocks from the end of an idle run without children, which it may leave empty.
    `stays` is how much of a prompt that nobody will extend is used all the same.
    """

    def __init__(
        self,
        options: RetentionOptions,
        capacity: int,
        tree: RadixTree,
        cut: Callable[[BlockRun, int], None],
        stays: Callable[["array[int]"], int] = lambda _: 0,
    ) -> None:
        self.budget = RetentionBudget(int(options.budget * capacity), _log, options.session_idle_s)
        self.evictable: EvictionPool[BlockRun] = EvictionPool(_carries, self._refreshed_rank)
        self._tree = tree
        self._evict_blocks = cut
        self._used_above = stays
        self._sessions: SessionBook[int] = SessionBook(
            options.session_idle_s, options.session_blocks * capacity
        )
        self._pins: PinTable[int] = PinTable()
        self._has_claims = False

    def state(self, rank: int, now: float) -> RetentionState:
        """What there is now, as rank `rank`."""
        self.evictable.expire(now)
        counts = self.budget.outcomes.counts
        return RetentionState(
            rank=rank,
            sessions=len(self._sessions),
            pins=len(self._pins),
            charged_blocks=sum(self.budget.charged.values()),
            outcomes={str(outcome): count for outcome, count in counts.items()},
        )

    def eviction_rank(self, run: BlockRun, now: float) -> EvictionRank:
        """Where a run is in the order of eviction."""
        return run.retention.standing(now) if run.retention is not None else PLAIN

    def begin_use(self, run: BlockRun, now: float) -> None:
        """An idle run is used again: what had ended by then has ended."""
        self.evictable.discard(run)
        if run.retention is not None:
            self._expire_claims(run, now)

    def end_use(self, run: BlockRun, now: float) -> None:
        """One user less: what it was kept for counts from now."""
        if run.retention is not None:
            run.retention.renew(now)
        if not run.refs:
            self.evictable.add(run, self.eviction_rank(run, now))

    def evict(self, count: int, now: float) -> None:
        """Drop the `count` idle blocks that are worth least; there are as many."""
        while count > 0:
            run = self.evictable.first(now)
            part = min(count, len(run.hashes))
            if run.retention is not None:
                self.budget.evicted(run.retention, part, now)
            if part == len(run.hashes):
                self._evict_run(run)
            else:
                self._evict_blocks(run, part)
            count -= part

    # requests

    def start_request(
        self, held: "array[int]", prompt: "array[int]", asked: RetentionRequest | None, now: float
    ) -> list[str] | None:
        """A prompt is in memory whose full blocks are `held`; what came of each directive for it.

        It is its session's newest one, and may grow; what that leaves of earlier ones is dropped.
        """
        self.claim(held, asked, now)
        if asked is None:
            return None
        self.record_prompt(asked.session, prompt, now)
        granted = self.budget.outcomes.granted
        return [str(granted(asked.directives[i])) for i in range(asked.prompt_directives)] or None

    def claim(self, held: "array[int]", asked: RetentionRequest | None, now: float) -> None:
        """Claim the blocks of a sequence, all of which are in use."""
        asked = asked or NO_RETENTION
        if asked.segments or self._has_claims or self._pins:
            self._claim_from(held, asked, now, 0)

    def raise_priority(self, held: "array[int]", priority: int, now: float) -> None:
        """Blocks in use serve a request of a priority above 0: they are kept as dearly as it is.

        As far as the budget of their tenant has room, and until nobody has used them for long.
        """
        self.evictable.expire(now)
        wish = RetentionWish(min(MOST_LEVEL, PLAIN_LEVEL + priority))
        payer = ""
        for at, run in self._split_runs(held, ()):
            payer = payer if at else owner(run.tenant)
            self._raise_run(run, wish, payer, now)

    def record_prompt(self, session: str | None, prompt: "array[int]", now: float) -> None:
        """A session has this prompt now: what that leaves of its earlier ones is dropped."""
        if session is not None:
            self._drop_tails(self._sessions.record(session, prompt, now))

    def finish_request(
        self, held: "array[int]", asked: RetentionRequest, now: float, first: int
    ) -> str | None:
        """The answer is complete; its blocks begin with the `first` of those that are `held`.

        What came of the directive for it, if there is one.
        """
        self._claim_from(held, asked, now, first)
        granted = self.budget.outcomes.granted
        told = [
            str(granted(directive)) for directive in asked.directives[asked.prompt_directives :]
        ]
        return told[0] if told else None

    def _claim_from(
        self, prompt: "array[int]", asked: RetentionRequest, now: float, first: int
    ) -> None:
        """Claim blocks from the `first` one on of a prompt, all of which are in use."""
        self.evictable.expire(now)
        if asked.segments or self._has_claims:
            shared = self._sessions.shared(prompt, asked.session) if asked.segments else first
            edges = (e for s in asked.segments for e in (s.first, s.end) if e)
            for at, run in self._split_runs(prompt, {first, shared, *edges}):
                if at >= first:
                    self._claim_run(run, asked.wish_at(at), at >= shared, asked, now)
        for pin, blocks in self._pins.along(prompt, now):
            self._pin(pin, prompt[:blocks], now)

    def claim_inherited(self, held: "array[int]", asked: RetentionRequest, now: float) -> None:
        """Leading blocks of a prompt, in use, come from a tier where this was asked for them."""
        edges = {edge for segment in asked.segments for edge in segment[:2] if edge}
        for at, run in self._split_runs(held, edges):
            wish = asked.wish_at(at)
            if wish is not None:
                self._claim_run(run, wish, False, asked, now)

    def retained_segments(self, prompt: "array[int]", now: float) -> list[RetentionSegment]:
        """What the blocks of a prompt are kept for, to tell a tier that takes them in."""
        found: list[RetentionSegment] = []
        at = 0
        for run in self._tree.match(prompt).runs:
            standing = run.retention.standing(now) if run.retention is not None else PLAIN
            if standing.level >= PLAIN_LEVEL and standing != PLAIN:
                ttl_s = None if standing.until == inf else standing.until - now
                found.append(
                    RetentionSegment(at, at + len(run), RetentionWish(standing.level, ttl_s))
                )
            at += len(run)
        return found

    def release(self, sessions: Sequence[str]) -> int:
        """Drop what only these sessions use; returns how many blocks that was."""
        return self._drop_tails(self._sessions.release(sessions))

    def clear(self, salt: int | None, tenant: str = "") -> int:
        """Drop what nobody uses, pinned or not, of one namespace if told; returns how many."""
        meant = salt, tenant
        roots = [
            root
            for root in self._tree.roots.values()
            if salt is None or (root.salt, root.tenant) == meant
        ]
        return sum(self._prune(root, pinned=True) for root in roots)

    # pins

    def pin(self, pin: Pin, now: float) -> int:
        """Prefer to keep a prefix; returns how many of its blocks are here and within budget."""
        self.unpin(pin.id, now)
        prompt = array("Q", pin.sequence_hashes)
        if not prompt:
            return 0
        self.evictable.expire(now)
        directive = Directive(pin.tenant, pin.priority, pin.ttl_s)
        pinned = Pinned(pin.id, prompt, pin.priority, now + pin.ttl_s, directive)
        for over in self._pins.put(pinned):
            self._unpin(over, now)
        self._pin(pinned, prompt, now)
        self.budget.outcomes.granted(directive)
        return directive.blocks

    def unpin(self, pin: str, now: float) -> int:
        """Forget a pin; returns how many blocks it was on."""
        known = self._pins.remove(pin)
        return self._unpin(known, now) if known is not None else 0

    # runs

    def _split_runs(
        self, prompt: "array[int]", edges: Iterable[int]
    ) -> Iterator[tuple[int, BlockRun]]:
        """The runs of a prompt with the places of their first blocks, cut at `edges`."""
        way = self._tree.match(prompt)
        cuts = sorted({*edges, way.matched})
        at = 0
        for run in way.runs:
            end = at + len(run)
            for cut in cuts[bisect_right(cuts, at) : bisect_left(cuts, end)]:
                yield at, self._split(run, cut - at)
                at = cut
            if at < way.matched:
                yield at, run
            at = end

    def _split(self, run: BlockRun, size: int) -> BlockRun:
        """Make the first blocks of a run one of its own, which is returned."""
        upper = self._tree.split(run, size)
        if not upper.refs:
            self.evictable.add(upper, self.evictable.standing(run))
        return upper

    def _claim_run(
        self,
        run: BlockRun,
        wish: RetentionWish | None,
        alone: bool,
        asked: RetentionRequest,
        now: float,
    ) -> None:
        if wish is None:
            if run.retention is not None:
                self.budget.touch(run.retention, len(run), now)
                self._drop_if_empty(run)
            return
        keep = run.retention = run.retention or BlockRetention(asked.tenant)
        size = self.budget.grantable(keep, len(run), wish)
        if 0 < size < len(run):
            self._claim_run(self._split(run, size), wish, alone, asked, now)
        directive = asked.directives[wish.directive] if wish.directive is not None else None
        self.budget.claim(keep, len(run), wish, now, directive, alone)
        self._drop_if_empty(run)

    def _raise_run(self, run: BlockRun, wish: RetentionWish, payer: str, now: float) -> None:
        keep = run.retention = run.retention or BlockRetention(payer)
        size = self.budget.grantable(keep, len(run), wish)
        if 0 < size < len(run):
            self._raise_run(self._split(run, size), wish, payer, now)
        self.budget.claim(keep, len(run), wish, now, alone=False)
        self._drop_if_empty(run)

    def _pin(self, pin: Pinned[int], prompt: "array[int]", now: float) -> None:
        for _, run in self._split_runs(prompt, ()):
            if run.retention is None or pin.id not in run.retention.pins:
                self._pin_run(run, pin, now)

    def _pin_run(self, run: BlockRun, pin: Pinned[int], now: float) -> None:
        keep = run.retention = run.retention or BlockRetention(pin.directive.tenant)
        size = self.budget.grantable(keep, len(run), PINNED)
        if 0 < size < len(run):
            self._pin_run(self._split(run, size), pin, now)
        self.budget.pin(keep, len(run), pin.id, pin.priority, pin.deadline, pin.directive)
        self._update_rank(run, now)

    def _unpin(self, pin: Pinned[int], now: float) -> int:
        blocks = 0
        for _, run in self._split_runs(array("Q", pin.prompt), ()):
            if run.retention is not None and pin.id in run.retention.pins:
                blocks += len(run)
                self.budget.unpin(run.retention, len(run), pin.id)
                self._update_rank(run, now)
        return blocks

    def _update_rank(self, run: BlockRun, now: float) -> None:
        self._drop_if_empty(run)
        if not run.refs:
            self.evictable.set(run, self.eviction_rank(run, now))

    def _refreshed_rank(self, run: BlockRun, now: float) -> EvictionRank:
        self._expire_claims(run, now)
        return self.eviction_rank(run, now)

    def _expire_claims(self, run: BlockRun, now: float) -> None:
        if run.retention is not None:
            self.budget.lapse(run.retention, len(run), now)
            self._drop_if_empty(run)

    def _drop_if_empty(self, run: BlockRun) -> None:
        if run.retention:
            self._has_claims = True
        else:
            run.retention = None

    def _evict_run(self, run: BlockRun) -> None:
        self.evictable.discard(run)
        self._evict_blocks(run, len(run.hashes))
        if run.parent is not None and not run.parent.children:
            self.evictable.uncover(run.parent)

    # what nobody wants any more

    def _drop_tails(self, tails: Iterable[PromptTail[int]]) -> int:
        return sum([self._drop_tail(tail) for tail in tails])

    def _drop_tail(self, tail: PromptTail[int]) -> int:
        prompt = array("Q", tail.prompt)
        kept = max(tail.kept, self._used_above(prompt))
        at = 0
        for run in self._tree.match(prompt).runs:
            end = at + len(run)
            if end > kept:
                if at < kept and not run.refs:
                    self._split(run, kept - at)
                return self._prune(run)
            at = end
        return 0

    def _prune(self, top: BlockRun, pinned: bool = False) -> int:
        """Drop of a run and all that hangs on it what nobody uses; returns how many blocks."""
        runs, blocks = [top], 0
        for run in runs:
            runs.extend(run.children.values())
        for run in reversed(runs):
            kept = run.retention is not None and bool(run.retention.pins) and not pinned
            if run.refs or run.children or kept:
                continue
            blocks += len(run)
            if run.retention is not None:
                self.budget.freed(run.retention, len(run))
            self._evict_run(run)
        return blocks


def _log(directive: Directive, outcome: DirectiveOutcome) -> None:
    log.debug(
        "a directive (priority %d, ttl %s s) of tenant %r for %d blocks: %s",
        directive.priority,
        directive.ttl_s,
        directive.tenant,
        directive.asked,
        outcome,
    )


def _carries(run: BlockRun) -> bool:
    return bool(run.children)
