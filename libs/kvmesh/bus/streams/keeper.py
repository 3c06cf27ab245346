"""Keeps the streams of a mesh, and what this process has to store in them, whole while it runs.

A stream may be deleted, emptied, lost with its server's disk, or replaced by an older copy. Each
process looks now and then, at once after a reconnect, and when something cannot be stored: it makes
missing streams as they were, and has its restorers store again what only it knows. Nothing depends
on a notice of the loss, which may be missed.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from math import inf
from typing import NoReturn

import msgspec
from msgspec import Raw, Struct
from nats.js.api import StreamConfig
from nats.js.errors import APIError

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.translation import bus_errors
from kvmesh.bus.errors import (
    BusError,
    JetStreamUnavailable,
    MalformedReply,
    NoResponder,
    NotPermitted,
    ServerUnfit,
    cause,
)
from kvmesh.bus.streams import altered
from kvmesh.bus.streams.configuration import (
    StreamMissing,
    StreamSpec,
    ensure_stream,
    replica_limit,
)
from kvmesh.bus.streams.preparation import why_not_ready
from kvmesh.bus.streams.server_check import absence, explained_refusal, too_small
from kvmesh.bus.ticks import next_tick

log = logging.getLogger(__name__)
CHECK_S = 10.0
# Checks from one look at all streams to the next, as each look is a call for each stream: by those
# that tell of losses, and by others
CHECKS_PER_LOOK, OTHERS_CHECKS = 2, 6
READERS_PER_LOOK = 16  # of a stream: the more processes there are, the more seldom each looks
SETTLE_S = 1.0
PASS_S = 10.0
SPACING_S = 1.0  # between checks that something missing has caused
RECENT_S = 1.0
API_S = 5.0
SHOWN_S = 600.0  # for which a loss is on the card
NOT_FOUND, EXISTS = 404, 10058
# Contents that no running process can restore, by the last part of a stream's name.
ONLY_COPIES = {
    "pins": "pins",
    "responses": "stored responses",
    "answers": "answers as they were generated",
    "batches": "batches, and the names of files",
    "files": "files and the results of batches",
    "catalog": "the names of uploaded models",
    "modelstore": "uploaded models",
    "route": "earlier decisions and outcomes",
    "scaling": "earlier scaling decisions",
}
Warn = Callable[[str, Mapping[str, str]], None]


class _Error(Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Counts(Struct, frozen=True):
    last_seq: int = 0
    consumer_count: int = 0
    last_ts: str = ""

    @property
    def end(self) -> tuple[int, str]:
        """The last message: a stream that only grows has later and later ones."""
        return self.last_seq, self.last_ts.removesuffix("Z")


class _Info(Struct):
    """The server's reply about a stream, or about the creation of one."""

    config: Raw = Raw()
    created: str = ""
    state: _Counts = _Counts()
    error: _Error | None = None


class _Names(Struct):
    total: int = 0
    streams: list[str] | None = None
    error: _Error | None = None


_info_decoder = msgspec.json.Decoder(_Info)
_names_decoder = msgspec.json.Decoder(_Names)


async def stream_names(bus: Bus) -> set[str]:
    """The names of all streams of the account; raises BusError."""
    subject, found = f"{bus.js.prefix}.STREAM.NAMES", set[str]()
    while True:
        with bus_errors(subject):
            query = json.dumps({"offset": len(found)}).encode()
            reply = await bus.client.request(subject, query, timeout=API_S)
        try:
            page = _names_decoder.decode(reply.data)
        except msgspec.MsgspecError as error:
            raise MalformedReply(subject, error) from error
        if page.error is not None:  # no list is no proof that streams are missing
            _raise(page.error)
        found.update(page.streams or ())
        if not page.streams or len(found) >= page.total:
            return found


def keeper_of(bus: Bus) -> "StreamKeeper":
    """The keeper of a connection, made at the first call."""
    return bus.keeper if isinstance(bus.keeper, StreamKeeper) else StreamKeeper(bus)


def declare(bus: Bus, config: StreamConfig) -> None:
    """Have a stream among those that this process makes whenever they are missing."""
    keeper_of(bus)
    name = config.name or ""
    bus.specs[name] = StreamSpec(name, replica_limit(bus), lambda: bus.js.add_stream(config))


def remake(bus: Bus, *streams: str) -> None:
    """Have these streams made anew if they exist, now or later, and are lost."""
    keeper_of(bus)
    bus.specs.update({name: StreamSpec(name, {}, None) for name in streams})


class StreamKeeper:
    """Makes the missing ones of `bus.specs`, with the configuration that they had."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._seen: dict[str, _Info] = {}
        self._losses: dict[str, tuple[float, str]] = {}  # by stream: time and text
        self._absent: dict[str, str] = {}  # texts about streams that cannot be made
        self._altered: dict[str, str] = {}  # texts about streams that do not store what they should
        self._may_create = True
        self._there_since: dict[str, float] = {}  # by stream: the connection that has shown it
        self._looks_due = 0
        self._readers = 0
        self._unready: list[str] = []  # the reasons of the checks that have failed in a row
        self._tells = False
        self._making = asyncio.Lock()
        self._made_at = 0.0
        self._wanted = asyncio.Event()
        self._restorers: dict[str, Callable[[], Awaitable[None]]] = {}
        self._failing: set[str] = set()
        bus.keeper = self

    def restore(self, what: str, restorer: Callable[[], Awaitable[None]]) -> None:
        """Call `restorer` now and then: it stores again what is missing, and may raise BusError.

        One of the same name is replaced.
        """
        self._restorers[what] = restorer

    def forget(self, what: str) -> None:
        """End what `restore` began."""
        self._restorers.pop(what, None)

    def report(self, about: str, text: str) -> None:
        """Have a loss among the warnings of this process, for SHOWN_S."""
        self._losses[about] = _now(), text

    async def make_missing(self) -> bool:
        """Make missing streams now; False if some are still missing. Never raises BusError."""
        self._wanted.set()  # the restorers run soon
        asked = _now()
        async with self._making:
            recent = RECENT_S if self._absent else 0.0  # what fails is retried often
            if self._made_at < asked - recent:
                try:
                    async with asyncio.timeout(PASS_S):
                        await self._make(self._found)
                except (BusError, TimeoutError) as error:
                    log.debug("streams not made yet: %s", cause(error))
                    return False
        return not self._absent

    async def run(self, warn: Warn, tells: bool) -> None:
        """Check until cancelled; a process that `tells` names what is lost for good."""
        self._tells = tells
        self._bus.on_reconnect.append(self._on_reconnect)
        try:
            while True:
                try:
                    async with asyncio.timeout(PASS_S):
                        await self._check()
                    self._unready.clear()
                except (JetStreamUnavailable, NoResponder) as error:
                    answers = isinstance(error, JetStreamUnavailable)
                    reason = why_not_ready(error) if answers else absence(self._bus)
                    self._unready = [*self._unready[-1:], reason]
                except (BusError, TimeoutError) as error:
                    log.debug("streams not checked: %s", cause(error))
                warn("missing_stream", {**dict(self._foreign()), **self._altered, **self._absent})
                warn("lost_data", dict(self._told()))
                reason = too_small(self._bus)
                warn("small_messages", {"": reason} if reason else {})
                warn("not_stored", dict(self._not_stored()))
                await asyncio.sleep(SPACING_S)
                await next_tick(CHECK_S, self._wanted)
        finally:
            self._bus.on_reconnect.remove(self._on_reconnect)

    def _on_reconnect(self) -> None:
        self._may_create, self._looks_due = True, 0
        self._wanted.set()

    async def _check(self) -> None:
        self._wanted.clear()
        if not self._bus.connected:
            return
        async with self._making:
            await self._make(partial(stream_names, self._bus))
        for name, restore in list(self._restorers.items()):
            try:
                await restore()
                self._failing.discard(name)
            except BusError as error:
                if name not in self._failing:
                    log.warning("cannot restore %s, retrying: %s", name, cause(error))
                self._failing.add(name)

    async def _make(self, find: Callable[[], Awaitable[set[str]]]) -> None:
        """Make what `find` does not find, and note the states of all now and then."""
        missing = await self._missing(find)
        if any(self._there_since.get(name) == self._bus.connected_at for name in missing):
            # deleted just now: a server breaks a stream that is made while it deletes the former
            await asyncio.sleep(SETTLE_S)
            missing = await self._missing(find)
        absent = {}
        for name in missing:
            if reason := await self._make_one(name, self._bus.specs[name]):
                absent[name] = f"stream {name} is missing: {reason}"
        self._absent, self._made_at = absent, _now()
        self._looks_due -= 1
        if missing or self._altered or self._looks_due <= 0:
            # together: each alone would wake this process and the server
            await asyncio.gather(*(self._look(name) for name in self._bus.specs))
            seldom = max(OTHERS_CHECKS, self._readers // READERS_PER_LOOK)
            self._looks_due = CHECKS_PER_LOOK if self._tells else seldom

    async def _found(self) -> set[str]:
        """Those of the expected streams that the server has."""
        subject = f"{self._bus.js.prefix}.STREAM.INFO."
        names = list(self._bus.specs)
        infos = await asyncio.gather(*(self._request(f"{subject}{name}") for name in names))
        gone = {
            n for n, i in zip(names, infos, strict=True) if i.error and i.error.code == NOT_FOUND
        }
        return set(names) - gone

    async def _missing(self, find: Callable[[], Awaitable[set[str]]]) -> list[str]:
        """The expected streams that the server does not have."""
        names, connected_at = await find(), self._bus.connected_at
        specs = list(self._bus.specs.items())
        self._there_since.update({name: connected_at for name, _ in specs if name in names})
        return [
            name
            for name, spec in specs
            if name not in names and (spec.create is not None or name in self._seen)
        ]

    async def _make_one(self, name: str, spec: StreamSpec) -> str:
        """Make a stream as it was, or for the first time; the reason if that fails."""
        if not (self._may_create and self._bus.may_create(name)):
            return "only frontends and operators may create it"
        seen = self._seen.get(name)
        try:
            if seen is None:
                await ensure_stream(self._bus, spec)
            else:
                await self._create(name, seen.config)
        except (NotPermitted, StreamMissing):
            self._may_create = False
            return "only frontends and operators may create it"
        except ServerUnfit as error:
            return cause(error)
        except BusError as error:
            return f"it cannot be created: {cause(error)}"
        if seen is not None:
            # one in the server's memory goes with each restart of the server
            level = logging.INFO if b'"storage":"memory"' in bytes(seen.config) else logging.WARNING
            log.log(level, "stream %s was missing: made it again", name)
        return ""

    async def _create(self, name: str, config: Raw) -> None:
        subject = f"{self._bus.js.prefix}.STREAM.CREATE.{name}"
        async with explained_refusal(self._bus, name, altered.decoder.decode(config).max_bytes):
            reply = await self._request(subject, bytes(config))
            if reply.error is not None and reply.error.err_code != EXISTS:
                _raise(reply.error)

    async def _look(self, name: str) -> None:
        """Note a stream's configuration and state, and a loss of what it held."""
        try:
            info = await self._request(f"{self._bus.js.prefix}.STREAM.INFO.{name}")
        except NotPermitted:
            return
        if info.error is not None:
            if info.error.code != NOT_FOUND:
                log.debug("stream %s not seen: %s", name, info.error.description)
            return
        info.config = info.config.copy()
        if not self._is_sound(name, info):
            return
        self._readers = max(self._readers, info.state.consumer_count)
        before, self._seen[name] = self._seen.get(name), info
        # what this process has stored since the last look, by the connection before this one
        stored = self._bus.stored.pop(name, inf) < self._bus.connected_at
        if before is None or not (before.state.last_seq or stored):
            return
        if before.created != info.created:
            self._lose(name, "was lost")
        elif info.state.end < before.state.end:
            self._lose(name, "went back to an older state")

    def _is_sound(self, name: str, info: _Info) -> bool:
        """False if a stream has settings that do harm: it is not made anew with these."""
        faults = list(altered.harm(altered.decoder.decode(info.config)))
        self._altered.pop(name, None)
        if faults:
            self._altered[name] = f"stream {name} {'; it '.join(faults)}"
        return not faults

    def _lose(self, name: str, event: str) -> None:
        contents = ONLY_COPIES.get(name.rpartition("-")[2])
        if contents is not None and self._tells:
            self.report(name, f"stream {name} {event}: {contents} are gone")

    async def _request(self, subject: str, data: bytes = b"") -> _Info:
        with bus_errors(subject):
            reply = await self._bus.client.request(subject, data, timeout=API_S)
        try:
            return _info_decoder.decode(reply.data)
        except msgspec.MsgspecError as error:
            raise MalformedReply(subject, error) from error

    def _told(self) -> Iterator[tuple[str, str]]:
        since = _now() - SHOWN_S
        for name, (at, text) in self._losses.items():
            if at > since:
                yield name, text

    def _foreign(self) -> Iterator[tuple[str, str]]:
        for name, subjects in self._bus.acks.foreign(_now()):
            yield name, f"stream {name} {altered.answers_on(subjects)}"

    def _not_stored(self) -> Iterator[tuple[str, str]]:
        if len(self._unready) > 1:  # an election is shorter
            yield "", f"JetStream stores nothing: {self._unready[-1]}"
            return
        away = "most of its servers may be away; or " if self._bus.is_clustered else ""
        for name in self._bus.acks.silent(_now()):
            if name not in self._absent and name not in self._altered:
                yield (
                    name,
                    f"NATS does not acknowledge what is stored in {name}: {away}its disk may be"
                    " full, or was; once it has space, restart NATS",
                )
        for name, reason in self._bus.acks.refused(_now()):
            yield name, f"NATS refuses what is stored in {name}: {reason}"


def _raise(error: _Error) -> NoReturn:
    """Raise the bus's error for one in a reply."""
    with bus_errors():
        APIError.from_error(msgspec.structs.asdict(error))
    raise AssertionError


def _now() -> float:
    return asyncio.get_running_loop().time()
