"""Ordered, gap-checked reading of a stream that survives reconnects and lost consumers.

Built on an ephemeral push consumer (JetStream ADR-17, ordered consumers). Every delivery carries
the consumer's own sequence, so a gap means a lost message; missing heartbeats mean that the
consumer is gone. In both cases a new consumer starts after the last message read, if the stream
still has that message under that sequence.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from math import inf
from time import monotonic
from typing import NamedTuple

from msgspec import Raw
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StreamInfo

from kvmesh.bus.backoff import Backoff
from kvmesh.bus.client import Bus, RawMessage, Subscription
from kvmesh.bus.connection.ack_subject import delivery_fields
from kvmesh.bus.connection.api_errors import TOO_MANY_CONSUMERS
from kvmesh.bus.errors import (
    BusError,
    BusTimeout,
    JetStreamError,
    NotFound,
    NotPermitted,
    cause,
)
from kvmesh.bus.faults import STALLED
from kvmesh.bus.packs import unpacked
from kvmesh.bus.streams.identity import is_rewound
from kvmesh.bus.ticks import next_tick

log = logging.getLogger(__name__)
# Each heartbeat wakes the server and this process. Readers of last values need fewer: leases are
# renewed more often than that, and settings change seldom.
HEARTBEAT_S, VALUES_HEARTBEAT_S = 2.0, 4.0
SILENCES = 2.5  # heartbeats that are due without any: the consumer is gone
SILENCE_S = SILENCES * HEARTBEAT_S
ATTEMPTS = 3  # to attach to a stream that is recreated meanwhile
SETTLED_S = 10.0  # a consumer that lives this long ends a series of attempts
STALLED_S = 5.0  # of heartbeats, while messages wait that the consumer does not deliver
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 30.0
# A cluster does not reply about a stream whose leader it elects: ask again, but leave a slow server
# more and more time to create a consumer.
FIRST_PATIENCE_S, MAX_PATIENCE_S = 2.5, 40.0
DELETE_S = 1.0
REFUSED_S = 60.0
OFFLINE_S = 0.1
MAX_CONSUMERS = 4
BATCH_S = 0.002
_NOTHING = Raw()


class StreamMessage(NamedTuple):
    """One message: its stream sequence, the messages pending behind it, and its headers.

    `time` is when the server stored it, in Unix seconds. Messages of one pack have all of these in
    common.
    """

    subject: str
    data: bytes
    seq: int
    pending: int
    headers: dict[str, str] | None
    time: float = 0.0


@dataclass(frozen=True)
class Start:
    """The start of a reader: after a sequence, at a time, at each subject's last message, or now.

    `stored` is the time at which the message `after` was stored; another time means a rewound
    stream. With `headers_only` messages come without their data.
    """

    after: int | None = None
    stored: float | None = None
    time: datetime | None = None
    last_per_subject: bool = False
    new: bool = False
    headers_only: bool = False

    def consumer_fields(self) -> ConsumerConfig:
        fields = self._deliver_policy()
        fields.headers_only = self.headers_only or None
        return fields

    def _deliver_policy(self) -> ConsumerConfig:
        if self.after is not None:
            policy = DeliverPolicy.BY_START_SEQUENCE
            return ConsumerConfig(deliver_policy=policy, opt_start_seq=self.after + 1)
        if self.time is not None:
            stamp = self.time.isoformat()
            return ConsumerConfig(
                deliver_policy=DeliverPolicy.BY_START_TIME,
                opt_start_time=stamp,  # type: ignore[arg-type]
            )
        if self.last_per_subject:
            return ConsumerConfig(deliver_policy=DeliverPolicy.LAST_PER_SUBJECT)
        return ConsumerConfig(deliver_policy=DeliverPolicy.NEW if self.new else DeliverPolicy.ALL)


class StreamReader:
    """Passes every message of `stream` that matches `subject` to `handler`, in order, once.

    `handler` is synchronous and must not raise. `on_recreated` runs when the stream was recreated,
    or rewound behind the last message read: all messages read before are void.
    """

    def __init__(
        self,
        bus: Bus,
        stream: str,
        subject: str,
        handler: Callable[[StreamMessage], None],
        start: Start,
        on_recreated: Callable[[], None] | None = None,
    ) -> None:
        self._bus = bus
        self.stream = stream
        self._subject = subject
        self._unpacks = stream == bus.subjects.route_stream
        self._handler = handler
        self._start = start
        self._heartbeat_s = VALUES_HEARTBEAT_S if start.last_per_subject else HEARTBEAT_S
        self._on_recreated = on_recreated
        self._created: object = None
        self._subscription: Subscription | None = None
        self._consumers: deque[str] = deque(maxlen=MAX_CONSUMERS)  # the last one is in use
        self._consumer_seq = 0
        self._backoff = Backoff(FIRST_DELAY_S, MAX_DELAY_S)
        self._connected_at = bus.connected_at  # when the series of delays began
        self._last_message_at = 0.0
        self._stalled_since = inf  # the first heartbeat of those without a message between
        self._attached_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[RawMessage] = deque()  # bounded by the server's flow control
        self._batch_scheduled = False
        self._paused = False
        self._reported = False
        self._attaching = False  # until the stream is known to be the one read before
        self._stale = asyncio.Event()
        self._failing = False
        self._task: asyncio.Task[None] | None = None
        self.last_seq = start.after or 0
        self._stored = start.stored  # storage time of the message `last_seq`
        self.pending = 0
        self.caught_up = asyncio.Event()
        self.refusal: JetStreamError | None = None  # the account permits no more consumers

    async def open(self) -> None:
        """Create the consumer; raises BusError if the stream cannot be read.

        A server that refuses this process what it needs, or an account that permits no more
        consumers while this is a service, is asked again, as after a loss.
        """
        try:
            await self._attach()
        except NotPermitted as error:
            if not self._bus.refusals.is_needed(error.subject):
                raise
            self._stale.set()
        except JetStreamError as error:
            if error.err_code != TOO_MANY_CONSUMERS or not self._bus.patient:
                raise
            log.warning("cannot read %s yet, retrying: %s", self.stream, cause(error))
            self._failing, self.refusal = True, error
            self._stale.set()
        self._bus.readers.add(self)
        self._task = asyncio.create_task(self._watch(), name=f"reader {self.stream}")

    def pause(self) -> None:
        """Handle nothing until `resume`; the server's flow control then stops deliveries."""
        self._paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        self._paused = False
        self._schedule_batch()

    @property
    def silent_for(self) -> float:
        """Seconds without the messages or heartbeats that are due; 0 if none is overdue."""
        silence = self._loop.time() - self._last_message_at
        return silence if silence > SILENCES * self._heartbeat_s else 0.0

    async def until_caught_up(self, timeout: float) -> None:
        """Return once all that was in the stream is handled.

        Raises BusTimeout after `timeout` seconds, REFUSED_S while the account permits no more
        consumers; then its refusal.
        """
        try:
            async with asyncio.timeout(REFUSED_S if self.refusal is not None else timeout):
                await self.caught_up.wait()
        except TimeoutError:
            if self.refusal is not None:
                raise self.refusal from None
            raise BusTimeout(f"{self.stream} was not read within {timeout:g} s") from None

    async def close(self) -> None:
        self._bus.readers.discard(self)
        self._report("")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None  # its traceback refers to this reader, and so to the handler's data
        await self._detach()
        await self._delete_consumers()

    async def _delete_consumers(self) -> None:
        """Delete the consumers: the server may notice late or never that they lack a listener."""
        while self._consumers and self._bus.connected:
            try:
                async with asyncio.timeout(DELETE_S):
                    await self._bus.js.delete_consumer(self.stream, self._consumers[0])
            except NotFound:
                pass
            except (BusError, TimeoutError) as error:
                log.debug("consumer %s not deleted yet: %s", self._consumers[0], cause(error))
                return
            self._consumers.popleft()

    async def _attach(self) -> None:
        self._attaching = True
        info = await self._bus.using(partial(self._bus.js.stream_info, self.stream))
        await self._check(info)
        for _ in range(ATTEMPTS):
            await self._create_consumer()
            info = await self._bus.js.stream_info(self.stream)
            if not await self._check(info):  # the stream was the same when the consumer was created
                self._attaching = False
                self._schedule_batch()
                return
        self._stale.set()

    async def _check(self, info: StreamInfo) -> bool:
        """Start over if the stream was recreated or rewound; returns whether it was."""
        fault = await self._fault(info)
        if fault:
            self._start_over(fault)
        self._created = info.created
        return bool(fault)

    async def _create_consumer(self) -> None:
        await self._detach()
        await self._delete_consumers()
        self._attached_at = self._loop.time()
        inbox = self._bus.new_inbox()
        self._consumer_seq = 0
        self._stale.clear()
        self._subscription = await self._bus.subscribe_raw(inbox, self._receive)
        name = secrets.token_hex(8)
        self._consumers.append(name)  # before it is created: the reply may be lost
        consumer = await self._bus.js.add_consumer(self.stream, self._config(name, inbox))
        self._last_message_at = self._loop.time()
        self._stalled_since = inf
        self.pending = consumer.num_pending or 0
        if not self.pending:
            self._on_caught_up()

    async def _fault(self, info: StreamInfo) -> str:
        """The reason why the messages read are no prefix of the stream; empty if they are."""
        if self._created is not None and info.created != self._created:
            return "was recreated"
        if info.state.last_seq < self.last_seq:
            return "lost messages that had been read"
        if self._start.last_per_subject or self._stored is None:
            return ""
        rewound = await is_rewound(self._bus, self.stream, self.last_seq, self._stored)
        return "was rewound and reuses sequences that had been read" if rewound else ""

    def _start_over(self, fault: str) -> None:
        self._bus.counts.stream_resets[self.stream] += 1
        log.warning("stream %s %s; reading it from its start", self.stream, fault)
        self._start = replace(self._start, after=None if self._start.after is None else 0)
        self.last_seq = 0
        self._stored = None
        self.caught_up.clear()
        if self._on_recreated is not None:
            self._on_recreated()

    def _config(self, name: str, inbox: str) -> ConsumerConfig:
        resumed = self.last_seq > 0 and not self._start.last_per_subject
        start = replace(self._start, after=self.last_seq) if resumed else self._start
        return replace(
            start.consumer_fields(),
            name=name,
            description=self._bus.client.options["name"],
            deliver_subject=inbox,
            filter_subject=self._subject,
            ack_policy=AckPolicy.NONE,
            max_deliver=1,
            mem_storage=True,
            num_replicas=1,
            idle_heartbeat=self._heartbeat_s,
            flow_control=True,
            inactive_threshold=30.0,
        )

    async def _detach(self) -> None:
        if self._subscription is None:
            return
        try:
            await self._subscription.unsubscribe()
        except BusError as error:
            log.debug("unsubscribing from %s: %s", self.stream, error)
        self._subscription = None
        self._arrived.clear()

    def _receive(self, msg: RawMessage) -> None:
        self._last_message_at = self._loop.time()
        self._arrived.append(msg)
        if not self._batch_scheduled:
            self._schedule_batch()

    def _schedule_batch(self) -> None:
        if self._arrived and not (self._paused or self._attaching or self._batch_scheduled):
            self._batch_scheduled = True
            self._loop.call_soon(self._handle_batch)

    def _handle_batch(self) -> None:
        """Handle what has arrived, for at most BATCH_S before other callbacks run."""
        ends = monotonic() + BATCH_S
        try:
            while self._arrived and not (self._paused or self._attaching):
                self._handle(self._arrived.popleft())
                if monotonic() > ends:
                    break
        finally:
            self._batch_scheduled = False
            self._schedule_batch()

    def _handle(self, msg: RawMessage) -> None:
        headers = msg.headers
        if headers is not None and headers.get("Status") == "100":
            self._on_status(msg, headers)
            return
        if self._stale.is_set():
            return
        fields = delivery_fields(msg.reply)
        seq, consumer_seq, pending = int(fields[3]), int(fields[4]), int(fields[6])
        if consumer_seq != self._consumer_seq + 1:
            self._stale.set()
            return
        self._consumer_seq = consumer_seq
        stored = int(fields[5]) / 1e9
        parts = unpacked(msg.data) if self._unpacks else (msg.data,)
        for data in parts:
            self._handler(StreamMessage(msg.subject, data, seq, pending, headers, stored))
        self.last_seq = seq
        self._stored = stored
        self._stalled_since = inf
        self.pending = pending
        if not pending:
            self._on_caught_up()

    def _on_caught_up(self) -> None:
        self.caught_up.set()
        if self._reported:
            self._report("")

    def _report(self, stalled: str) -> None:
        """Begin, or end, the report that the stream's consumer stalls."""
        if bool(stalled) is not self._reported:
            self._reported = bool(stalled)
            self._bus.faults.set(STALLED, self.stream, stalled)

    def _on_status(self, msg: RawMessage, headers: dict[str, str]) -> None:
        if msg.reply:
            self._bus.post(msg.reply, _NOTHING)
        elif "Nats-Consumer-Stalled" in headers:
            self._bus.post(headers["Nats-Consumer-Stalled"], _NOTHING)
        last = headers.get("Nats-Last-Consumer")
        if last is not None and int(last) != self._consumer_seq:
            self._stale.set()
        elif last is not None and (self.pending or "Nats-Consumer-Stalled" in headers):
            self._on_idle()

    def _on_idle(self) -> None:
        """Start again if messages have waited too long, as without this process's flow control."""
        now = self._loop.time()
        self._stalled_since = min(now, self._stalled_since)
        if now - self._stalled_since < STALLED_S:
            return
        self._stale.set()
        self._report(
            f"stream {self.stream} is read slowly or not at all: its consumer delivers nothing for"
            f" {STALLED_S:g} s at a time while {self.pending:,} messages wait"
        )

    async def _watch(self) -> None:
        """Attach again after a loss: at once if the consumer lived long, else after a delay."""
        patience_s = FIRST_PATIENCE_S
        while True:
            if not await self._lost():
                continue
            if self._loop.time() - self._attached_at > SETTLED_S and not self._failing:
                self._backoff.reset()
            else:
                await self._wait()
            self._bus.counts.reader_restarts[self.stream] += 1
            try:
                async with asyncio.timeout(patience_s):
                    await self._attach()
                self._failing, self.refusal, patience_s = False, None, FIRST_PATIENCE_S
            except (BusError, TimeoutError) as error:
                patience_s = min(2 * patience_s, MAX_PATIENCE_S)
                if not self._failing:
                    log.warning("cannot read %s, retrying: %s", self.stream, cause(error))
                self._failing = True
                if isinstance(error, NotFound):  # no load of the server, and soon there again
                    self._backoff.reset()
                self._stale.set()

    async def _wait(self) -> None:
        """Wait for the next delay; a new connection restarts the series of delays."""
        self._renew_delays()
        ends = self._loop.time() + self._backoff.delay()
        while (left := ends - self._loop.time()) > 0:
            await asyncio.sleep(min(left, HEARTBEAT_S))
            if self._renew_delays():
                ends = self._loop.time() + self._backoff.delay()

    def _renew_delays(self) -> bool:
        """Reset the delays if the connection is new since the last call; returns whether it is."""
        if self._bus.connected_at <= self._connected_at:
            return False
        self._connected_at = self._bus.connected_at
        self._backoff.reset()
        return True

    async def _lost(self) -> bool:
        """Wait up to a heartbeat; return whether the consumer is lost. False while offline."""
        await next_tick(self._heartbeat_s, self._stale)
        if not self._stale.is_set():
            reconnected = self._bus.connected_at > self._attached_at
            if not (self.silent_for or reconnected):
                return False
        if self._bus.connected:
            return True
        await asyncio.sleep(OFFLINE_S)
        return False
