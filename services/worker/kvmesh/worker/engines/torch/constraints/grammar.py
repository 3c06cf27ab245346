"""Compiles constraints to llguidance matchers for one tokenizer. Imports no torch."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from kvmesh.bus.messages import Guided
from kvmesh.bus.storage.tokenizer_file import tokenizer_json
from kvmesh.worker.engines.torch.constraints.lark import (
    choice_grammar,
    readable,
    structural_tag_grammar,
)


class MatcherFactory:
    """Compiles constraints for the tokenizer in a model folder.

    Raises OSError or ValueError if the tokenizer cannot be read.
    """

    def __init__(self, folder: Path, vocabulary: int, eos_tokens: Iterable[int]) -> None:
        text, stops = tokenizer_json(folder).decode(), sorted(eos_tokens)
        self._tokenizer = LLTokenizer(text, n_vocab=vocabulary, eos_token=stops or None)
        added = json.loads(text).get("added_tokens") or []
        ids = {token["content"]: token["id"] for token in added}
        self._special = {
            text: i
            for text, i in ids.items()
            if self._tokenizer.is_special_token(i) and i not in stops
        }

    def make(self, guided: Guided) -> LLMatcher:
        """Compile a constraint; raises ValueError if it is malformed or unsatisfiable.

        Computes the first two masks: they take longest, and all copies of a matcher share what
        llguidance caches while computing them.
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
    return LLMatcher.grammar_from_json_schema(json.dumps(readable(json.loads(text))))


def _grammar(kind: str, value: str, special: Mapping[str, int]) -> str:
    match kind:
        case "json_object":
            return _schema('{"type": "object"}')
        case "json_schema":
            return _schema(value)
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "choice":
            return LLMatcher.grammar_from_lark(choice_grammar(json.loads(value), special))
        case "grammar":
            return LLMatcher.grammar_from_lark(value)
        case "structural_tag":
            return LLMatcher.grammar_from_lark(structural_tag_grammar(json.loads(value), special))
    raise ValueError("unknown kind of constraint")
