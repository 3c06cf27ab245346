"""Subscription to the KV events of vLLM and SGLang over ZeroMQ, with replay.

A message is `[topic, sequence number (uint64, big-endian), payload]`. A second socket, if the
engine has one, replays messages from a sequence number on.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio

from kvmesh.worker.adapters.kv_events.inbox import Inbox

log = logging.getLogger(__name__)
RECEIVE_QUEUE = 10_000
REPLAY_TIMEOUT_S = 5.0
TAIL_CHECK_S = 2.0
SEQ_BYTES = 8
END = (1 << 8 * SEQ_BYTES) - 1
MONITOR = "inproc://connection"


def event_endpoints(folder: Path) -> dict[str, str]:
    """Sockets in a private folder: events contain all prompts, and the sockets require no key.

    Engines add a rank to the number at the end, and only to endpoints that have "tcp" in them.
    """
    return {
        "endpoint": f"ipc://{folder}/tcp-events:1",
        "replay_endpoint": f"ipc://{folder}/tcp-replay:1",
    }


def rank_endpoint(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank: the number at its end is the first one's plus the rank.

    Engines leave endpoints without "tcp" in them unchanged.
    """
    head, colon, port = endpoint.rpartition(":")
    if not rank or "tcp" not in endpoint or not port.isdecimal():
        return endpoint
    return f"{head}{colon}{int(port) + rank}"


def _number(frames: list[bytes]) -> int | None:
    """The number of a message; None if it is in another form."""
    numbered = len(frames) >= 2 and len(frames[-2]) == SEQ_BYTES
    return int.from_bytes(frames[-2], "big") if numbered else None


def _shown(topic: bytes) -> str:
    return repr(topic[:80].decode(errors="replace"))


class ZmqSubscriber:
    """Follows one rank's publisher and delivers every message once, in order.

    `on_payload` gets each payload. `on_restart` is called when the publisher restarts, `on_gap`
    with the number of messages lost for good, `on_foreign` with the fault of a message in another
    form. The queue is bounded: ZeroMQ drops messages that do not fit, and the subscriber requests
    them again by sequence number.

    A publisher has restarted if its numbers run backwards, if its replay has another message of the
    last number that arrived, or, without a replay, if the numbers go on elsewhere after the
    connection was lost. Each topic has numbers of its own: the first of a connection is followed.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str | None,
        topic: str,
        on_payload: Callable[[bytes], None],
        on_restart: Callable[[], None],
        on_gap: Callable[[int], None],
        on_foreign: Callable[[str], None],
    ) -> None:
        self._endpoint = endpoint
        self._replay_endpoint = replay
        self._topic = topic
        self._on_payload = on_payload
        self._on_restart = on_restart
        self._on_gap = on_gap
        self._on_foreign = on_foreign
        self._context = zmq.asyncio.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._next_seq = 0
        self._last = b""  # the payload before
        self._was_cut = False
        self._stream: bytes | None = None  # the topic: another one numbers its messages itself
        self._replayed: set[int] = set()
        self._odd = 0, b""  # the last message that was not simply the next one

    def start(self) -> None:
        """Subscribe; raises zmq.ZMQError for an invalid endpoint."""
        socket = self._socket = zmq.Socket(self._context, zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt_string(zmq.SUBSCRIBE, self._topic)
        socket.connect(self._endpoint)
        socket.monitor(MONITOR, zmq.EVENT_DISCONNECTED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.connect(MONITOR)
        self._tasks = [
            asyncio.create_task(self._run(socket), name="kv event subscriber"),
            asyncio.create_task(self._watch(monitor), name="kv event connection"),
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._socket is not None:
            self._socket.close(linger=0)
        self._context.destroy(linger=0)

    async def _run(self, socket: zmq.Socket[bytes]) -> None:
        inbox = Inbox(socket, self._take)
        await self._catch_up(None)
        while True:
            if await inbox.read(TAIL_CHECK_S):
                await self._catch_up(None)
            else:
                await self._on_message(*self._odd)

    def _take(self, frames: list[bytes]) -> bool:
        """Deliver the next message; False for another one, which becomes the odd one."""
        seq, payload = _number(frames), frames[-1]
        if seq is None:
            self._on_foreign(f"a message of {len(frames)} frames is no KV event")
            return True
        topic = frames[0] if len(frames) > 2 else b""
        if self._stream is None:
            self._stream = topic
        elif topic != self._stream:
            self._on_foreign(f"messages of topic {_shown(topic)} beside {_shown(self._stream)}")
            return True
        if seq == self._next_seq and not self._was_cut:
            self._deliver(seq, payload)
            return True
        self._odd = seq, payload
        return False

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            await monitor.recv_multipart()
            self._was_cut, self._stream = True, None

    async def _on_message(self, seq: int, payload: bytes) -> None:
        if seq in self._replayed:
            self._replayed.discard(seq)
            return
        if seq < self._next_seq or (
            self._was_cut and not self._has_replay and seq > self._next_seq
        ):
            self._restart()
        if seq > self._next_seq or (self._was_cut and self._has_replay):
            await self._catch_up(seq)
        self._was_cut = False
        self._deliver(seq, payload)

    def _restart(self) -> None:
        log.info("the KV event publisher at %s restarted", self._endpoint)
        self._next_seq = 0
        self._replayed.clear()
        self._on_restart()

    def _deliver(self, seq: int, payload: bytes) -> None:
        self._next_seq, self._last = seq + 1, payload
        self._on_payload(payload)

    @property
    def _has_replay(self) -> bool:
        return self._replay_endpoint is not None

    async def _catch_up(self, before: int | None) -> None:
        """Replay missed messages: up to message `before`, or all published so far."""
        found = await self._replay(max(self._next_seq - 1, 0), before)
        expected = b"" if self._was_cut else self._last  # the replay of a living one has the last
        if self._next_seq and found.pop(self._next_seq - 1, expected) != self._last:
            self._restart()
            found = await self._replay(0, before)
        self._was_cut = False
        end = max([*found, self._next_seq - 1]) + 1 if before is None else before
        missing = end - self._next_seq - len(found)
        if missing:
            self._on_gap(missing)
        for seq in sorted(found):
            self._deliver(seq, found[seq])
            if before is None:
                self._replayed.add(seq)
        self._next_seq = end
        self._replayed = {seq for seq in self._replayed if seq > end - RECEIVE_QUEUE}

    async def _replay(self, first: int, before: int | None) -> dict[int, bytes]:
        if self._replay_endpoint is None:
            return {}
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._replay_endpoint)
        found: dict[int, bytes] = {}
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", first.to_bytes(SEQ_BYTES, "big")])
                while (seq := _number(frames := await socket.recv_multipart())) != END:
                    if seq is None:
                        self._on_foreign(f"a reply of {len(frames)} frames is no replay")
                        return {}
                    if seq >= first and (before is None or seq < before):
                        found[seq] = frames[-1]
        except TimeoutError:
            log.warning("no replay of KV events from %s", self._replay_endpoint)
        finally:
            socket.close()
        return found
