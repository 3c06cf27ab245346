"""Ordered, gap-checked reading of a stream that survives reconnects and lost consumers.

Built on an ephemeral push consumer (JetStream ADR-17, ordered consumers): every delivery carries
the consumer's own sequence, so a hole means a lost message, and idle heartbeats tell when the
consumer itself has vanished. In both cases a new consumer starts after the last message seen.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from time import monotonic
from typing import NamedTuple

from msgspec import Raw
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from kvmesh.bus.client import Bus
from kvmesh.bus.errors import cause

log = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
SILENCE_S = 3 * HEARTBEAT_S
TURN_S = 0.002
_NOTHING = Raw()


class StreamMessage(NamedTuple):
    """One message: stream sequence, messages still behind it, headers if it has any.

    `time` is when the server stored it, in Unix seconds.
    """

    subject: str
    data: bytes
    seq: int
    pending: int
    headers: dict[str, str] | None
    time: float = 0.0


@dataclass(frozen=True)
class Start:
    """Where to begin: after a sequence, at a time, at each subject's last message, or at now.

    `headers_only`: messages come without data, and say in a header how much they have.
    """

    after: int | None = None
    time: datetime | None = None
    last_per_subject: bool = False
    new: bool = False
    headers_only: bool = False

    def consumer_fields(self) -> ConsumerConfig:
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
    """Feeds every message of `stream` that matches `subject` to `handler`, in order, once.

    `handler` is synchronous and must not raise. `on_recreated` is called when the stream turns
    out to be another one (made anew, or older than what was read): what was read no longer counts.
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
        self._stream = stream
        self._subject = subject
        self._handler = handler
        self._start = start
        self._on_recreated = on_recreated
        self._created: object = None
        self._subscription: Subscription | None = None
        self._consumer = ""
        self._consumer_seq = 0
        self._heard = 0.0
        self._attached = 0.0
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[Msg] = deque()  # the server's flow control bounds it
        self._turn_planned = False
        self._held = False
        self._stale = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.last_seq = start.after or 0
        self.pending = 0
        self.caught_up = asyncio.Event()

    async def open(self) -> None:
        """Create the consumer; raises the server's error if the stream cannot be read."""
        await self._attach()
        self._task = asyncio.create_task(self._watch(), name=f"reader {self._stream}")

    def hold(self) -> None:
        """Handle nothing more until `go_on`: the server sends on only until it is not answered."""
        self._held = True

    def go_on(self) -> None:
        """End what `hold` began."""
        self._held = False
        self._plan_turn()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._detach()
        await self._delete_consumer()

    async def _delete_consumer(self) -> None:
        """So that it is not listed as one that lags until the server drops it."""
        if not (self._consumer and self._bus.client.is_connected):
            return
        try:
            async with asyncio.timeout(1):
                await self._bus.js.delete_consumer(self._stream, self._consumer)
        except (NatsError, OSError, TimeoutError) as error:
            log.debug("consumer %s is left to lapse: %s", self._consumer, error)

    async def _attach(self) -> None:
        await self._detach()
        self._attached = self._loop.time()
        info = await self._bus.js.stream_info(self._stream)
        another = self._created is not None and info.created != self._created
        if another or info.state.last_seq < self.last_seq:
            self._forget()
        self._created = info.created
        inbox = self._bus.client.new_inbox()
        self._consumer_seq = 0
        self._stale.clear()
        self._subscription = await self._bus.client.subscribe_direct(inbox, self._receive)
        consumer = await self._bus.js.add_consumer(self._stream, self._config(inbox))
        self._consumer = consumer.name
        self._heard = self._loop.time()
        self.pending = consumer.num_pending or 0
        if not self.pending:
            self.caught_up.set()

    def _forget(self) -> None:
        log.warning("stream %s was made anew; reading it from its start", self._stream)
        self._start = replace(self._start, after=None if self._start.after is None else 0)
        self.last_seq = 0
        self.caught_up.clear()
        if self._on_recreated is not None:
            self._on_recreated()

    def _config(self, inbox: str) -> ConsumerConfig:
        resumed = self.last_seq > 0 and not self._start.last_per_subject
        start = replace(self._start, after=self.last_seq) if resumed else self._start
        return replace(
            start.consumer_fields(),
            headers_only=start.headers_only or None,
            description=self._bus.client.options["name"],
            deliver_subject=inbox,
            filter_subject=self._subject,
            ack_policy=AckPolicy.NONE,
            max_deliver=1,
            mem_storage=True,
            num_replicas=1,
            idle_heartbeat=HEARTBEAT_S,
            flow_control=True,
            inactive_threshold=30.0,
        )

    async def _detach(self) -> None:
        if self._subscription is None:
            return
        try:
            await self._subscription.unsubscribe()
        except NatsError as error:
            log.debug("unsubscribing from %s: %s", self._stream, error)
        self._subscription = None
        self._arrived.clear()

    def _receive(self, msg: Msg) -> None:
        self._heard = self._loop.time()
        self._arrived.append(msg)
        if not self._turn_planned:
            self._plan_turn()

    def _plan_turn(self) -> None:
        if self._arrived and not (self._held or self._turn_planned):
            self._turn_planned = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Handle what has arrived; what takes longer than a turn lets others run first."""
        ends = monotonic() + TURN_S
        try:
            while self._arrived and not self._held:
                self._take(self._arrived.popleft())
                if monotonic() > ends:
                    break
        finally:
            self._turn_planned = False
            self._plan_turn()

    def _take(self, msg: Msg) -> None:
        headers = msg.headers
        if headers is not None and headers.get("Status") == "100":
            self._on_status(msg, headers)
            return
        if self._stale.is_set():
            return
        fields = msg.reply.split(".")
        at = 5 if len(fields) == 9 else 7  # ADR-15: domain and account hash come before the stream
        seq, consumer_seq, pending = int(fields[at]), int(fields[at + 1]), int(fields[at + 3])
        if consumer_seq != self._consumer_seq + 1:
            self._stale.set()
            return
        self._consumer_seq = consumer_seq
        stored = int(fields[at + 2]) / 1e9
        self._handler(StreamMessage(msg.subject, msg.data, seq, pending, headers, stored))
        self.last_seq = seq
        self.pending = pending
        if not pending:
            self.caught_up.set()

    def _on_status(self, msg: Msg, headers: dict[str, str]) -> None:
        if msg.reply:
            self._bus.post(msg.reply, _NOTHING)
        elif "Nats-Consumer-Stalled" in headers:
            self._bus.post(headers["Nats-Consumer-Stalled"], _NOTHING)
        last = headers.get("Nats-Last-Consumer")
        if last is not None and int(last) != self._consumer_seq:
            self._stale.set()

    async def _watch(self) -> None:
        failing = False
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._stale.wait()
            except TimeoutError:
                quiet = self._loop.time() - self._heard > SILENCE_S
                reconnected = self._bus.connected_at > self._attached
                if not ((quiet or reconnected) and self._bus.client.is_connected):
                    continue
            try:
                await self._attach()
                failing = False
            except (NatsError, OSError, TimeoutError) as error:
                if not failing:
                    log.warning("cannot read %s, retrying: %s", self._stream, cause(error))
                failing = True
                self._stale.set()
                await asyncio.sleep(0.5)
