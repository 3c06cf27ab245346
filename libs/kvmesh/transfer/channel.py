"""One connection between a reader and an owner: small messages, and bytes without copies.

A read is: `Want`, `TransferReply`; the bytes, unless they are read directly; `Got`,
`TransferReply`. The second reply shows whether the grant was valid for the whole read, which a
direct reader cannot know otherwise. A reader that checks the bytes itself sends no `Got`, and may
send another `Want`.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Struct

from kvmesh.transfer.errors import Code

MAX_MESSAGE = 4 << 20
MAX_UNAUTHENTICATED = 64 << 10  # of a peer that has not shown a token yet
LENGTH_BYTES = 4
_encode = msgspec.msgpack.Encoder().encode
M = TypeVar("M")


class Descriptor(Struct, frozen=True, array_like=True):
    """Address and token of a grant, for its reader."""

    host: str
    port: int
    token: bytes
    nixl: bool

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class Want(Struct, frozen=True, array_like=True):
    """Request to read ranges (packed offsets and lengths) of a grant; `direct`: through NIXL.

    `checked`: the reader verifies the bytes. It sends no `Got`, and maybe further requests.
    """

    token: bytes
    ranges: bytes
    direct: bool = False
    checked: bool = False


class Got(Struct, frozen=True, array_like=True):
    """The bytes have arrived; requests the final reply. `final` returns the grant."""

    final: bool


class TransferReply(Struct, frozen=True, array_like=True):
    """Refusal with a `code`, or success; for direct readers with NIXL agent, base and metadata."""

    code: Code | None = None
    detail: str = ""
    agent: str = ""
    base: int = 0
    metadata: bytes = b""


class Closed(Exception):
    """The peer closed the connection or sent a malformed message."""


class Silent(Closed):
    """The peer sent nothing in time."""


class Channel:
    """Messages and bytes over a non-blocking socket on this event loop.

    Raises Silent if nothing arrives for `quiet_s` seconds while receiving.
    """

    def __init__(self, sock: socket.socket, quiet_s: float | None = None) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._quiet_s = quiet_s
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def connect(cls, host: str, port: int, quiet_s: float | None = None) -> "Channel":
        """Connect; raises OSError, also if the peer does not accept in time."""
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
        await self.send_bytes(memoryview(encode_message(message)))

    async def receive(
        self, kind: type[M], is_known_token: Callable[[bytes], bool] = lambda _: True
    ) -> M:
        """Receive a message; a large one is read only if its token is known."""
        size = int.from_bytes(await self._exactly(LENGTH_BYTES), "big")
        if size > MAX_MESSAGE:
            raise Closed(f"a message of {size} bytes")
        body = await self._exactly(min(size, MAX_UNAUTHENTICATED))
        if size > MAX_UNAUTHENTICATED:
            if not is_known_token(_token(bytes(body))):
                raise Closed(f"a message of {size} bytes without a known token")
            body += await self._exactly(size - MAX_UNAUTHENTICATED)
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Closed(str(error)) from error

    async def send_bytes(self, data: memoryview) -> None:
        try:
            await self._loop.sock_sendall(self._sock, data)
        except OSError as error:
            raise Closed(error.strerror or str(error)) from error

    async def send_file(self, file: int, offset: int, length: int) -> None:
        """Send a range of an open file, without a copy through this process."""
        done = 0
        while done < length:
            try:
                count = os.sendfile(self._sock.fileno(), file, offset + done, length - done)
            except BlockingIOError:
                await self._writable()
                continue
            except OSError as error:
                raise Closed(error.strerror or str(error)) from error
            if not count:
                raise Closed("the file is shorter than it was")
            done += count

    async def receive_into(self, target: memoryview) -> None:
        """Fill `target`."""
        done = 0
        while done < len(target):
            try:
                async with asyncio.timeout(self._quiet_s):
                    count = await self._loop.sock_recv_into(self._sock, target[done:])
            except TimeoutError:
                raise Silent("nothing received in time") from None
            except OSError as error:
                raise Closed(error.strerror or str(error)) from error
            if not count:
                raise Closed("the connection ended")
            done += count

    def cut(self) -> None:
        """Stop sending and receiving at once, also in the middle of a message."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # already closed
            return

    def close(self) -> None:
        self._sock.close()

    async def _writable(self) -> None:
        number, ready = self._sock.fileno(), self._loop.create_future()
        self._loop.add_writer(number, _wake, ready)
        try:
            await ready
        finally:
            self._loop.remove_writer(number)

    async def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        await self.receive_into(memoryview(data))
        return data


def encode_message(message: Struct) -> bytes:
    """A message as it is sent: its length, and its content."""
    body = _encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def _wake(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


def _token(head: bytes) -> bytes:
    """Return the token of a `Want` from its first bytes: an array that starts with a binary."""
    if len(head) < 3 or head[0] & 0xF0 != 0x90 or head[1] != 0xC4:
        return b""
    return bytes(head[3 : 3 + head[2]])
