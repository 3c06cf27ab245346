"""SessionBlocks against a model that compares every block of every session."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.retention.session_blocks import (
    MAX_COMPARED,
    PromptTail,
    SessionBlocks,
    common_prefix,
)

NAMES = "abcd"
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def chain(tokens: list[int]) -> list[int]:
    """Hashes over whole prefixes, like sequence hashes."""
    return [hash(tuple(tokens[: end + 1])) for end in range(len(tokens))]


def tails(found: list[PromptTail[int]]) -> set[int]:
    return {block for tail in found for block in tail.prompt[tail.start :]}


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(NAMES), st.lists(PROMPTS, max_size=3), min_size=1),
    st.sets(st.sampled_from(NAMES), min_size=1),
)
def test_release_frees_exactly_what_no_live_session_uses(
    prompts: dict[str, list[list[int]]], closed: set[str]
) -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    newest: dict[str, list[int]] = {}
    for name, turns in prompts.items():
        grown: list[int] = []
        for turn in turns:
            grown = [*grown, *turn]
            assert tails(book.record(name, chain(grown), 1.0)) == set()
        if turns:
            newest[name] = chain(grown)
    live = {block for name, blocks in newest.items() if name not in closed for block in blocks}
    mine = {block for name, blocks in newest.items() if name in closed for block in blocks}
    assert tails(book.release(sorted(closed))) == mine - live
    assert book.release(sorted(closed)) == []


@given(PROMPTS, PROMPTS)
def test_common_prefix_ends_at_the_first_difference(one: list[int], other: list[int]) -> None:
    first, second = chain(one), chain(other)
    expected = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    assert common_prefix(first, second) == expected


@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]])
def test_what_sessions_have_begun_with_outlives_them_all(order: list[str]) -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    book.record("a", chain([1, 2, 3]), 1.0)
    book.record("b", chain([1, 2, 9]), 1.0)
    book.record("b", chain([1, 2, 9, 10]), 2.0)
    book.record("a", chain([1, 5]), 3.0)  # compacted: it shares one block with its own earlier one
    starts = {session: book.release([session])[0].start for session in order}
    assert starts == {"a": 1, "b": 2}
    book.record("c", chain([7, 8]), 4.0)
    assert book.release(["c"]) == [PromptTail(chain([7, 8]), 0)]
    book.record("d", chain([7, 9]), 5.0)  # begins as a session that has ended did
    assert book.release(["d"]) == [PromptTail(chain([7, 9]), 1)]


def test_two_sessions_share_a_prefix() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    book.record("a", chain([1, 2, 3, 4]), 1.0)
    book.record("b", chain([1, 2, 9]), 1.0)
    assert book.release(["a"]) == [PromptTail(chain([1, 2, 3, 4]), 2)]
    assert book.release(["a", "unknown"]) == []
    assert book.release(["b"]) == [PromptTail(chain([1, 2, 9]), 2)]  # the next may begin so


def test_a_prompt_supersedes_a_different_tail() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    book.record("a", chain([1, 2, 3, 4]), 1.0)
    book.record("other", chain([1, 2, 3]), 1.0)
    assert tails(book.record("a", chain([1, 7]), 2.0)) == {chain([1, 2, 3, 4])[3]}
    assert tails(book.release(["a"])) == {chain([1, 7])[1]}


def test_generated_blocks_belong_to_the_session() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    prompt = chain([1, 2])
    book.record("a", prompt, 1.0)
    prompt.append(hash("generated"))
    assert tails(book.release(["a"])) == set(prompt)


def test_a_prefix_of_the_last_prompt_supersedes_nothing() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    book.record("a", chain([1, 2, 3]), 1.0)
    assert book.record("a", chain([1, 2]), 2.0) == []
    assert tails(book.release(["a"])) == set(chain([1, 2, 3]))


def test_prompts_without_a_common_prefix_coexist() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    book.record("a", chain([1, 2]), 1.0)
    assert book.record("a", chain([5, 6]), 2.0) == []
    assert tails(book.release(["a"])) == {*chain([1, 2]), *chain([5, 6])}


def test_a_session_that_returns_to_a_prompt_branches() -> None:
    """For example one prompt_cache_key for all conversations of an application."""
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=1000)
    book.record("key", chain([1, 2, 3]), 1.0)
    assert tails(book.record("key", chain([1, 5]), 2.0)) == set(chain([1, 2, 3])[1:])
    assert book.record("key", chain([1, 2, 3, 4]), 3.0) == []
    assert book.record("key", chain([1, 5, 6]), 4.0) == []
    assert tails(book.release(["key"])) == {*chain([1, 2, 3, 4]), *chain([1, 5, 6])}


def test_idle_sessions_are_forgotten() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=10.0, max_blocks=1000)
    book.record("idle", chain([1, 2]), 1.0)
    book.record("busy", chain([1, 3]), 12.0)
    assert "idle" not in book
    assert tails(book.release(["busy"])) == set(chain([1, 3]))


def test_memory_is_bounded() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=1e9, max_blocks=100)
    for i in range(1000):
        book.record(f"s{i}", chain([1, i, i, i, i]), 1.0)
        book.record("growing", chain([7] * (i % 20)), 1.0)
    assert len(book) <= 22
    assert book.shared_blocks(chain([1, 999, 999])) == 3
    assert book.shared_blocks(chain([1, 999, 999]), except_session="s999") == 1


class Counting(list[int]):
    """A prompt that counts how often its blocks are read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def test_a_new_session_is_compared_with_few_of_many_that_begin_like_it() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=100_000)
    for number in range(3 * MAX_COMPARED):
        book.record(f"s{number}", [0, 2 * number + 1], 1.0)
    prompt = Counting([0, 2])
    book.record("new", prompt, 1.0)
    assert 0 < prompt.reads < 2 * MAX_COMPARED
    assert book.release(["new"]) == [PromptTail(prompt, 1)]


def test_the_prompts_of_released_sessions_are_bounded() -> None:
    book: SessionBlocks[int] = SessionBlocks(idle_s=100.0, max_blocks=10)
    for root in (1, 2, 3):
        book.record("a", chain([root, 5, 6, 7]), 1.0)
        book.release(["a"])
    for root, start in ((1, 0), (3, 1)):
        book.record("b", chain([root, 8]), 2.0)
        assert book.release(["b"])[0].start == start
