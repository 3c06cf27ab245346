"""Spans of the requests of workers and of other kvbms, until their replies."""

from collections import Counter

from kvmesh.bus.client import Reply
from kvmesh.bus.messages import (
    Declined,
    Fetch,
    Fetched,
    Lend,
    Lent,
    Offer,
    Prepare,
    Prepared,
    Wanted,
)
from kvmesh.hashing import HASH_BYTES
from kvmesh.tracing import names
from kvmesh.tracing.span import TraceSpan
from kvmesh.tracing.tracer import continued

_NAMES = {
    Fetch: names.KVBM_FETCH,
    Offer: names.KVBM_OFFER,
    Lend: names.KVBM_LEND,
    Prepare: names.KVBM_PREPARE,
}
_INDEX_BYTES = 4


def traced(request: Fetch | Offer | Lend | Prepare, send: Reply) -> Reply:
    """`send`, which also ends the span of a traced request."""
    span = continued(request.traceparent, _NAMES[type(request)])
    if not span:
        return send

    def reply(answer: object) -> None:
        _describe(span, answer)
        span.end()
        send(answer)

    return reply


def _describe(span: TraceSpan, answer: object) -> None:
    if isinstance(answer, Fetched):
        found = Counter(answer.tiers)
        span.set(names.BLOCKS, len(answer.tiers))
        span.set(names.TIERS, [found[tier] for tier in range(max(found, default=-1) + 1)])
    elif isinstance(answer, Wanted):
        span.set(names.BLOCKS, len(answer.blocks) // _INDEX_BYTES)
    elif isinstance(answer, Lent):
        span.set(names.BLOCKS, len(answer.offsets) // HASH_BYTES)
    elif isinstance(answer, Prepared):
        span.set(names.BLOCKS, answer.blocks)
    elif isinstance(answer, Declined):
        span.fail(answer.code)
