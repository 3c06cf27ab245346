"""Grants: permissions for other processes to read ranges of a memory region for some time.

A grant ends when its reader returns it, when it is revoked, or at its deadline. After that no byte
of its ranges is sent, and a reader that has not received the final reply discards its bytes.
"""

import asyncio
import ctypes
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvmesh.transfer.channel import Channel, Closed
from kvmesh.transfer.memory_ranges import Allowed, Range, check_range

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from kvmesh.transfer.nixl import NixlAgent

GRANT_TOKEN_BYTES = 16
Ending: TypeAlias = Literal["read", "revoked", "expired"]


class Grant:
    """Permission to read some ranges; `descriptor` holds the address and the token for the reader.

    `on_end` is called once, as soon as no other process reads the memory.
    """

    def __init__(
        self,
        region: "LentBytes",
        allowed: Allowed,
        describe: Callable[[], bytes],
        forget: Callable[[], None],
        on_end: Callable[[Ending], None] | None,
    ) -> None:
        self.region = region
        self.allowed = allowed
        self.readers: set[Channel] = set()
        self.ended: Ending | None = None
        self.deadline = 0.0
        self._describe = describe
        self._forget = forget
        self._on_end = on_end
        self._timer: asyncio.TimerHandle | None = None

    @property
    def descriptor(self) -> bytes:
        """Address and token for the reader, and whether it may read through NIXL by now."""
        return self._describe()

    def expire_in(self, seconds: float) -> None:
        """End the grant `seconds` from now, instead of when it would have ended."""
        loop = asyncio.get_running_loop()
        if self.ended is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self.deadline = loop.time() + seconds
        self._timer = loop.call_at(self.deadline, self.end, "expired")

    def revoke(self) -> None:
        """End the grant now; does nothing if it has ended."""
        self.end("revoked")

    def end(self, ending: Ending) -> None:
        if self.ended is not None:
            return
        self.ended = ending
        if self._timer is not None:
            self._timer.cancel()
        self._forget()
        for reader in self.readers:
            reader.cut()
        if self._on_end is not None:
            self._on_end(ending)


class Grants:
    """The grants of a process, by token."""

    def __init__(self, describe: Callable[[bytes, bool], bytes]) -> None:
        self._describe = describe
        self._by_token: dict[bytes, Grant] = {}

    def __len__(self) -> int:
        return len(self._by_token)

    def find(self, token: bytes) -> Grant | None:
        return self._by_token.get(token)

    def add(
        self, region: "LentBytes", allowed: Allowed, on_end: Callable[[Ending], None] | None
    ) -> Grant:
        token = secrets.token_bytes(GRANT_TOKEN_BYTES)

        def forget() -> None:
            del self._by_token[token]

        def describe() -> bytes:
            return self._describe(token, region.direct)

        grant = Grant(region, allowed, describe, forget, on_end)
        self._by_token[token] = grant
        return grant

    def revoke_all(self, region: "LentBytes") -> None:
        for grant in [g for g in self._by_token.values() if g.region is region]:
            grant.revoke()


class LentBytes:
    """Bytes of which ranges can be lent until it is closed; `direct`: NIXL may read them."""

    direct = False

    def __init__(self, size: int, grants: Grants) -> None:
        self.size = size
        self.address = 0
        self._grants = grants

    def grant(
        self,
        ranges: Iterable[tuple[int, int]],
        seconds: float,
        on_end: Callable[[Ending], None] | None = None,
    ) -> Grant:
        """Let holders of the descriptor read these (offset, length) ranges for `seconds`.

        Raises ValueError for a range outside the region.
        """
        allowed = Allowed((Range(*pair) for pair in ranges), self.size)
        grant = self._grants.add(self, allowed, on_end)
        grant.expire_in(seconds)
        return grant

    async def send(self, channel: Channel, offset: int, length: int) -> None:
        """Send a granted range to its reader."""
        raise NotImplementedError

    async def prepare(self, offset: int, length: int) -> None:
        """Have a granted range at hand, so that `send` does not block."""

    def was_read(self, offset: int, length: int) -> None:
        """A granted range was sent, or a direct reader is about to read it."""

    def close(self) -> None:
        """Revoke all grants."""
        self._grants.revoke_all(self)


class Region(LentBytes):
    """Memory to be lent or read into, at a fixed address until it is closed."""

    def __init__(
        self,
        memory: "WriteableBuffer",
        grants: Grants,
        on_close: Callable[["Region"], None],
        direct: bool = False,
    ) -> None:
        self.view = memoryview(memory).cast("B")
        super().__init__(len(self.view), grants)
        if self.view.readonly or not self.size:
            raise ValueError("a region needs writable memory")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        self.direct = direct
        self._on_close: Callable[[Region], None] | None = on_close

    def part(self, offset: int, length: int) -> memoryview:
        """Return a part of the memory; raises ValueError if it is out of range."""
        check_range(offset, length, self.size)
        return self.view[offset : offset + length]

    async def send(self, channel: Channel, offset: int, length: int) -> None:
        await channel.send_bytes(self.view[offset : offset + length])

    def wipe(self, offset: int, length: int) -> None:
        """Fill with zeros."""
        ctypes.memset(self.address + offset, 0, length)

    def close(self) -> None:
        """Revoke all grants and release the memory. Reads into it must have ended."""
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            super().close()
            on_close(self)
            self.view.release()


class LentFile(LentBytes):
    """A file to be lent; over TCP it is sent without a copy through this process.

    Direct readers may read a mapping of it once `show` has returned. Bytes that the file loses or
    changes meanwhile are the reader's to detect.
    """

    def __init__(
        self,
        path: Path,
        grants: Grants,
        in_memory: bool,
        on_sent: Callable[[int, int], None],
    ) -> None:
        """Open the file, which may be `in_memory` as a whole; raises OSError.

        `on_sent` gets the offset and length of each range that was sent.
        """
        self._in_memory = in_memory
        self._on_sent = on_sent
        self._agent: NixlAgent | None = None
        self._file: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        super().__init__(os.fstat(self._file).st_size, grants)

    async def send(self, channel: Channel, offset: int, length: int) -> None:
        if self._file is None:
            raise Closed("the file is lent no more")
        await channel.send_file(self._file, offset, length)

    async def prepare(self, offset: int, length: int) -> None:
        if self._file is not None and not self._in_memory:
            await asyncio.to_thread(_load, self._file, offset, length)

    def was_read(self, offset: int, length: int) -> None:
        self._on_sent(offset, length)

    async def show(self, memory: "WriteableBuffer", agent: "NixlAgent") -> None:
        """Let NIXL read the file through `memory`, its mapping; raises TransferError."""
        view = memoryview(memory).cast("B")
        if len(view) != self.size:
            raise ValueError(f"{len(view)} bytes of memory for a file of {self.size}")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        await asyncio.to_thread(agent.register, self)
        self._agent = agent
        self.direct = self._file is not None
        if not self.direct:
            agent.deregister(self)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            super().close()
            if self.direct and self._agent is not None:
                self.direct = False
                self._agent.deregister(self)
            os.close(file)


class LentView(LentBytes):
    """Bytes to be lent that are computed anew for each read, over TCP."""

    def __init__(self, size: int, grants: Grants, content: Callable[[], bytes]) -> None:
        super().__init__(size, grants)
        self._content = content

    async def send(self, channel: Channel, offset: int, length: int) -> None:
        await channel.send_bytes(memoryview(self._content())[offset : offset + length])


def _load(file: int, offset: int, length: int) -> None:
    """Have a range of a file in memory, so that sending it does not wait for the disk."""
    with Path(os.devnull).open("wb") as sink:
        done = 0
        while done < length:
            count = os.sendfile(sink.fileno(), file, offset + done, length - done)
            if not count:
                return
            done += count
