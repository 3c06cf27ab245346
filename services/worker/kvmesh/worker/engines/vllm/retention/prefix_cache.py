"""Retention of the blocks in vLLM's prefix cache: claims, pins, sessions and clears of one rank.

The rules are those of `kvmesh.retention`. A block is known by vLLM's hash of its prompt up to its
end. Claims are granted when vLLM allocates blocks, since it frees those of a sliding window before
their request ends.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Protocol

from kvmesh.bus.messages import CLEARED, RELEASED, SUPERSEDED, Pin
from kvmesh.retention.budget import RetentionBudget
from kvmesh.retention.claims import THINKING_LEVEL, UNCLAIMED, RetentionWish
from kvmesh.retention.outcomes import Directive
from kvmesh.retention.pins import Pinned, PinTable
from kvmesh.retention.session_blocks import PromptTail, SessionBlocks
from kvmesh.worker.enginecore.counters import RetentionState
from kvmesh.worker.enginecore.retention import PINNED
from kvmesh.worker.enginecore.retention_options import RetentionOptions
from kvmesh.worker.engines.vllm.retention.block_runs import NO_FLOOR, RetainedRun, RetainedRuns
from kvmesh.worker.engines.vllm.retention.requests import RetainedRequest

MAX_UNUSED = 1024
COPY = RetentionWish(THINKING_LEVEL)


class PrefixCache(Protocol):
    """vLLM's prefix cache, as far as retention needs it."""

    def find(self, block_hash: bytes, group: int) -> list[int]:
        """Ids of the blocks of a KV cache group that hold this hash; several if duplicated."""
        ...

    def first_copies(self, blocks: Sequence[int]) -> list[int]:
        """For each block, the one that vLLM finds by its hash: of several copies the first."""
        ...

    def holds(self, block: int) -> bool:
        """True if the block has a hash."""
        ...

    def is_free(self, block: int) -> bool:
        """True if no request uses the block."""
        ...

    def drop(self, blocks: list[int], reason: str, request: str | None) -> None:
        """Remove free blocks from the cache; they are reused first.

        Reason and request are those of a `Removed` event.
        """
        ...


class PrefixCacheRetention:
    """Retention on one rank with `len(runs.by_block)` blocks.

    `group_sizes` are the tokens of a block of each KV cache group, multiples of `hash_size`, the
    tokens that one hash covers.
    """

    def __init__(
        self,
        options: RetentionOptions,
        cache: PrefixCache,
        runs: RetainedRuns,
        budget: RetentionBudget,
        group_sizes: Sequence[int],
        hash_size: int,
    ) -> None:
        capacity = len(runs.by_block)
        self.group_sizes = group_sizes
        self.hash_size = hash_size
        self.defaults = options.defaults
        self._cache = cache
        self._runs = runs
        self._budget = budget
        self._sessions: SessionBlocks[bytes] = SessionBlocks(
            options.session_idle_s, options.session_blocks * capacity
        )
        self._pins: PinTable[int] = PinTable()
        self._hash_of: dict[int, bytes] = {}  # vLLM's hash of each kvmesh sequence hash
        self._namespaces: dict[tuple[int, str], int] = {}
        self._namespace_ids = count(1)
        self._namespace_of = array("I", bytes(4 * capacity))

    def figures(self, now: float) -> tuple[int, ...]:
        """Numbers that differ if the state does; cheap enough for every step."""
        self._runs.expire(now)
        budget = self._budget
        counts = budget.outcomes.counts.values()
        return (
            *(len(self._sessions), len(self._pins), sum(budget.charged.values())),
            *(*counts, *self._runs.evictions.values()),
        )

    def state(self, rank: int, now: float) -> RetentionState:
        """The state at `now`, reported as rank `rank`."""
        self._runs.expire(now)
        counts = self._budget.outcomes.counts
        return RetentionState(
            rank=rank,
            sessions=len(self._sessions),
            pins=len(self._pins),
            charged_blocks=sum(self._budget.charged.values()),
            outcomes={str(outcome): count for outcome, count in counts.items()},
            evicted=dict(self._runs.evictions),
        )

    # requests

    def start_request(self, request: RetainedRequest, now: float) -> None:
        """Record the prompt of a request: what it leaves goes first, or is dropped if confirmed."""
        known = zip(request.sequence_hashes, request.hashes, strict=False)
        self._hash_of.update(known)
        if len(self._hash_of) > 4 * len(self._runs.by_block) + MAX_UNUSED:
            self._forget_evicted_hashes()
        session, conversation = request.session, request.conversation
        request.shared = self._sessions.shared_blocks(request.hashes, session, conversation)
        if session is None:
            return
        changes = self._sessions.record(
            session,
            request.hashes,
            now,
            conversation,
            request.tentative,
            ahead=request.ahead,
        )
        for tail in changes.restored:
            self._doubt_tail(tail, False, now)
        for tail in changes.doubted:
            self._doubt_tail(tail, True, now)
        self._drop_tails(changes.dropped, SUPERSEDED, request.id)

    def allocated(
        self, request: RetainedRequest | None, blocks: Sequence[int], salt: int, tenant: str
    ) -> None:
        """Note the namespace of blocks that vLLM has given to a request."""
        if request is None and not self._namespaces:
            return
        key = salt, tenant
        namespace = self._namespaces.get(key)
        if namespace is None:
            namespace = self._namespaces[key] = next(self._namespace_ids)
            if len(self._namespaces) > MAX_UNUSED + len(self._namespace_of):
                used = {namespace, *self._namespace_of}
                self._namespaces = {k: v for k, v in self._namespaces.items() if v in used}
        of = self._namespace_of
        for block in blocks:
            of[block] = namespace

    def claim(self, request: RetainedRequest, group: int, end: int, now: float) -> None:
        """Claim a request's blocks of a group up to index `end`, which will be full."""
        first = request.claimed[group]
        if end <= first:
            return
        request.claimed[group] = end
        if request.is_plain and not self._runs.retained and not len(self._pins):
            return
        self._runs.expire(now)
        shared = request.shared_blocks(group)
        found = self._found(request, group, first, end, now)
        for start, stop, wish in request.wishes(group, first, end):
            middle = min(max(start, shared), stop)
            self._claim_range(request, found[start - first : middle - first], wish, False, now)
            self._claim_range(request, found[middle - first : stop - first], wish, True, now)
        if request.raised is not None:
            self._claim_range(request, found, request.raised, False, now)
        # Pin those of the blocks `found`, from index `first` on, that pinned prefixes cover
        per_block = self.group_sizes[group] // self.hash_size
        for pin, blocks in self._pins.matching(request.sequence_hashes, now):
            held = found[: max(blocks // per_block - first, 0)]
            self._pin_blocks(pin, [block for block in held if block], now)

    def claim_copies(self, request: RetainedRequest, now: float) -> None:
        """Claim what a request computed a second time, in case its own copies are now the first.

        To be called at its end.
        """
        copied, request.copied = request.copied, {}
        for group, index in copied.items():
            end, request.claimed[group] = request.claimed[group], index
            self.claim(request, group, end, now)

    def rank_prompt(self, request: RetainedRequest, now: float) -> None:
        """Rank a request's runs no lower than those that follow, and merge equal ones.

        To be called once its prompt is complete, and again at its end.
        """
        if self._runs.retained:
            for ids in request.blocks:
                found = self._cache.first_copies([block for block in ids if block])
                self._set_floors(found, now)

    def grant(self, directives: Iterable[Directive]) -> list[str]:
        """Record that all existing blocks of these directives have been claimed."""
        return [str(self._budget.outcomes.record_grant(directive)) for directive in directives]

    def _found(
        self, request: RetainedRequest, group: int, first: int, end: int, now: float
    ) -> list[int]:
        """The blocks in which vLLM finds the content of a request's blocks `first` to `end`.

        vLLM computes a prompt anew that another request has not computed yet. No later prompt gets
        such a copy before the first one has gone: the copy has the lowest rank.
        """
        ids = request.blocks[group][first:end]
        found = self._cache.first_copies(ids)
        if found != ids:
            pairs = list(zip(ids, found, strict=True))
            copies = [own for own, other in pairs if own != other]
            request.copied[group] = min(
                first + ids.index(copies[0]), request.copied.get(group, end)
            )
            self._claim_range(request, copies, COPY, True, now)
        return found

    def _claim_range(
        self,
        request: RetainedRequest,
        ids: Sequence[int],
        wish: RetentionWish | None,
        exclusive: bool,
        now: float,
    ) -> None:
        blocks = [block for block in ids if block]
        for start, stop, run in list(self._runs.segments(blocks)):
            self._claim_part(request, blocks[start:stop], run, wish, exclusive, now)

    def _claim_part(
        self,
        request: RetainedRequest,
        blocks: Sequence[int],
        run: RetainedRun | None,
        wish: RetentionWish | None,
        exclusive: bool,
        now: float,
    ) -> None:
        if wish is None and run is None:
            return
        made = self._runs.isolate(blocks, run, request.payer)
        made.doubtful = False
        if wish is None:
            self._budget.touch(made.retention, len(blocks), now)
            self._runs.update(made, blocks, now)
            return
        size = self._budget.grantable(made.retention, len(blocks), wish)
        if 0 < size < len(blocks):
            self._claim_part(request, blocks[:size], made, wish, exclusive, now)
            blocks = blocks[size:]
        directive = None if wish.directive is None else request.directives[wish.directive]
        granted = self._budget.claim(made.retention, len(blocks), wish, now, directive, exclusive)
        self._runs.granted(blocks, granted)
        self._runs.update(made, blocks, now)

    def _set_floors(self, blocks: Sequence[int], now: float) -> None:
        following: tuple[RetainedRun, Sequence[int]] | None = None
        floor = NO_FLOOR
        for start, stop, run in reversed(list(self._runs.segments(blocks))):
            part = blocks[start:stop]
            if run is None:
                floor, following = max(floor, UNCLAIMED), None
                continue
            if run.size == len(part):
                run.floor = floor
            if following is not None and self._runs.mergeable(run, following[0]):
                small, large = sorted((run, following[0]), key=lambda one: one.size)
                both = [*part, *following[1]]
                if small.size == len(part if small is run else following[1]):
                    moved = part if small is run else following[1]
                    self._runs.merge(small, moved, large)
                    run, part = large, both
            floor = max(floor, run.retention.eviction_rank(now))
            following = run, part

    # sessions and namespaces

    def release(self, sessions: Sequence[str]) -> int:
        """Forget sessions and drop blocks that only they used; return the number of blocks."""
        return self._drop_tails(self._sessions.release(sessions), RELEASED)

    def clear(self, salt: int | None, tenant: str) -> int:
        """Drop unused blocks, pinned or not, of all or one namespace; return their number."""
        return self._drop(self._blocks_of(salt, tenant), CLEARED)

    def held(self, salt: int | None, tenant: str) -> int:
        """The number of blocks of all or one namespace, in use or not."""
        return sum(1 for _ in self._blocks_of(salt, tenant))

    def _blocks_of(self, salt: int | None, tenant: str) -> Iterable[int]:
        namespace = None if salt is None else self._namespaces.get((salt, tenant), -1)
        return (
            block
            for block, of in enumerate(self._namespace_of)
            if (namespace is None or of == namespace) and self._cache.holds(block)
        )

    def _drop_tails(
        self, tails: Iterable[PromptTail[bytes]], reason: str, request: str | None = None
    ) -> int:
        return sum([self._drop(self._unpinned(tail), reason, request) for tail in tails])

    def _doubt_tail(self, tail: PromptTail[bytes], doubtful: bool, now: float) -> None:
        """Put the unused blocks of a tail first in the order of eviction, or back in their place.

        A request that runs uses its blocks: there is no doubt about them.
        """
        for group in range(len(self.group_sizes)):
            blocks = [one for one in self._tail_blocks(tail, group) if self._cache.is_free(one)]
            for start, stop, run in list(self._runs.segments(blocks)):
                if doubtful or (run is not None and run.doubtful):
                    part = blocks[start:stop]
                    self._runs.doubt(self._runs.isolate(part, run, ""), part, doubtful, now)

    def _tail_blocks(self, tail: PromptTail[bytes], group: int) -> list[int]:
        """The blocks of a group that hold a tail, in order."""
        per_block = self.group_sizes[group] // self.hash_size
        return [
            block
            for index in range(tail.start // per_block, len(tail.prompt) // per_block)
            for block in self._cache.find(tail.prompt[(index + 1) * per_block - 1], group)
        ]

    def _unpinned(self, tail: PromptTail[bytes]) -> Iterable[int]:
        """The blocks of a tail that no pin holds, last first."""
        for group in range(len(self.group_sizes)):
            for block in reversed(self._tail_blocks(tail, group)):
                run = self._runs.by_block[block]
                if run is None or not run.retention.pins:
                    yield block

    def _drop(self, blocks: Iterable[int], reason: str, request: str | None = None) -> int:
        unused = [block for block in blocks if self._cache.is_free(block)]
        self._cache.drop(unused, reason, request)
        return len(unused)

    def _forget_evicted_hashes(self) -> None:
        groups = range(len(self.group_sizes))
        self._hash_of = {
            sequence_hash: block_hash
            for sequence_hash, block_hash in self._hash_of.items()
            if any(self._cache.find(block_hash, group) for group in groups)
        }

    # pins

    @property
    def has_pins(self) -> bool:
        """True if any pin is in force."""
        return len(self._pins) > 0

    def pinned_end(self, prompt: Sequence[int], now: float) -> int:
        """Tokens of the longest pin that is a prefix of a prompt, given by sequence hashes."""
        pins = self._pins.matching(prompt, now)
        whole = (blocks for pin, blocks in pins if blocks == len(pin.prompt))
        return self.hash_size * max(whole, default=0)

    def pin(self, pin: Pin, now: float) -> int:
        """Pin a prefix; return the number of its blocks that are held and within the budget."""
        self.unpin(pin.id, now)
        prompt = array("Q", pin.sequence_hashes)
        if not prompt:
            return 0
        self._runs.expire(now)
        directive = Directive(pin.tenant, pin.priority, pin.ttl_s)
        pinned = Pinned(pin.id, prompt, pin.priority, now + pin.ttl_s, directive)
        for replaced in self._pins.put(pinned):
            self._unpin(replaced, now)
        for group in range(len(self.group_sizes)):
            self._pin_blocks(pinned, self._held(prompt, group), now)
        self._budget.outcomes.record_grant(directive)
        return directive.granted_blocks

    def unpin(self, pin: str, now: float) -> int:
        """Remove a pin; return the number of blocks that it held."""
        known = self._pins.remove(pin)
        return self._unpin(known, now) if known is not None else 0

    def _held(self, prompt: Sequence[int], group: int) -> list[int]:
        """The blocks of a group that hold a prompt's prefix; a sliding window has gaps."""
        per_block = self.group_sizes[group] // self.hash_size
        found: list[int] = []
        for last in range(per_block - 1, len(prompt), per_block):
            block_hash = self._hash_of.get(prompt[last])
            found += self._cache.find(block_hash, group)[:1] if block_hash is not None else ()
        return found

    def _pin_blocks(self, pin: Pinned[int], blocks: Sequence[int], now: float) -> None:
        for start, stop, run in list(self._runs.segments(blocks)):
            if run is None or pin.id not in run.retention.pins:
                self._pin_part(pin, blocks[start:stop], run, now)

    def _pin_part(
        self, pin: Pinned[int], blocks: Sequence[int], run: RetainedRun | None, now: float
    ) -> None:
        made = self._runs.isolate(blocks, run, pin.directive.tenant)
        size = self._budget.grantable(made.retention, len(blocks), PINNED)
        if 0 < size < len(blocks):
            self._pin_part(pin, blocks[:size], made, now)
            blocks = blocks[size:]
        budget, retention = self._budget, made.retention
        budget.pin(retention, len(blocks), pin.id, pin.priority, pin.deadline, pin.directive)
        self._runs.update(made, blocks, now)

    def _unpin(self, pin: Pinned[int], now: float) -> int:
        found = 0
        for group in range(len(self.group_sizes)):
            blocks = self._held(pin.prompt, group)
            for start, stop, run in list(self._runs.segments(blocks)):
                if run is not None and pin.id in run.retention.pins:
                    part = blocks[start:stop]
                    self._budget.unpin(run.retention, run.size, pin.id)
                    self._runs.update(run, part, now)
                    found += len(part)
        return found
