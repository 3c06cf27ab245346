"""The judgement of pairs of runs, and the check of tokens on the wire."""

import pytest
from chat_load import Timing
from hypothesis import given
from hypothesis import strategies as st
from pairs import Ratio, outside, short_table
from rows import ROWS, Sample, TokenError, chosen


class Named:
    """A side of which only the name counts."""

    def __init__(self, name: str) -> None:
        self.name = name


def ratio(*values: float, name: str = "row: all") -> Ratio:
    return Ratio(name, "ms", list(values), [1.0] * len(values), 1.0)


def test_a_figure_moved_if_every_pair_of_enough_says_so() -> None:
    assert ratio(*[1.1] * 7).moved
    assert ratio(*[0.9] * 7).moved
    assert not ratio(*[1.1] * 6).moved
    assert not ratio(*[1.1] * 6, 0.99).moved
    assert not ratio(*[1.01] * 7).moved


def test_more_rounds_bear_stray_ones() -> None:
    assert ratio(*[1.1] * 10, 0.5).moved
    assert not ratio(*[1.1] * 9, 0.5, 0.5).moved


@given(st.integers(1, 40))
def test_the_interval_of_the_median_is_not_empty_and_narrows(rounds: int) -> None:
    assert 2 * outside(rounds) < rounds
    assert outside(rounds) <= outside(rounds + 1)


def test_the_short_table_joins_the_figures_of_a_row() -> None:
    ratios = [ratio(2.0, name="row: p50"), ratio(0.5, name="row: p99"), ratio(1, name="  row: x")]
    *_, line = short_table(ratios, Named("a"), Named("b")).splitlines()  # type: ignore[arg-type]
    assert line.replace("  ", " ") == "| row: p50 / p99, ms | 2 / 0.5 | 1 / 1 | **2.00** / 0.50 |"


def test_answers_of_another_length_fail_a_row() -> None:
    timing = Timing()
    timing.count(b'"usage": {"prompt_tokens": 36, "completion_tokens":15, "total_tokens":51}}')
    assert (timing.prompt_tokens, timing.output_tokens) == (36, 15)
    sample = Sample()
    sample.count([timing], 1, 15)
    assert sample.prompt_tokens == 36
    for answers, tokens in ((1, 16), (2, 15)):
        with pytest.raises(TokenError):
            sample.count([timing], answers, tokens)


def test_rows_are_chosen_by_the_beginnings_of_their_names() -> None:
    assert chosen("") == [*ROWS]
    assert [row.name for row in chosen("short,first")] == ["short request", "first token"]
