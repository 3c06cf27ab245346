"""A prompt described by what follows one that is known arrives whole, or is asked for whole."""

from array import array
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.blocks.prompt_delta import LEAST_BLOCKS, KnownPrompts, Names, SentPrompts
from kvmesh.bus.messages import Fetch, Offer

MOST = 8 * LEAST_BLOCKS


def named(*parts: tuple[int, int]) -> Names:
    """A prompt of so many blocks of each seed, one after the other."""
    digests, previous = bytearray(), b""
    for seed, count in parts:
        for _ in range(count):
            previous = blake2b(previous + bytes([seed]), digest_size=16).digest()
            digests += previous
    words = array("Q", bytes(digests))
    return Names(bytes(digests), words[::2].tobytes(), words[1::2].tobytes())


def offer(names: Names) -> Offer:
    return Offer(1, 0, names.digests, names.sequence_hashes, names.local, 5)


def fetch(names: Names) -> Fetch:
    return Fetch(1, "r", 0, names.digests, names.sequence_hashes, names.local, 5, 0.0, 0.0, 0.0)


def told(known: KnownPrompts, message: Offer | Fetch) -> Names | None:
    """What one who keeps prompts makes of a message."""
    rest = Names(message.digests, message.sequence_hashes, message.local)
    whole = known.complete(message.base, message.shared, rest)
    if whole is not None:
        known.keep(whole, message.base)
    return whole


def exchange(sent: SentPrompts, known: KnownPrompts, names: Names) -> Offer:
    """Tell of a prompt, again if need be; returns what was sent in the end."""
    message = sent.shorten(offer(names))
    whole = told(known, message)
    if whole is None:
        sent.forget(message.base)
        message = offer(names)
        whole = told(known, message)
    assert whole == names
    sent.sent(names.digests, message.base)
    return message


lengths = st.integers(1, 3 * LEAST_BLOCKS)
prompts = st.lists(st.tuples(st.integers(0, 2), lengths), min_size=1, max_size=3)


@given(st.lists(prompts, max_size=25), st.integers(0, MOST), st.integers(0, MOST))
def test_what_arrives_is_what_was_sent(
    told_of: list[list[tuple[int, int]]], sender: int, keeper: int
) -> None:
    sent, known = SentPrompts(sender), KnownPrompts(keeper)
    for parts in told_of:
        exchange(sent, known, named(*parts))
        assert known.blocks <= keeper
        assert sent.blocks <= sender


@given(st.lists(prompts, max_size=25), st.integers(0, MOST))
def test_nothing_is_asked_again_in_order(told_of: list[list[tuple[int, int]]], most: int) -> None:
    sent, known = SentPrompts(most), KnownPrompts(most)
    for parts in told_of:
        names = named(*parts)
        message = sent.shorten(offer(names))
        assert told(known, message) == names
        sent.sent(names.digests, message.base)
        assert known.blocks == sent.blocks


def test_a_growing_prompt_sends_what_it_adds() -> None:
    sent, known = SentPrompts(MOST), KnownPrompts(MOST)
    for length in range(LEAST_BLOCKS, 4 * LEAST_BLOCKS, 7):
        message = exchange(sent, known, named((0, length)))
        assert message.shared == (length - 7 if length > LEAST_BLOCKS else 0)
        assert known.blocks == length
    again = sent.shorten(fetch(named((0, length))))
    assert (again.digests, again.sequence_hashes, again.local, again.shared) == (
        b"",
        b"",
        b"",
        length,
    )


@pytest.mark.parametrize("common", [LEAST_BLOCKS, LEAST_BLOCKS + 5, 3 * LEAST_BLOCKS - 1])
def test_a_prompt_that_goes_on_otherwise_stands_beside(common: int) -> None:
    sent, known = SentPrompts(MOST), KnownPrompts(MOST)
    whole = named((0, 3 * LEAST_BLOCKS))
    exchange(sent, known, whole)
    message = exchange(sent, known, named((0, common), (1, 9)))
    assert message.shared == common
    assert len(message.sequence_hashes) == 9 * 8
    assert sent.shorten(offer(whole)).shared == 3 * LEAST_BLOCKS
    assert known.blocks == 3 * LEAST_BLOCKS + common + 9


def test_the_start_of_a_known_prompt_is_not_kept_twice() -> None:
    sent, known = SentPrompts(MOST), KnownPrompts(MOST)
    exchange(sent, known, named((0, 3 * LEAST_BLOCKS)))
    message = exchange(sent, known, named((0, 2 * LEAST_BLOCKS)))
    assert (message.shared, message.digests) == (2 * LEAST_BLOCKS, b"")
    assert known.blocks == 3 * LEAST_BLOCKS


def test_what_is_forgotten_is_sent_whole() -> None:
    sent = SentPrompts(MOST)
    exchange(sent, KnownPrompts(MOST), named((0, LEAST_BLOCKS)))
    longer = named((0, LEAST_BLOCKS + 1))
    restarted = KnownPrompts(MOST)
    assert exchange(sent, restarted, longer) == offer(longer)
    assert exchange(sent, restarted, longer).shared == LEAST_BLOCKS + 1


@pytest.mark.parametrize("shared", [-1, 0, LEAST_BLOCKS + 1])
def test_more_than_is_known_cannot_be_shared(shared: int) -> None:
    known, names = KnownPrompts(MOST), named((0, LEAST_BLOCKS))
    known.keep(names)
    assert known.complete(names.digests[-16:], shared, Names(b"")) is None


def test_a_kvbm_that_keeps_nothing_is_told_all() -> None:
    sent, names = SentPrompts(0), named((0, 2 * LEAST_BLOCKS))
    sent.sent(names.digests, b"")
    assert sent.shorten(offer(names)) == offer(names)
