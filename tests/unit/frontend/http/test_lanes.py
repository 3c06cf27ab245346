"""Lanes of a WebSocket: order, bounds, and what waits."""

import pytest

from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.http.responses.lanes import MAX_NAMED, MAX_RUNNING, MAX_WAITING, Lanes


def test_a_lane_runs_one_request_after_the_other_and_lanes_run_at_once() -> None:
    lanes = Lanes[int](1000)
    for number, lane in enumerate(["a", "a", "", "b", "a"]):
        lanes.add(lane, number, 10)
    assert lanes.take() == [("a", 0), ("", 2), ("b", 3)]
    assert lanes.take() == []
    lanes.end("a")
    assert lanes.take() == [("a", 1)]
    for lane in ("", "b", "a"):
        lanes.end(lane)
    assert not lanes.idle
    assert lanes.take() == [("a", 4)]
    lanes.end("a")
    assert lanes.idle


def test_so_many_run_at_once_and_the_others_wait_in_order() -> None:
    lanes = Lanes[int](1000)
    for number in range(MAX_NAMED):
        lanes.add(f"lane-{number}", number, 10)
    assert [number for _, number in lanes.take()] == [*range(MAX_RUNNING)]
    lanes.end("lane-3")
    lanes.end("lane-7")
    assert [number for _, number in lanes.take()] == [MAX_RUNNING, MAX_RUNNING + 1]


def test_a_connection_has_so_many_named_lanes_for_its_whole_life() -> None:
    lanes = Lanes[int](1000)
    for number in range(MAX_NAMED):
        lanes.add(f"lane-{number}", number, 1)
        lanes.take()
        lanes.end(f"lane-{number}")
    with pytest.raises(ApiError) as error:
        lanes.add("another", 0, 1)
    assert (error.value.code, error.value.param) == ("websocket_stream_limit_reached", "stream_id")
    lanes.add("", 0, 1)  # the default lane has no name
    lanes.add("lane-5", 0, 1)


@pytest.mark.parametrize(("count", "size"), [(MAX_WAITING, 1), (10, 100)])
def test_what_waits_is_bounded_in_number_and_bytes(count: int, size: int) -> None:
    lanes = Lanes[int](1000)
    lanes.add("", 0, 1000)  # a single one may be as large as a body
    lanes.take()
    for number in range(count):
        lanes.add("", number, size)
    with pytest.raises(ApiError) as error:
        lanes.add("", 0, size)
    assert (error.value.kind, error.value.code) == ("rate_limit", "websocket_queue_full")
    assert error.value.retry_after
    lanes.end("")
    lanes.take()
    lanes.add("", 0, size)
