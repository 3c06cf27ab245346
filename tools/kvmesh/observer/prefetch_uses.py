"""The request that each prefetch was made for, from the routing decisions in their order; pure."""

from collections import OrderedDict
from collections.abc import Iterator

from msgspec import Struct

from kvmesh.bus.messages import Candidate, Decision, Outcome, PrefetchTerms
from kvmesh.hashing import HASH_BYTES
from kvmesh.retention.session_blocks import common_prefix

MAX_OPEN = 1024
ENGINE = 0  # the tier


class PrefetchUse(Struct, kw_only=True):
    """A prefetch with its `terms`, and the request that came next, once it has been placed.

    That request has the prompt of the prefetch, or a longer or shorter one, or is of its session.
    `shared_blocks` leading blocks of the prompts are the same.
    """

    prefetch: Decision
    terms: PrefetchTerms
    request: Decision | None = None
    outcome: Outcome | None = None
    shared_blocks: int = 0

    @property
    def rank(self) -> Candidate:
        """The rank that was to load the prompt."""
        return prompt_rank(self.prefetch)

    @property
    def first_token(self) -> int:
        """The tokens that the engine had cached before."""
        return self.rank.overlap[ENGINE] * self.prefetch.block_size

    @property
    def tokens_to_load(self) -> int:
        """Tokens in lower tiers at the time."""
        return sum(self.rank.overlap[ENGINE + 1 :]) * self.prefetch.block_size

    @property
    def tokens_to_compute(self) -> int:
        """Tokens in no tier at the time, up to the bound; whole blocks."""
        size, held = self.prefetch.block_size, self.first_token + self.tokens_to_load
        whole = min(held + self.terms.compute, self.prefetch.tokens) // max(size, 1) * size
        return max(whole - held, 0)

    @property
    def differs(self) -> bool:
        """True if the request has another prompt, neither longer nor shorter."""
        if self.request is None:
            return False
        lengths = len(self.prefetch.sequence_hashes), len(self.request.sequence_hashes)
        return self.shared_blocks * HASH_BYTES < min(lengths)

    @property
    def elsewhere(self) -> bool:
        """True if another rank computed the request's prompt."""
        if self.request is None:
            return False
        rank, other = self.rank, prompt_rank(self.request)
        return (rank.instance, rank.rank) != (other.instance, other.rank)

    @property
    def used_tokens(self) -> int:
        """Tokens to load or to compute that the request then found in the engine."""
        outcome = self.outcome
        if outcome is None or self.elsewhere:
            return 0
        found = outcome.cached_tiers[ENGINE] if outcome.cached_tiers else outcome.cached_tokens
        end = min(found, self.shared_blocks * self.prefetch.block_size)
        wanted = self.tokens_to_load + self.tokens_to_compute
        return min(max(end - self.first_token, 0), wanted)


class PrefetchUses:
    """Follows a route stream from its start; at most MAX_OPEN prefetches wait for their request."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, PrefetchUse] = OrderedDict()
        self._of: dict[str, list[PrefetchUse]] = {}
        self._by_prefetch: dict[str, PrefetchUse] = {}

    def __bool__(self) -> bool:
        """True once there has been a prefetch."""
        return bool(self._by_prefetch)

    def add(self, event: Decision | Outcome) -> None:
        """Follow the next event of the stream."""
        name = base_id(event.request)
        if isinstance(event, Outcome):
            for use in self._of.get(name, ()):
                use.outcome = event
        elif event.prefetch is not None:
            use = PrefetchUse(prefetch=event, terms=event.prefetch)
            self._open[name] = self._by_prefetch[name] = use
            if len(self._open) > MAX_OPEN:
                del self._by_prefetch[self._open.popitem(last=False)[0]]
        elif name in self._of:
            for use in self._of[name]:
                use.request = event  # a further attempt
        else:
            self._on_request(name, event)

    def of_request(self, request: str) -> list[PrefetchUse]:
        """The prefetches that a request ended, in order."""
        return self._of.get(base_id(request), [])

    def of_prefetch(self, prefetch: str) -> PrefetchUse | None:
        return self._by_prefetch.get(base_id(prefetch))

    def _on_request(self, name: str, decision: Decision) -> None:
        for prefetch, shared in list(self._ended_by(decision)):
            use = self._open.pop(prefetch)
            use.request, use.shared_blocks = decision, shared
            self._of.setdefault(name, []).append(use)

    def _ended_by(self, decision: Decision) -> Iterator[tuple[str, int]]:
        """The prefetches that a request ends, with the number of blocks of both prompts."""
        prompt, session = decision.sequence_hashes, decision.hints.session
        for name, use in self._open.items():
            if use.prefetch.model != decision.model:
                continue
            shared = common_blocks(use.prefetch.sequence_hashes, prompt)
            whole = shared * HASH_BYTES == min(len(use.prefetch.sequence_hashes), len(prompt))
            same_session = session is not None and session == use.prefetch.hints.session
            if (shared and whole) or same_session:
                yield name, shared


def base_id(request: str) -> str:
    """The id of a request without the number of a further attempt."""
    name, _, attempt = request.rpartition(".")
    return name if attempt.isdigit() else request


def prompt_rank(decision: Decision) -> Candidate:
    """The rank that computes the prompt."""
    return decision.prefill or decision.chosen


def common_blocks(one: bytes, other: bytes) -> int:
    """The number of leading blocks that two prompts share, from their packed sequence hashes."""
    return common_prefix(memoryview(one).cast("Q"), memoryview(other).cast("Q"))
