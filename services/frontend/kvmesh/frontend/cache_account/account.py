"""Account of a prompt's tokens: those reused, those lost and why, and new ones. Pure."""

from collections.abc import Sequence

from kvmesh.bus.messages import (
    ELSEWHERE,
    FORGOTTEN,
    NEVER_ANNOUNCED,
    NOT_FOUND,
    OTHER_NAMESPACE,
    UNFINISHED,
    UNKNOWN,
    CacheAccount,
    CacheLoss,
    ComputedAhead,
    PossibleHits,
    Removal,
)
from kvmesh.bus.subjects import name_of
from kvmesh.frontend.cache_account.comparison import PromptComparison


def cache_account(
    prompt_tokens: int,
    block_size: int,
    cached: int,
    possible: PossibleHits | None,
    earlier: PromptComparison | None = None,
    ahead: ComputedAhead | None = None,
) -> CacheAccount:
    """The account of a prompt of which `cached` tokens were reused.

    `possible` comes from the router, None if the index did not reply; `earlier` compares the prompt
    with the session's earlier one; `ahead` is what a speculative prefill computed, and its use.
    """
    cached = min(cached, prompt_tokens)
    losses = _Losses(prompt_tokens, block_size, cached)
    if possible is not None:
        losses.add_possible(possible, earlier)
    own = earlier.computed if earlier is not None and earlier.same_salt else 0
    losses.lose_blocks(own // block_size, _unrecorded(possible, earlier))
    reachable = losses.at
    if earlier is not None and not earlier.same_salt:
        losses.lose_blocks(earlier.computed // block_size, OTHER_NAMESPACE)
    elif earlier is not None and earlier.common < earlier.length:
        losses.diverge(earlier)
    reused_own = min(own, cached)
    used = 0 if ahead is None else min(ahead.used, cached - reused_own)
    return CacheAccount(
        prompt_tokens=prompt_tokens,
        own=reused_own,
        ahead=used,
        shared=cached - reused_own - used,
        new=prompt_tokens - cached - losses.tokens,
        possible=reachable,
        losses=losses.found,
        previous=None if earlier is None else earlier.request,
        change=None if earlier is None else earlier.change,
    )


class _Losses:
    """Losses in order of position; `at` is the end of the tokens accounted for so far.

    The last token of a prompt is always computed, so its block is new.
    """

    def __init__(self, prompt_tokens: int, block_size: int, cached: int) -> None:
        self.found: list[CacheLoss] = []
        self.tokens = 0
        self.at = cached
        self._prompt = prompt_tokens
        self._size = block_size
        self._limit = (prompt_tokens - 1) // block_size * block_size

    def add_possible(self, possible: PossibleHits, earlier: PromptComparison | None) -> None:
        """Add the blocks that some rank held, had held, or was computing."""
        self.lose_blocks(possible.chosen, NOT_FOUND)
        other = possible.elsewhere
        if other is not None:
            reason = f"{ELSEWHERE}:{other.reason}"
            self.lose_blocks(other.blocks, reason, worker=name_of(other.instance))
        for removal in possible.removals:
            self.lose_blocks(removal.first, _unrecorded(possible, earlier))
            self._lose_removed(removal)
        self.lose_blocks(possible.running, UNFINISHED)

    def _lose_removed(self, removal: Removal) -> None:
        self.lose_blocks(
            removal.first + removal.blocks,
            removal.reason,
            worker=removal.worker,
            tier=removal.tier,
            time=removal.time,
            request=removal.request,
        )

    def lose_blocks(
        self,
        blocks: int,
        reason: str,
        *,
        worker: str | None = None,
        tier: int | None = None,
        time: float | None = None,
        request: str | None = None,
    ) -> None:
        """Lose the tokens up to the end of `blocks` leading blocks."""
        end = min(blocks * self._size, self._limit)
        if end > self.at:
            self._append(
                CacheLoss(
                    first=self.at,
                    tokens=end - self.at,
                    reason=reason,
                    worker=worker,
                    tier=tier,
                    time=time,
                    request=request,
                )
            )
            self.at = end

    def diverge(self, earlier: PromptComparison) -> None:
        """Lose the tokens after the first difference, as many as the earlier prompt had."""
        first, end = max(self.at, earlier.common), min(earlier.length, self._prompt)
        if end > first:
            self._append(CacheLoss(first=first, tokens=end - first, reason=earlier.reason))

    def _append(self, loss: CacheLoss) -> None:
        self.found.append(loss)
        self.tokens += loss.tokens


def _unrecorded(possible: PossibleHits | None, earlier: PromptComparison | None) -> str:
    """The reason of a loss of which the index has no record."""
    if possible is None:
        return UNKNOWN
    if earlier is None:
        return FORGOTTEN
    if not earlier.done:
        return UNFINISHED
    return NEVER_ANNOUNCED if 0.0 < possible.since <= earlier.time else FORGOTTEN


def lost_by_reason(losses: Sequence[CacheLoss]) -> dict[str, int]:
    """The lost tokens of each reason."""
    tokens: dict[str, int] = {}
    for loss in losses:
        tokens[loss.reason] = tokens.get(loss.reason, 0) + loss.tokens
    return tokens
