"""Warnings: a process sees something wrong on the mesh, and goes on serving.

Each warning is told in the log when it begins and ends, and is on /health, in the metric
`kvmesh_warnings` and on the process's card, from where `kvmesh status` takes it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping

from msgspec.structs import replace
from prometheus_client import Gauge

from kvmesh.bus.discovery import Lease
from kvmesh.bus.errors import BusError, cause

log = logging.getLogger(__name__)
TELL_S = 1.0
SHOWN = 16
_gauge = Gauge("kvmesh_warnings", "Things that this process sees to be wrong, by kind", ["kind"])


class Warnings:
    """Warnings by kind and by what they are about."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, str]] = {}

    def update(self, kind: str, found: Mapping[str, str]) -> None:
        """All that is wrong of this kind now: whatever it is about → one line."""
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
    def texts(self) -> list[str]:
        """One line each; of many only the first."""
        lines = [text for _, found in sorted(self._found.items()) for text in found.values()]
        if len(lines) > SHOWN:
            lines[SHOWN:] = [f"and {len(lines) - SHOWN} more warnings: see the log"]
        return lines


async def keep_told(lease: Callable[[], Lease | None], warnings: Warnings) -> None:
    """Keep the warnings on a card current, for ever."""
    while True:
        await asyncio.sleep(TELL_S)
        held = lease()
        if held is None or held.card.warnings == warnings.texts:
            continue
        try:
            await held.update(replace(held.card, warnings=warnings.texts))
        except BusError as error:
            log.debug("the card will change with the next renewal: %s", cause(error))


class Streak:
    """Says that something holds once it was seen `on` times in a row, until it was not `off` times.

    Looks are counted instead of time: a process that was stopped for a while has looked only once.
    """

    def __init__(self, on: int, off: int) -> None:
        self._on = on
        self._off = off
        self._length = 0
        self.holds = False

    def look(self, seen: bool) -> bool:
        """Take one look; returns whether it holds."""
        self._length = 0 if seen is self.holds else self._length + 1
        if self._length >= (self._off if self.holds else self._on):
            self.holds = not self.holds
            self._length = 0
        return self.holds
