"""Token streams over lost chunks, repeats and changes of worker."""

from math import inf, nan

import pytest

from kvmesh.bus.messages import Chunk
from kvmesh.frontend.dispatch.token_stream import ChunkResult, TokenStream
from kvmesh.frontend.errors import ApiError


@pytest.fixture
def stream() -> TokenStream:
    stream = TokenStream("r", 10.0)
    stream.next_attempt()
    stream.dispatched("w", 10.0)
    return stream


def test_tokens_add_up_in_order(stream: TokenStream) -> None:
    assert stream.receive(Chunk("r", 0, [1, 2], cached=[16]), 11.0) is ChunkResult.NEW
    assert stream.receive(Chunk("r", 2, [3], finish="stop"), 12.0) is ChunkResult.NEW
    assert stream.tokens == [1, 2, 3]
    assert stream.cached == [16]
    assert stream.first_token_at == 11.0
    assert (stream.finish, stream.engine_done) == ("stop", True)
    assert stream.ended.is_set()


def test_chunks_after_a_gap_add_nothing_until_it_is_filled(stream: TokenStream) -> None:
    stream.receive(Chunk("r", 0, [1]), 11.0)
    assert stream.receive(Chunk("r", 3, [4], finish="stop"), 11.0) is ChunkResult.GAP
    assert stream.tokens == [1]
    assert stream.finish is None
    assert stream.receive(Chunk("r", 1, [2, 3, 4], finish="stop"), 11.0) is ChunkResult.NEW
    assert stream.tokens == [1, 2, 3, 4]


def test_tokens_beyond_the_limit_end_the_sequence() -> None:
    stream = TokenStream("r", 0.0, limit=3)
    stream.next_attempt()
    stream.dispatched("w", 0.0)
    stream.receive(Chunk("r", 0, [1, 2], logprobs=[{1: 0.0}, {2: 0.0}]), 1.0)
    stream.receive(Chunk("r", 2, [3, 4], logprobs=[{3: 0.0}, {4: 0.0}]), 1.0)
    assert (stream.tokens, len(stream.logprobs)) == ([1, 2, 3], 3)
    assert (stream.finish, stream.ended.is_set()) == ("length", True)
    assert not stream.engine_done  # so the worker is told to stop


@pytest.mark.parametrize(
    ("chunk", "fault"),
    [
        (Chunk("r", -1, [1]), "it begins at token -1"),
        (Chunk("r", 0, [1, -2]), "token -2"),
        (Chunk("r", 0, [1], finish="weird\x1b"), "the end 'weird\\x1b'"),
        (Chunk("r", 0, [1], logprobs=[{1: 0.0, -3: 0.0}]), "a log probability of a negative token"),
    ],
)
def test_malformed_output_loses_the_attempt(stream: TokenStream, chunk: Chunk, fault: str) -> None:
    assert stream.receive(chunk, 11.0) is ChunkResult.OLD
    assert (stream.lost, stream.loss) == (f"malformed output: {fault}", "failed")
    assert (stream.tokens, stream.finish, stream.ended.is_set()) == ([], None, True)


@pytest.mark.parametrize("cached", [[65], [40, 25], [-1, 5], [0] * 1000])
def test_cached_tokens_that_the_prompt_cannot_have_are_not_counted(
    cached: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    stream = TokenStream("r", 0.0, prompt_tokens=64)
    stream.next_attempt()
    stream.dispatched("w", 0.0)
    assert stream.receive(Chunk("r", 0, [1], cached=cached), 1.0) is ChunkResult.NEW
    assert (stream.cached, stream.tokens) == (None, [1])
    assert "worker w counts" in caplog.text
    stream.receive(Chunk("r", 1, [2], cached=[64]), 1.0)
    assert stream.cached == [64]


@pytest.mark.parametrize("seconds", [nan, inf, -1.0])
def test_times_that_cannot_be_are_not_counted(stream: TokenStream, seconds: float) -> None:
    stream.receive(Chunk("r", 0, [1], device_s=2.0), 11.0)
    stream.receive(Chunk("r", 1, [2], device_s=seconds, waited_s=seconds), 11.0)
    assert (stream.device_s, stream.engine_wait_s) == (2.0, None)


def test_a_gap_is_no_sign_of_life(stream: TokenStream) -> None:
    stream.receive(Chunk("r", 0, [1]), 11.0)
    stream.receive(Chunk("r", 10**12, [2]), 12.0)
    assert (stream.received_at, stream.tokens) == (11.0, [1])


def test_a_clients_error_has_a_bounded_part_of_the_engines_reason(stream: TokenStream) -> None:
    stream.receive(Chunk("r", 0, [], finish="error", error="\x1b[31m\n" * 10_000), 11.0)
    assert stream.error is not None
    assert len(stream.error.message) < 20_000
    assert stream.error.message.isprintable()


def test_repeated_tokens_count_once(stream: TokenStream) -> None:
    stream.receive(Chunk("r", 0, [1, 2]), 11.0)
    assert stream.receive(Chunk("r", 0, [1, 2]), 11.0) is ChunkResult.OLD
    assert stream.receive(Chunk("r", 1, [2, 3]), 11.0) is ChunkResult.NEW
    assert stream.tokens == [1, 2, 3]


def test_cached_tokens_are_those_of_the_attempt_that_began_the_answer(stream: TokenStream) -> None:
    stream.receive(Chunk("r", 0, [], cached=[16]), 11.0)
    stream.next_attempt()
    counted = [stream.counts_cached]  # the first attempt gave no token
    stream.dispatched("v", 12.0)
    stream.receive(Chunk("r.1", 0, [1], cached=[32]), 12.0)
    stream.next_attempt()
    counted.append(stream.counts_cached)
    stream.dispatched("w", 13.0)
    stream.receive(Chunk("r.2", 1, [2], cached=[48]), 13.0)
    assert counted == [True, False]
    assert stream.cached == [32]


def test_a_new_attempt_keeps_the_tokens_and_gets_a_new_id(stream: TokenStream) -> None:
    stream.receive(Chunk("r", 0, [1, 2], cached=[3]), 11.0)
    stream.lose("gone")
    assert stream.ended.is_set()
    assert stream.finish is None
    stream.next_attempt()
    stream.dispatched("v", 12.0)
    assert (stream.attempt, stream.lost) == ("r.1", "")
    assert not stream.ended.is_set()
    before = stream.fresh
    stream.receive(Chunk("r.1", 2, [3], finish="length", cached=[9]), 13.0)
    assert (before, stream.fresh) == (0, 1)
    assert stream.tokens == [1, 2, 3]
    assert stream.cached == [3]


def test_an_abort_by_the_engine_is_a_loss(stream: TokenStream) -> None:
    stream.receive(Chunk("r", 0, [1], finish="abort"), 11.0)
    assert stream.finish is None
    assert stream.lost
    assert stream.engine_done


def test_an_engine_error_is_the_error_of_the_stream(stream: TokenStream) -> None:
    stream.receive(Chunk("r", 0, [], finish="error", error="out of memory"), 11.0)
    assert isinstance(stream.error, ApiError)
    assert "out of memory" in str(stream.error)


def test_the_end_is_final(stream: TokenStream) -> None:
    stream.stop("stop")
    stream.lose("too late")
    stream.fail(ApiError("internal", "too late"))
    stream.stop("cancelled")
    assert (stream.finish, stream.lost, stream.error) == ("stop", "", None)
    assert not stream.engine_done


def test_cached_tokens_after_a_remote_prefill_are_those_that_the_prefill_found(
    stream: TokenStream,
) -> None:
    stream.prefilled([16, 0])
    stream.receive(Chunk("r", 0, [1], cached=[48, 0]), 11.0)
    assert stream.cached == [16, 0]


def test_the_last_chunk_corrects_the_cached_tokens_of_its_attempt(stream: TokenStream) -> None:
    stream.receive(Chunk("r", 0, [1, 2], cached=[16], retention=["honoured"]), 11.0)
    stream.receive(Chunk("r", 2, [3], cached=[0, 32]), 12.0)
    assert (stream.cached, stream.retention_outcomes) == ([0, 32], ["honoured"])
    stream.lose("gone", "vanished")
    stream.next_attempt()
    stream.dispatched("w2", 13.0)
    stream.receive(Chunk("r.1", 3, [4], finish="stop", cached=[64]), 14.0)
    assert stream.cached == [0, 32], "a migrated request keeps what its first worker reused"
