"""Attributes of the spans of dispatch; without a trace these functions cost one test each."""

from time import monotonic

from kvmesh.bus.messages import RankKey, Refused, Routed
from kvmesh.frontend.dispatch.task import SequenceTask
from kvmesh.frontend.dispatch.token_stream import TokenStream
from kvmesh.tracing import names
from kvmesh.tracing.span import NO_SPAN, TraceSpan


def describe_attempt(span: TraceSpan, task: SequenceTask, rank: RankKey) -> None:
    """Set the attributes that are known at the offer."""
    if span:
        span.attributes = {
            names.CHOICE: task.index,
            names.ATTEMPT_ID: task.stream.attempt,
            names.INSTANCE: rank.instance,
            names.RANK: rank.rank,
        }


def end_attempt(stream: TokenStream, refusal: str = "") -> None:
    """End the span of the stream's attempt, which was refused, has finished or was lost."""
    span = stream.span
    if not span:
        return
    stream.span = NO_SPAN
    first = stream.first_token_at
    if first is not None and first >= span.start:
        span.event(names.FIRST_TOKEN, first)
    lost = stream.loss or ("lost" if stream.finish is None else "")
    span.set(names.STATUS, refusal or stream.finish or lost)
    span.set(names.OUTPUT_TOKENS, stream.fresh)
    if stream.cached is not None:
        span.set(names.TIERS, stream.cached)
    if not refusal and (lost or stream.error is not None):
        span.fail(lost or "error")
    span.end()


def end_route(span: TraceSpan, task: SequenceTask, reply: Routed | Refused | None) -> None:
    """End the span of a query for `task`; `reply` is None if it failed or was cancelled."""
    if not span:
        return
    span.attributes = {names.CHOICE: task.index, names.ATTEMPT_ID: task.stream.attempt}
    if isinstance(reply, Routed):
        span.attributes |= {
            names.STATUS: "routed",
            names.INSTANCE: reply.instance,
            names.RANK: reply.rank,
            names.OVERLAP: reply.overlap,
        }
    else:
        span.set(names.STATUS, reply.code if reply is not None else "none")
    span.end(monotonic())
