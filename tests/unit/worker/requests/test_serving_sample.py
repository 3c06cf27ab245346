"""Reports of a worker's requests to its weights process."""

from msgspec.structs import replace

from kvmesh.bus.messages import Sampling, Work
from kvmesh.worker.engine import OutputDelta
from kvmesh.worker.requests.serving_sample import LENT_S, MIN_GAPS, ServingSample


def work(request: str, handoff: dict[str, object] | None = None) -> Work:
    sampling = Sampling(max_tokens=20)
    base = Work(request=request, frontend="f", tokens=b"abcd", sampling=sampling)
    return replace(base, handoff=handoff)


def test_times_between_tokens_are_reported_once_there_are_enough() -> None:
    sample = ServingSample(lambda: None)
    now = 10.0
    sample.take(now)
    for number in range(MIN_GAPS):
        sample.output([OutputDelta("a", [1])], now + number * 0.01)
    assert sample.take(now + 0.2) is None
    sample.output([OutputDelta("a", [1]), OutputDelta("b", [1])], now + 1.15)
    report = sample.take(now + 0.3)
    assert report is not None
    assert report.gaps == MIN_GAPS
    assert 0.009 < report.slow_s < 0.011
    assert not report.transfers
    sample.output([OutputDelta("a", [1], finish="stop")], now + 1.2)
    few = sample.take(now + 5)
    assert few is not None
    assert few.gaps == 1
    assert sample.take(now + 10) is None


def test_transfers_of_kv_are_told_at_once() -> None:
    told: list[str] = []
    sample = ServingSample(lambda: told.append("now"))
    sample.submitted(work("plain"))
    assert told == []
    sample.submitted(work("a", {"grant": b""}))
    assert told == ["now"]
    sample.output([OutputDelta("a", [])], 1.0)  # its constraint is compiled
    report = sample.take(1.0)
    assert report is not None
    assert report.transfers
    sample.output([OutputDelta("a", [1])], 2.0)
    ended = sample.take(2.0)
    assert ended is None or not ended.transfers
    sample.output([OutputDelta("p", [1], finish="length", handoff={})], 3.0)
    assert told == ["now", "now"]
    lent = sample.take(3.1)
    assert lent is not None
    assert lent.transfers
    assert sample.take(3.1 + LENT_S) is None
