"""Expected returns of a node's blocks: forecasts of prompts, applied to the blocks of each."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence

from kvmesh.bus.messages import ReturnForecast
from kvmesh.kvbm.core.blocks.block import ARENA, Block
from kvmesh.kvbm.core.blocks.prompt_blocks import Digests, PromptBlocks
from kvmesh.kvbm.core.blocks.savings import Savings
from kvmesh.kvbm.core.blocks.store import Store
from kvmesh.retention.awaited_prompts import (
    MAX_PROMPTS,
    AwaitedPrompt,
    AwaitedPrompts,
    with_expectation,
)

MAX_BLOCKS = 1 << 21  # of all awaited prompts, 16 bytes each
MOST_APPLIED = 2048  # blocks at once, 20 ms: forecasts of long prompts must not stop the node
LEAD = 0


class NodeReturns:
    """Notes what is expected of the blocks of a node, for restores and writes to lower tiers.

    Forecasts are applied to at most MOST_APPLIED blocks at once, those of the first prompt first.
    Unless it is `enabled`, nothing is expected. `has_forecasts` once there are any.
    """

    def __init__(self, store: Store, enabled: bool) -> None:
        self.enabled = enabled
        self.has_forecasts = False
        self.savings = Savings(store)
        self._store = store
        self._awaited: defaultdict[int, AwaitedPrompts[Digests]] = defaultdict(
            lambda: AwaitedPrompts(MAX_PROMPTS, MAX_BLOCKS)
        )  # by part
        self._awaited[LEAD] = AwaitedPrompts(MAX_PROMPTS, MAX_BLOCKS)
        self._due: OrderedDict[int, tuple[AwaitedPrompt[Digests], int]] = OrderedDict()

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
        if not self.enabled or not len(prompt) or prompt.request is None:
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
        if not self.enabled or prompt.request is None:
            return
        expectation = self._awaited[prompt.space.layout.part].expectation(prompt.request)
        if expectation is not None:
            for block in blocks:
                block.expected = with_expectation(block.expected, expectation, self._store.now)

    def release(self, sessions: list[str]) -> None:
        """Expect nothing of sessions any more."""
        for awaited in self._awaited.values():
            awaited.release(sessions)

    def likeliest(self, count: int, wanted: Callable[[str], bool]) -> list[Digests]:
        """At most so many prompts with a forecast, of the highest value first.

        `wanted(tenant)` is true of the tenants to consider, for prompts of a session.
        """
        now = self._store.now
        found: list[tuple[float, Digests]] = []
        for awaited in self._awaited.values():
            found += awaited.likeliest(count, now, wanted)
        found.sort(key=_value, reverse=True)
        return [digests for _, digests in found[:count]]

    def expect(self, forecasts: Iterable[ReturnForecast]) -> list[Block]:
        """Take forecasts, with `since` on the caller's clock, and apply some, as `apply_due`."""
        if not self.enabled:
            return []
        self.has_forecasts = True
        for forecast in forecasts:
            for awaited in self._awaited.values():
                prompt = awaited.expect(forecast)
                if prompt is not None:
                    self._due.pop(id(prompt), None)
                    self._due[id(prompt)] = prompt, 0
        while len(self._due) > MAX_PROMPTS:
            self._due.popitem(last=False)
        return self.apply_due()

    def apply_due(self) -> list[Block]:
        """Apply forecasts to the next blocks that are due; return those of them in memory."""
        blocks: list[Block] = []
        left = MOST_APPLIED
        while self._due and left > 0:
            key, (prompt, first) = next(iter(self._due.items()))
            end = min(first + left, len(prompt.place))
            blocks += self._apply(prompt, first, end)
            left -= max(end - first, 1)
            if end < len(prompt.place):
                self._due[key] = prompt, end
            else:
                del self._due[key]
        return blocks

    def _apply(
        self, prompt: AwaitedPrompt[Digests], first: int = 0, end: int | None = None
    ) -> list[Block]:
        """Expect the return of a prompt's blocks that are held; return those in memory."""
        expectation, store = prompt.expectation, self._store
        if expectation is None or expectation.over:
            return []
        digests = prompt.place.between(first, len(prompt.place) if end is None else end)
        blocks = list(filter(None, map(store.blocks.get, digests)))
        for block in blocks:
            block.expected = with_expectation(block.expected, expectation, store.now)
        return [block for block in blocks if block.registered(ARENA)]


def _value(valued: tuple[float, Digests]) -> float:
    return valued[0]
