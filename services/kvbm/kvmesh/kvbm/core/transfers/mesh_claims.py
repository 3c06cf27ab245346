"""Claims that nodes publish for the prompts they compute, so that the mesh computes each once.

A claim lists some of the digests of a prompt's blocks; each identifies all blocks before it.
If two nodes claim the same blocks before either receives the other's claim, the node with the
lesser instance id computes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.kvbm.core.blocks.prompt_blocks import PromptBlocks
from kvmesh.kvbm.core.transfers.in_progress import RequestKey

MAX_CLAIM_DIGESTS = 256
MAX_PEER_DIGESTS = 1 << 17
MAX_REPEATED = 256


class ClaimMessage(NamedTuple):
    """A claim to publish; without `digests` it ends the claim with this number."""

    model: str
    number: int
    digests: list[bytes]


@dataclass(slots=True)
class ComputeClaim:
    """A published claim of the blocks of a prompt from `first` on."""

    message: ClaimMessage
    first: int
    sent_at: float


class Claims:
    """Claims of this node's requests; each is valid for `ttl_s` and renewed after half of it."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._last_number = 0
        self._claims: dict[RequestKey, ComputeClaim] = {}
        self._outgoing: list[ClaimMessage] = []

    def __len__(self) -> int:
        return len(self._claims)

    def first(self, request: RequestKey | None) -> int | None:
        """Index of the first block that a request has claimed."""
        claim = self._claims.get(request) if request is not None else None
        return claim.first if claim is not None else None

    def start(self, request: RequestKey, prompt: PromptBlocks, first: int, now: float) -> None:
        """Claim the blocks of a prompt from `first` on; end the claim if there are none."""
        known = self._claims.get(request)
        if first >= len(prompt):
            self.end(request)
        elif known is None or first < known.first:
            self._last_number += known is None
            number = known.message.number if known is not None else self._last_number
            message = ClaimMessage(prompt.space.model, number, _sample(prompt, first))
            self._claims[request] = ComputeClaim(message, first, now)
            self._outgoing.append(message)

    def end(self, request: RequestKey) -> None:
        claim = self._claims.pop(request, None)
        if claim is not None:
            self._outgoing.append(claim.message._replace(digests=[]))

    def renew(self, requests: Iterable[RequestKey], now: float) -> None:
        """Publish the claims of these requests again in time; drop other claims once expired."""
        computing = set(requests)
        for request, claim in list(self._claims.items()):
            if request in computing and now - claim.sent_at > self.ttl_s / 2:
                claim.sent_at = now
                self._outgoing.append(claim.message)
            elif now - claim.sent_at > self.ttl_s:
                del self._claims[request]

    def current(self, model: str) -> list[ClaimMessage]:
        """The newest valid claims of a model, for a node that has just joined."""
        sent = [c.message for c in self._claims.values() if c.message.model == model]
        return sent[-MAX_REPEATED:]

    def drain(self) -> list[ClaimMessage]:
        """The messages to publish since the last call."""
        messages, self._outgoing = self._outgoing, []
        return messages


class PeerSource(NamedTuple):
    """Another kvbm that has, or computes, the blocks of a prompt up to `end`."""

    instance: str
    end: int


@dataclass(slots=True, eq=False)
class _PeerClaim:
    instance: str
    number: int
    digests: list[bytes]
    until: float


class PeerClaims:
    """Claims received from other nodes, until they expire."""

    def __init__(self) -> None:
        self._claims: dict[tuple[str, int], _PeerClaim] = {}
        self._by_digest: dict[bytes, list[_PeerClaim]] = {}
        self._digest_count = 0

    def __len__(self) -> int:
        return len(self._claims)

    def receive(self, instance: str, number: int, digests: list[bytes], until: float) -> None:
        """Replace the claim with this number of a node."""
        self._remove(instance, number)
        if not digests:
            return
        claim = _PeerClaim(instance, number, digests[:MAX_CLAIM_DIGESTS], until)
        self._claims[instance, number] = claim
        for digest in claim.digests:
            self._by_digest.setdefault(digest, []).append(claim)
        self._digest_count += len(claim.digests)
        while self._digest_count > MAX_PEER_DIGESTS:
            self._remove(*next(iter(self._claims)))

    def find(self, prompt: PromptBlocks, first: int) -> PeerSource | None:
        """The node that computes block `first`, and the end of its claim in this prompt."""
        if not self._by_digest:
            return None
        digests = prompt.digests[first:]
        claims = next((self._by_digest[d] for d in digests if d in self._by_digest), None)
        if claims is None:
            return None
        chosen = min(claims, key=lambda claim: claim.instance)
        claimed = set(chosen.digests)
        count = next(n for n in range(len(digests), 0, -1) if digests[n - 1] in claimed)
        return PeerSource(chosen.instance, first + count)

    def drop(self, instance: str, prompt: PromptBlocks, first: int) -> None:
        """Drop a node's claims of the blocks of a prompt from `first` on."""
        for digest in prompt.digests[first:]:
            claims = self._by_digest.get(digest, ())
            for claim in [claim for claim in claims if claim.instance == instance]:
                self._remove(claim.instance, claim.number)

    def drop_peer(self, instance: str) -> None:
        """Drop all claims of a node."""
        for claim in [c for c in self._claims.values() if c.instance == instance]:
            self._remove(instance, claim.number)

    def expire(self, now: float) -> None:
        for claim in [claim for claim in self._claims.values() if claim.until < now]:
            self._remove(claim.instance, claim.number)

    def _remove(self, instance: str, number: int) -> None:
        claim = self._claims.pop((instance, number), None)
        if claim is None:
            return
        self._digest_count -= len(claim.digests)
        for digest in claim.digests:
            claims = self._by_digest[digest]
            claims.remove(claim)
            if not claims:
                del self._by_digest[digest]


def _sample(prompt: PromptBlocks, first: int) -> list[bytes]:
    """Evenly spaced digests of the rest of a prompt, including the last one."""
    step = -(-(len(prompt) - first) // MAX_CLAIM_DIGESTS)
    return [prompt.digests[i] for i in range(len(prompt) - 1, first - 1, -step)][::-1]
