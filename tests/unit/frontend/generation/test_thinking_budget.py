"""The end of thinking at its budget, token by token."""

import pytest

from kvmesh.frontend.generation.thinking_budget import READ, ThinkingBudget

END = [90, 91]


class Thinking:
    """A pipeline whose tokens are thinking from `first` to `last`, of which all have text."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last, self._fed = first, last, 0

    def feed(self, count: int) -> None:
        self._fed += count

    @property
    def reasoning_tokens(self) -> int:
        return max(min(self._fed, self._last) - self._first, 0)

    @property
    def thinks(self) -> bool:
        return self._first < self._fed <= self._last

    @property
    def began(self) -> bool:
        return self._fed > self._first


def ended_at(budget: ThinkingBudget, pipeline: Thinking, tokens: list[int]) -> int | None:
    """The number of tokens after which the thinking is ended; None if it is not."""
    at = 0
    while at < len(tokens) and budget.open:
        count = min(budget.room(pipeline), len(tokens) - at)  # type: ignore[arg-type]
        pipeline.feed(count)
        at += count
        if budget.exceeded(pipeline, count, tokens[at:]):  # type: ignore[arg-type]
            return at
    return None


@pytest.mark.parametrize(("limit", "first", "expected"), [(5, 0, 5), (5, 2, 7), (50, 0, None)])
def test_thinking_is_ended_after_its_last_token(
    limit: int, first: int, expected: int | None
) -> None:
    budget = ThinkingBudget(limit, END, begins=first == 0)
    assert ended_at(budget, Thinking(first, 40), [1] * 60) == expected
    assert not budget.open


def test_an_answer_that_ends_its_thinking_itself_is_left_alone() -> None:
    tokens = [1] * 5 + END + [2] * 20
    assert ended_at(ThinkingBudget(5, END, True), Thinking(0, 5), tokens) is None


def test_a_budget_of_nothing_ends_thinking_before_it_begins() -> None:
    assert ended_at(ThinkingBudget(0, END, True), Thinking(0, 40), [1] * 60) == 0


def test_an_answer_without_thinking_closes_its_budget() -> None:
    class Silent(Thinking):
        @property
        def thinks(self) -> bool:
            return False

    budget = ThinkingBudget(5, END, False)
    assert ended_at(budget, Silent(READ * 2, READ * 3), [1] * READ * 2) is None
    assert not budget.open
