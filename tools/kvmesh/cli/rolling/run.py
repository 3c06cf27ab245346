"""Carries out a roll: cards and outcomes in, orders to the platform out."""

import asyncio
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime

import msgspec

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.jetstream import Bucket
from kvmesh.bus.discovery.compatibility import misfits
from kvmesh.bus.discovery.directory import Directory, routable
from kvmesh.bus.errors import NotFound
from kvmesh.bus.messages import MessageDecoder, Role, RollRecord, encode
from kvmesh.bus.streams.reader import Start, StreamMessage, StreamReader
from kvmesh.cli.arguments import failed
from kvmesh.cli.rolling.core import Act, Replica, Roll
from kvmesh.cli.rolling.figures import OutcomeLog, RequestFigures
from kvmesh.cli.rolling.platforms import Platform, RollError, caller
from kvmesh.observer.route_stream import decoded_outcome
from kvmesh.runtime.service import stream_limits
from kvmesh.settings import Settings

POLL_S = 0.2
BASELINE_S = 60.0
READ_S = 10.0
BEAT_S, ALONE_S = 1.0, 4.0
_records = MessageDecoder(RollRecord)


class RollCommand:
    """One run of `kvmesh fleet roll`: `watch_s`, `timeout_s` and `tolerance` as of `Roll`."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        service: str,
        platform: Platform,
        watch_s: float,
        timeout_s: float,
        tolerance: float,
    ) -> None:
        self._bus = bus
        self._service = service
        self._platform = platform
        self._limits = (watch_s, timeout_s, tolerance)
        self._directory = Directory(bus, stream_limits(settings.streams))
        self._requests = OutcomeLog()

    async def run(self, to: str, afresh: bool) -> int:
        """Roll, or go on with a roll that was interrupted; returns the exit status."""
        await self._directory.open()
        try:
            record = await self._begin(to, afresh)
            if record is None:
                return failed("fleet roll", f"no {self._service} runs")
            await self._platform.prepare(record.to, len(record.before))
            await self._store(record)
            reader = await self._read_outcomes(record.started)
            try:
                return await self._roll(record)
            finally:
                await reader.close()
        except RollError as error:
            return failed("fleet roll", error)
        finally:
            await self._directory.close()

    async def _begin(self, to: str, afresh: bool) -> RollRecord | None:
        """The record of an unfinished roll of this service, or a new one; None without any."""
        key = self._bus.subjects.roll_key(self._service)
        found = None
        with suppress(NotFound, msgspec.MsgspecError):
            found = _records.decode((await self._bucket.get(key)).value or b"")
        present = self._replicas()
        if found is not None and not found.ended:
            await self._check_alone(key, found)
        left = {replica.instance for replica in present}
        left &= set(found.before.values()) if found is not None else set()
        if found is not None and left and not found.ended and not afresh:
            if to and to != found.to:
                raise RollError(
                    f"a roll to {found.to or 'the present version'} has not ended; --afresh begins"
                    " another one"
                )
            done = len(found.before) - len(left)
            text = f"; it stopped: {found.stopped}" if found.stopped else ""
            print(f"going on with the roll of {found.by}: {done} of {len(found.before)} done{text}")
            return msgspec.structs.replace(found, stopped="")
        before = {r.name: r.instance for r in present if not r.draining}
        if not before:
            return None
        return RollRecord(
            service=self._service, started=time.time(), to=to, before=before, by=caller()
        )

    async def _check_alone(self, key: str, found: RollRecord) -> None:
        """Raise RollError if another command carries out this roll: it stores the record often."""
        if found.stopped:
            return
        revision = (await self._bucket.get(key)).revision
        await asyncio.sleep(ALONE_S)
        if (await self._bucket.get(key)).revision != revision:
            raise RollError(f"{found.by} rolls {self._service} just now")

    async def _roll(self, record: RollRecord) -> int:
        roll = Roll(record, *self._limits, self._platform.last_first)
        before = self._requests.between(record.started - BASELINE_S, record.started)
        print(f"before: {before}", flush=True)
        asked_at = served_at = 0.0
        stored_at = time.monotonic()

        def figures() -> tuple[RequestFigures, RequestFigures]:
            return before, self._requests.between(served_at, float("inf"))

        while True:
            failure = await self._platform.failure()
            step = roll.step(time.monotonic(), self._replicas(), failure, figures)
            if step.act is Act.REPLACE:
                if served_at:
                    print(f"  since then: {figures()[1]}", flush=True)
                left = len(roll.left(self._replicas()))
                print(f"replacing {step.name} ({left} left)", flush=True)
                asked_at = time.monotonic()
                await self._platform.replace(step.name)
            elif step.act is Act.REPLACED:
                served_at = time.time()
                took = f" after {time.monotonic() - asked_at:.1f} s" if asked_at else ""
                print(f"  {step.name} serves again{took}", flush=True)
            elif step.act is Act.STOP:
                await self._store(msgspec.structs.replace(record, stopped=step.reason))
                left = len(roll.left(self._replicas()))
                print(
                    f"kvmesh fleet roll: stopped: {step.reason}\n"
                    f"{left} of {len(record.before)} are not replaced; the same command goes on",
                    file=sys.stderr,
                )
                return 1
            elif step.act is Act.END:
                await self._store(msgspec.structs.replace(record, ended=True))
                if served_at:
                    print(f"  since then: {figures()[1]}")
                print(f"all {len(record.before)} of {self._service} are replaced")
                return 0
            if time.monotonic() - stored_at > BEAT_S:
                stored_at = time.monotonic()
                await self._store(record)  # others see that this command is at it
            await asyncio.sleep(POLL_S)

    def _replicas(self) -> list[Replica]:
        cards = self._directory.instances
        incompatible = misfits(cards)
        roles = {Role(self._service)}
        if Role.WORKER in roles:
            roles.add(Role.PARKED)
        return [
            Replica(
                card.name,
                card.instance,
                routable(card) and card.instance not in incompatible,
                card.draining,
            )
            for card in cards
            if card.role in roles
        ]

    async def _read_outcomes(self, started: float) -> StreamReader:
        def receive(message: StreamMessage) -> None:
            outcome = decoded_outcome(message.data)
            if outcome is not None:
                self._requests.add(outcome)

        subjects = self._bus.subjects
        start = Start(time=datetime.fromtimestamp(started - BASELINE_S, UTC))
        reader = StreamReader(self._bus, subjects.route_stream, subjects.route_all, receive, start)
        await reader.open()
        await reader.until_caught_up(READ_S)
        return reader

    @property
    def _bucket(self) -> Bucket:
        return self._bus.bucket(self._bus.subjects.plan_bucket)

    async def _store(self, record: RollRecord) -> None:
        await self._bucket.put(self._bus.subjects.roll_key(self._service), encode(record))
