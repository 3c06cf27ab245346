"""Native patterns match as regular expressions do, and known words have their tokens."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh._native import WordTokens
from kvmesh.frontend.tokenizer.pretokenizer import translate
from kvmesh.frontend.tokenizer.word_patterns import Node, UnsupportedPattern, word_pattern

NUMBER = (7).to_bytes(4, "little")


def words_of(*expressions: str) -> WordTokens:
    return WordTokens([word_pattern(translate(expression)) for expression in expressions], 0)


EXPRESSIONS = [
    r"a?b*c+",
    r"a{2}|a{1,3}b|b{2,}",
    r"ab(?:c|ca)?|[abc]",
    r"(?i:AB|c)a|b\s*",
    r"a*+b|[ab]++c|c",
    r"a+(?!b)|b(?=c)|c",
    r"(?:a|b(?:c|a)?)c?",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
@settings(max_examples=100)
@given(st.text(alphabet="abc "))
def test_patterns_match_as_regular_expressions_do(expression: str, text: str) -> None:
    matches = list(re.finditer("".join(each.text for each in translate(expression)), text))
    edges = sorted({0, len(text), *(m.start() for m in matches), *(m.end() for m in matches)})
    assert words_of(expression).words(text) == [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("expression", ["a+?", "(?:ab)+", "(?!ab)a", "(?=a|b)a"])
def test_other_forms_are_unsupported(expression: str) -> None:
    with pytest.raises(UnsupportedPattern):
        word_pattern(translate(expression))


@given(st.lists(st.sampled_from(["one", "two", " three", "x" * 31]), max_size=9))
def test_known_words_come_back_as_tokens(words: list[str]) -> None:
    native = words_of(r" ?[a-z]+")
    text = "!".join(words)
    assert native.find(text) == native.words(text)
    for word in set(words):
        native.keep(word, NUMBER)
    native.keep("!", NUMBER)
    found = native.find(text)
    long = [word for word in native.words(text) if len(word) > 30]
    assert [part for part in found if isinstance(part, str)] == long
    known = len(native.words(text)) - len(long)
    assert b"".join(part for part in found if isinstance(part, bytes)) == NUMBER * known


def test_the_cache_forgets_the_words_that_were_used_least() -> None:
    native = words_of(r"[a-z0-9]+")
    for number in range(200_000):
        native.keep(f"w{number}", NUMBER)
    kept = sum(native.find(f"w{number}") == [NUMBER] for number in range(200_000))
    assert 60_000 < kept <= 65_536
    assert native.find("w199999") == [NUMBER]


def test_what_does_not_fit_is_refused() -> None:
    native = words_of("a")
    for wrong in (lambda: native.find("é"), lambda: native.keep("a", b"123")):
        with pytest.raises(ValueError, match=r"ASCII|whole"):
            wrong()
    patterns: list[list[Node]] = [
        [],
        [(9, bytes(128), 0, 0, (0,))],
        [(0, bytes(128), 0, 0, (1,))],
        [(0, bytes(128), 0, 0, ())],
    ]
    for nodes in patterns:
        with pytest.raises(ValueError, match="node"):
            WordTokens([nodes], 0)
