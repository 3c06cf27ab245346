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
    DEFAULT_LEVEL,
    MAX_LEVEL,
    UNCLAIMED,
    BlockRetention,
    EvictionRank,
    RetentionWish,
)
from kvmesh.retention.eviction_pool import EvictionPool
from kvmesh.retention.outcomes import Directive, DirectiveOutcome
from kvmesh.retention.pins import Pinned, PinTable
from kvmesh.retention.session_blocks import PromptTail, SessionBlocks
from kvmesh.retention.token_ranges import (
    DEFAULTS,
    RetentionError,
    RetentionSegment,
    parse_defaults,
)
from kvmesh.settings.schema import WorkerSettings
from kvmesh.worker.engine import EngineConfigError
from kvmesh.worker.enginecore.counters import RetentionState
from kvmesh.worker.enginecore.radix_tree import BlockRun, RadixTree
from kvmesh.worker.enginecore.retention_request import NOTHING, RetentionRequest

log = logging.getLogger(__name__)
PINNED = RetentionWish(MAX_LEVEL)


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


def retention_options(worker: WorkerSettings) -> RetentionOptions:
    """What the settings say; raises ConfigError."""
    try:
        defaults = parse_defaults(worker.retention)
    except RetentionError as error:
        raise EngineConfigError(f"worker.retention: {error}") from error
    return RetentionOptions(
        budget=worker.tenant_share, session_idle_s=worker.session_idle_s, defaults=defaults
    )


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
        self.promises = RetentionBudget(
            int(options.budget * capacity), _log, options.session_idle_s
        )
        self.idle: EvictionPool[BlockRun] = EvictionPool(_carries, self._renewed)
        self._tree = tree
        self._cut = cut
        self._stays = stays
        self._book: SessionBlocks[int] = SessionBlocks(
            options.session_idle_s, options.session_blocks * capacity
        )
        self._pins: PinTable[int] = PinTable()
        self._claimed = False

    def state(self, rank: int, now: float) -> RetentionState:
        """What there is now, as rank `rank`."""
        self.idle.expire(now)
        counts = self.promises.outcomes.counts
        return RetentionState(
            rank=rank,
            sessions=len(self._book),
            pins=len(self._pins),
            kept_blocks=sum(self.promises.charged.values()),
            outcomes={str(outcome): count for outcome, count in counts.items()},
        )

    def standing(self, run: BlockRun, now: float) -> EvictionRank:
        """Where a run is in the order of eviction."""
        return run.keep.eviction_rank(now) if run.keep is not None else UNCLAIMED

    def begin_use(self, run: BlockRun, now: float) -> None:
        """An idle run is used again: what had ended by then has ended."""
        self.idle.discard(run)
        if run.keep is not None:
            self._lapse(run, now)

    def end_use(self, run: BlockRun, now: float) -> None:
        """One user less: what it was kept for counts from now."""
        if run.keep is not None:
            run.keep.renew(now)
        if not run.refs:
            self.idle.add(run, self.standing(run, now))

    def evict(self, count: int, now: float) -> None:
        """Drop the `count` idle blocks that are worth least; there are as many."""
        while count > 0:
            run = self.idle.next_victim(now)
            part = min(count, len(run.hashes))
            if run.keep is not None:
                self.promises.on_evicted(run.keep, part, now)
            if part == len(run.hashes):
                self._drop(run)
            else:
                self._cut(run, part)
            count -= part

    # requests

    def begin(
        self, held: "array[int]", prompt: "array[int]", asked: RetentionRequest | None, now: float
    ) -> list[str] | None:
        """A prompt is in memory whose full blocks are `held`; what came of each directive for it.

        It is its session's newest one, and may grow; what that leaves of earlier ones is dropped.
        """
        self.keep(held, asked, now)
        if asked is None:
            return None
        self.follow(asked.session, prompt, now)
        granted = self.promises.outcomes.record_grant
        return [str(granted(asked.directives[i])) for i in range(asked.for_prompt)] or None

    def keep(self, held: "array[int]", asked: RetentionRequest | None, now: float) -> None:
        """Claim the blocks of a sequence, all of which are in use."""
        asked = asked or NOTHING
        if asked.segments or self._claimed or self._pins:
            self._ask(held, asked, now, 0)

    def prize(self, held: "array[int]", priority: int, now: float) -> None:
        """Blocks in use serve a request of a priority above 0: they are kept as dearly as it is.

        As far as the budget of their tenant has room, and until nobody has used them for long.
        """
        self.idle.expire(now)
        wish = RetentionWish(min(MAX_LEVEL, DEFAULT_LEVEL + priority))
        payer = ""
        for at, run in self._pieces(held, ()):
            payer = payer if at else owner(run.tenant)
            self._prize(run, wish, payer, now)

    def follow(self, session: str | None, prompt: "array[int]", now: float) -> None:
        """A session has this prompt now: what that leaves of its earlier ones is dropped."""
        if session is not None:
            self._forget(self._book.record(session, prompt, now))

    def end(
        self, held: "array[int]", asked: RetentionRequest, now: float, first: int
    ) -> str | None:
        """The answer is complete; its blocks begin with the `first` of those that are `held`.

        What came of the directive for it, if there is one.
        """
        self._ask(held, asked, now, first)
        granted = self.promises.outcomes.record_grant
        told = [str(granted(directive)) for directive in asked.directives[asked.for_prompt :]]
        return told[0] if told else None

    def _ask(self, prompt: "array[int]", asked: RetentionRequest, now: float, first: int) -> None:
        """Claim blocks from the `first` one on of a prompt, all of which are in use."""
        self.idle.expire(now)
        if asked.segments or self._claimed:
            shared = self._book.shared_blocks(prompt, asked.session) if asked.segments else first
            edges = (e for s in asked.segments for e in (s.first, s.end) if e)
            for at, run in self._pieces(prompt, {first, shared, *edges}):
                if at >= first:
                    self._claim(run, asked.wish_at(at), at >= shared, asked, now)
        for pin, blocks in self._pins.matching(prompt, now):
            self._pin(pin, prompt[:blocks], now)

    def inherit(self, held: "array[int]", asked: RetentionRequest, now: float) -> None:
        """Leading blocks of a prompt, in use, come from a tier where this was asked for them."""
        edges = {edge for segment in asked.segments for edge in segment[:2] if edge}
        for at, run in self._pieces(held, edges):
            wish = asked.wish_at(at)
            if wish is not None:
                self._claim(run, wish, False, asked, now)

    def inherited(self, prompt: "array[int]", now: float) -> list[RetentionSegment]:
        """What the blocks of a prompt are kept for, to tell a tier that takes them in."""
        found: list[RetentionSegment] = []
        at = 0
        for run in self._tree.way(prompt).runs:
            standing = run.keep.eviction_rank(now) if run.keep is not None else UNCLAIMED
            if standing.level >= DEFAULT_LEVEL and standing != UNCLAIMED:
                ttl_s = None if standing.until == inf else standing.until - now
                found.append(
                    RetentionSegment(at, at + len(run), RetentionWish(standing.level, ttl_s))
                )
            at += len(run)
        return found

    def release(self, sessions: Sequence[str]) -> int:
        """Drop what only these sessions use; returns how many blocks that was."""
        return self._forget(self._book.release(sessions))

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
        self.idle.expire(now)
        directive = Directive(pin.tenant, pin.priority, pin.ttl_s)
        pinned = Pinned(pin.id, prompt, pin.priority, now + pin.ttl_s, directive)
        for over in self._pins.put(pinned):
            self._unpin(over, now)
        self._pin(pinned, prompt, now)
        self.promises.outcomes.record_grant(directive)
        return directive.granted_blocks

    def unpin(self, pin: str, now: float) -> int:
        """Forget a pin; returns how many blocks it was on."""
        known = self._pins.remove(pin)
        return self._unpin(known, now) if known is not None else 0

    # runs

    def _pieces(self, prompt: "array[int]", edges: Iterable[int]) -> Iterator[tuple[int, BlockRun]]:
        """The runs of a prompt with the places of their first blocks, cut at `edges`."""
        way = self._tree.way(prompt)
        cuts = sorted({*edges, way.held})
        at = 0
        for run in way.runs:
            end = at + len(run)
            for cut in cuts[bisect_right(cuts, at) : bisect_left(cuts, end)]:
                yield at, self._split(run, cut - at)
                at = cut
            if at < way.held:
                yield at, run
            at = end

    def _split(self, run: BlockRun, size: int) -> BlockRun:
        """Make the first blocks of a run one of its own, which is returned."""
        upper = self._tree.split(run, size)
        if not upper.refs:
            self.idle.add(upper, self.idle.eviction_rank(run))
        return upper

    def _claim(
        self,
        run: BlockRun,
        wish: RetentionWish | None,
        alone: bool,
        asked: RetentionRequest,
        now: float,
    ) -> None:
        if wish is None:
            if run.keep is not None:
                self.promises.touch(run.keep, len(run), now)
                self._tidy(run)
            return
        keep = run.keep = run.keep or BlockRetention(asked.tenant)
        size = self.promises.grantable(keep, len(run), wish)
        if 0 < size < len(run):
            self._claim(self._split(run, size), wish, alone, asked, now)
        directive = asked.directives[wish.directive] if wish.directive is not None else None
        self.promises.claim(keep, len(run), wish, now, directive, alone)
        self._tidy(run)

    def _prize(self, run: BlockRun, wish: RetentionWish, payer: str, now: float) -> None:
        keep = run.keep = run.keep or BlockRetention(payer)
        size = self.promises.grantable(keep, len(run), wish)
        if 0 < size < len(run):
            self._prize(self._split(run, size), wish, payer, now)
        self.promises.claim(keep, len(run), wish, now, exclusive=False)
        self._tidy(run)

    def _pin(self, pin: Pinned[int], prompt: "array[int]", now: float) -> None:
        for _, run in self._pieces(prompt, ()):
            if run.keep is None or pin.id not in run.keep.pins:
                self._pin_run(run, pin, now)

    def _pin_run(self, run: BlockRun, pin: Pinned[int], now: float) -> None:
        keep = run.keep = run.keep or BlockRetention(pin.directive.tenant)
        size = self.promises.grantable(keep, len(run), PINNED)
        if 0 < size < len(run):
            self._pin_run(self._split(run, size), pin, now)
        self.promises.pin(keep, len(run), pin.id, pin.priority, pin.deadline, pin.directive)
        self._revise(run, now)

    def _unpin(self, pin: Pinned[int], now: float) -> int:
        blocks = 0
        for _, run in self._pieces(array("Q", pin.prompt), ()):
            if run.keep is not None and pin.id in run.keep.pins:
                blocks += len(run)
                self.promises.unpin(run.keep, len(run), pin.id)
                self._revise(run, now)
        return blocks

    def _revise(self, run: BlockRun, now: float) -> None:
        self._tidy(run)
        if not run.refs:
            self.idle.update(run, self.standing(run, now))

    def _renewed(self, run: BlockRun, now: float) -> EvictionRank:
        self._lapse(run, now)
        return self.standing(run, now)

    def _lapse(self, run: BlockRun, now: float) -> None:
        if run.keep is not None:
            self.promises.expire(run.keep, len(run), now)
            self._tidy(run)

    def _tidy(self, run: BlockRun) -> None:
        if run.keep:
            self._claimed = True
        else:
            run.keep = None

    def _drop(self, run: BlockRun) -> None:
        self.idle.discard(run)
        self._cut(run, len(run.hashes))
        if run.parent is not None and not run.parent.children:
            self.idle.unblock(run.parent)

    # what nobody wants any more

    def _forget(self, tails: Iterable[PromptTail[int]]) -> int:
        return sum([self._drop_tail(tail) for tail in tails])

    def _drop_tail(self, tail: PromptTail[int]) -> int:
        prompt = array("Q", tail.prompt)
        kept = max(tail.start, self._stays(prompt))
        at = 0
        for run in self._tree.way(prompt).runs:
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
            kept = run.keep is not None and bool(run.keep.pins) and not pinned
            if run.refs or run.children or kept:
                continue
            blocks += len(run)
            if run.keep is not None:
                self.promises.on_dropped(run.keep, len(run))
            self._drop(run)
        return blocks


def _log(directive: Directive, outcome: DirectiveOutcome) -> None:
    log.debug(
        "a directive (priority %d, ttl %s s) of tenant %r for %d blocks: %s",
        directive.priority,
        directive.ttl_s,
        directive.tenant,
        directive.requested_blocks,
        outcome,
    )


def _carries(run: BlockRun) -> bool:
    return bool(run.children)
