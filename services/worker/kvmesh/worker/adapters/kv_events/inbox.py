"""A ZeroMQ socket that is read by callbacks of the event loop.

An awaited receive of `zmq.asyncio` costs several times the CPU of the message: it makes futures,
and a task wakes for each.
"""

import asyncio
from collections.abc import Callable

import zmq

TURN = 16  # messages taken before other callbacks of the loop have their turn


class Inbox:
    """Passes the frames of each message of `socket` to `take`, in order, while `read` runs."""

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], bool]) -> None:
        self._socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[bool] = self._loop.create_future()
        self._has_taken = False  # since the last look for silence

    async def read(self, silence_s: float) -> bool:
        """Read until `take` returns False, or until nothing arrives; True after a silence.

        A silence lasts `silence_s` seconds, or up to twice as long after messages. Raises whatever
        `take` raises.
        """
        self._ended = self._loop.create_future()
        self._has_taken = False
        descriptor: int = self._socket.FD
        self._loop.add_reader(descriptor, self._drain)
        self._loop.call_later(silence_s, self._look, self._ended, silence_s)
        try:
            self._drain()  # the descriptor does not tell of what has arrived before
            return await self._ended
        finally:
            self._ended.cancel()
            self._loop.remove_reader(descriptor)

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
        try:
            for _ in range(TURN):
                if self._ended.done():
                    return
                frames = self._receive()
                self._has_taken = True
                if not self._take(frames):
                    self._ended.set_result(False)
                if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    return
        except zmq.Again:
            return
        except Exception as error:
            self._ended.set_exception(error)
        else:
            self._loop.call_soon(self._drain)

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
