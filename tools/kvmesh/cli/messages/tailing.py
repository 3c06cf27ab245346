"""Tails the bus: live subjects, streams from a point in time, and leases."""

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

import msgspec

from kvmesh.bus.client import Bus, RawMessage
from kvmesh.bus.discovery.directory import Directory
from kvmesh.bus.errors import NotPermitted
from kvmesh.bus.faults import REFUSED
from kvmesh.bus.messages import Instance, encode
from kvmesh.bus.packs import unpacked
from kvmesh.bus.streams.reader import Start, StreamMessage
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
REFUSED_S = 1.0  # in which a server refuses subscriptions
QUIET_S = 10.0  # without a message, after which a terminal says so
ONE_SUBJECT = ("sessions", "limits", "traces")  # these kinds have no further tokens


@dataclass(frozen=True)
class TailFilter:
    """Subject patterns, start of the replay, whether to follow it, and number of messages."""

    patterns: Sequence[str]
    since: datetime | None = None
    follow: bool = True
    limit: int | None = None


class LineFormat:
    """Formats a message as one line of JSON or of coloured text."""

    def __init__(self, as_json: bool, colour: bool) -> None:
        self._json = as_json
        self._colour = colour

    def line(self, when: float, subject: str, kind: str, names: Sequence[str], data: bytes) -> str:
        message = decode(kind, data)
        if self._json:
            whole = {"time": when, "subject": subject, "message": plain(message)}
            return msgspec.json.encode(whole).decode()
        clock = f"{_clock(when)}.{int(when % 1 * 1000):03}"
        source = printable(f"{kind:<5} {' '.join(names)}")
        painted = self._paint(COLOURS.get(kind, REQUEST_COLOUR), source)
        return f"{self._paint(90, clock)} {painted}  {printable(summarise(message))}"

    def _paint(self, code: int, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


class BusTail:
    """Prints messages until interrupted, until the limit, or to the end of the replay."""

    def __init__(
        self, bus: Bus, filters: TailFilter, line_format: LineFormat, settings: Settings
    ) -> None:
        self._bus = bus
        self._filter = filters
        self._line_format = line_format
        self._limits = stream_limits(settings.streams)
        self._remaining = filters.limit
        self._done = asyncio.Event()
        self._replayer: MergedReader | None = None
        self._directory: Directory | None = None
        self._broken = False
        self._began = time.time()
        self._last = 0.0  # Unix time of the last line

    async def run(self) -> int:
        """Show messages; returns the exit status."""
        try:
            showing = asyncio.create_task(self._show_all())
            done = asyncio.create_task(self._done.wait())
            await asyncio.wait({showing, done}, return_when=asyncio.FIRST_COMPLETED)
            done.cancel()
            if showing.done():
                await showing
            showing.cancel()
        finally:
            await self._close()
        if self._broken:
            raise BrokenPipeError
        return 0

    async def _show_all(self) -> None:
        """Replay the streams if requested, then follow until the limit.

        Raises NotFound if no mesh has run in the namespace.
        """
        patterns = self._filter.patterns or DEFAULT
        subjects = [self._subject(p) for p in patterns if p != "instances"]
        with suppress(NotPermitted):
            await self._bus.js.stream_info(self._bus.subjects.kv_stream)
        follows = self._filter.since is None or self._filter.follow
        self._say(self._header(patterns, follows))
        if self._filter.since is not None:
            await self._replay(subjects, self._filter.since)
        for subject in subjects if follows else []:
            await self._follow(subject)
        if "instances" in patterns:
            self._directory = Directory(self._bus, self._limits, self._on_join, self._on_leave)
            await self._directory.open()
        if follows:
            await self._until_done(subjects)

    def _header(self, patterns: Sequence[str], follows: bool) -> str:
        """The subjects, the mesh, and since when."""
        place = f"mesh {self._bus.options.namespace} on NATS at {self._bus.server}"
        since = self._filter.since
        then = (
            f"since {_clock(self._began)}" if since is None else f"from {_clock(since.timestamp())}"
        )
        verb = "following" if follows else "replaying"
        end = ", until Ctrl-C" if follows else " to now"
        return f"{verb} {' '.join(patterns)} of {place} {then}{end}"

    async def _until_done(self, subjects: Sequence[str]) -> None:
        """Wait for the end; a terminal is told of each silence.

        Raises NotPermitted once the server refuses all `subjects`; the bus warns of each.
        """
        told, wait_s = -1.0, REFUSED_S
        while not self._done.is_set():
            seen = self._last
            with suppress(TimeoutError):
                await asyncio.wait_for(self._done.wait(), wait_s)
            self._check_refused(subjects)
            if wait_s == REFUSED_S:
                wait_s = QUIET_S
                continue
            silent = seen == self._last != told and not self._done.is_set()
            if silent and sys.stderr.isatty():
                lost = "" if self._bus.connected else "; NATS cannot be reached, retrying"
                self._say(f"no message since {_clock(seen or self._began)}{lost}")
                told = seen

    def _check_refused(self, subjects: Sequence[str]) -> None:
        refused = self._bus.faults.about(REFUSED)
        wanted = [f"subscribe {subject}" for subject in subjects]
        if wanted and self._directory is None and all(each in refused for each in wanted):
            raise NotPermitted(subjects[0], "subscribe to")

    def _say(self, text: str) -> None:
        print(f"kvmesh tail: {text}", file=sys.stderr, flush=True)

    async def _close(self) -> None:
        if self._directory is not None:
            await self._directory.close()
        if self._replayer is not None:
            await self._replayer.close()

    def _subject(self, pattern: str) -> str:
        is_kind = pattern.isalnum() and pattern not in ONE_SUBJECT
        return self._bus.subjects.expand(f"{pattern}.>" if is_kind else pattern)

    async def _follow(self, subject: str) -> None:
        kind = subject.split(".")[2]
        if kind in ("*", ">", *REQUESTS):
            log.warning("tailing requests: NATS counts this command as their responder")
        if self._filter.since is None:
            await self._bus.subscribe_raw(subject, self._on_live)
        elif kind not in STREAMED:
            await self._bus.subscribe_raw(subject, self._on_unstreamed)

    async def _replay(self, wanted: Sequence[str], since: datetime) -> None:
        """Replay the streams merged by time; their readers then follow."""
        subjects = self._bus.subjects
        streams = {
            "kv": subjects.kv_stream,
            "route": subjects.route_stream,
            "seq": subjects.seq_stream,
            "scaling": subjects.scaling_stream,
        }
        self._replayer = MergedReader(self._bus, self._on_stored, Start(time=since))
        for subject in wanted:
            tokens = subject.split(".")
            for kind, stream in streams.items():
                if tokens[2] in ("*", ">", kind):
                    narrowed = [*tokens[:2], kind, *(tokens[3:] if tokens[2] != ">" else [">"])]
                    self._replayer.add(stream, ".".join(narrowed))
        await self._replayer.open()
        await self._replayer.caught_up()

    def _on_live(self, msg: RawMessage) -> None:
        for data in unpacked(msg.data):
            self._show(time.time(), msg.subject, data)

    def _on_unstreamed(self, msg: RawMessage) -> None:
        if self._bus.subjects.parse(msg.subject)[0] not in STREAMED:
            self._on_live(msg)

    def _on_stored(self, message: StreamMessage) -> None:
        self._show(message.time, message.subject, message.data)

    def _on_join(self, card: Instance) -> None:
        names = ("instances", (card.role, card.name))
        self._print(self._line_format.line(time.time(), card.instance, *names, encode(card)))

    def _on_leave(self, card: Instance) -> None:
        departure = {"instance": card.instance, "role": card.role, "left": True}
        names = ("instances", (card.role, card.name))
        self._print(
            self._line_format.line(time.time(), card.instance, "left", names[1], encode(departure))
        )

    def _show(self, when: float, subject: str, data: bytes) -> None:
        kind, names = self._bus.subjects.parse(subject)
        self._print(self._line_format.line(when, subject, kind, names, data))

    def _print(self, line: str) -> None:
        if self._done.is_set():
            return
        try:
            self._last = time.time()
            print(line, flush=True)
        except BrokenPipeError:
            self._broken = True
            self._done.set()
        if self._remaining is not None:
            self._remaining -= 1
            if self._remaining <= 0:
                self._done.set()
