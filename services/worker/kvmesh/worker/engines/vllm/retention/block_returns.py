"""Forecasts of the return of prompts, applied to the blocks of vLLM that hold each.

A run is not known to depend on another one here, unlike in a tree: what is expected of a prompt is
expected of all its blocks, so that those at the start, which more prompts have, are worth the most.
"""

from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence

from kvmesh.bus.messages import ReturnForecast
from kvmesh.retention.awaited_prompts import AwaitedPrompt, AwaitedPrompts
from kvmesh.retention.return_value import Expectation
from kvmesh.worker.engines.vllm.retention.block_runs import RetainedRuns
from kvmesh.worker.engines.vllm.retention.requests import RetainedRequest

MAX_BLOCKS = 4  # of ended prompts, for each block of the pool


class HeldBlocks:
    """Blocks by number, and the content that each had."""

    __slots__ = ("contents", "numbers")

    def __init__(self, numbers: "array[int]", contents: list[Hashable]) -> None:
        self.numbers = numbers
        self.contents = contents


class BlockReturns:
    """Expected returns in a pool of vLLM.

    `contents` returns what identifies the content of each block, None for a block without any.
    """

    def __init__(
        self, runs: RetainedRuns, contents: Callable[[Sequence[int]], list[Hashable]]
    ) -> None:
        self._runs = runs
        self._contents = contents
        self._ordered = False
        self.awaited: AwaitedPrompts[HeldBlocks] = AwaitedPrompts(
            runs.typical, max_blocks=MAX_BLOCKS * len(runs.by_block)
        )

    def end_request(self, request: RetainedRequest, blocks: Sequence[int], now: float) -> None:
        """Note an ended request, before its `blocks` are free.

        Blocks of which something else is expected are kept for it too, until its forecast comes.
        """
        if not request.hashes:
            return
        numbers = array("I", blocks)
        prompt = AwaitedPrompt(
            request.id,
            request.session,
            len(request.hashes),
            request.hashes[-1],
            HeldBlocks(numbers, self._contents(numbers)),
            request.conversation,
        )
        end = self.awaited.end_ahead if request.ahead else self.awaited.end
        if end(prompt):
            self._apply(prompt, now)
        elif self._ordered:
            prompt.expectation = Expectation(now, self._runs.typical.values)
            self._apply(prompt, now, only_expected=True)

    def expect(self, forecasts: Iterable[ReturnForecast], now: float) -> int:
        """Apply forecasts, with `since` on the caller's clock; returns how many had effect now."""
        self._ordered, applied = True, 0
        for forecast in forecasts:
            prompt = self.awaited.expect(forecast)
            if prompt is not None:
                self._apply(prompt, now)
                applied += 1
        return applied

    def _apply(
        self, prompt: AwaitedPrompt[HeldBlocks], now: float, only_expected: bool = False
    ) -> None:
        """Expect the return of the blocks that still hold a prompt.

        `only_expected`: of those alone of which something is expected.
        """
        expectation, place = prompt.expectation, prompt.place
        if expectation is None:
            return
        present = self._contents(place.numbers)
        pairs = zip(place.numbers, place.contents, present, strict=True)
        held = [number for number, content, found in pairs if found == content is not None]
        for start, end, run in list(self._runs.segments(held)):
            if not only_expected or (run is not None and run.expected):
                part = held[start:end]
                made = self._runs.isolate(part, run, "")
                self._runs.expect(made, part, expectation, now)
