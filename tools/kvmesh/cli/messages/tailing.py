"""Follow the bus: live subjects, streams from a point in time, and the leases."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from kvmesh.bus.client import Bus, RawMessage
from kvmesh.bus.discovery import Directory
from kvmesh.bus.messages import Instance, encode
from kvmesh.bus.reader import Start, StreamMessage
from kvmesh.cli.messages.decoding import REQUESTS, STREAMED, decode, plain
from kvmesh.cli.messages.merging import MergedReader
from kvmesh.cli.messages.one_line import summarise
from kvmesh.runtime.logs import printable
from kvmesh.runtime.service import stream_limits
from kvmesh.settings import Settings

log = logging.getLogger(__name__)
DEFAULT = (*STREAMED, "instances")
COLOURS = {"kv": 32, "route": 35, "seq": 34, "instances": 33, "load": 90, "out": 36}
REQUEST_COLOUR = 31


@dataclass(frozen=True)
class TailFilter:
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
        return f"{self._paint(90, clock)} {place}  {printable(summarise(message))}"

    def _paint(self, code: int, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text


class BusTail:
    """Prints what passes until interrupted, or until enough or all has been shown."""

    def __init__(self, bus: Bus, wanted: TailFilter, form: Form, settings: Settings) -> None:
        self._bus = bus
        self._wanted = wanted
        self._form = form
        self._limits = stream_limits(settings.streams)
        self._left = wanted.limit
        self._enough = asyncio.Event()
        self._past: MergedReader | None = None
        self._directory: Directory | None = None
        self._broken = False

    async def run(self) -> int:
        """Show messages; returns the exit status."""
        try:
            showing = asyncio.create_task(self._show_all())
            enough = asyncio.create_task(self._enough.wait())
            await asyncio.wait({showing, enough}, return_when=asyncio.FIRST_COMPLETED)
            enough.cancel()
            if showing.done():
                await showing
            showing.cancel()
        finally:
            await self._close()
        if self._broken:
            raise BrokenPipeError
        return 0

    async def _show_all(self) -> None:
        """The past first, then, unless that is all, what comes until there is enough."""
        patterns = self._wanted.patterns or DEFAULT
        subjects = [self._subject(p) for p in patterns if p != "instances"]
        if self._wanted.since is not None:
            await self._replay(subjects, self._wanted.since)
        goes_on = self._wanted.since is None or self._wanted.follow
        for subject in subjects if goes_on else []:
            await self._follow(subject)
        if "instances" in patterns:
            self._directory = Directory(self._bus, self._limits, self._joined, self._left_mesh)
            await self._directory.open()
        if goes_on:
            await self._enough.wait()

    async def _close(self) -> None:
        if self._directory is not None:
            await self._directory.close()
        if self._past is not None:
            await self._past.close()

    def _subject(self, pattern: str) -> str:
        return self._bus.subjects.expand(f"{pattern}.>" if pattern.isalnum() else pattern)

    async def _follow(self, subject: str) -> None:
        kind = subject.split(".")[2]
        if kind in ("*", ">", *REQUESTS):
            log.warning("watching requests: senders may take this tail for a listener")
        if self._wanted.since is None:
            await self._bus.subscribe_raw(subject, self._on_live)
        elif kind not in STREAMED:
            await self._bus.subscribe_raw(subject, self._on_unstreamed)

    async def _replay(self, wanted: Sequence[str], since: datetime) -> None:
        """All streams as one; they go on with what comes."""
        subjects = self._bus.subjects
        streams = {
            "kv": subjects.kv_stream,
            "route": subjects.route_stream,
            "seq": subjects.seq_stream,
        }
        self._past = MergedReader(self._bus, self._on_stored, Start(time=since))
        for subject in wanted:
            tokens = subject.split(".")
            for kind, stream in streams.items():
                if tokens[2] in ("*", ">", kind):
                    narrowed = [*tokens[:2], kind, *(tokens[3:] if tokens[2] != ">" else [">"])]
                    self._past.add(stream, ".".join(narrowed))
        await self._past.open()
        await self._past.caught_up()

    def _on_live(self, msg: RawMessage) -> None:
        self._show(time.time(), msg.subject, msg.data)

    def _on_unstreamed(self, msg: RawMessage) -> None:
        if self._bus.subjects.parse(msg.subject)[0] not in STREAMED:
            self._on_live(msg)

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
