"""Expected returns of a node's blocks: forecasts of prompts, applied to the blocks of each."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from kvmesh.bus.messages import ReturnForecast
from kvmesh.kvbm.core.blocks.block import ARENA, Block, Copy
from kvmesh.kvbm.core.blocks.prompt_blocks import Digests, PromptBlocks
from kvmesh.kvbm.core.blocks.savings import Savings
from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.retention.awaited_prompts import (
    MAX_PROMPTS,
    AwaitedPrompt,
    AwaitedPrompts,
    with_expectation,
)
from kvmesh.retention.return_value import TypicalReturn
from kvmesh.retention.valued_keys import Expected, ReturnOrder

MAX_BLOCKS = 1 << 21  # of all awaited prompts, 16 bytes each
LEAD = 0


class NodeReturns:
    """Orders eviction in the tiers of a node by forecasts, once there are any.

    Without `by_forecast`, recency orders it whatever is forecast.
    """

    def __init__(self, store: Store, by_forecast: bool) -> None:
        self.by_forecast = by_forecast
        self.savings = Savings(store)
        self._store = store
        self._typical = TypicalReturn()
        self._awaited: defaultdict[int, AwaitedPrompts[Digests]] = defaultdict(
            lambda: AwaitedPrompts(self._typical, MAX_PROMPTS, MAX_BLOCKS)
        )  # by part
        self._awaited[LEAD] = AwaitedPrompts(self._typical, MAX_PROMPTS, MAX_BLOCKS)
        self.ordered = False

    @property
    def forecasts(self) -> Counter[str]:
        """Forecasts by what came of them."""
        return self._awaited[LEAD].results

    @property
    def returns(self) -> Counter[str]:
        """Prompts with a forecast that returned, by what had become of their blocks."""
        return self._awaited[LEAD].returns

    def on_prompt(self, prompt: PromptBlocks, given_up: Iterable[Sequence[bytes]]) -> None:
        """Note the prompt of a request so far, and earlier ones that its session gives up."""
        if not self.by_forecast or not len(prompt) or prompt.request is None:
            return
        digests, awaited = prompt.digests, self._awaited[prompt.space.layout.part]
        awaited.on_prompt(prompt.session, [digests, *given_up], prompt.request)
        one = AwaitedPrompt(
            prompt.request, prompt.session, len(digests), digests[len(digests) - 1], digests
        )
        if awaited.grow(one):
            self._apply(one)

    def on_staged(self, prompt: PromptBlocks, blocks: Iterable[Block]) -> None:
        """Expect of new blocks of a request's prompt what is expected of the prompt."""
        if not self.by_forecast or prompt.request is None:
            return
        expectation = self._awaited[prompt.space.layout.part].expectation(prompt.request)
        if expectation is not None:
            for block in blocks:
                block.expected = with_expectation(block.expected, expectation, self._store.now)

    def release(self, sessions: list[str]) -> None:
        """Expect nothing of sessions any more."""
        for awaited in self._awaited.values():
            awaited.release(sessions)

    def likeliest(self, count: int) -> list[Digests]:
        """At most so many prompts with a forecast, of the highest value first."""
        now = self._store.now
        found: list[tuple[float, Digests]] = []
        for awaited in self._awaited.values():
            found += awaited.likeliest(count, now)
        found.sort(key=_value, reverse=True)
        return [digests for _, digests in found[:count]]

    def expect(self, forecasts: Iterable[ReturnForecast]) -> list[Block]:
        """Apply forecasts, with `since` on the caller's clock; return their blocks in memory."""
        blocks: list[Block] = []
        if not self.by_forecast:
            return blocks
        if not self.ordered:
            self.ordered = True
            order = ReturnOrder(self._typical, _expected, _last_use, self.savings.of_copy)
            for tier in self._store.tiers.values():
                tier.order_by_returns(order)
        for forecast in forecasts:
            for awaited in self._awaited.values():
                prompt = awaited.expect(forecast)
                if prompt is not None:
                    blocks += self._apply(prompt)
        return blocks

    def _apply(self, prompt: AwaitedPrompt[Digests]) -> list[Block]:
        """Expect the return of all blocks of a prompt that are held; return those in memory."""
        expectation, store = prompt.expectation, self._store
        if expectation is None:
            return []
        blocks = list(filter(None, map(store.blocks.get, prompt.place)))
        for block in blocks:
            block.expected = with_expectation(block.expected, expectation, store.now)
            for number, copy in block.copies.items():
                if number in store.tiers:
                    store.tiers[number].reconsider(copy)
        return [block for block in blocks if block.registered(ARENA)]


def _value(valued: tuple[float, Digests]) -> float:
    return valued[0]


def _expected(copy: Copy) -> Expected:
    return copy.block.expected


def _last_use(copy: Copy) -> float:
    return copy.block.used
