"""Prompt deltas in sequence hashes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.routing import sequence

from kvmesh.hashing import HASH_BYTES
from kvmesh.prompt_delta.hashes import MIN_BYTES, TAIL_BYTES, ReceivedHashes, SentHashes

LEAST = MIN_BYTES // HASH_BYTES
TAIL = TAIL_BYTES // HASH_BYTES
KEY = ("router", 7, "session")


def prompt(blocks: int, other_from: int = 1 << 30) -> bytes:
    """A prompt that differs from the others of its length from a block on."""
    return sequence(*(block if block < other_from else -block - 1 for block in range(blocks)))


def test_a_turn_goes_as_what_follows_the_last_one() -> None:
    sent, received = SentHashes(), ReceivedHashes()
    first, second = prompt(LEAST), prompt(LEAST + 5)
    assert sent.base_of(KEY, first) == (b"", 0)
    sent.store(KEY, first)
    assert received.complete(7, b"", 0, first) == first
    base, shared = sent.base_of(KEY, second)
    assert shared == LEAST
    assert received.complete(7, base, shared, second[shared * HASH_BYTES :]) == second


def test_the_last_blocks_of_a_turn_may_differ_from_the_next_one() -> None:
    sent = SentHashes()
    sent.store(KEY, prompt(LEAST, LEAST - 3))
    assert sent.base_of(KEY, prompt(LEAST + 1))[1] == LEAST - 3
    assert sent.base_of(KEY, prompt(LEAST + 1, LEAST - TAIL))[1] == 0
    assert sent.base_of(("other", 7, "session"), prompt(LEAST)) == (b"", 0)


def test_short_prompts_are_not_stored() -> None:
    sent, received = SentHashes(), ReceivedHashes()
    short = prompt(LEAST - 1)
    sent.store(KEY, short)
    received.complete(7, b"", 0, short)
    assert sent.base_of(KEY, short) == (b"", 0)
    assert received.size == 0


def test_a_prompt_replaces_its_base() -> None:
    received = ReceivedHashes()
    first, second = prompt(LEAST), prompt(LEAST + 5)
    received.complete(7, b"", 0, first)
    received.complete(7, first[-HASH_BYTES:], LEAST, second[LEAST * HASH_BYTES :])
    assert received.size == len(second)
    assert received.complete(7, first[-HASH_BYTES:], LEAST, b"") is None
    assert received.complete(7, second[-HASH_BYTES:], LEAST + 5, b"") == second
    assert received.size == len(second)


@pytest.mark.parametrize(("salt", "shared"), [(8, LEAST), (None, LEAST), (7, LEAST + 1), (7, 0)])
def test_nothing_completes_what_is_not_held(salt: int | None, shared: int) -> None:
    received = ReceivedHashes()
    first = prompt(LEAST)
    received.complete(7, b"", 0, first)
    assert received.complete(salt, first[-HASH_BYTES:], shared, b"") is None
    assert received.complete(7, first[-HASH_BYTES:], LEAST, b"") == first


def test_a_tenant_evicts_its_own_prompts_first() -> None:
    received = ReceivedHashes(4 * MIN_BYTES)
    small = prompt(LEAST)
    received.complete(1, b"", 0, small)
    for start in range(1, 6):
        received.complete(2, b"", 0, sequence(*range(start * 1000, start * 1000 + LEAST)))
    assert received.size <= 4 * MIN_BYTES
    assert received.complete(1, small[-HASH_BYTES:], LEAST, b"") == small


def test_a_sender_forgets_what_the_receiver_cannot_hold() -> None:
    sent = SentHashes(2 * MIN_BYTES)
    for session in "abc":
        sent.store(("router", 7, session), prompt(LEAST))
    assert sent.base_of(("router", 7, "a"), prompt(LEAST)) == (b"", 0)
    assert sent.base_of(("router", 7, "c"), prompt(LEAST))[1] == LEAST
    sent.forget(("router", 7, "c"))
    assert sent.base_of(("router", 7, "c"), prompt(LEAST)) == (b"", 0)


turns = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.integers(LEAST - 2, LEAST + 40),
        st.integers(LEAST - 12, LEAST + 40),
        st.booleans(),
    ),
    max_size=12,
)


@given(turns)
def test_a_receiver_has_the_prompt_or_says_that_it_lacks_the_base(
    sequences: list[tuple[str, int, int, bool]],
) -> None:
    sent, received = SentHashes(), ReceivedHashes(3 * MIN_BYTES)
    for session, blocks, other_from, restarted in sequences:
        received = ReceivedHashes(3 * MIN_BYTES) if restarted else received
        whole, key = prompt(blocks, other_from), ("router", 7, session)
        base, shared = sent.base_of(key, whole)
        sent.store(key, whole)
        got = received.complete(7, base, shared, whole[shared * HASH_BYTES :])
        assert got in (None, whole)
        if got is None:
            assert received.complete(7, b"", 0, whole) == whole
