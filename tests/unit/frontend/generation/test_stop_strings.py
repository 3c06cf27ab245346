"""Stop strings: text ends before the first one, and only a possible prefix is held back."""

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.frontend.generation.output import StopMatcher


def match(stops: list[str], parts: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(part) for part in parts) + matcher.finish()
    return shown, matcher.matched


def test_text_ends_before_a_stop_string() -> None:
    assert match(["END"], ["some text E", "N", "D and more"]) == ("some text ", "END")
    assert match(["END"], ["some EN"]) == ("some EN", None)
    assert match(["b", "abc"], ["xabc"]) == ("x", "abc")
    assert match([], ["anything"]) == ("anything", None)
    assert match(["\n\n"], ["a\n", "b\n", "\nc"]) == ("a\nb", "\n\n")


def test_only_a_possible_prefix_of_a_stop_string_is_held() -> None:
    matcher = StopMatcher(["<stop>"])
    assert matcher.feed("text <st") == "text "
    assert matcher.feed("ill") == "<still"


@given(
    st.text("ab.", max_size=30),
    st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_the_match_does_not_depend_on_the_chunks(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    parts = [text[a:b] for a, b in pairwise(edges)]
    shown, matched = match(stops, parts)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert (matched is not None) == bool(ends)
    assert text.startswith(shown)
    if matched is not None:
        assert text[len(shown) :].startswith(matched)


def test_matching_a_long_stop_string_takes_linear_time() -> None:
    stop = Counted("a" * 4095 + "b")
    matcher = StopMatcher([stop])
    matcher.feed("a" * 4095)
    stop.looks = 0
    assert matcher.feed("a" * 100) == "a" * 100
    assert matcher.feed("b") == ""
    assert matcher.matched == stop
    assert stop.looks < 1000


class Counted(str):
    """Counts how often a character of the string is read."""

    looks = 0

    def __getitem__(self, key: Any) -> str:
        self.looks += 1 if isinstance(key, int) else len(self)
        return super().__getitem__(key)

    def startswith(self, *args: Any) -> bool:
        self.looks += len(self)
        return super().startswith(*args)
