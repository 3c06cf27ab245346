"""Guided decoding: cache of compiled constraints, and token masks of one output."""

import asyncio
import sys
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from kvmesh.bus.messages import Guided
from kvmesh.worker.constraints.trial_client import TrialClient
from kvmesh.worker.engine import EngineConfigError, EngineError, Rejected
from kvmesh.worker.engines.torch.constraints.grammar import MatcherFactory

CACHED_GRAMMARS = 64
CACHED_BYTES = 512 << 20
COMPILE_THREADS = 2


class _CompiledGrammar(NamedTuple):
    """A compiled constraint and its size in bytes."""

    matcher: LLMatcher
    size: int


class GrammarCache:
    """Compiles and caches constraints for the tokenizer in a model folder.

    `timeout_s` bounds both the trial of a constraint in another process and its compilation here.
    """

    def __init__(
        self, folder: Path, vocabulary: int, eos_tokens: Iterable[int], timeout_s: float = 10.0
    ) -> None:
        self.vocabulary = vocabulary
        self._folder = folder
        self._eos_tokens = sorted(eos_tokens)
        self._timeout_s = timeout_s
        self._factory: MatcherFactory | None = None
        self._compiled: OrderedDict[Guided, _CompiledGrammar] = OrderedDict()
        arguments = (str(folder), *map(str, (vocabulary, timeout_s, *self._eos_tokens)))
        self._trials = TrialClient(
            timeout_s,
            sys.executable,
            "-m",
            "kvmesh.worker.engines.torch.constraints.trial",
            *arguments,
        )
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, "grammars")

    def load(self) -> None:
        """Read the tokenizer; raises EngineConfigError."""
        try:
            self._factory = MatcherFactory(self._folder, self.vocabulary, self._eos_tokens)
        except Exception as error:  # llguidance raises plain Exception
            raise EngineConfigError(
                f"cannot read the tokenizer of {self._folder}: {error}"
            ) from error

    def close(self) -> None:
        self._trials.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __contains__(self, guided: Guided) -> bool:
        return guided in self._compiled

    async def compile(self, guided: Guided) -> None:
        """Try a constraint in another process, then compile and cache it.

        The trial bounds time and memory. Raises Rejected as `constraint` does, and EngineError if
        a constraint that passed its trial exceeds `timeout_s` here.
        """
        size = await self._trials.try_constraint(guided)
        loop = asyncio.get_running_loop()
        compiling = loop.run_in_executor(self._threads, self._compile, guided)
        try:
            matcher = await asyncio.wait_for(compiling, self._timeout_s)
        except TimeoutError:
            raise EngineError(
                f"a {guided.kind} passed its trial but takes too long to compile"
            ) from None
        self._store(guided, _CompiledGrammar(matcher, size))

    def constraint(self, guided: Guided) -> "GrammarConstraint":
        """A fresh constraint; raises Rejected if it is malformed or unsatisfiable."""
        entry = self._compiled.get(guided) or _CompiledGrammar(
            self._compile(guided), len(guided.value)
        )
        self._store(guided, entry)
        return GrammarConstraint(entry.matcher.deep_copy(), self.vocabulary)

    def _store(self, guided: Guided, entry: _CompiledGrammar) -> None:
        self._compiled[guided] = entry
        self._compiled.move_to_end(guided)
        size = sum(entry.size for entry in self._compiled.values())
        while len(self._compiled) > 1 and (
            len(self._compiled) > CACHED_GRAMMARS or size > CACHED_BYTES
        ):
            size -= self._compiled.popitem(last=False)[1].size

    def _compile(self, guided: Guided) -> LLMatcher:
        if self._factory is None:
            raise Rejected("the engine has not started")
        try:
            return self._factory.make(guided)
        except ValueError as error:
            raise Rejected(str(error)) from error


class GrammarConstraint:
    """State of one output in a grammar; implements `Constraint`."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._bits = np.zeros((vocabulary + 31) // 32 * 4, dtype=np.uint8)

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped()

    @property
    def error(self) -> str:
        if not self._matcher.is_error():
            return ""
        return f"the constraint became too complex: {self._matcher.get_error().splitlines()[0]}"

    def allowed(self) -> Tensor:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        bits = np.unpackbits(self._bits, bitorder="little")[: self._vocabulary]
        return torch.from_numpy(bits).bool()

    def advance(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
