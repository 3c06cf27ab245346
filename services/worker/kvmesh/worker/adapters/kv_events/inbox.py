"""A ZeroMQ socket that is read by callbacks of the event loop.

An awaited receive of `zmq.asyncio` costs several times the CPU of the message: it makes futures,
and a task wakes for each. A wake-up costs more than all that follows from a message, also for
ZeroMQ's thread: messages that come within COLLECT_S of each other share one. It is a small part of
the time that a batch of the KV stream waits.
"""

import asyncio
from collections.abc import Callable

import zmq

TURN = 16  # messages taken before other callbacks of the loop have their turn
COLLECT_S = 0.01
_IN = int(zmq.POLLIN)


class Inbox:
    """Passes the frames of each message of `socket` to `take`, in order, while `read` runs."""

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], bool]) -> None:
        self._socket = socket
        self._descriptor: int = socket.FD
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[bool] = self._loop.create_future()
        self._has_taken = False  # since the last look for silence
        self._emptied_at = 0.0
        self._collecting: asyncio.TimerHandle | None = None

    async def read(self, silence_s: float) -> bool:
        """Read until `take` returns False, or until nothing arrives; True after a silence.

        A silence lasts `silence_s` seconds, or up to twice as long after messages. Raises whatever
        `take` raises.
        """
        self._ended = self._loop.create_future()
        self._has_taken = False
        self._loop.add_reader(self._descriptor, self._drain)
        self._loop.call_later(silence_s, self._look, self._ended, silence_s)
        try:
            self._drain()  # the descriptor does not tell of what has arrived before
            return await self._ended
        finally:
            self._ended.cancel()
            self._loop.remove_reader(self._descriptor)
            if self._collecting is not None:
                self._collecting.cancel()
                self._collecting = None

    def _look(self, ended: "asyncio.Future[bool]", silence_s: float) -> None:
        if ended.done():
            return
        if not self._has_taken:
            ended.set_result(True)
            return
        self._has_taken = False
        self._loop.call_later(silence_s, self._look, ended, silence_s)

    def _drain(self) -> None:
        """Take what has arrived; the socket signals anew only once none is left."""
        taken = 0
        try:
            while taken < TURN and not self._ended.done():
                frames = self._receive()
                taken += 1
                self._has_taken = True
                if not self._take(frames):
                    self._ended.set_result(False)
                if not int(self._socket.getsockopt(zmq.EVENTS)) & _IN:
                    return self._emptied(True)
        except zmq.Again:
            return self._emptied(taken > 0)
        except Exception as error:
            self._ended.set_exception(error)
        if not self._ended.done():
            self._loop.call_soon(self._drain)
        return None

    def _emptied(self, has_taken: bool) -> None:
        """Look again in COLLECT_S if messages come that fast, else when the socket signals."""
        if self._ended.done():
            return
        now = self._loop.time()
        is_dense = has_taken and (
            self._collecting is not None or now - self._emptied_at < COLLECT_S
        )
        if is_dense:
            if self._collecting is None:
                self._loop.remove_reader(self._descriptor)
            self._collecting = self._loop.call_later(COLLECT_S, self._drain)
        elif self._collecting is not None:
            self._collecting = None
            self._loop.add_reader(self._descriptor, self._drain)
        if has_taken:
            self._emptied_at = now

    def _receive(self) -> list[bytes]:
        """The frames of a message; raises zmq.Again if there is none.

        A frame knows whether others follow: `recv_multipart` asks the socket, for thrice the time.
        """
        frames = []
        more = True
        while more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            frames.append(frame.bytes)
            more = frame.more
        return frames
