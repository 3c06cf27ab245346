"""Long texts a slice at a time: where markers stand in them, and where they may be cut. Pure.

One call of a C library keeps every other thread waiting, so none may get more than a slice.
"""

import re
from collections.abc import Iterable, Iterator

from kvmesh.frontend.errors import InvalidRequest

SLICE = 1 << 16
RUN = 1 << 18
# Pre-tokenizers begin a word at all of these; whether a tokenizer does is tried, not believed.
_PLACE = re.compile(
    r"""(?<=\S)(?= \S)|(?<=[A-Za-z0-9])(?=[\"(,:;<=\[{])|(?<=\S\n)(?=[A-Za-z0-9])"""
)
_AROUND = 2  # characters on either side of a border that tell that it is one
PROSE = """The fox's "quick", (brown) {jump: [12, a3]} = <it>;
Next Line says 'so', it's x=1,y;z:w\n\n  Again<b>bold</b>[0]{1}(2) 4 5 a 7
café naïve (yes) "no", f(x)(y)[z]: {"key": "value", "n": 10}
日本 語です, 🦀 🦀! ?! 12 345 ' s 's — é 𐌰𐌱 𐌰 ́ ئە\t x  y \u3000 z\xa0 w
"""
_COMPOSED = re.compile("[\x00-\x7f\u4e00-\u9fff]")


def any_of(texts: Iterable[str]) -> str:
    """A pattern of the longest of `texts` that stands at a place.

    Each character is looked at once, however many texts begin with it.
    """
    tree: dict[str, dict[str, object]] = {}
    for text in texts:
        node: dict[str, object] = tree  # type: ignore[assignment]  # a tree of itself
        for char in text:
            node = node.setdefault(char, {})  # type: ignore[assignment]
        node[""] = {}
    return _pattern(tree)  # type: ignore[arg-type]


def _pattern(node: dict[str, object]) -> str:
    chain = ""
    while len(node) == 1 and "" not in node:
        ((char, node),) = node.items()  # type: ignore[assignment]
        chain += re.escape(char)
    if set(node) == {""}:
        return chain
    ways = "|".join(re.escape(c) + _pattern(n) for c, n in node.items() if c)  # type: ignore[arg-type]
    return f"{chain}(?:{ways}){'?' if '' in node else ''}"


def find_all(pattern: "re.Pattern[str]", text: str, longest: int) -> Iterator["re.Match[str]"]:
    """The matches of `pattern.finditer`, where none is longer than `longest`."""
    place = 0
    while place < len(text):
        edge = place + SLICE
        for match in pattern.finditer(text, place, edge + longest):
            if match.start() >= edge:
                break
            yield match
            place = match.end()
        place = max(place, edge)


def cut(text: str, size: int = SLICE) -> Iterator[str]:
    """Parts of about `size` characters whose words are those of the whole, if they are of PROSE."""
    return _parts(_PLACE, text, size)


def composed_apart(text: str) -> Iterator[str]:
    """Parts that become NFC each by itself: nothing composes with a character before these."""
    return _parts(_COMPOSED, text, SLICE)


def _parts(border: "re.Pattern[str]", text: str, size: int) -> Iterator[str]:
    """Each part but the first begins at the first border behind `size` characters."""
    start = 0
    while len(text) - start > size:
        end = _border(border, text, start + size)
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


def _border(border: "re.Pattern[str]", text: str, start: int) -> int:
    """Where the first border from `start` on is, or the end of the text."""
    for place in range(start, len(text), SLICE):
        found = border.search(text, place, place + SLICE + _AROUND)
        if found is not None:
            return found.start()
    return len(text)


def check_runs(text: str) -> None:
    """Raise InvalidRequest for a run without spaces, or of spaces, that may be one endless word."""
    for start in range(0, len(text) - RUN, RUN):
        words = text[start : start + RUN].split(None, 1)
        if not words or len(words[0]) == RUN:
            reason = f"The prompt has more than {RUN} characters in a row without any space"
            raise InvalidRequest(f"{reason}, or of spaces alone.", code="run_too_long")
