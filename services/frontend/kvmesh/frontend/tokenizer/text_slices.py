"""Search and split of long texts slice by slice. Pure.

A call of `re` holds the GIL, so no call gets more than a slice of text.
"""

import re
from collections.abc import Iterable, Iterator

from kvmesh.frontend.errors import InvalidRequest

SLICE = 1 << 16  # characters
MAX_RUN = 1 << 18  # characters
# Most pre-tokenizers begin a word at each of these; the encoder tests every tokenizer.
_WORD_BORDER = re.compile(
    r"""(?<=\S)(?= \S)|(?<=[A-Za-z0-9])(?=[\"(,:;<=\[{])|(?<=\S\n)(?=[A-Za-z0-9])"""
)
_PROBE = 256  # characters
_CONTEXT = 2  # characters on either side of a border that its pattern looks at
SAMPLE_TEXT = """The fox's "quick", (brown) {jump: [12, a3]} = <it>;
Next Line says 'so', it's x=1,y;z:w\n\n  Again<b>bold</b>[0]{1}(2) 4 5 a 7
café naïve (yes) "no", f(x)(y)[z]: {"key": "value", "n": 10}
日本 語です, 🦀 🦀! ?! 12 345 ' s 's — é 𐌰𐌱 𐌰 ́ ئە\t x  y \u3000 z\xa0 w
"""
_NFC_BORDER = re.compile("[\x00-\x7f\u4e00-\u9fff]")


def alternation(texts: Iterable[str]) -> str:
    """A pattern that matches the longest of `texts` at a position.

    It is a prefix tree, so matching reads each character once however many texts share a prefix.
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
    branches = "|".join(re.escape(c) + _pattern(n) for c, n in node.items() if c)  # type: ignore[arg-type]
    return f"{chain}(?:{branches}){'?' if '' in node else ''}"


def find_all(pattern: "re.Pattern[str]", text: str, longest: int) -> Iterator["re.Match[str]"]:
    """The matches of `pattern.finditer`, none longer than `longest`, found slice by slice."""
    if len(text) <= SLICE:
        return pattern.finditer(text)
    return _find_all(pattern, text, longest)


def _find_all(pattern: "re.Pattern[str]", text: str, longest: int) -> Iterator["re.Match[str]"]:
    pos = 0
    while pos < len(text):
        edge = pos + SLICE
        for match in pattern.finditer(text, pos, edge + longest):
            if match.start() >= edge:
                break
            yield match
            pos = match.end()
        pos = max(pos, edge)


def split_at_words(text: str, size: int = SLICE) -> Iterator[str]:
    """Parts of about `size` characters, split where most pre-tokenizers begin a word.

    Callers test with SAMPLE_TEXT that their tokenizer does.
    """
    return _split(_WORD_BORDER, text, size)


def split_for_nfc(text: str) -> Iterator[str]:
    """Parts that can be normalized to NFC one by one: no border composes with the text before."""
    return _split(_NFC_BORDER, text, SLICE)


def _split(border: "re.Pattern[str]", text: str, size: int) -> Iterator[str]:
    """Parts that end at the first border at least `size` characters after their start."""
    start = 0
    while len(text) - start > size:
        end = _border(border, text, start + size)
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


def _border(border: "re.Pattern[str]", text: str, start: int) -> int:
    """Offset of the first border from `start` on, or of the end of the text."""
    for pos in range(start, len(text), SLICE):
        found = border.search(text, pos, pos + SLICE + _CONTEXT)
        if found is not None:
            return found.start()
    return len(text)


def check_runs(text: str) -> None:
    """Raise InvalidRequest for MAX_RUN characters without a space, or of spaces: one huge word."""
    for start in range(0, len(text) - MAX_RUN, MAX_RUN):
        if len(text[start : start + _PROBE].split(None, 2)) > 1:
            continue  # two words, as nearly all texts have
        words = text[start : start + MAX_RUN].split(None, 1)
        if not words or len(words[0]) == MAX_RUN:
            reason = f"The prompt contains a run of more than {MAX_RUN} characters"
            raise InvalidRequest(f"{reason} without a space, or of spaces.", code="run_too_long")
