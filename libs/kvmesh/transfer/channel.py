"""One connection between a reader and an owner: small messages, and bytes without copies.

A read is: `Want`, `TransferReply`; the bytes, if they come this way; `Got`, `TransferReply`. The
second answer says whether the grant has been good all the time, which the reader of memory that
is not copied by its owner cannot know otherwise.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Struct

from kvmesh.transfer.errors import Code

MOST_MESSAGE = 4 << 20
STRANGER_MESSAGE = 64 << 10  # of somebody who has not shown a token yet
_LENGTH = 4
_encode = msgspec.msgpack.Encoder().encode
M = TypeVar("M")


class Descriptor(Struct, frozen=True, array_like=True):
    """Where a grant is, as its reader needs it."""

    host: str
    port: int
    token: bytes
    nixl: bool

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class Want(Struct, frozen=True, array_like=True):
    """These ranges (packed offsets and lengths) of a grant; `direct`: read without its owner."""

    token: bytes
    ranges: bytes
    direct: bool = False


class Got(Struct, frozen=True, array_like=True):
    """The bytes are there; is all well? `final` gives the grant back."""

    final: bool


class TransferReply(Struct, frozen=True, array_like=True):
    """No, with a `code`, or yes; then `agent` knows the region at `base` by `metadata`."""

    code: Code | None = None
    detail: str = ""
    agent: str = ""
    base: int = 0
    metadata: bytes = b""


class Closed(Exception):
    """The other side has closed the connection, or says what cannot be understood."""


class Silent(Closed):
    """Nothing has come from the other side in time."""


class Channel:
    """A non-blocking socket on this event loop.

    It is `Silent` if nothing comes for `quiet_s` seconds while something is waited for.
    """

    def __init__(self, sock: socket.socket, quiet_s: float | None = None) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._quiet_s = quiet_s
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def connect(cls, host: str, port: int, quiet_s: float | None = None) -> "Channel":
        """Raises OSError if nobody listens there, or answers in time."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(quiet_s):
                await loop.sock_connect(sock, address)
            return cls(sock, quiet_s)
        except BaseException:
            sock.close()
            raise

    async def send(self, message: Struct) -> None:
        body = _encode(message)
        await self.send_bytes(memoryview(len(body).to_bytes(_LENGTH, "big") + body))

    async def receive(self, kind: type[M], knows: Callable[[bytes], bool] = lambda _: True) -> M:
        """The next message. What is large is read to its end if `knows` the token that it has."""
        size = int.from_bytes(await self._exactly(_LENGTH), "big")
        if size > MOST_MESSAGE:
            raise Closed(f"a message of {size} bytes")
        body = await self._exactly(min(size, STRANGER_MESSAGE))
        if size > STRANGER_MESSAGE:
            if not knows(_token(bytes(body))):
                raise Closed(f"a message of {size} bytes from a stranger")
            body += await self._exactly(size - STRANGER_MESSAGE)
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise Closed(str(error)) from error

    async def send_bytes(self, data: memoryview) -> None:
        try:
            await self._loop.sock_sendall(self._sock, data)
        except OSError as error:
            raise Closed(error.strerror or str(error)) from error

    async def receive_into(self, place: memoryview) -> None:
        """Fill `place`."""
        done = 0
        while done < len(place):
            try:
                async with asyncio.timeout(self._quiet_s):
                    count = await self._loop.sock_recv_into(self._sock, place[done:])
            except TimeoutError:
                raise Silent("nothing came in time") from None
            except OSError as error:
                raise Closed(error.strerror or str(error)) from error
            if not count:
                raise Closed("the connection ended")
            done += count

    def cut(self) -> None:
        """Not one more byte leaves or comes, also of what is being sent."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is closed already
            return

    def close(self) -> None:
        self._sock.close()

    async def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        await self.receive_into(memoryview(data))
        return data


def _token(head: bytes) -> bytes:
    """The first field of a `Want` of which this is the beginning: an array, a short binary."""
    if len(head) < 3 or head[0] & 0xF0 != 0x90 or head[1] != 0xC4:
        return b""
    return bytes(head[3 : 3 + head[2]])
