"""Transport: lends memory regions to other processes and reads from theirs."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import msgspec

from kvmesh.bus.messages import MessageDecoder
from kvmesh.runtime.background import ended
from kvmesh.settings.schema import TransferSettings
from kvmesh.transfer.channel import Channel, Closed, Descriptor, Got, Silent, TransferReply, Want
from kvmesh.transfer.errors import TransferError
from kvmesh.transfer.grants import Grants, LentFile, LentView, Region
from kvmesh.transfer.memory_ranges import Piece, merged, pack
from kvmesh.transfer.nixl import NixlAgent
from kvmesh.transfer.pace import SendingPace
from kvmesh.transfer.server import TransferServer

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

log = logging.getLogger(__name__)
WILDCARDS = ("0.0.0.0", "::")
MAX_READS = 8  # of one owner at once
QUIET_S = 1.0  # owners reply and send at once: one that does not is frozen
Via: TypeAlias = Literal["nixl", "tcp"]
_descriptors = MessageDecoder(Descriptor)


class Transport:
    """Lends regions of memory to other processes and reads from theirs.

    The owner checks grants over TCP. The bytes go directly from memory to memory if both sides have
    NIXL, else over the same connection. A direct reader is trusted to read only the granted ranges;
    over TCP the owner enforces them.
    """

    def __init__(
        self, options: TransferSettings, agent: NixlAgent | None, pace: SendingPace, tos: int
    ) -> None:
        self._options = options
        self._agent = agent
        self._grants = Grants(self._describe)
        self._server = TransferServer(self._grants, options.readers, agent, pace, tos)
        self._regions: set[Region] = set()
        self._owners: WeakValueDictionary[str, _Owner] = WeakValueDictionary()
        self._port = 0

    @classmethod
    async def open(
        cls, options: TransferSettings, pace: SendingPace | None = None, tos: int = 0
    ) -> "Transport":
        """Listen. Raises TransferError if that fails or the requested transport is unavailable.

        `pace` bounds and counts what is lent to others; `tos` is the IP type of service of it.
        """
        if options.host in WILDCARDS and not options.advertise:
            reason = "other processes need an address: set transfer.advertise"
            raise TransferError("unavailable", options.host, reason)
        agent = await asyncio.to_thread(_agent, options.via)
        transport = cls(options, agent, pace or SendingPace(), tos)
        try:
            transport._port = await transport._server.open(options.host, options.port)
        except OSError as error:
            peer = f"{options.host}:{options.port}"
            raise TransferError("unavailable", peer, f"cannot listen: {error.strerror}") from error
        return transport

    async def use_nixl(self) -> None:
        """Use NIXL from now on, after it has started; raises TransferError if it does not."""
        self._agent = await asyncio.to_thread(NixlAgent)
        self._server.agent = self._agent

    @property
    def direct(self) -> bool:
        """True if this side has NIXL."""
        return self._agent is not None

    def register(self, memory: "WriteableBuffer") -> Region:
        """Register memory to lend or to read into; it must stay until the region is closed.

        Raises TransferError if NIXL cannot register it.
        """
        region = Region(memory, self._grants, self._release, self.direct)
        if self._agent is not None:
            self._agent.register(region)
        self._regions.add(region)
        return region

    def lend_file(
        self, path: Path, on_sent: Callable[[int, int], None], in_memory: bool = False
    ) -> LentFile:
        """A file to be lent over TCP until it is closed; raises OSError.

        `on_sent` gets the offset and length of each range that was sent. `in_memory`: it is in
        shared memory, so that reading it never waits for a disk.
        """
        return LentFile(path, self._grants, in_memory, on_sent)

    async def show_file(self, lent: LentFile, memory: "WriteableBuffer") -> None:
        """Let NIXL read a lent file through `memory`, a mapping of it that stays.

        Raises TransferError if NIXL cannot register it.
        """
        if self._agent is None:
            raise TransferError("unavailable", "", "there is no NIXL")
        await lent.show(memory, self._agent)

    async def read_directly(
        self, descriptor: Descriptor, reply: TransferReply, into: Region, offset: int, length: int
    ) -> None:
        """Fill the beginning of a region from a range that the owner's reply to a Line permits.

        The caller verifies the bytes. A cancelled read ends first, within some seconds. Raises
        TransferError.
        """
        if self._agent is None:
            raise TransferError("unavailable", descriptor.address, "there is no NIXL")
        pieces = [Piece(offset, 0, length)]
        reading = asyncio.create_task(
            self._agent.read(descriptor.address, reply, into, pieces), name="direct read"
        )
        try:
            await ended(reading, reading.cancel)
        except asyncio.CancelledError:
            error = None if reading.cancelled() else reading.exception()
            if isinstance(error, TransferError) and not error.settled:
                raise error from None  # the caller must not use the region again
            raise

    def lend_view(self, size: int, content: Callable[[], bytes]) -> LentView:
        """`size` bytes to be lent over TCP until closed; `content` is called for each read."""
        return LentView(size, self._grants, content)

    async def read(
        self,
        descriptor: bytes,
        into: Region,
        pieces: Iterable[tuple[int, int, int]],
        timeout: float,
        final: bool = True,
    ) -> Via:
        """Copy (remote offset, local offset, length) pieces of a grant into a region.

        `final` returns the grant. Returns the transport used. Raises TransferError, also if the
        owner stops replying while this read waits for a slot, and ValueError for a range outside
        `into`.
        """
        wanted = merged(Piece(*piece) for piece in pieces)
        for piece in wanted:
            into.part(piece.local, piece.length)
        job = _ReadJob(decode_descriptor(descriptor), into, wanted, final)
        owner = self._owners.setdefault(job.peer, _Owner())
        silences = owner.silences
        try:
            async with asyncio.timeout(timeout), owner.slots:
                if owner.silences != silences:
                    raise TransferError("unreachable", job.peer, "it has just stopped replying")
                return await self._read_counting_silences(owner, job)
        except Closed as error:
            raise TransferError("lost", job.peer, str(error)) from error
        except TimeoutError as error:
            raise TransferError("timeout", job.peer, f"not done in {timeout:g} s") from error

    def forget(self, descriptor: bytes) -> None:
        """Drop the state of the grant's owner, which has ended; TransferError if malformed."""
        if self._agent is not None:
            self._agent.forget(decode_descriptor(descriptor).address)

    async def close(self) -> None:
        """Revoke all grants, stop listening and release all memory."""
        await self._server.close()
        for region in list(self._regions):
            region.close()

    async def _read_counting_silences(self, owner: "_Owner", job: "_ReadJob") -> Via:
        """Read; if the owner does not reply, let the waiting reads fail."""
        try:
            return await self._read(job)
        except (Silent, TransferError) as error:
            if isinstance(error, Silent) or error.code == "unreachable":
                owner.silences += 1
            raise

    async def _read(self, job: "_ReadJob") -> Via:
        agent = self._agent if job.owner.nixl else None
        if agent is None and self._options.via == "nixl":
            raise TransferError("unavailable", job.peer, "it does not offer NIXL")
        try:
            return await _fetch(agent, job)
        except TransferError as error:
            if agent is None or error.code != "failed" or self._options.via == "nixl":
                raise
            log.warning("%s; trying TCP", error)
            return await _fetch(None, job)

    def _describe(self, token: bytes, direct: bool) -> bytes:
        host = self._options.advertise or self._options.host
        return msgspec.msgpack.encode(Descriptor(host, self._port, token, direct))

    def _release(self, region: Region) -> None:
        self._regions.discard(region)
        if region.direct and self._agent is not None:
            self._agent.deregister(region)


class _Owner:
    """Concurrency limit of reads from one process, and the number of missing replies."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(MAX_READS)
        self.silences = 0


class _ReadJob(NamedTuple):
    """One read of a grant."""

    owner: Descriptor
    into: Region
    pieces: list[Piece]
    final: bool

    @property
    def peer(self) -> str:
        return self.owner.address


async def _fetch(agent: NixlAgent | None, job: _ReadJob) -> Via:
    channel = await _connect(job)
    try:
        await channel.send(Want(job.owner.token, pack(job.pieces), direct=agent is not None))
        reply = _checked(job, await channel.receive(TransferReply))
        if agent is not None:
            await agent.read(job.peer, reply, job.into, job.pieces)
        else:
            for piece in job.pieces:
                await channel.receive_into(job.into.part(piece.local, piece.length))
        await channel.send(Got(job.final))
        verdict = await channel.receive(TransferReply)
        if verdict.code:
            for piece in job.pieces:
                job.into.wipe(piece.local, piece.length)
        _checked(job, verdict)
    finally:
        channel.close()
    return "tcp" if agent is None else "nixl"


async def _connect(job: _ReadJob) -> Channel:
    try:
        return await Channel.connect(job.owner.host, job.owner.port, QUIET_S)
    except OSError as error:
        reason = error.strerror or str(error) or f"no connection in {QUIET_S:g} s"
        raise TransferError("unreachable", job.peer, reason) from error


def _agent(via: str) -> NixlAgent | None:
    if via == "tcp":
        return None
    try:
        return NixlAgent()
    except TransferError as error:
        if via == "nixl":
            raise
        log.info("KV blocks move over TCP: %s", error)
        return None


def decode_descriptor(descriptor: bytes) -> Descriptor:
    """Decode the descriptor of a grant; raises TransferError if it is malformed."""
    try:
        return _descriptors.decode(descriptor)
    except msgspec.MsgspecError as error:
        raise TransferError("refused", "", f"malformed descriptor of a grant: {error}") from error


def _checked(job: _ReadJob, reply: TransferReply) -> TransferReply:
    if reply.code:
        raise TransferError(reply.code, job.peer, reply.detail)
    return reply
