"""Spells a workload's prompts as words; equal prefixes become equal text."""

import numpy as np

from kvmesh.demo.corpus import words
from kvmesh.runtime.lru import LruCache
from kvmesh.workload.tree import TokenSegment, Tree, mix

CACHE_CHARACTERS = 64 << 20


class Speller:
    """Spells prompts for a tokenizer with `tokens_per_word` tokens per average word.

    Each word of the list is one token of the demo model. `overhead` is the number of tokens that
    the served chat template adds to a message. Prompts of two seeds share no prefix.
    """

    def __init__(
        self, tree: Tree, tokens_per_word: float = 1.0, overhead: int = 0, seed: int = 0
    ) -> None:
        self._tree = tree
        self._offset = seed << 40
        self._scale = tokens_per_word
        self._overhead = overhead
        self._words = np.array([f" {word}" for word in words()], dtype=object)
        self._cache: LruCache[TokenSegment, str] = LruCache(CACHE_CHARACTERS, _characters)

    def prompt(self, branch: int, tokens: int) -> str:
        """The text (at least one word) of a prompt of `tokens` tokens, the template's included."""
        length = max(1, tokens - self._overhead)
        return "".join(self._segment(segment) for segment in self._tree.path(branch, length))

    def _segment(self, segment: TokenSegment) -> str:
        text = self._cache.get(segment)
        if text is None:
            text = self._spell(segment)
            self._cache.put(segment, text)
        return text

    def _spell(self, segment: TokenSegment) -> str:
        positions = np.arange(round(segment.start / self._scale), round(segment.end / self._scale))
        chosen = mix(segment.branch + self._offset, positions) % np.uint64(len(self._words))
        return "".join(self._words[chosen.astype(np.intp)])


def _characters(_segment: TokenSegment, text: str) -> int:
    return len(text)
