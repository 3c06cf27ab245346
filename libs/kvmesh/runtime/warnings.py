"""Warnings about faults on the mesh that a process notices while it continues to serve.

Each warning is logged when it begins and ends. Current ones are in /health, in the metric
`kvmesh_warnings` and on the process's card, where `kvmesh status` reads them.
"""

import logging
from collections.abc import Callable, Mapping

from msgspec.structs import replace
from prometheus_client import Gauge

from kvmesh.bus.discovery.leases import Lease
from kvmesh.bus.errors import BusError, cause
from kvmesh.bus.faults import REFUSED
from kvmesh.bus.ticks import next_tick

log = logging.getLogger(__name__)
PUBLISH_S = 1.0
MAX_SHOWN = 16
_gauge = Gauge(
    "kvmesh_warnings", "Faults on the mesh that this process currently sees, by kind", ["kind"]
)


class Warnings:
    """Current warnings by kind and subject."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, str]] = {}

    def update(self, kind: str, found: Mapping[str, str]) -> None:
        """Replace all warnings of a kind; `found` maps a subject to one line of text.

        The metric has the kind from the first call on, at 0 without warnings.
        """
        before = self._found.get(kind, {})
        for about, text in found.items():
            if about not in before:
                log.warning("%s", text)
        for about in before.keys() - found.keys():
            log.info("no longer: %s", before[about])
        if found or before:
            self._found[kind] = dict(found)
        _gauge.labels(kind).set(len(found))

    @property
    def refused(self) -> bool:
        """True if the NATS server refuses a subject that this process needs: it is not ready."""
        return bool(self._found.get(REFUSED))

    @property
    def texts(self) -> list[str]:
        """One line per warning, at most MAX_SHOWN and a line that counts the rest."""
        lines = [text for _, found in sorted(self._found.items()) for text in found.values()]
        if len(lines) > MAX_SHOWN:
            lines[MAX_SHOWN:] = [f"and {len(lines) - MAX_SHOWN} more warnings: see the log"]
        return lines


async def publish_warnings(lease: Callable[[], Lease | None], warnings: Warnings) -> None:
    """Keep the warnings on a card current until cancelled."""
    while True:
        await next_tick(PUBLISH_S)
        held = lease()
        if held is None or held.card.warnings == warnings.texts:
            continue
        try:
            await held.update(replace(held.card, warnings=warnings.texts))
        except BusError as error:
            log.debug("the card will change with the next renewal: %s", cause(error))


class Streak:
    """A condition that holds after `on` positive observations in a row, until `off` negative ones.

    It counts observations instead of time: a process that was stopped has made only one.
    """

    def __init__(self, on: int, off: int) -> None:
        self._on = on
        self._off = off
        self._length = 0
        self.holds = False

    def observe(self, seen: bool) -> bool:
        """Add an observation; returns whether the condition holds."""
        self._length = 0 if seen is self.holds else self._length + 1
        if self._length >= (self._off if self.holds else self._on):
            self.holds = not self.holds
            self._length = 0
        return self.holds
