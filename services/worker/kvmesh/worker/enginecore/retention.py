"""Retention on one rank: claims and pins on runs, sessions, and the order of eviction.

Runs are split where claims change. A run without claims has no `BlockRetention`, and its eviction
goes by recency.
"""

import logging
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf

from kvmesh.bus.messages import (
    CLEARED,
    CLIPPED,
    EVICTED,
    EXPIRED,
    RELEASED,
    SUPERSEDED,
    Pin,
    owner,
)
from kvmesh.retention.budget import RetentionBudget
from kvmesh.retention.claims import (
    DEFAULT_LEVEL,
    DOUBTFUL,
    MAX_LEVEL,
    UNCLAIMED,
    BlockRetention,
    EvictionRank,
    RetentionWish,
    rank_of,
)
from kvmesh.retention.eviction_pool import EvictionPool
from kvmesh.retention.outcomes import Directive, DirectiveOutcome
from kvmesh.retention.pins import Pinned, PinTable
from kvmesh.retention.session_blocks import PromptTail, SessionBlocks
from kvmesh.retention.token_ranges import RetentionSegment
from kvmesh.worker.enginecore.counters import (
    BY_CLAIM,
    BY_RECENCY,
    EVICTION_ORDERS,
    RetentionState,
)
from kvmesh.worker.enginecore.radix_tree import BlockRun, RadixTree
from kvmesh.worker.enginecore.retention_options import RetentionOptions
from kvmesh.worker.enginecore.retention_request import NO_RETENTION, RetentionRequest

log = logging.getLogger(__name__)
PINNED = RetentionWish(MAX_LEVEL)


class RetentionManager:
    """Claims, pins and sessions of a rank with `capacity` blocks.

    `evict_blocks` drops blocks from the end of an unused run without children, for the reason of a
    `Removed` event, and may leave it empty. `used_above` returns how many leading blocks of a
    prompt an upper tier holds: these stay when a session drops the prompt.
    """

    def __init__(
        self,
        options: RetentionOptions,
        capacity: int,
        tree: RadixTree,
        evict_blocks: Callable[[BlockRun, int, str], None],
        used_above: Callable[["array[int]"], int] = lambda _: 0,
    ) -> None:
        self.budget = RetentionBudget(
            int(options.budget * capacity), _log_outcome, options.session_idle_s
        )
        self.evictable: EvictionPool[BlockRun] = EvictionPool(_has_children, self._refreshed_rank)
        self._tree = tree
        self._evict_blocks = evict_blocks
        self._used_above = used_above
        self._sessions: SessionBlocks[int] = SessionBlocks(
            options.session_idle_s, options.session_blocks * capacity
        )
        self._pins: PinTable[int] = PinTable()
        self._has_claims = False
        self._evicted = dict.fromkeys(EVICTION_ORDERS, 0)

    def state(self, rank: int, now: float) -> RetentionState:
        """The state at `now`, reported as rank `rank`."""
        self.evictable.expire(now)
        counts = self.budget.outcomes.counts
        return RetentionState(
            rank=rank,
            sessions=len(self._sessions),
            pins=len(self._pins),
            charged_blocks=sum(self.budget.charged.values()),
            outcomes={str(outcome): count for outcome, count in counts.items()},
            evicted=dict(self._evicted),
        )

    def eviction_rank(self, run: BlockRun, now: float) -> EvictionRank:
        """The position of a run in the order of eviction."""
        claimed = run.retention.eviction_rank(now) if run.retention is not None else UNCLAIMED
        return rank_of(claimed, True) if run.doubtful else claimed

    def begin_use(self, run: BlockRun, now: float) -> None:
        """Take an unused run out of the eviction order; its expired claims end."""
        self.evictable.discard(run)
        if run.retention is not None:
            self._expire_claims(run, now)
        run.lapsed, run.doubtful = None, False

    def end_use(self, run: BlockRun, now: float) -> None:
        """Restart the time to live of a run's claims; put it into the eviction order if unused."""
        if run.retention is not None:
            run.retention.renew(now)
        if not run.refs:
            self.evictable.add(run, self.eviction_rank(run, now))

    def evict(self, count: int, now: float) -> None:
        """Evict the `count` unused blocks of the lowest rank; there are at least as many."""
        while count > 0:
            run = self.evictable.next_victim(now)
            part, reason = min(count, len(run.hashes)), run.lapsed or EVICTED
            if run.doubtful and self.evictable.eviction_rank(run) == DOUBTFUL:
                self._evicted[BY_CLAIM] += part
                reason = SUPERSEDED
            else:
                self._evicted[BY_CLAIM if run.retention is not None else BY_RECENCY] += part
            if run.retention is not None:
                self.budget.on_evicted(run.retention, part, now)
            if part == len(run.hashes):
                self._evict_run(run, reason)
            else:
                self._evict_blocks(run, part, reason)
            count -= part

    # requests

    def start_request(
        self, held: "array[int]", prompt: "array[int]", request: RetentionRequest | None, now: float
    ) -> list[str] | None:
        """Claim the full blocks `held` of a prompt in memory; return the outcome of each directive.

        The prompt becomes the newest of its session; see `record_prompt`.
        """
        self.claim(held, request, now)
        if request is None:
            return None
        self.record_prompt(request, prompt, now)
        granted = self.budget.outcomes.record_grant
        return [
            str(granted(request.directives[i])) for i in range(request.prompt_directives)
        ] or None

    def claim(self, held: "array[int]", request: RetentionRequest | None, now: float) -> None:
        """Apply the claims of a request to locked blocks."""
        request = request or NO_RETENTION
        if request.segments or self._has_claims or self._pins:
            self._claim_from(held, request, now, 0)

    def raise_priority(self, held: "array[int]", priority: int, now: float) -> None:
        """Claim locked blocks at the level of a request with a priority above 0.

        The claim counts against the tenant's budget and ends once the blocks are unused for
        `session_idle_s`.
        """
        self.evictable.expire(now)
        wish = RetentionWish(min(MAX_LEVEL, DEFAULT_LEVEL + priority))
        payer = ""
        for at, run in self._split_runs(held, ()):
            payer = payer if at else owner(run.tenant)
            self._raise_run(run, wish, payer, now)

    def record_prompt(self, request: RetentionRequest, prompt: "array[int]", now: float) -> None:
        """Record a session's newest prompt: what it leaves goes first, or is dropped."""
        if request.session is None:
            return
        changes = self._sessions.record(
            request.session,
            prompt,
            now,
            request.conversation,
            request.tentative,
            ahead=request.ahead,
        )
        for tail in changes.restored:
            self._doubt_tail(tail, False, now)
        for tail in changes.doubted:
            self._doubt_tail(tail, True, now)
        for tail in changes.dropped:
            # Drop the unused blocks of a tail on which nothing else depends
            for run in reversed(self._unused_runs(tail)):
                self._drop_run(run, SUPERSEDED)

    def finish_request(
        self, held: "array[int]", request: RetentionRequest, now: float, first: int
    ) -> str | None:
        """Claim the blocks of a complete output: those of `held` from index `first` on.

        Return the outcome of the directive for the output, if there is one.
        """
        self._claim_from(held, request, now, first)
        granted = self.budget.outcomes.record_grant
        outcomes = [
            str(granted(directive)) for directive in request.directives[request.prompt_directives :]
        ]
        return outcomes[0] if outcomes else None

    def _claim_from(
        self, prompt: "array[int]", request: RetentionRequest, now: float, first: int
    ) -> None:
        """Claim the blocks of a locked prompt from index `first` on."""
        self.evictable.expire(now)
        if request.segments or self._has_claims:
            shared = (
                self._sessions.shared_blocks(prompt, request.session, request.conversation)
                if request.segments
                else first
            )
            edges = (e for s in request.segments for e in (s.first, s.end) if e)
            for at, run in self._split_runs(prompt, {first, shared, *edges}):
                if at >= first:
                    self._claim_run(run, request.wish_at(at), at >= shared, request, now)
        for pin, blocks in self._pins.matching(prompt, now):
            self._pin(pin, prompt[:blocks], now)

    def claim_inherited(self, held: "array[int]", request: RetentionRequest, now: float) -> None:
        """Claim leading blocks that came from another tier as they were claimed there."""
        edges = {edge for segment in request.segments for edge in segment[:2] if edge}
        for at, run in self._split_runs(held, edges):
            wish = request.wish_at(at)
            if wish is not None:
                self._claim_run(run, wish, False, request, now)

    def retained_segments(self, prompt: "array[int]", now: float) -> list[RetentionSegment]:
        """The claims on the blocks of a prompt, for another tier that receives the blocks."""
        found: list[RetentionSegment] = []
        at = 0
        for run in self._tree.match(prompt).runs:
            rank = self.eviction_rank(run, now)
            if rank.level >= DEFAULT_LEVEL and rank != UNCLAIMED:
                ttl_s = None if rank.until == inf else rank.until - now
                found.append(RetentionSegment(at, at + len(run), RetentionWish(rank.level, ttl_s)))
            at += len(run)
        return found

    def release(self, sessions: Sequence[str]) -> int:
        """Forget sessions and drop blocks that only they used; return the number of blocks."""
        return sum([self._drop_released(tail) for tail in self._sessions.release(sessions)])

    def clear(self, salt: int | None, tenant: str = "") -> int:
        """Drop unused blocks, pinned or not, of all or one namespace; return their number."""
        return sum([self._prune(root, CLEARED, pinned=True) for root in self._roots(salt, tenant)])

    def held(self, salt: int | None, tenant: str = "") -> int:
        """The number of full blocks of all or one namespace."""
        runs = self._roots(salt, tenant)
        for run in runs:
            runs.extend(run.children.values())
        return sum([len(run) for run in runs])

    def _roots(self, salt: int | None, tenant: str) -> list[BlockRun]:
        namespace = salt, tenant
        return [
            root
            for root in self._tree.roots.values()
            if salt is None or (root.salt, root.tenant) == namespace
        ]

    # pins

    def pin(self, pin: Pin, now: float) -> int:
        """Pin a prefix; return the number of its blocks that are held and within the budget."""
        self.unpin(pin.id, now)
        prompt = array("Q", pin.sequence_hashes)
        if not prompt:
            return 0
        self.evictable.expire(now)
        directive = Directive(pin.tenant, pin.priority, pin.ttl_s)
        pinned = Pinned(pin.id, prompt, pin.priority, now + pin.ttl_s, directive)
        for replaced in self._pins.put(pinned):
            self._unpin(replaced, now)
        self._pin(pinned, prompt, now)
        self.budget.outcomes.record_grant(directive)
        return directive.granted_blocks

    def unpin(self, pin: str, now: float) -> int:
        """Remove a pin; return the number of blocks that it held."""
        known = self._pins.remove(pin)
        return self._unpin(known, now) if known is not None else 0

    # runs

    def _split_runs(
        self, prompt: "array[int]", edges: Iterable[int]
    ) -> Iterator[tuple[int, BlockRun]]:
        """Yield the runs of a prompt with the index of their first block, split at `edges`."""
        match = self._tree.match(prompt)
        cuts = sorted({*edges, match.matched})
        at = 0
        for run in match.runs:
            end = at + len(run)
            for edge in cuts[bisect_right(cuts, at) : bisect_left(cuts, end)]:
                yield at, self._split(run, edge - at)
                at = edge
            if at < match.matched:
                yield at, run
            at = end

    def _split(self, run: BlockRun, size: int) -> BlockRun:
        """Split off the first `size` blocks of a run as a separate run and return it."""
        upper = self._tree.split(run, size)
        if not upper.refs:
            self.evictable.add(upper, self.evictable.eviction_rank(run))
        return upper

    def _claim_run(
        self,
        run: BlockRun,
        wish: RetentionWish | None,
        exclusive: bool,
        request: RetentionRequest,
        now: float,
    ) -> None:
        if wish is None:
            if run.retention is not None:
                self.budget.touch(run.retention, len(run), now)
                self._drop_if_empty(run)
            return
        retention = run.retention = run.retention or BlockRetention(request.tenant)
        size = self.budget.grantable(retention, len(run), wish)
        if 0 < size < len(run):
            self._claim_run(self._split(run, size), wish, exclusive, request, now)
        directive = request.directives[wish.directive] if wish.directive is not None else None
        granted = self.budget.claim(retention, len(run), wish, now, directive, exclusive)
        run.lapsed = None if granted else CLIPPED
        self._drop_if_empty(run)

    def _raise_run(self, run: BlockRun, wish: RetentionWish, payer: str, now: float) -> None:
        retention = run.retention = run.retention or BlockRetention(payer)
        size = self.budget.grantable(retention, len(run), wish)
        if 0 < size < len(run):
            self._raise_run(self._split(run, size), wish, payer, now)
        self.budget.claim(retention, len(run), wish, now, exclusive=False)
        self._drop_if_empty(run)

    def _pin(self, pin: Pinned[int], prompt: "array[int]", now: float) -> None:
        for _, run in self._split_runs(prompt, ()):
            if run.retention is None or pin.id not in run.retention.pins:
                self._pin_run(run, pin, now)

    def _pin_run(self, run: BlockRun, pin: Pinned[int], now: float) -> None:
        retention = run.retention = run.retention or BlockRetention(pin.directive.tenant)
        size = self.budget.grantable(retention, len(run), PINNED)
        if 0 < size < len(run):
            self._pin_run(self._split(run, size), pin, now)
        self.budget.pin(retention, len(run), pin.id, pin.priority, pin.deadline, pin.directive)
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
            self.evictable.update(run, self.eviction_rank(run, now))

    def _refreshed_rank(self, run: BlockRun, now: float) -> EvictionRank:
        self._expire_claims(run, now)
        return self.eviction_rank(run, now)

    def _expire_claims(self, run: BlockRun, now: float) -> None:
        retention = run.retention
        if retention is not None:
            self.budget.expire(retention, len(run), now)
            if not retention:
                run.lapsed = EXPIRED
            self._drop_if_empty(run)

    def _drop_if_empty(self, run: BlockRun) -> None:
        if run.retention:
            self._has_claims = True
        else:
            run.retention = None

    def _evict_run(self, run: BlockRun, reason: str) -> None:
        self.evictable.discard(run)
        self._evict_blocks(run, len(run.hashes), reason)
        if run.parent is not None and not run.parent.children:
            self.evictable.unblock(run.parent)

    # blocks that no session uses

    def _doubt_tail(self, tail: PromptTail[int], doubtful: bool, now: float) -> None:
        """Put the unused blocks of a tail first in the order of eviction, or back in their place.

        A request that runs uses its blocks: there is no doubt about them.
        """
        for run in self._tail_runs(tail.prompt, tail.start):
            if not run.refs and run.doubtful != doubtful:
                run.doubtful = doubtful
                self.evictable.update(run, self.eviction_rank(run, now))

    def _drop_released(self, tail: PromptTail[int]) -> int:
        """Drop the unused blocks of a tail, and all below them; return their number."""
        runs = self._unused_runs(tail)
        return self._prune(runs[0], RELEASED) if runs else 0

    def _unused_runs(self, tail: PromptTail[int]) -> list[BlockRun]:
        """The runs of a tail of which an upper tier holds nothing."""
        prompt = array("Q", tail.prompt)
        return self._tail_runs(prompt, max(tail.start, self._used_above(prompt)))

    def _tail_runs(self, prompt: Sequence[int], start: int) -> list[BlockRun]:
        """The runs of a prompt's held blocks from index `start` on, split where they begin."""
        split = self._split_runs(array("Q", prompt), (start,))
        return [run for at, run in split if at >= start]

    def _prune(self, top: BlockRun, reason: str, pinned: bool = False) -> int:
        """Drop unused blocks of a run and all runs below it; return their number.

        Pinned blocks are dropped only with `pinned`.
        """
        runs = [top]
        for run in runs:
            runs.extend(run.children.values())
        return sum([self._drop_run(run, reason, pinned) for run in reversed(runs)])

    def _drop_run(self, run: BlockRun, reason: str, pinned: bool = False) -> int:
        """Drop the blocks of a run unless they are needed; return their number."""
        retained = run.retention is not None and bool(run.retention.pins) and not pinned
        if run.refs or run.children or retained:
            return 0
        blocks = len(run)
        if run.retention is not None:
            self.budget.on_dropped(run.retention, blocks)
        self._evict_run(run, reason)
        return blocks


def _log_outcome(directive: Directive, outcome: DirectiveOutcome) -> None:
    log.debug(
        "a directive (priority %d, ttl %s s) of tenant %r for %d blocks: %s",
        directive.priority,
        directive.ttl_s,
        directive.tenant,
        directive.requested_blocks,
        outcome,
    )


def _has_children(run: BlockRun) -> bool:
    return bool(run.children)
