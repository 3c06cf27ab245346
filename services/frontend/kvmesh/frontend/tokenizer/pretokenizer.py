"""Pre-tokenization of byte-level tokenizers with Python's `re`.

Tokenizer files split text into words by Oniguruma regular expressions. This module translates the
few forms that nearly all of them use. It gets the members of each character class from the
`tokenizers` library, so that two versions of Unicode cannot disagree. Any other tokenizer raises
UnsupportedTokenizer, and the library then pre-tokenizes its texts.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import msgspec
from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import Split

from kvmesh.frontend.tokenizer.text_slices import SAMPLE_TEXT, SLICE, split_at_words
from kvmesh.frontend.tokenizer.word_patterns import (
    Element,
    Node,
    UnsupportedPattern,
    word_pattern,
)

BATCH = 2048
SMALL_BATCH = 4  # words found while holding the GIL in long texts, where words may be long
SHORT = 2 * SLICE
# The BMP and emoji: more would slow down Python's classes. The library handles other texts.
_SUPPORTED = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10000), *range(0x1F000, 0x1FB00)]))
_UNSUPPORTED = re.compile("[\U00010000-\U0001efff\U0001fb00-\U0010ffff]")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CLASS = r"\\[pP]\{\^?\w+\}|\\[sdw]"
_ESCAPE = r"\\(?:[^A-Za-z0-9]|[rnt])"
_ELEMENT = re.compile(
    rf"(?P<set>\[\^?(?:{_CLASS}|{_ESCAPE}|[^\[\]\\&]|&(?!&))+\])"
    rf"|(?P<class>{_CLASS})|(?P<complement>\\[SDW])|(?P<escape>{_ESCAPE})"
    r"|(?P<open>\((?:\?(?:i?:|[!=])|(?!\?)))|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<repeat>[?*+][?+]?|\{\d+(?:,\d*)?\}(?![?+]))"
    r"|(?P<plain>[^\\()\[\]{}.^$*+?|])",
    re.DOTALL,
)


class UnsupportedTokenizer(Exception):
    """The tokenizer splits text in a way that this package does not implement."""


class Splitter:
    """Splits text into the tokenizer's words; raises UnsupportedTokenizer if it cannot.

    `splittable`: the words of the parts of `split_at_words` are those of the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        elements = [translate(expression) for expression in _expressions(tokenizer)]
        try:
            self._patterns = [re.compile("".join(each.text for each in e)) for e in elements]
        except re.error as error:
            raise UnsupportedTokenizer(f"Python cannot read a pattern: {error}") from error
        if any(pattern.match("") for pattern in self._patterns):
            raise UnsupportedTokenizer("a word may be empty")
        parts = (words for part in split_at_words(SAMPLE_TEXT, 1) for words in self._words(part))
        self.splittable = [*chain(*parts)] == [*chain(*self._words(SAMPLE_TEXT))]

        self._elements = elements

    def native_patterns(self) -> list[list[Node]] | None:
        """The patterns for `kvmesh._native.WordTokens`; None if it does not implement one."""
        try:
            return [word_pattern(elements) for elements in self._elements]
        except UnsupportedPattern:
            return None

    def supports(self, text: str) -> bool:
        """True if the classes of all characters of `text` are known."""
        return text.isascii() or _UNSUPPORTED.search(text) is None

    def words(self, text: str) -> Iterator[list[str]]:
        """All words of a supported text, in batches."""
        for part in split_at_words(text) if self.splittable else (text,):
            yield from self._words(part)

    def _words(self, text: str) -> Iterator[list[str]]:
        batches: Iterable[list[str]] = [[text]]
        for pattern in self._patterns:
            batches = _split_all(pattern, batches)
        yield from batches


def _split_all(pattern: "re.Pattern[str]", batches: Iterable[list[str]]) -> Iterator[list[str]]:
    for batch in batches:
        for piece in batch:
            yield from _split(pattern, piece)


def _split(pattern: "re.Pattern[str]", text: str) -> Iterator[list[str]]:
    """Matches and the texts between them, in order."""
    short = len(text) <= SHORT
    if short:
        whole = pattern.findall(text)
        if sum(map(len, whole)) == len(text):
            yield whole
            return
    end = 0
    matches = pattern.finditer(text)
    while found := list(islice(matches, BATCH if short else SMALL_BATCH)):
        parts = list(map(itemgetter(0), found))
        start, end = end, found[-1].end()
        yield parts if sum(map(len, parts)) == end - start else _with_gaps(text, start, found)
    if end < len(text):
        yield [text[end:]]


def _with_gaps(text: str, end: int, found: "list[re.Match[str]]") -> list[str]:
    parts = []
    for match in found:
        if end < match.start():
            parts.append(text[end : match.start()])
        parts.append(match[0])
        end = match.end()
    return parts


class _Step(msgspec.Struct):
    """One pre-tokenizer of a tokenizer file."""

    type: str
    pretokenizers: "list[_Step]" = []
    pattern: dict[str, str] = {}
    behavior: str = ""
    invert: bool = False
    add_prefix_space: bool = True
    use_regex: bool = True


def _expressions(tokenizer: Tokenizer) -> list[str]:
    """Regular expressions, each of which splits the words of the one before."""
    pre_tokenizer: Any = tokenizer.pre_tokenizer
    if pre_tokenizer is None:
        raise UnsupportedTokenizer("there is no pre-tokenizer")
    step = msgspec.json.decode(pre_tokenizer.__getstate__(), type=_Step)
    steps = step.pretokenizers if step.type == "Sequence" else [step]
    if not steps or steps[-1].type != "ByteLevel" or steps[-1].add_prefix_space:
        raise UnsupportedTokenizer("the last step does not map words to bytes")
    expressions = [_expression(step) for step in steps[:-1]]
    return [*expressions, _GPT2] if steps[-1].use_regex else expressions


def _expression(step: _Step) -> str:
    if step.type != "Split" or step.behavior != "Isolated" or step.invert:
        raise UnsupportedTokenizer(f"step {step.type} {step.behavior}")
    if "String" in step.pattern:
        return re.sub(r"(\W)", r"\\\1", step.pattern["String"])
    return step.pattern["Regex"]


def translate(expression: str) -> list[Element]:
    """Translate Oniguruma's regular expression to Python's, equivalent for supported texts."""
    elements: list[Element] = []
    folding: list[bool] = [False]
    pos = 0
    while pos < len(expression):
        found = _ELEMENT.match(expression, pos)
        if found is None:
            raise UnsupportedTokenizer(f"{expression[pos:]!r} in {expression!r}")
        pos = found.end()
        if found["open"] is not None:
            folding.append(folding[-1] or found["open"] == "(?i:")
        elif found["close"] is not None and len(folding) > 1:
            folding.pop()
        is_symbol = found.lastgroup in ("open", "close", "bar", "repeat")
        elements.append(Element(_translate_element(found, folding[-1]), is_symbol))
    return elements


def _translate_element(found: "re.Match[str]", fold: bool) -> str:
    text = found[0]
    match found.lastgroup:
        case "set" if not fold:
            return re.sub(_CLASS, lambda inner: _members(inner[0]), text)
        case "class":
            return f"[{_members(text)}]"
        case "complement":
            return f"[^{_members(text.lower())}]"
        case "open":
            return "(?:" if text in ("(", "(?i:") else text
        case "plain":
            return f"[{_members(f'(?i:{text})')}]" if fold and text.isalpha() else re.escape(text)
        case "escape" | "close" | "bar" | "repeat":
            return text
    raise UnsupportedTokenizer(f"case-insensitive set {text}")


@cache
def _members(expression: str) -> str:
    """Supported characters that match `expression`, as ranges of a Python character set."""
    try:
        gaps = Split(Regex(expression), "removed").pre_tokenize_str(_SUPPORTED)
    except Exception as error:  # the library raises nothing narrower
        raise UnsupportedTokenizer(f"{expression}: {error}") from error
    edges = [0, *(edge for _, span in gaps for edge in span), len(_SUPPORTED)]
    ranges = [(a, b - 1) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    if not ranges:
        raise UnsupportedTokenizer(f"no character matches {expression}")
    return "".join(f"\\U{ord(_SUPPORTED[a]):08x}-\\U{ord(_SUPPORTED[b]):08x}" for a, b in ranges)
