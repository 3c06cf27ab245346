"""Prompt deltas in blocks, from sender to receiver."""

from array import array
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.bus.messages import Fetch, Offer
from kvmesh.prompt_delta.blocks import (
    MIN_BLOCKS,
    BlockHashes,
    BlockPromptCache,
    SentBlockPromptCache,
)

MOST = 8 * MIN_BLOCKS


def named(*parts: tuple[int, int]) -> BlockHashes:
    """A prompt of consecutive runs of blocks: (seed, number of blocks)."""
    digests, previous = bytearray(), b""
    for seed, count in parts:
        for _ in range(count):
            previous = blake2b(previous + bytes([seed]), digest_size=16).digest()
            digests += previous
    words = array("Q", bytes(digests))
    return BlockHashes(bytes(digests), words[::2].tobytes(), words[1::2].tobytes())


def offer(names: BlockHashes) -> Offer:
    return Offer(1, 0, names.digests, names.sequence_hashes, names.local, 5)


def fetch(names: BlockHashes) -> Fetch:
    return Fetch(1, "r", 0, names.digests, names.sequence_hashes, names.local, 5, 0.0, 0.0, 0.0)


def completed(received: BlockPromptCache, message: Offer | Fetch) -> BlockHashes | None:
    """The complete prompt of a message, stored; None if its base is missing."""
    rest = BlockHashes(message.digests, message.sequence_hashes, message.local)
    whole = received.complete(message.base, message.shared, rest)
    if whole is not None:
        received.store(whole, message.base)
    return whole


def exchange(sent: SentBlockPromptCache, received: BlockPromptCache, names: BlockHashes) -> Offer:
    """Send a prompt, again in full if incomplete; returns the last message."""
    message = sent.shorten(offer(names))
    whole = completed(received, message)
    if whole is None:
        sent.forget(message.base)
        message = offer(names)
        whole = completed(received, message)
    assert whole == names
    sent.store(names.digests, message.base)
    return message


lengths = st.integers(1, 3 * MIN_BLOCKS)
prompts = st.lists(st.tuples(st.integers(0, 2), lengths), min_size=1, max_size=3)


@given(st.lists(prompts, max_size=25), st.integers(0, MOST), st.integers(0, MOST))
def test_the_receiver_rebuilds_every_prompt(
    told_of: list[list[tuple[int, int]]], sender: int, keeper: int
) -> None:
    sent, received = SentBlockPromptCache(sender), BlockPromptCache(keeper)
    for parts in told_of:
        exchange(sent, received, named(*parts))
        assert received.blocks <= keeper
        assert sent.blocks <= sender


@given(st.lists(prompts, max_size=25), st.integers(0, MOST))
def test_in_order_nothing_is_sent_twice(told_of: list[list[tuple[int, int]]], most: int) -> None:
    sent, received = SentBlockPromptCache(most), BlockPromptCache(most)
    for parts in told_of:
        names = named(*parts)
        message = sent.shorten(offer(names))
        assert completed(received, message) == names
        sent.store(names.digests, message.base)
        assert received.blocks == sent.blocks


def test_a_growing_prompt_sends_what_it_adds() -> None:
    sent, received = SentBlockPromptCache(MOST), BlockPromptCache(MOST)
    for length in range(MIN_BLOCKS, 4 * MIN_BLOCKS, 7):
        message = exchange(sent, received, named((0, length)))
        assert message.shared == (length - 7 if length > MIN_BLOCKS else 0)
        assert received.blocks == length
    again = sent.shorten(fetch(named((0, length))))
    assert (again.digests, again.sequence_hashes, again.local, again.shared) == (
        b"",
        b"",
        b"",
        length,
    )


@pytest.mark.parametrize("common", [MIN_BLOCKS, MIN_BLOCKS + 5, 3 * MIN_BLOCKS - 1])
def test_a_diverging_prompt_is_stored_besides(common: int) -> None:
    sent, received = SentBlockPromptCache(MOST), BlockPromptCache(MOST)
    whole = named((0, 3 * MIN_BLOCKS))
    exchange(sent, received, whole)
    message = exchange(sent, received, named((0, common), (1, 9)))
    assert message.shared == common
    assert len(message.sequence_hashes) == 9 * 8
    assert sent.shorten(offer(whole)).shared == 3 * MIN_BLOCKS
    assert received.blocks == 3 * MIN_BLOCKS + common + 9


def test_a_prefix_of_a_stored_prompt_is_not_stored_twice() -> None:
    sent, received = SentBlockPromptCache(MOST), BlockPromptCache(MOST)
    exchange(sent, received, named((0, 3 * MIN_BLOCKS)))
    message = exchange(sent, received, named((0, 2 * MIN_BLOCKS)))
    assert (message.shared, message.digests) == (2 * MIN_BLOCKS, b"")
    assert received.blocks == 3 * MIN_BLOCKS


def test_an_evicted_base_leads_to_the_whole_prompt() -> None:
    sent = SentBlockPromptCache(MOST)
    exchange(sent, BlockPromptCache(MOST), named((0, MIN_BLOCKS)))
    longer = named((0, MIN_BLOCKS + 1))
    restarted = BlockPromptCache(MOST)
    assert exchange(sent, restarted, longer) == offer(longer)
    assert exchange(sent, restarted, longer).shared == MIN_BLOCKS + 1


@pytest.mark.parametrize("shared", [-1, 0, MIN_BLOCKS + 1])
def test_no_more_than_the_base_can_be_shared(shared: int) -> None:
    received, names = BlockPromptCache(MOST), named((0, MIN_BLOCKS))
    received.store(names)
    assert received.complete(names.digests[-16:], shared, BlockHashes(b"")) is None


def test_without_a_cache_prompts_are_sent_whole() -> None:
    sent, names = SentBlockPromptCache(0), named((0, 2 * MIN_BLOCKS))
    sent.store(names.digests, b"")
    assert sent.shorten(offer(names)) == offer(names)
