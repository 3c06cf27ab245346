"""Long texts in slices: markers are found, and nothing is lost."""

import re

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.frontend.tokenizer import text_slices
from kvmesh.frontend.tokenizer.text_slices import (
    alternation,
    find_all,
    split_at_words,
    split_for_nfc,
)


@given(st.lists(st.sampled_from(["<a>", "<ab>", "<a", "b>", "<", "x" * 50]), max_size=60))
def test_markers_are_found_across_slices(parts: list[str]) -> None:
    markers = ["<a>", "<ab>", "<a"]
    text = "".join(parts)
    longest_first = "|".join(re.escape(m) for m in sorted(markers, key=len, reverse=True))
    wanted = [(m.start(), m[0]) for m in re.finditer(longest_first, text)]
    pattern = re.compile(alternation(markers))
    before, text_slices.SLICE = text_slices.SLICE, 40
    try:
        found = [(m.start(), m[0]) for m in find_all(pattern, text, 4)]
    finally:
        text_slices.SLICE = before
    assert found == wanted


@given(st.text(alphabet='ab 1"(,\né日\u0301', max_size=200))
def test_slices_add_up_to_the_text(text: str) -> None:
    assert "".join(split_at_words(text, 5)) == text
    assert "".join(split_for_nfc(text)) == text
