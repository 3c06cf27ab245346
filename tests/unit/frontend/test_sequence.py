"""A sequence of tokens over losses, repeats and changes of worker."""

import pytest

from kvmesh.bus.messages import Chunk
from kvmesh.frontend.dispatch.token_stream import ChunkResult, TokenStream
from kvmesh.frontend.errors import ApiError


class Ignore:
    def ready(self, sequence: TokenStream) -> None:
        return


@pytest.fixture
def sequence() -> TokenStream:
    sequence = TokenStream("r", Ignore(), 10.0)
    sequence.next_attempt()
    sequence.place("w", 10.0)
    return sequence


def test_tokens_add_up_in_order(sequence: TokenStream) -> None:
    assert sequence.take(Chunk("r", 0, [1, 2], cached=[16]), 11.0) is ChunkResult.NEW
    assert sequence.take(Chunk("r", 2, [3], finish="stop"), 12.0) is ChunkResult.NEW
    assert sequence.tokens == [1, 2, 3]
    assert sequence.cached == [16]
    assert sequence.first_at == 11.0
    assert (sequence.finish, sequence.engine_done) == ("stop", True)
    assert sequence.ended.is_set()


def test_a_hole_adds_nothing_until_it_is_filled(sequence: TokenStream) -> None:
    sequence.take(Chunk("r", 0, [1]), 11.0)
    assert sequence.take(Chunk("r", 3, [4], finish="stop"), 11.0) is ChunkResult.HOLE
    assert sequence.tokens == [1]
    assert sequence.finish is None
    assert sequence.take(Chunk("r", 1, [2, 3, 4], finish="stop"), 11.0) is ChunkResult.NEW
    assert sequence.tokens == [1, 2, 3, 4]


def test_repeated_tokens_count_once(sequence: TokenStream) -> None:
    sequence.take(Chunk("r", 0, [1, 2]), 11.0)
    assert sequence.take(Chunk("r", 0, [1, 2]), 11.0) is ChunkResult.OLD
    assert sequence.take(Chunk("r", 1, [2, 3]), 11.0) is ChunkResult.NEW
    assert sequence.tokens == [1, 2, 3]


def test_a_lost_sequence_keeps_its_tokens_and_gets_a_new_name(sequence: TokenStream) -> None:
    sequence.take(Chunk("r", 0, [1, 2], cached=[3]), 11.0)
    sequence.lose("gone")
    assert sequence.ended.is_set()
    assert sequence.finish is None
    sequence.next_attempt()
    sequence.place("v", 12.0)
    assert (sequence.attempt, sequence.lost) == ("r.1", "")
    assert not sequence.ended.is_set()
    at_first = sequence.fresh  # what it has so far is of another engine
    sequence.take(Chunk("r.1", 2, [3], finish="length", cached=[9]), 13.0)
    assert (at_first, sequence.fresh) == (0, 1)
    assert sequence.tokens == [1, 2, 3]
    assert sequence.cached == [3]


def test_an_abort_that_nobody_asked_for_is_a_loss(sequence: TokenStream) -> None:
    sequence.take(Chunk("r", 0, [1], finish="abort"), 11.0)
    assert sequence.finish is None
    assert sequence.lost
    assert sequence.engine_done


def test_an_engine_error_is_the_request_s_error(sequence: TokenStream) -> None:
    sequence.take(Chunk("r", 0, [], finish="error", error="out of memory"), 11.0)
    assert isinstance(sequence.error, ApiError)
    assert "out of memory" in str(sequence.error)


def test_the_end_is_final(sequence: TokenStream) -> None:
    sequence.stop()
    sequence.lose("too late")
    sequence.fail(ApiError("internal", "too late"))
    assert (sequence.finish, sequence.lost, sequence.error) == ("stop", "", None)
    assert not sequence.engine_done
