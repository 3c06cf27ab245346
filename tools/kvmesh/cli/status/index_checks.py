"""Has each indexer compare its view of each rank with the rank's worker."""

import asyncio
from collections.abc import Iterable

from msgspec import Struct

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.directory import routable
from kvmesh.bus.errors import BusError, MalformedReply, NotPermitted, cause
from kvmesh.bus.messages import CheckIndex, IndexCheck, Instance, MessageDecoder, Role

TIMEOUT_S = 25.0  # more than an indexer takes for its tries
PARALLEL = 8
_checks = MessageDecoder(IndexCheck)


class RankCheck(Struct, frozen=True, kw_only=True):
    """One comparison: an indexer's view of one rank. `replied`: the indexer replied at all."""

    indexer: str
    instance: str
    rank: int
    check: IndexCheck
    replied: bool = True


async def check_ranks(bus: Bus, cards: Iterable[Instance]) -> list[RankCheck]:
    """Every ready indexer's view of every worker's ranks; raises NotPermitted to an observer.

    An indexer that does not reply is not asked again: a large mesh would wait for hours.
    """
    cards = list(cards)
    indexers = [card for card in cards if card.role is Role.INDEXER and routable(card)]
    workers = [card for card in cards if card.role is Role.WORKER and card.capacity is not None]
    slots = asyncio.Semaphore(PARALLEL)
    silent: dict[str, IndexCheck] = {}  # the first failure of each indexer that does not reply

    async def one(indexer: str, instance: str, rank: int) -> RankCheck:
        async with slots:
            check, replied = silent.get(indexer), False
            if check is None:
                question = CheckIndex(instance=instance, rank=rank)
                check, replied = await _ask(bus, indexer, question)
            if not replied:
                silent.setdefault(indexer, check)
        return RankCheck(
            indexer=indexer, instance=instance, rank=rank, check=check, replied=replied
        )

    return await asyncio.gather(
        *(
            one(indexer.instance, worker.instance, rank)
            for indexer in indexers
            for worker in workers
            for rank in range(worker.capacity.dp_ranks if worker.capacity else 0)
        )
    )


async def _ask(bus: Bus, indexer: str, question: CheckIndex) -> tuple[IndexCheck, bool]:
    """The indexer's reply, or the failure, and whether it replied at all."""
    try:
        return await bus.request(bus.subjects.ask(indexer), question, _checks, TIMEOUT_S), True
    except NotPermitted:
        raise
    except BusError as error:
        replied = isinstance(error, MalformedReply)
        return IndexCheck(result="failed", reason=cause(error)), replied
