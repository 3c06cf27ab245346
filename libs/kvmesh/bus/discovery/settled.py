"""Settled facts of models, as routers and frontends state them on their cards.

Workers cannot write those cards. So a worker that changes its card, or one that joins while a
router or frontend restarts, shuts out none of the workers that serve.
"""

import logging
from collections.abc import Callable, Iterable
from heapq import nsmallest

from msgspec.structs import replace

from kvmesh.bus.discovery.compatibility import Compatibility
from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.messages import Settled
from kvmesh.bus.ticks import next_tick

log = logging.getLogger(__name__)
SETTLE_S = 1.0
MAX_MODELS = 128  # on one card, which a server limits in size
LONGEST_NAME = 256  # of a model


def shown(groups: Iterable[Compatibility]) -> list[Settled]:
    """As many statements as a card takes, those of the models with the most workers first."""
    found = [
        (-len(group.names), group.settled.model, group.settled)
        for group in groups
        if group.settled is not None and len(group.settled.model) <= LONGEST_NAME
    ]
    return [settled for _, _, settled in nsmallest(MAX_MODELS, found)]


async def publish_settled(lease: Lease, settled: Callable[[], list[Settled]]) -> None:
    """Keep the statements on a card current until cancelled."""
    while True:
        await next_tick(SETTLE_S)
        found = settled()
        if lease.card.settled != found:
            try:
                await lease.update(replace(lease.card, settled=found))
            except BusError as error:
                log.debug("the card will change with the next renewal: %s", cause(error))
