"""Constraints of the mesh as matchers of llguidance, for one tokenizer. Imports no torch."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from kvmesh.bus.messages import Guided
from kvmesh.worker.engines.torch.constraints.lark import choice, lean, structural


class GrammarMaker:
    """Makes matchers for the tokenizer in a model folder; raises OSError or ValueError."""

    def __init__(self, folder: Path, vocabulary: int, ends: Iterable[int]) -> None:
        text, stops = (folder / "tokenizer.json").read_text(), sorted(ends)
        self._tokenizer = LLTokenizer(text, n_vocab=vocabulary, eos_token=stops or None)
        added = json.loads(text).get("added_tokens") or []
        ids = {token["content"]: token["id"] for token in added}
        self._special = {
            text: i
            for text, i in ids.items()
            if self._tokenizer.is_special_token(i) and i not in stops
        }

    def make(self, guided: Guided) -> LLMatcher:
        """Raises ValueError for a constraint that is malformed or that nothing satisfies.

        The first masks take longest, and what is learned then all copies of a matcher share: so
        two are computed here.
        """
        kind, value = guided.kind, guided.value
        try:
            matcher = LLMatcher(self._tokenizer, _grammar(kind, value, self._special), log_level=0)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"malformed {kind}: {error}") from error
        copy = matcher.deep_copy()
        first = int.from_bytes(copy.compute_bitmask(), "little")
        if first and not copy.is_stopped():
            copy.consume_token((first & -first).bit_length() - 1)
            copy.compute_bitmask()
        if copy.is_error():
            raise ValueError(f"cannot follow this {kind}: {copy.get_error()}")
        return matcher


def _schema(text: str) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(lean(json.loads(text))))


def _grammar(kind: str, value: str, special: Mapping[str, int]) -> str:
    match kind:
        case "json_object":
            return _schema('{"type": "object"}')
        case "json_schema":
            return _schema(value)
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "choice":
            return LLMatcher.grammar_from_lark(choice(json.loads(value), special))
        case "grammar":
            return LLMatcher.grammar_from_lark(value)
        case "structural_tag":
            return LLMatcher.grammar_from_lark(structural(json.loads(value), special))
    raise ValueError("there is no such kind")
