"""Comparison of prompts: the first difference, its way, and how long it has come again."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.bus.messages import PromptChange, SessionPrompt
from kvmesh.frontend.cache_account.comparison import (
    PromptComparison,
    common_tokens,
    compare,
    described,
)
from kvmesh.frontend.cache_account.differences import PromptDifference

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def packed(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def text(tokens: bytes) -> str:
    return " ".join(map(str, array("I", tokens)))


def system(token: int) -> PromptDifference:
    return PromptDifference(
        PromptChange(token=token, part="system", way="", index=0, offset=2 * token)
    )


def comparison(
    now: list[int], before: list[int], output: list[int], last: PromptChange | None = None
) -> PromptComparison:
    old = SessionPrompt(
        packed(before), salt=1, request="r", time=2.0, output=packed(output), change=last
    )
    return compare(packed(now), 1, old, system, text)


@given(TOKENS, TOKENS)
def test_the_common_prefix_is_that_of_the_lists(one: list[int], other: list[int]) -> None:
    expected = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    assert common_tokens(packed(one), packed(other)) == expected


def test_a_prompt_that_continues_the_last_one_has_not_changed() -> None:
    found = comparison([1, 2, 3, 4, 5], [1, 2], [3])
    assert (found.common, found.length, found.change) == (3, 3, None)
    assert found.computed == 2  # the last token's KV is never computed


def test_a_prompt_that_ends_early_has_not_changed() -> None:
    assert comparison([1, 2], [1, 2, 3, 4], []).change is None


def test_the_first_difference_has_a_part_and_both_texts() -> None:
    found = comparison([1, 2, 19, 4], [1, 2, 13, 4], [5])
    # the first character of the token is the same
    assert found.change == PromptChange(token=2, part="system", way="changed", index=0, offset=5)
    assert (found.before, found.after) == ("13 4 5", "19 4")


def test_what_was_put_in_or_taken_out_is_told_from_what_follows() -> None:
    tail = list(range(10, 60))
    inserted = comparison([1, 2, 7, 8, *tail], [1, 2, *tail], [])
    removed = comparison([1, 2, *tail], [1, 2, 7, 8, *tail], [])
    assert inserted.change is not None
    assert inserted.change.way == "inserted"
    assert removed.change is not None
    assert removed.change.way == "removed"


def test_changes_of_one_part_in_a_row_are_counted() -> None:
    last = PromptChange(token=1, part="system", way="changed", index=0, turns=2)
    found = comparison([1, 9], [1, 2, 3], [], last)
    assert found.change is not None
    assert found.change.turns == 3
    other = PromptChange(token=1, part="tool", way="changed", index=0, turns=2)
    found = comparison([1, 9], [1, 2, 3], [], other)
    assert found.change is not None
    assert found.change.turns == 1


def test_a_change_is_described_by_its_part() -> None:
    names = [
        ("system", "system", "the system prompt"),
        ("tool", "read", "tool 2 (read)"),
        ("message", "user", "message 2 (user)"),
        ("thinking", "assistant", "the thinking of message 2"),
        ("call", "read", "the tool call in message 2 (read)"),
        ("prompt", None, "the prompt"),
    ]
    for part, name, words in names:
        assert described(PromptChange(token=0, part=part, way="", index=2, name=name)) == words
