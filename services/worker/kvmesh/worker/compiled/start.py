"""The compile cache of a worker that starts, from its settings."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery.cards import read_cards
from kvmesh.bus.messages import Role
from kvmesh.bus.storage.shared_secret import SecretUnusable, parse_secret
from kvmesh.runtime.service import StartError
from kvmesh.settings.schema import Settings
from kvmesh.worker.compiled.cache import CompileCache
from kvmesh.worker.compiled.environment import engine_environment
from kvmesh.worker.compiled.exchange import ArchiveExchange

log = logging.getLogger(__name__)
ENGINES = ("vllm",)  # the others compile nothing, or in a process that the worker does not start
KEY_BYTES = 32


@asynccontextmanager
async def compile_cache(
    settings: Settings, folder: Path, bus: Bus, exchange: ArchiveExchange | None
) -> AsyncIterator[CompileCache | None]:
    """The cache for the engine of these settings within the block; None if they ask for none.

    A block that ends with a StartError which a restart may mend makes the cache suspect. Raises
    StartError if the domain's key is malformed.
    """
    weights, engine = settings.weights, settings.worker.engine
    if not weights.compile_cache or engine not in ENGINES:
        yield None
        return
    key = _domain_key(weights.domain_key)
    environment = await asyncio.to_thread(engine_environment, settings, folder)
    cards = partial(read_cards, bus, Role.WORKER, Role.PARKED)
    cache = CompileCache(weights, engine, environment, cards, exchange, key)
    failed = False
    try:
        await cache.open()
        yield cache
    except StartError as error:
        failed = not error.permanent
        raise
    finally:
        await cache.close(failed)


def _domain_key(text: str) -> bytes:
    try:
        return parse_secret(text, KEY_BYTES, "weights.domain_key") if text else b""
    except SecretUnusable as error:
        raise StartError(str(error), permanent=True) from error
