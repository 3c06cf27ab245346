"""Waits for JetStream at the start of a process, and makes what the mesh stores."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvmesh.bus.backoff import Backoff
from kvmesh.bus.client import Bus
from kvmesh.bus.errors import (
    BusError,
    BusTimeout,
    JetStreamError,
    JetStreamUnavailable,
    OutOfReach,
    ServerUnfit,
    cause,
)
from kvmesh.bus.streams.configuration import (
    Difference,
    StreamLimits,
    StreamMissing,
    ensure_streams,
)
from kvmesh.bus.streams.server_check import JETSTREAM, check_server, founds_mesh, old_version

log = logging.getLogger(__name__)
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 10.0
PATIENCE_S = 30.0
MISSING_DELAY_S = 1.0  # between looks for streams that a frontend makes once it has started
NO_META_LEADER, NO_LEADER, NO_PEERS, OFFLINE = 10008, 10009, 10005, 10118
T = TypeVar("T")
ELECTING = (NO_META_LEADER, NO_LEADER, OFFLINE)


async def prepare_streams(
    bus: Bus, limits: StreamLimits, waits: Callable[[], None] = lambda: None
) -> list[Difference]:
    """Return once the streams exist, with their differences from `limits`.

    Retries until cancelled while the server or the cluster is not ready, the link to it is down, or
    a frontend has not made the streams yet, and calls `waits` before the first time. Raises
    ServerUnfit.
    """
    backoff, failing = Backoff(FIRST_DELAY_S, MAX_DELAY_S), False
    missing = _MissingStreams()
    while True:
        try:
            domain = await check_server(bus)
            founds = await founds_mesh(bus, domain)
            found = await ensure_streams(bus, limits)
        except StreamMissing as error:
            if missing.since is None:
                waits()
            missing.note(error)
            await asyncio.sleep(MISSING_DELAY_S)
        except BusError as error:
            if isinstance(error, ServerUnfit) and not (
                bus.patient and isinstance(error, OutOfReach)
            ):
                raise
            if not failing:
                waits()
                log.warning("JetStream is not ready yet, retrying: %s", why_not_ready(error))
            failing = True
            await asyncio.sleep(backoff.delay())
        else:
            if failing or missing.since is not None:
                log.info("JetStream is ready")
            if warning := old_version(bus):
                log.warning("%s", warning)
            if founds:
                text = "no mesh %s in JetStream domain %s of this server: made a new one;"
                text += " nats.domain names that of another"
                log.warning(text, bus.options.namespace, domain)
            return found


class _MissingStreams:
    """Tells of streams that another process has to make: a warning once that takes long."""

    def __init__(self) -> None:
        self.since: float | None = None
        self._warned = False

    def note(self, error: StreamMissing) -> None:
        now = asyncio.get_running_loop().time()
        if self.since is None:
            self.since = now
            log.info("waiting for a frontend to create the streams: %s", error)
        elif now > self.since + PATIENCE_S and not self._warned:
            self._warned = True
            log.warning("no frontend has created the streams for %.0f s: %s", PATIENCE_S, error)


async def patiently(work: Callable[[], Awaitable[T]], patience_s: float = PATIENCE_S) -> T:
    """The result of `work`, done again while JetStream elects a leader or does not reply.

    `work` can be repeated. Raises its last error once `patience_s` seconds have passed.
    """
    loop, backoff = asyncio.get_running_loop(), Backoff(FIRST_DELAY_S, MAX_DELAY_S)
    ends = loop.time() + patience_s
    while True:
        try:
            return await work()
        except (BusTimeout, JetStreamUnavailable) as error:
            if loop.time() > ends:
                raise
            log.warning("JetStream does not reply, retrying: %s", why_not_ready(error))
        await asyncio.sleep(backoff.delay())


def why_not_ready(error: BusError) -> str:
    """The reason of a failure that passes, in words where JetStream has a bare code."""
    code = error.err_code if isinstance(error, JetStreamError) else None
    if code in ELECTING:
        return "the cluster of NATS servers has no leader yet; it elects one once most of them run"
    if code is None and isinstance(error, JetStreamUnavailable):
        return f"no NATS server offers JetStream now, which needs {JETSTREAM}"
    if code == NO_PEERS:
        return f"fewer NATS servers run than nats.replicas, or they lack space ({cause(error)})"
    return cause(error)
