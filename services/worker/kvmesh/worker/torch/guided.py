"""Guided decoding: constraints of the mesh as grammars of llguidance, and their token masks."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from kvmesh.bus.messages import Guided
from kvmesh.worker.engine import ConfigError, Rejected
from kvmesh.worker.torch.lark import choice, lean, structural

CACHED_GRAMMARS = 64
THREADS = 2


class Grammars:
    """Makes constraints for the tokenizer in a model folder."""

    def __init__(self, folder: Path, vocabulary: int, ends: Iterable[int]) -> None:
        self.vocabulary = vocabulary
        self._folder = folder
        self._ends = sorted(ends)
        self._tokenizer: LLTokenizer | None = None
        self._special: dict[str, int] = {}
        self._compiled: OrderedDict[Guided, LLMatcher] = OrderedDict()
        self._threads = ThreadPoolExecutor(THREADS, "grammars")

    def load(self) -> None:
        """Read the tokenizer; raises ConfigError."""
        file = self._folder / "tokenizer.json"
        try:
            text = file.read_text()
            tokenizer = LLTokenizer(text, n_vocab=self.vocabulary, eos_token=self._ends or None)
            added = json.loads(text).get("added_tokens") or []
            ids = {token["content"]: token["id"] for token in added}
        except Exception as error:  # llguidance raises nothing narrower
            raise ConfigError(f"cannot read {file}: {error}") from error
        self._special = {
            text: i
            for text, i in ids.items()
            if tokenizer.is_special_token(i) and i not in self._ends
        }
        self._tokenizer = tokenizer

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __contains__(self, guided: Guided) -> bool:
        return guided in self._compiled

    async def compile(self, guided: Guided) -> None:
        """Have the grammar at hand; raises Rejected as `constraint` does."""
        loop = asyncio.get_running_loop()
        self._keep(guided, await loop.run_in_executor(self._threads, self._compile, guided))

    def constraint(self, guided: Guided) -> "GrammarConstraint":
        """Raises Rejected for a constraint that is malformed or that nothing satisfies."""
        fresh = self._compiled.get(guided)
        if fresh is None:
            fresh = self._compile(guided)
        self._keep(guided, fresh)
        return GrammarConstraint(fresh.deep_copy(), self.vocabulary)

    def _keep(self, guided: Guided, matcher: LLMatcher) -> None:
        self._compiled[guided] = matcher
        self._compiled.move_to_end(guided)
        while len(self._compiled) > CACHED_GRAMMARS:
            self._compiled.popitem(last=False)

    def _compile(self, guided: Guided) -> LLMatcher:
        kind, value = guided.kind, guided.value
        if self._tokenizer is None:
            raise Rejected("the engine has not started")
        try:
            matcher = LLMatcher(self._tokenizer, _grammar(kind, value, self._special), log_level=0)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Rejected(f"malformed {kind}: {error}") from error
        if matcher.is_error():
            raise Rejected(f"cannot follow this {kind}: {matcher.get_error()}")
        return matcher


class GrammarConstraint:
    """One answer on its way through a grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._bits = np.zeros((vocabulary + 31) // 32 * 4, dtype=np.uint8)

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped()

    def allowed(self) -> Tensor:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        bits = np.unpackbits(self._bits, bitorder="little")[: self._vocabulary]
        return torch.from_numpy(bits).bool()

    def take(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)


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
