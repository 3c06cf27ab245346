"""The trees of the models' prompts with their holders, which the index is asked for."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import routable
from kvmesh.bus.errors import BusError
from kvmesh.bus.messages import Instance, MessageDecoder, OverlapQuery, OverlapReply, Role
from kvmesh.dashboard.polled import Polled, fault_text
from kvmesh.dashboard.state.prefixes.holders import RunHolders, holders, questions
from kvmesh.dashboard.state.prefixes.tree import PromptTree, prompt_tree
from kvmesh.dashboard.state.requests.log import RequestLog
from kvmesh.router.index_client import IndexClient
from kvmesh.router.scoring.overlaps import Overlaps

EVERY_S = 4.0
REPLY_S = 2.0
MOST_MODELS = 100
_replies = MessageDecoder(OverlapReply)


@dataclass(frozen=True)
class PrefixSnapshot:
    """A tree and the holders of its runs at the Unix time `time`; `fault`: the index is silent."""

    tree: PromptTree
    holders: dict[str, RunHolders]
    time: float
    fault: str


class Prefixes:
    """One tree per model, made while a page shows it. `cards` are those of all processes."""

    def __init__(self, bus: Bus, requests: RequestLog, cards: Mapping[str, Instance]) -> None:
        self._bus = bus
        self._requests = requests
        self._cards = cards
        self._polled: dict[str, Polled[PrefixSnapshot]] = {}

    def models(self) -> list[str]:
        """The models of workers."""
        return sorted({card.model.name for card in self._cards.values() if card.model})

    def of(self, model: str) -> Polled[PrefixSnapshot] | None:
        """The tree of a model that workers serve; None if none does."""
        found = self._polled.get(model)
        if found is None and model in self.models() and len(self._polled) < MOST_MODELS:
            index = _ModelIndex(self._bus, model, self._cards)
            found = Polled(lambda: self._ask(index), EVERY_S)
            self._polled[model] = found
        return found

    async def _ask(self, index: "_ModelIndex") -> PrefixSnapshot:
        tree = prompt_tree(self._requests.latest(), index.model)
        found, fault = await index.overlaps(questions(tree))
        return PrefixSnapshot(tree, holders(tree, found), time.time(), fault)


class _ModelIndex:
    """The index of a model, queried as routers do."""

    def __init__(self, bus: Bus, model: str, cards: Mapping[str, Instance]) -> None:
        self._bus = bus
        self.model = model
        self._cards = cards
        self._client = IndexClient(bus, model, REPLY_S)
        self._opened = False
        self._replied = False

    async def overlaps(self, asked: Mapping[int, bytes]) -> tuple[dict[int, Overlaps], str]:
        """The overlaps of prompts by number, and the reason why some are missing."""
        if not asked:
            return {}, ""
        try:
            await self._prepare()
        except BusError as error:
            return {}, fault_text(error)
        results = await asyncio.gather(*map(self._client.overlaps, asked.values()))
        found = {n: r.overlaps for n, r in zip(asked, results, strict=True) if r.overlaps}
        fault = next((r.failure for r in results if r.failure), "")
        self._replied = not fault
        return found, f"The {fault}." if fault else ""

    async def _prepare(self) -> None:
        """Raises BusError if the index does not reply: the client's queries would not tell why."""
        if not self._opened:
            await self._client.open()
            self._opened = True
        known = set(self._client.indexers.instances)
        ready = {c.instance for c in self._cards.values() if c.role is Role.INDEXER and routable(c)}
        for instance in known - ready:
            self._client.indexers.left(instance)
        for instance in ready - known:
            self._client.indexers.joined(instance)
        self._client.probe(monotonic())
        if not self._replied:
            subject = self._bus.subjects.index(self.model)
            await self._bus.request(subject, OverlapQuery([]), _replies, REPLY_S)
