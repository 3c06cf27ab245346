"""Retention directives of requests, converted from tokens to blocks."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvmesh.bus.messages import Retain, Work, owner
from kvmesh.hashing import TOKEN_BYTES
from kvmesh.retention.budget import directives
from kvmesh.retention.claims import RetentionWish
from kvmesh.retention.outcomes import Directive
from kvmesh.retention.token_ranges import RetentionSegment, segments, with_prefix

PREFETCH_PRIORITY = -(1 << 31)  # of prompts computed ahead: below every request's


@dataclass(frozen=True, kw_only=True)
class RetentionRequest:
    """Claims of one request on its blocks, charged to the budget of `tenant`.

    `directives` are the explicit ones; the first `prompt_directives` of them concern the prompt.
    `ahead`: the prompt is computed ahead of the session's next request. `conversation` and
    `tentative` are those of `SessionBlocks.record`.
    """

    segments: list[RetentionSegment]
    directives: list[Directive]
    prompt_directives: int
    tenant: str
    session: str | None
    ahead: bool = False
    conversation: int = 0
    tentative: bool = False

    def wish_at(self, block: int) -> RetentionWish | None:
        """The claim for a block, if any."""
        at = bisect_right(self.segments, block, key=lambda segment: segment.first) - 1
        if at < 0 or block >= (self.segments[at].end or block + 1):
            return None
        return self.segments[at].wish

    @property
    def for_other_tier(self) -> "RetentionRequest":
        """A copy with its own directives, since each tier counts its own grants."""
        return replace(
            self, directives=[Directive(d.tenant, d.priority, d.ttl_s) for d in self.directives]
        )


NO_RETENTION = RetentionRequest(
    segments=[], directives=[], prompt_directives=0, tenant="", session=None
)


def inherited_retention(
    retention: Sequence[Retain], block_size: int, tenant: str
) -> RetentionRequest:
    """Claims of earlier requests on blocks that come from another tier: whole blocks, in order."""
    segments_in_blocks = [
        RetentionSegment(
            r.start // block_size,
            (r.end or r.start) // block_size,
            RetentionWish(r.priority, r.ttl_s),
        )
        for r in retention
    ]
    return RetentionRequest(
        segments=segments_in_blocks, directives=[], prompt_directives=0, tenant=tenant, session=None
    )


def parse_retention(
    work: Work, block_size: int, defaults: Mapping[str, RetentionWish]
) -> RetentionRequest | None:
    """The claims of a request; None if it has no session and no directives."""
    if work.session is None and not work.retention and work.decode is None:
        return None
    prompt = len(work.tokens) // TOKEN_BYTES - work.generated
    claims = request_claims(
        work.retention, work.decode, prompt, block_size, defaults, owner(work.tenant), work.session
    )
    return replace(
        claims,
        ahead=work.priority == PREFETCH_PRIORITY,
        conversation=work.conversation,
        tentative=is_tentative(work),
    )


def is_tentative(work: Work) -> bool:
    """True if the prompt says nothing about earlier ones of its session.

    It is computed ahead of the request, goes on with an answer that began on another worker, or its
    caller says that it is no part of what follows.
    """
    return work.priority == PREFETCH_PRIORITY or work.generated > 0 or work.ephemeral


def request_claims(
    retention: Sequence[Retain],
    decode: Retain | None,
    prompt_tokens: int,
    block_size: int,
    defaults: Mapping[str, RetentionWish],
    payer: str,
    session: str | None,
) -> RetentionRequest:
    """The claims of a prompt of `prompt_tokens` tokens and of the output, charged to `payer`."""
    explicit = directives(retention, payer)
    for_output = directives([decode] if decode is not None else [], payer)
    return RetentionRequest(
        segments=with_prefix(segments(retention, decode, prompt_tokens, block_size, defaults)),
        directives=explicit + for_output,
        prompt_directives=len(explicit),
        tenant=payer,
        session=session,
    )
