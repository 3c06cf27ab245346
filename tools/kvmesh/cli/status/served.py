"""Cached tokens that workers serve beside those that routers expect, and their KV events."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import NamedTuple

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import BusError, NotFound, NotPermitted
from kvmesh.bus.messages import (
    Decision,
    EventReport,
    Instance,
    MessageDecoder,
    Outcome,
    RankEvents,
    Role,
    RouteEvent,
    ShowEvents,
)
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.hashing import HASH_BYTES
from kvmesh.index import TIERS
from kvmesh.observer.cache_text import TIERS as NAMES
from kvmesh.placement_rules.served import ServedTokens, expected_tokens

RECENT = 256  # prompts of a worker
MOST_PLACED = 128  # of a worker
MOST_READ = 20_000  # messages of the route stream
MOST_ASKED = 256  # workers
ASK_S = 2.0
PARALLEL = 16
_routes: MessageDecoder[RouteEvent] = MessageDecoder(RouteEvent)
_reports = MessageDecoder(EventReport)


class ServedPrompt(NamedTuple):
    """A prompt whose request ended at the Unix time `time`: tokens by tier, as `ServedTokens`."""

    time: float
    expected: Sequence[int]
    served: Sequence[int]
    running: int


class WorkerCache(NamedTuple):
    """One worker: its recent prompts, and its KV events; None where they cannot be asked for."""

    instance: str
    served: ServedTokens
    events: list[RankEvents] | None = None

    @property
    def kept(self) -> list[int] | None:
        """The blocks that reached the index, by tier; None if the engine has no KV events."""
        if not self.events:
            return None
        return [sum(tier) for tier in zip(*(rank.kept for rank in self.events), strict=True)]

    @property
    def lost(self) -> Counter[tuple[int, str]]:
        """The blocks that did not reach the index, by tier and reason."""
        counts: Counter[tuple[int, str]] = Counter()
        for rank in self.events or ():
            for reason, tiers in rank.lost.items():
                counts.update({(tier, reason): count for tier, count in enumerate(tiers) if count})
        return counts

    @property
    def malformed(self) -> int:
        """The messages of KV events that could not be decoded."""
        return sum(rank.malformed for rank in self.events or ())

    @property
    def limits(self) -> list[str]:
        """Names of all that the index cannot know of this engine."""
        return sorted({limit for rank in self.events or () for limit in rank.limits})

    @property
    def unplaced(self) -> int:
        """The blocks that wait for an event which says what precedes them."""
        return sum(rank.unplaced for rank in self.events or ())


@dataclass(slots=True)
class _Placed:
    decision: Decision
    ended: float = inf  # in Unix time


class ServedByWorker:
    """Compares the outcomes of the route stream with its decisions, worker by worker.

    Requests that ran at a decision may have computed its prefix: their ends come later.
    """

    def __init__(self) -> None:
        self._placed: dict[str, OrderedDict[str, _Placed]] = {}
        self._prompts: dict[str, deque[ServedPrompt]] = {}

    def add(self, data: bytes) -> None:
        """Take a message of the stream."""
        try:
            event = _routes.decode(data)
        except msgspec.MsgspecError:
            return  # of another version
        if isinstance(event, Decision):
            recent = self._placed.setdefault(event.chosen.instance, OrderedDict())
            recent[event.request] = _Placed(event)
            if len(recent) > MOST_PLACED:
                recent.popitem(last=False)
            return
        recent = self._placed.get(event.instance, OrderedDict())
        placed = recent.get(event.request)
        if placed is None:
            return
        placed.ended = event.time
        running = (
            _shared_blocks(other.decision, placed.decision)
            for other in recent.values()
            if other is not placed and other.ended > placed.decision.time > other.decision.time
        )
        prompt = compared(placed.decision, event, max(running, default=0))
        if prompt is not None:
            prompts = self._prompts.setdefault(event.instance, deque(maxlen=RECENT))
            prompts.append(prompt)

    def since(self, time: float) -> dict[str, ServedTokens]:
        """The tokens of each worker's prompts that ended after a Unix time."""
        found: dict[str, ServedTokens] = {}
        for instance, prompts in self._prompts.items():
            total = ServedTokens()
            for prompt in prompts:
                if prompt.time >= time:
                    total.add(prompt.expected, prompt.served, prompt.running)
            if total.requests:
                found[instance] = total
        return found

    def retain(self, instances: Iterable[str]) -> None:
        """Forget all workers but these."""
        kept = set(instances)
        self._prompts = {i: found for i, found in self._prompts.items() if i in kept}
        self._placed = {i: found for i, found in self._placed.items() if i in kept}


def compared(decision: Decision, outcome: Outcome, running: int) -> ServedPrompt | None:
    """A prompt's expected and served tokens; None if it was computed in several places.

    Requests that ran had `running` leading blocks of it. None, too, of further choices of a
    prompt, and if the engine has not counted its cached tokens.
    """
    if decision.prefill is not None or outcome.attempts != 1 or not outcome.prompt_tokens:
        return None
    if not outcome.cached_tiers:
        return None
    size, possible = decision.block_size, decision.possible
    announced = None if possible is None else possible.chosen
    overlap = decision.chosen.overlap
    expected = expected_tokens(overlap, size, outcome.prompt_tokens, announced)
    return ServedPrompt(outcome.time, expected, outcome.cached_tiers, running * size)


def _shared_blocks(one: Decision, other: Decision) -> int:
    """The number of leading blocks that two prompts share."""
    first, second = one.sequence_hashes, other.sequence_hashes
    low, high = 0, min(len(first), len(second)) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * HASH_BYTES  # a hash stands for all before it
        same = first[end - HASH_BYTES : end] == second[end - HASH_BYTES : end]
        low, high = (middle, high) if same else (low, middle - 1)
    return low


async def read_served(bus: Bus, since: float, last: int) -> ServedByWorker:
    """The prompts in the route stream, whose last message is number `last`, since a Unix time.

    It reads at most MOST_READ messages.
    """
    subjects, found = bus.subjects, ServedByWorker()

    def on_message(message: StreamMessage) -> None:
        found.add(message.data)

    start = Start(time=datetime.fromtimestamp(since, UTC))
    if last > MOST_READ:
        with suppress(NotFound):  # the stream is shorter
            info = await bus.js.get_msg(subjects.route_stream, last - MOST_READ)
            if info.time is not None and info.time.timestamp() > since:
                start = Start(after=last - MOST_READ)
    reader = StreamReader(bus, subjects.route_stream, subjects.route_all, on_message, start)
    await reader.open()
    try:
        await reader.caught_up.wait()
    finally:
        await reader.close()
    return found


async def events_of(bus: Bus, cards: Iterable[Instance]) -> dict[str, list[RankEvents]]:
    """The KV events of each worker that replies, of at most MOST_ASKED; raises NotPermitted."""
    workers = [card for card in cards if card.role is Role.WORKER and card.model is not None]
    slots = asyncio.Semaphore(PARALLEL)

    async def ask(card: Instance) -> list[RankEvents] | None:
        async with slots:
            try:
                subject = bus.subjects.ctl(card.instance)
                return (await bus.request(subject, ShowEvents(), _reports, ASK_S)).ranks
            except NotPermitted:
                raise
            except BusError:
                return None  # of another version, or gone

    asked = workers[:MOST_ASKED]
    replies = await asyncio.gather(*map(ask, asked))
    found = zip(asked, replies, strict=True)
    return {card.instance: reply for card, reply in found if reply is not None}


class CacheRow(NamedTuple):
    """A row of `kvmesh top --view caches`: tokens of recent prompts, blocks since the start."""

    instance: str
    prompts: int
    expected_tokens: int
    served_tokens: int
    engine_difference: int
    host_difference: int
    disk_difference: int
    remote_difference: int
    unexpected_tokens: int
    missing_tokens: int
    kept_blocks: list[int] | None
    dropped_blocks: str


def cache_rows(
    served: Mapping[str, ServedTokens], events: Mapping[str, list[RankEvents]]
) -> list[CacheRow]:
    """A row for each worker that has served a prompt, or follows KV events."""
    names = dict.fromkeys([*served, *(name for name, ranks in events.items() if ranks)])
    return [
        _row(WorkerCache(name, served.get(name, ServedTokens()), events.get(name)))
        for name in names
    ]


def _row(cache: WorkerCache) -> CacheRow:
    served, kept = cache.served, cache.kept
    engine, host, disk, remote = [*served.difference, *[0] * TIERS][:TIERS]
    return CacheRow(
        instance=cache.instance,
        prompts=served.requests,
        expected_tokens=sum(served.expected),
        served_tokens=sum(served.served),
        engine_difference=engine,
        host_difference=host,
        disk_difference=disk,
        remote_difference=remote,
        unexpected_tokens=served.unexpected,
        missing_tokens=served.missing,
        kept_blocks=kept,
        dropped_blocks=", ".join(
            [
                *(f"{n:,} {why} ({NAMES[tier]})" for (tier, why), n in sorted(cache.lost.items())),
                *([f"{cache.malformed:,} malformed"] if cache.malformed else ()),
            ]
        ),
    )
