"""Follow the bus: live subjects, streams from a point in time, and the leases."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec
from nats.aio.msg import Msg

from kvmesh.bus.client import Bus
from kvmesh.bus.discovery import Directory
from kvmesh.bus.messages import Instance, encode
from kvmesh.bus.reader import Start, StreamMessage, StreamReader
from kvmesh.cli.decode import REQUESTS, STREAMED, decode, plain
from kvmesh.cli.summary import summarise
from kvmesh.runtime.service import stream_limits
from kvmesh.settings import Settings

log = logging.getLogger(__name__)
DEFAULT = (*STREAMED, "instances")
COLOURS = {"kv": 32, "route": 35, "seq": 34, "instances": 33, "load": 90, "out": 36}
REQUEST_COLOUR = 31


@dataclass(frozen=True)
class Wanted:
    """What to show: subject patterns, from when on, whether to go on, and how many at most."""

    patterns: Sequence[str]
    since: datetime | None = None
    follow: bool = True
    limit: int | None = None


class Form:
    """A message as a line: JSON, or coloured text."""

    def __init__(self, as_json: bool, colour: bool) -> None:
        self._json = as_json
        self._colour = colour

    def line(self, when: float, subject: str, kind: str, names: Sequence[str], data: bytes) -> str:
        message = decode(kind, data)
        if self._json:
            whole = {"time": when, "subject": subject, "message": plain(message)}
            return msgspec.json.encode(whole).decode()
        clock = f"{time.strftime('%H:%M:%S', time.localtime(when))}.{int(when % 1 * 1000):03}"
        place = self._paint(COLOURS.get(kind, REQUEST_COLOUR), f"{kind:<5} {' '.join(names)}")
        return f"{self._paint(90, clock)} {place}  {summarise(message)}"

    def _paint(self, code: int, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text


class Tail:
    """Prints what passes until interrupted, or until enough or all has been shown."""

    def __init__(self, bus: Bus, wanted: Wanted, form: Form, settings: Settings) -> None:
        self._bus = bus
        self._wanted = wanted
        self._form = form
        self._limits = stream_limits(settings.streams)
        self._left = wanted.limit
        self._enough = asyncio.Event()
        self._readers: list[StreamReader] = []
        self._directory: Directory | None = None
        self._broken = False

    async def run(self) -> int:
        """Show messages; returns the exit status."""
        try:
            for pattern in self._wanted.patterns or DEFAULT:
                await self._follow(pattern)
            await self._wait()
        finally:
            await self._close()
        if self._broken:
            raise BrokenPipeError
        return 0

    async def _wait(self) -> None:
        if self._wanted.follow or self._wanted.since is None:
            await self._enough.wait()
            return
        endings = [
            asyncio.create_task(self._enough.wait()),
            asyncio.create_task(self._catch_up()),
        ]
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        for task in endings:
            task.cancel()

    async def _catch_up(self) -> bool:
        for reader in self._readers:
            await reader.caught_up.wait()
        return True

    async def _close(self) -> None:
        if self._directory is not None:
            await self._directory.close()
        for reader in self._readers:
            await reader.close()

    async def _follow(self, pattern: str) -> None:
        if pattern == "instances":
            self._directory = Directory(self._bus, self._limits, self._joined, self._left_mesh)
            await self._directory.open()
            return
        if pattern.isalnum():
            pattern = f"{pattern}.>"
        subject = self._bus.subjects.expand(pattern)
        kind = subject.split(".")[2]
        if kind in ("*", ">", *REQUESTS):
            log.warning("watching requests: senders may take this tail for a listener")
        if self._wanted.since is None:
            await self._bus.client.subscribe(subject, cb=self._on_live)
            return
        for streamed in STREAMED:
            if kind in ("*", ">", streamed):
                await self._replay(streamed, subject)
        if kind not in STREAMED and self._wanted.follow:
            await self._bus.client.subscribe(subject, cb=self._on_unstreamed)

    async def _replay(self, kind: str, subject: str) -> None:
        subjects = self._bus.subjects
        streams = {
            "kv": subjects.kv_stream,
            "route": subjects.route_stream,
            "seq": subjects.seq_stream,
        }
        tokens = subject.split(".")
        narrowed = [*tokens[:2], kind, *(tokens[3:] if tokens[2] != ">" else [">"])]
        start = Start(time=self._wanted.since)
        reader = StreamReader(self._bus, streams[kind], ".".join(narrowed), self._on_stored, start)
        await reader.open()
        self._readers.append(reader)

    async def _on_live(self, msg: Msg) -> None:
        self._show(time.time(), msg.subject, msg.data)

    async def _on_unstreamed(self, msg: Msg) -> None:
        if self._bus.subjects.parse(msg.subject)[0] not in STREAMED:
            await self._on_live(msg)

    def _on_stored(self, message: StreamMessage) -> None:
        self._show(message.time, message.subject, message.data)

    def _joined(self, card: Instance) -> None:
        names = ("instances", (card.role, card.name))
        self._print(self._form.line(time.time(), card.instance, *names, encode(card)))

    def _left_mesh(self, card: Instance) -> None:
        gone = {"instance": card.instance, "role": card.role, "left": True}
        names = ("instances", (card.role, card.name))
        self._print(self._form.line(time.time(), card.instance, "left", names[1], encode(gone)))

    def _show(self, when: float, subject: str, data: bytes) -> None:
        kind, names = self._bus.subjects.parse(subject)
        self._print(self._form.line(when, subject, kind, names, data))

    def _print(self, line: str) -> None:
        if self._enough.is_set():
            return
        try:
            print(line, flush=True)
        except BrokenPipeError:
            self._broken = True
            self._enough.set()
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self._enough.set()
