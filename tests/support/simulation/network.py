"""A NATS server and its connections in memory: subjects, queue groups, and faults.

A connection's messages to the server keep their order. Messages from the server keep it within one
subscription and, unless the fault `reorder` is on, between subscriptions.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from nats.aio.msg import Msg
from nats.errors import ConnectionClosedError, NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.client import JetStreamContext

from kvmesh.bus.client import Bus
from kvmesh.bus.connection.direct_client import REPEAT_S
from support.simulation.faults import Faults
from support.simulation.loop import NODE, SimLoop

SERVER = "nats"
RECONNECT_S = 0.2
Headers = dict[str, str]


@lru_cache(65536)
def matches(pattern: str, subject: str) -> bool:
    """True if a subscriber to `pattern`, perhaps with wildcards, gets messages on `subject`."""
    if pattern == subject:
        return True
    parts, names = pattern.split("."), subject.split(".")
    for index, part in enumerate(parts):
        if part == ">":
            return len(names) > index
        if index >= len(names) or part not in ("*", names[index]):
            return False
    return len(parts) == len(names)


class Network:
    """Connections and subscriptions. `streams` receives messages without a subscriber."""

    def __init__(self, loop: SimLoop, faults: Faults) -> None:
        self.loop = loop
        self.faults = faults
        self.clients: list[SimClient] = []
        self._exact: dict[str, list[SimSubscription]] = {}
        self._wildcard: list[SimSubscription] = []
        self._wildcard_matches: dict[str, list[SimSubscription]] = {}
        self.taps: list[Callable[[str, bytes, str], None]] = []
        self.serve: Callable[[str, bytes, str, Headers | None], bool] = lambda *_: False
        self.context = copy_context()
        self.context.run(NODE.set, SERVER)

    def later(self, delay: float, callback: Callable[..., object], *args: Any) -> None:
        """Schedule an action of the server."""
        self.loop.call_later(delay, callback, *args, context=self.context)

    def receive(self, subject: str, data: bytes, reply: str, headers: Headers | None) -> None:
        """Receive a client's message at the server."""
        self.loop.add_to_digest(subject, data, reply)
        for tap in self.taps:
            tap(subject, data, reply)
        served = self.serve(subject, data, reply, headers)
        if not self.route(subject, data, reply, headers) and reply and not served:
            self.route(reply, b"", "", {"Status": "503"})

    def route(self, subject: str, data: bytes, reply: str, headers: Headers | None) -> bool:
        """Send to all subscribers, and to one of each queue group; True if there was any."""
        groups: dict[str, list[SimSubscription]] = {}
        found = self.listeners(subject)
        for subscription in found:
            if subscription.queue:
                groups.setdefault(subscription.queue, []).append(subscription)
            else:
                subscription.client.deliver(subscription, subject, data, reply, headers)
        for members in groups.values():
            chosen = members[0] if len(members) == 1 else self.loop.random.choice(members)
            chosen.client.deliver(chosen, subject, data, reply, headers)
        return bool(found)

    def listeners(self, subject: str) -> "list[SimSubscription]":
        """Matching subscriptions registered at the server."""
        found = self._wildcard_matches.get(subject)
        if found is None:
            found = [s for s in self._wildcard if matches(s.subject, subject)]
            self._wildcard_matches[subject] = found
        return self._exact.get(subject, []) + found

    def _list_of(self, subscription: "SimSubscription") -> "list[SimSubscription]":
        """The list that contains the subscription while it is registered."""
        subject = subscription.subject
        if "*" not in subject and ">" not in subject:
            return self._exact.setdefault(subject, [])
        self._wildcard_matches.clear()
        return self._wildcard

    def register(self, subscription: "SimSubscription") -> None:
        """Register a subscription at the server."""
        self._list_of(subscription).append(subscription)
        subscription.client.registered.append(subscription)

    def unregister(self, subscription: "SimSubscription") -> None:
        """Remove a subscription at the server."""
        if subscription in subscription.client.registered:
            subscription.client.registered.remove(subscription)
            self._list_of(subscription).remove(subscription)


class SimSubscription:
    """One subscription; a message comes to `handle`, or to the task that runs `callback`."""

    def __init__(
        self,
        client: "SimClient",
        subject: str,
        queue: str,
        handle: Callable[[Msg], None] | None,
        callback: Callable[[Msg], Awaitable[None]] | None,
    ) -> None:
        self.client = client
        self.subject = subject
        self.queue = queue
        self.arrives = 0.0
        self._handle = handle
        self._callback = callback
        self._waiting: deque[Msg] = deque()
        self._task: asyncio.Task[None] | None = None

    def receive(self, msg: Msg) -> None:
        if self not in self.client.subscriptions:
            return
        if self._handle is not None:
            self._handle(msg)
            return
        self._waiting.append(msg)
        if self._task is None or self._task.done():
            self._task = self.client.loop.create_task(self._work())

    async def _work(self) -> None:
        assert self._callback is not None
        while self._waiting:
            await self._callback(self._waiting.popleft())

    async def unsubscribe(self, limit: int = 0) -> None:
        if self in self.client.subscriptions:
            self.client.subscriptions.remove(self)
            self.client.send(self.client.network.unregister, self)

    drain = unsubscribe


class Nuid:
    """Replaces random names."""

    def __init__(self, prefix: str) -> None:
        self._names = (f"{prefix}{n:08d}".encode() for n in itertools.count())

    def next(self) -> bytes:
        return next(self._names)


class SimClient:
    """The part of a connection that kvmesh and nats-py's JetStream use, in simulation."""

    def __init__(self, network: Network, node: str) -> None:
        self.network = network
        self.loop = network.loop
        self.node = node
        self.options = {"name": node}
        self.connected_server_version = SimpleNamespace(major=2, minor=12, patch=0)
        self.subscriptions: list[SimSubscription] = []
        self.registered: list[SimSubscription] = []  # at the server
        self.max_payload = 1 << 20
        self.is_connected = True
        self.is_clustered = True
        self.is_closed = False
        self.bus: Bus | None = None
        self.promptness = SimpleNamespace(late=False, check=lambda: None)
        self._inbox_prefix = bytearray(b"_INBOX")
        self._nuid = Nuid(node)
        self._epoch = 0
        self._sent_until = 0.0
        self._arrives = 0.0
        self._unsent: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        self._inbox = ""
        self._context = copy_context()
        self._context.run(NODE.set, node)
        network.clients.append(self)

    # --- called by the services

    def jetstream(self, timeout: float = 5.0) -> JetStreamContext:
        return JetStreamContext(self, timeout=timeout)  # type: ignore[arg-type]

    def new_inbox(self) -> str:
        return f"_INBOX.{self._nuid.next().decode()}"

    def try_publish(self, subject: str, payload: bytes, reply: str = "") -> bool:
        if not self.is_connected:
            return False
        self._publish(subject, payload, reply, None)
        return True

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        reply: str = "",
        headers: dict[str, Any] | None = None,
    ) -> None:
        if self.is_closed:
            raise ConnectionClosedError
        self._publish(subject, payload, reply, headers)

    def _publish(self, subject: str, payload: bytes, reply: str, headers: Headers | None) -> None:
        if self.network.faults.strikes("loss"):
            return
        self.send(self.network.receive, subject, payload, reply, headers)

    async def subscribe(
        self,
        subject: str,
        queue: str = "",
        cb: Callable[[Msg], Awaitable[None]] | None = None,
    ) -> SimSubscription:
        return self._subscribe(SimSubscription(self, subject, queue, None, cb))

    async def subscribe_direct(
        self, subject: str, handle: Callable[[Msg], None], queue: str = ""
    ) -> SimSubscription:
        return self._subscribe(SimSubscription(self, subject, queue, handle, None))

    def _subscribe(self, subscription: SimSubscription) -> SimSubscription:
        self.subscriptions.append(subscription)
        if self.is_connected:  # else the next connection registers it with the others
            self.send(self.network.register, subscription)
        return subscription

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
        repeats: bool = False,
    ) -> Msg:
        if not self._inbox:
            self._inbox = self.new_inbox()
            await self.subscribe_direct(f"{self._inbox}.*", self._on_reply)
        reply = f"{self._inbox}.{self._nuid.next().decode()}"
        future: asyncio.Future[Msg] = self.loop.create_future()
        self._waiting[reply] = future
        timer = self.loop.call_later(timeout, _expire, future)
        repeated = self.loop.create_task(self._repeat(subject, payload, reply)) if repeats else None
        try:
            await self.publish(subject, payload, reply, headers)
            return await future
        finally:
            timer.cancel()
            if repeated is not None:
                repeated.cancel()
            del self._waiting[reply]

    async def _repeat(self, subject: str, payload: bytes, reply: str) -> None:
        while True:
            await asyncio.sleep(REPEAT_S)
            self.try_publish(subject, payload, reply)

    def _on_reply(self, msg: Msg) -> None:
        future = self._waiting.get(msg.subject)
        if future is None or future.done():
            return
        if msg.headers is not None and msg.headers.get("Status") == "503":
            future.set_exception(NoRespondersError())
        else:
            future.set_result(msg)

    async def flush(self) -> None:
        return None

    async def close(self) -> None:
        self.terminate()

    # --- the wire

    def send(self, action: Callable[..., None], *args: Any) -> None:
        """Schedule an action of the server after all earlier ones; during an outage, later."""
        if not self.is_connected:
            if not self.is_closed:
                self._unsent.append((action, args))
            return
        self._sent_until = max(self._sent_until, self.loop.now + self.network.faults.delay())
        self.network.later(self._sent_until - self.loop.now, self._sent, self._epoch, action, args)

    def _sent(self, epoch: int, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        if epoch == self._epoch:
            action(*args)

    def deliver(
        self,
        subscription: SimSubscription,
        subject: str,
        data: bytes,
        reply: str,
        headers: Headers | None,
    ) -> None:
        """Deliver a message from the server to this client, unless it is lost."""
        faults = self.network.faults
        if faults.strikes("loss"):
            return
        for _ in range(2 if faults.strikes("repeat") and reply.startswith("$JS.ACK") else 1):
            if faults.on("reorder"):
                subscription.arrives = max(subscription.arrives, self.loop.now + faults.delay())
                arrives = subscription.arrives
            else:
                arrives = self._arrives = max(self._arrives, self.loop.now + faults.delay())
            msg = Msg(self, subject, reply, data, headers)  # type: ignore[arg-type]
            self.loop.call_at(
                arrives, self._arrived, self._epoch, subscription, msg, context=self._context
            )

    def _arrived(self, epoch: int, subscription: SimSubscription, msg: Msg) -> None:
        if epoch == self._epoch:
            subscription.receive(msg)

    # --- disconnection

    def cut(self) -> None:
        """Break the connection: messages in flight are lost, and it reconnects a little later."""
        if self.is_closed:
            return
        self._epoch += 1
        self.is_connected = False
        for subscription in list(self.registered):
            self.network.unregister(subscription)
        delay = RECONNECT_S * self.loop.random.uniform(1, 5)
        self.loop.call_later(delay, self._reconnect, self._epoch, context=self._context)

    def _reconnect(self, epoch: int) -> None:
        if epoch != self._epoch or self.is_closed:
            return
        self.is_connected = True
        self._sent_until = self._arrives = self.loop.now
        for subscription in self.subscriptions:
            self.send(self.network.register, subscription)
        unsent, self._unsent = self._unsent, []
        for action, args in unsent:
            self.send(action, *args)
        assert self.bus is not None
        self.bus.connected_at = self.loop.time()
        for callback in self.bus.on_reconnect:
            callback()

    def terminate(self) -> None:
        """End the connection permanently."""
        self._epoch += 1
        self.is_connected = False
        self.is_closed = True
        for subscription in list(self.registered):
            self.network.unregister(subscription)
        if self in self.network.clients:
            self.network.clients.remove(self)


def _expire(future: "asyncio.Future[Msg]") -> None:
    if not future.done():
        future.set_exception(NatsTimeoutError())
