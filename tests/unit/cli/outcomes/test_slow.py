"""The slowest requests and the parts of their time."""

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from kvmesh.bus.messages import Outcome
from kvmesh.cli.outcomes.slow import SlowestRequests, render
from kvmesh.observer.request_time import split_time

OUTCOME = Outcome(
    request="chatcmpl-1", instance="w-1", time=1.0, cached_tokens=100, output_tokens=7, ttft_s=2.0,
    total_s=3.0, finish="stop", session="t\x1fs", prompt_tokens=150, prepare_s=0.1, route_s=0.9,
    wait_s=0.6, index_s=0.2, engine_wait_s=0.3,
)  # fmt: skip
PARTS = ("prepare_s", "queue_s", "index_s", "route_s", "engine_wait_s", "prefill_s", "decode_s")


@pytest.mark.parametrize(
    "outcome",
    [
        OUTCOME,
        replace(OUTCOME, engine_wait_s=None),
        replace(OUTCOME, ttft_s=None),
        replace(OUTCOME, engine_wait_s=9.0),
        replace(OUTCOME, ttft_s=0.5),  # migrated: a router was queried again after the first token
    ],
)
def test_the_parts_add_up_to_the_whole(outcome: Outcome) -> None:
    parts = [getattr(split_time(outcome), name) or 0.0 for name in PARTS]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(outcome.total_s)


def test_time_in_the_engine_s_queue_is_no_prefill() -> None:
    found = split_time(OUTCOME)
    assert (found.route_s, found.prefill_s) == pytest.approx((0.1, 0.7))
    assert found.decode_s == pytest.approx(1.0)
    assert found.session == "s"
    assert split_time(replace(OUTCOME, engine_wait_s=None)).prefill_s == pytest.approx(1.0)


def test_the_slowest_come_first() -> None:
    by_total, by_ttft = SlowestRequests(2), SlowestRequests(2, "ttft")
    for number, (total, ttft) in enumerate([(1.0, 0.9), (5.0, 0.1), (3.0, None), (4.0, 0.5)]):
        outcome = replace(OUTCOME, request=f"r{number}", total_s=total, ttft_s=ttft)
        for slowest in (by_total, by_ttft):
            slowest.add(outcome)
            slowest.add(replace(outcome, choice=1))
    assert [found.request for found in by_total.slowest()] == ["r1", "r3"]
    assert [found.request for found in by_ttft.slowest()] == ["r2", "r0"]
    assert by_total.added == 4


def test_a_row_shows_where_the_time_went() -> None:
    out = io.StringIO()
    again = replace(OUTCOME, engine_wait_s=None, attempts=3)
    rows = [split_time(OUTCOME), split_time(again)]
    Console(file=out, width=240, highlight=False).print(render(rows))
    lines = out.getvalue().splitlines()
    assert "600.0 ms" in lines[1]
    assert "700.0 ms" in lines[1]
    assert "–" in lines[2]
    assert "w-1 (3 attempts)" in lines[2]
