"""A source that is asked only for what no other one can give."""

from kvmesh.weights.stream import ChunkRequest, FetchOptions, StreamPlan

SIZE = 1 << 20


def plan(count: int = 8, **options: int) -> StreamPlan:
    return StreamPlan([SIZE] * count, FetchOptions(**options), "me")


def asked(requests: list[ChunkRequest], source: str) -> set[int]:
    return {request.chunk for request in requests if request.source == source}


def test_alone_it_gives_everything_a_few_at_a_time() -> None:
    stream, now = plan(8, spare_depth=2), 0.0
    assert stream.join("spare", now, complete=True, spare=True)
    while not stream.done:
        requests = stream.requests(now)
        assert 0 < len(requests) <= 2
        now += 0.1
        for request in requests:
            assert stream.arrived("spare", request.chunk, now)


def test_it_rests_while_a_worker_has_all() -> None:
    stream = plan()
    stream.join("spare", 0.0, complete=True, spare=True)
    stream.join("worker", 0.0, complete=True)
    for step in range(40):
        requests = stream.requests(step * 0.1)
        assert not asked(requests, "spare")
        for request in requests:
            stream.arrived("worker", request.chunk, step * 0.1 + 0.05)
    assert stream.done


def test_it_steps_in_when_the_worker_fails_or_hangs() -> None:
    failed = plan()
    failed.join("spare", 0.0, complete=True, spare=True)
    failed.join("worker", 0.0, complete=True)
    [request] = failed.requests(0.0)
    failed.failed("worker", request.chunk, "lost", 0.1)
    assert asked(failed.requests(0.1), "spare")
    hanging = plan()
    hanging.join("spare", 0.0, complete=True, spare=True)
    hanging.join("worker", 0.0, complete=True)
    hanging.requests(0.0)
    assert not asked(hanging.requests(0.5), "spare")
    assert asked(hanging.requests(1.5), "spare")


def test_it_gives_what_partial_workers_lack() -> None:
    stream = plan()
    stream.join("spare", 0.0, complete=True, spare=True)
    stream.join("worker", 0.0, complete=False)
    stream.learn("worker", bytes([1, 1, 1, 1, 0, 0, 0, 0]), 0.0)
    now, given = 0.0, set()
    while not stream.done:
        now += 0.1
        for request in stream.requests(now):
            if request.source == "spare":
                given.add(request.chunk)
            stream.arrived(request.source, request.chunk, now + 0.05)
        assert now < 10
    assert given == {4, 5, 6, 7}
