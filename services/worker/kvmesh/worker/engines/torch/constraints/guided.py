"""Guided decoding: constraints of the mesh as grammars of llguidance, and their token masks."""

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
from kvmesh.worker.engines.torch.constraints.grammar import GrammarMaker

CACHED_GRAMMARS = 64
CACHED_BYTES = 512 << 20
AT_ONCE = 2


class _Kept(NamedTuple):
    """A compiled constraint, and the bytes that it takes."""

    matcher: LLMatcher
    size: int


class Grammars:
    """Makes constraints for the tokenizer in a model folder.

    `most_s` bounds the time of trying one, and that of compiling it then.
    """

    def __init__(
        self, folder: Path, vocabulary: int, ends: Iterable[int], most_s: float = 10.0
    ) -> None:
        self.vocabulary = vocabulary
        self._folder = folder
        self._ends = sorted(ends)
        self._most_s = most_s
        self._maker: GrammarMaker | None = None
        self._compiled: OrderedDict[Guided, _Kept] = OrderedDict()
        arguments = (str(folder), *map(str, (vocabulary, most_s, *self._ends)))
        self._trials = TrialClient(
            most_s,
            sys.executable,
            "-m",
            "kvmesh.worker.engines.torch.constraints.trial",
            *arguments,
        )
        self._threads = ThreadPoolExecutor(AT_ONCE, "grammars")

    def load(self) -> None:
        """Read the tokenizer; raises ConfigError."""
        try:
            self._maker = GrammarMaker(self._folder, self.vocabulary, self._ends)
        except Exception as error:  # llguidance raises nothing narrower
            raise EngineConfigError(
                f"cannot read the tokenizer of {self._folder}: {error}"
            ) from error

    def close(self) -> None:
        self._trials.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __contains__(self, guided: Guided) -> bool:
        return guided in self._compiled

    async def compile(self, guided: Guided) -> None:
        """Have the grammar at hand; raises Rejected as `constraint` does.

        A constraint that takes too much of anything is found out in another process.
        """
        size = await self._trials.try_constraint(guided)
        loop = asyncio.get_running_loop()
        compiling = loop.run_in_executor(self._threads, self._compile, guided)
        try:
            matcher = await asyncio.wait_for(compiling, self._most_s)
        except TimeoutError:
            raise EngineError(f"a {guided.kind} that passed takes too long to compile") from None
        self._keep(guided, _Kept(matcher, size))

    def constraint(self, guided: Guided) -> "GrammarConstraint":
        """Raises Rejected for a constraint that is malformed or that nothing satisfies."""
        kept = self._compiled.get(guided) or _Kept(self._compile(guided), len(guided.value))
        self._keep(guided, kept)
        return GrammarConstraint(kept.matcher.deep_copy(), self.vocabulary)

    def _keep(self, guided: Guided, kept: _Kept) -> None:
        self._compiled[guided] = kept
        self._compiled.move_to_end(guided)
        size = sum(kept.size for kept in self._compiled.values())
        while len(self._compiled) > 1 and (
            len(self._compiled) > CACHED_GRAMMARS or size > CACHED_BYTES
        ):
            size -= self._compiled.popitem(last=False)[1].size

    def _compile(self, guided: Guided) -> LLMatcher:
        if self._maker is None:
            raise Rejected("the engine has not started")
        try:
            return self._maker.make(guided)
        except ValueError as error:
            raise Rejected(str(error)) from error


class GrammarConstraint:
    """One answer on its way through a grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._bits = np.zeros((vocabulary + 31) // 32 * 4, dtype=np.uint8)

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped()

    @property
    def fault(self) -> str:
        if not self._matcher.is_error():
            return ""
        return f"the constraint became too complex: {self._matcher.get_error().splitlines()[0]}"

    def allowed(self) -> Tensor:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        bits = np.unpackbits(self._bits, bitorder="little")[: self._vocabulary]
        return torch.from_numpy(bits).bool()

    def take(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
