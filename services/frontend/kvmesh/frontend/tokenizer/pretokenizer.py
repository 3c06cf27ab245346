"""How a byte-level tokenizer cuts text into words, as patterns of Python.

Tokenizers describe the cut by regular expressions for the Oniguruma engine. Those written in the
few forms that nearly all use are put into Python's; what a class of characters holds is asked of
the `tokenizers` library itself, so that no two versions of Unicode can disagree. Everything else
is refused: the library then cuts such a tokenizer's texts.
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

from kvmesh.frontend.tokenizer.text_slices import PROSE, SLICE, cut

BATCH = 2048
FEW = 4  # words found at once, with all other threads waiting, where some may be endless
SHORT = 2 * SLICE
# The BMP and emoji. More would make Python's classes slow: texts with more are the library's.
_KNOWN = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10000), *range(0x1F000, 0x1FB00)]))
_BEYOND = re.compile("[\U00010000-\U0001efff\U0001fb00-\U0010ffff]")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CLASS = r"\\[pP]\{\^?\w+\}|\\[sdw]"
_ESCAPE = r"\\(?:[^A-Za-z0-9]|[rnt])"
_FORM = re.compile(
    rf"(?P<set>\[\^?(?:{_CLASS}|{_ESCAPE}|[^\[\]\\&]|&(?!&))+\])"
    rf"|(?P<class>{_CLASS})|(?P<complement>\\[SDW])|(?P<escape>{_ESCAPE})"
    r"|(?P<open>\((?:\?(?:i?:|[!=])|(?!\?)))|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<repeat>[?*+][?+]?|\{\d+(?:,\d*)?\}(?![?+]))"
    r"|(?P<plain>[^\\()\[\]{}.^$*+?|])",
    re.DOTALL,
)


class NotUnderstood(Exception):
    """The tokenizer cuts text in a way that is not known here."""


class Splitter:
    """Cuts text into the words that the tokenizer would make; raises NotUnderstood if it cannot."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            self._patterns = [re.compile(translate(form)) for form in _forms(tokenizer)]
        except re.error as error:
            raise NotUnderstood(f"Python cannot read a pattern: {error}") from error
        if any(pattern.match("") for pattern in self._patterns):
            raise NotUnderstood("a word may be empty")
        apart = (words for part in cut(PROSE, 1) for words in self._words(part))
        self._cuts = [*chain(*apart)] == [*chain(*self._words(PROSE))]

    def knows(self, text: str) -> bool:
        """Whether all characters of `text` are among those whose classes are known."""
        return text.isascii() or _BEYOND.search(text) is None

    def words(self, text: str) -> Iterator[list[str]]:
        """All words, some at a time; `text` must be known."""
        for part in cut(text) if self._cuts else (text,):
            yield from self._words(part)

    def _words(self, text: str) -> Iterator[list[str]]:
        batches: Iterable[list[str]] = [[text]]
        for pattern in self._patterns:
            batches = _cut(pattern, batches)
        yield from batches


def _cut(pattern: "re.Pattern[str]", batches: Iterable[list[str]]) -> Iterator[list[str]]:
    for batch in batches:
        for piece in batch:
            yield from _parts(pattern, piece)


def _parts(pattern: "re.Pattern[str]", text: str) -> Iterator[list[str]]:
    """What matches and what lies between matches, in order."""
    short = len(text) <= SHORT
    if short:
        whole = pattern.findall(text)
        if sum(map(len, whole)) == len(text):
            yield whole
            return
    end = 0
    matches = pattern.finditer(text)
    while found := list(islice(matches, BATCH if short else FEW)):
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


def _forms(tokenizer: Tokenizer) -> list[str]:
    """Regular expressions, each to be applied to what the one before it leaves."""
    held: Any = tokenizer.pre_tokenizer
    if held is None:
        raise NotUnderstood("there is no pre-tokenizer")
    whole = msgspec.json.decode(held.__getstate__(), type=_Step)
    steps = whole.pretokenizers if whole.type == "Sequence" else [whole]
    if not steps or steps[-1].type != "ByteLevel" or steps[-1].add_prefix_space:
        raise NotUnderstood("words do not become bytes at the end")
    forms = [_form(step) for step in steps[:-1]]
    return [*forms, _GPT2] if steps[-1].use_regex else forms


def _form(step: _Step) -> str:
    if step.type != "Split" or step.behavior != "Isolated" or step.invert:
        raise NotUnderstood(f"a step is {step.type} {step.behavior}")
    if "String" in step.pattern:
        return re.sub(r"(\W)", r"\\\1", step.pattern["String"])
    return step.pattern["Regex"]


def translate(form: str) -> str:
    """Oniguruma's regular expression as one of Python's that matches the same in known texts."""
    parts: list[str] = []
    folding: list[bool] = [False]
    place = 0
    while place < len(form):
        found = _FORM.match(form, place)
        if found is None:
            raise NotUnderstood(f"{form[place:]!r} in {form!r}")
        place = found.end()
        if found["open"] is not None:
            folding.append(folding[-1] or found["open"] == "(?i:")
        elif found["close"] is not None and len(folding) > 1:
            folding.pop()
        parts.append(_translated(found, folding[-1]))
    return "".join(parts)


def _translated(found: "re.Match[str]", fold: bool) -> str:
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
    raise NotUnderstood(f"a set that ignores case: {text}")


@cache
def _members(expression: str) -> str:
    """The known characters that match `expression`, as ranges within a set of Python's."""
    try:
        gaps = Split(Regex(expression), "removed").pre_tokenize_str(_KNOWN)
    except Exception as error:  # the library raises nothing narrower
        raise NotUnderstood(f"{expression}: {error}") from error
    edges = [0, *(edge for _, span in gaps for edge in span), len(_KNOWN)]
    held = [(a, b - 1) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    if not held:
        raise NotUnderstood(f"nothing is {expression}")
    return "".join(f"\\U{ord(_KNOWN[a]):08x}-\\U{ord(_KNOWN[b]):08x}" for a, b in held)
