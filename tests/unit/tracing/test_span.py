"""Spans and W3C's `traceparent`."""

import pytest

from kvmesh.tracing.span import (
    MAX_EVENTS,
    NO_SPAN,
    Trace,
    TraceContext,
    TraceSpan,
    parse_traceparent,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def root(ended: list[TraceSpan], sampled: bool = True) -> TraceSpan:
    return TraceSpan(Trace(TRACE, sampled, ended.append), "root", "", 1.0)


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f" 00-{TRACE}-{SPAN}-00 ", False),
        (f"00-{TRACE}-{SPAN}-02", False),  # another flag
        (f"cc-{TRACE}-{SPAN}-01-more", True),  # a later version
    ],
)
def test_a_context_is_read(text: str, sampled: bool) -> None:
    assert parse_traceparent(text) == TraceContext(TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
    ],
)
def test_a_malformed_context_is_none(text: str) -> None:
    assert parse_traceparent(text) is None


def test_children_belong_to_their_parent_and_end_once() -> None:
    ended: list[TraceSpan] = []
    parent = root(ended)
    child = parent.child("child", 2.0)
    assert parse_traceparent(child.traceparent) == TraceContext(TRACE, child.id, True)
    child.beside("next", 3.0).end(4.0)
    parent.record("over", 1.5, 1.0)  # clocks of threads may disagree
    child.end(2.5)
    child.end(9.0)
    parent.end(5.0)
    assert [(s.name, s.parent_id == parent.id, s.start, s.stop) for s in ended] == [
        ("next", True, 3.0, 4.0),
        ("over", True, 1.5, 1.5),
        ("child", True, 2.0, 2.5),
        ("root", False, 1.0, 5.0),
    ]


def test_events_are_bounded_and_the_first_failure_counts() -> None:
    span = root([])
    for number in range(MAX_EVENTS + 5):
        span.event("token", float(number))
    span.fail("")
    span.fail("first")
    span.fail("second")
    assert len(span.events) == MAX_EVENTS
    assert span.error == "first"


def test_no_span_does_nothing() -> None:
    span = NO_SPAN.child("a").child("b", 1.0).beside("c", 1.0)
    span.set("key", 1)
    span.event("event", 1.0)
    span.fail("error")
    span.link(root([]))
    span.record("d", 1.0, 2.0)
    span.end()
    assert span is NO_SPAN
    assert not span
    assert span.traceparent == ""
    assert (span.attributes, span.events, span.links, span.error) == ({}, [], [], "")
