"""Numbering, retention and resending of output."""

from array import array

from msgspec.structs import replace

from kvmesh.bus.messages import (
    Chunk,
    Sampling,
    Tokens,
    Work,
)
from kvmesh.worker.engine import OutputDelta
from kvmesh.worker.requests.output_buffer import TAIL_TOKENS, VECTORS_BYTES, OutputBuffer


def work(count: int = 10, **fields: object) -> Work:
    base = Work(
        request="a",
        frontend="f",
        tokens=array("I", range(count)).tobytes(),
        sampling=Sampling(max_tokens=20),
    )
    return replace(base, **fields)


def test_output_is_numbered_and_grouped_by_frontend() -> None:
    kept = OutputBuffer()
    kept.start(work())
    kept.start(work(request="b", frontend="g", generated=4))
    first = kept.add([OutputDelta("a", [1, 2], cached=[16]), OutputDelta("b", [9])], 0.0)
    assert first == {"f": [Chunk("a", 0, [1, 2], cached=[16])], "g": [Tokens("b", 4, [9])]}
    second = kept.add([OutputDelta("a", [3], finish="stop"), OutputDelta("stranger", [1])], 0.0)
    assert second == {"f": [Chunk("a", 2, [3], "stop")]}
    assert kept.add([OutputDelta("a", [4])], 0.0) == {}
    assert kept.live == ["b"]
    assert kept.live_count == 1
    kept.drop("b")
    kept.drop("b")
    assert kept.live_count == 0


def test_output_is_resent_from_an_offset() -> None:
    kept = OutputBuffer()
    kept.start(work(generated=4))
    kept.add(
        [OutputDelta("a", [5, 6, 7], cached=[0], logprobs=[{5: 0.0}, {6: 0.0}, {7: 0.0}])], 0.0
    )
    again = Chunk("a", 5, [6, 7], cached=[0], logprobs=[{6: 0.0}, {7: 0.0}])
    assert kept.output_from("a", 5) == ("f", again)
    for early in (0, 4):
        found = kept.output_from("a", early)
        assert found is not None
        assert (found[1].offset, found[1].tokens) == (4, [5, 6, 7])
    assert kept.output_from("b", 0) is None


def test_the_last_output_of_what_runs_or_has_just_ended_is_sent_again() -> None:
    kept = OutputBuffer()
    for name in ("long", "ended", "silent", "old"):
        kept.start(work(request=name, frontend="f" if name != "ended" else "g"))
    kept.add([OutputDelta("old", [1], finish="stop")], 0.0)
    kept.add([OutputDelta("long", list(range(TAIL_TOKENS + 5)))], 0.0)
    kept.add([OutputDelta("ended", [7], finish="length")], 9.0)
    tails = kept.tails(9.5)
    assert {name: [(c.request, c.offset) for c in cs] for name, cs in tails.items()} == {
        "f": [("long", 5)],
        "g": [("ended", 0)],
    }
    assert tails["g"][0].finish == "length"
    assert len(tails["f"][0].tokens) == TAIL_TOKENS


def test_default_outcomes_apply_if_the_engine_reports_none() -> None:
    kept = OutputBuffer()
    kept.start(work(), ["unsupported"], "unsupported")
    kept.start(work(request="b"), ["unsupported"], "unsupported")
    first = kept.add([OutputDelta("a", [1], cached=[0]), OutputDelta("b", [1], cached=[0])], 0.0)[
        "f"
    ]
    assert [(chunk.retention, chunk.decode) for chunk in first if isinstance(chunk, Chunk)] == [
        (["unsupported"], None)
    ] * 2
    last = [OutputDelta("a", [2], "stop"), OutputDelta("b", [2], "stop", decode="clipped")]
    ends = kept.add(last, 0.0)["f"]
    assert [chunk.decode for chunk in ends if isinstance(chunk, Chunk)] == [
        "unsupported",
        "clipped",
    ]
    again = [found[1] for name in "ab" if (found := kept.output_from(name, 0)) is not None]
    assert [chunk.decode for chunk in again] == ["unsupported", "clipped"]


def test_output_of_ended_requests_is_retained_for_a_while() -> None:
    kept = OutputBuffer(retain_s=5)
    kept.start(work())
    kept.add([OutputDelta("a", [1], finish="stop")], 100.0)
    kept.add([], 105.0)
    assert "a" in kept
    kept.add([], 105.1)
    assert "a" not in kept


def test_vectors_are_sent_again_until_they_fill_the_memory() -> None:
    kept = OutputBuffer()
    vectors = [bytes(VECTORS_BYTES // 4)]
    for name in "abcde":
        kept.start(work(request=name))
        sent = kept.add([OutputDelta(name, [], "stop", vectors=vectors)], 0.0)
        assert sent == {"f": [Chunk(name, 0, [], "stop", vectors=vectors)]}
    assert kept.output_from("a", 0) is None
    found = kept.output_from("b", 0)
    assert found is not None
    assert found[1].vectors == vectors
    kept.drop_frontend("f")
    kept.start(work(request="f"))
    kept.add([OutputDelta("f", [], "stop", vectors=vectors)], 0.0)
    assert kept.output_from("f", 0) is not None
    assert kept.live_count == 0
