"""An owner that has fallen silent is waited for once, not by each reader in turn."""

import asyncio
import socket
from contextlib import suppress

import msgspec
from support.wait import PATIENCE_S

from kvmesh.settings.schema import TransferSettings
from kvmesh.transfer import TransferError, Transport
from kvmesh.transfer.channel import Descriptor
from kvmesh.transfer.transport import MAX_READS


async def test_who_waits_for_a_turn_does_not_ask_an_owner_that_does_not_answer() -> None:
    reader = await Transport.open(TransferSettings(via="tcp"))
    target = reader.register(bytearray(1))
    with socket.create_server(("127.0.0.1", 0), backlog=3 * MAX_READS) as deaf:
        host, port = deaf.getsockname()
        descriptor = msgspec.msgpack.encode(Descriptor(host, port, b"", False))
        reads = (
            reader.read(descriptor, target, [(0, 0, 1)], PATIENCE_S) for _ in range(2 * MAX_READS)
        )
        errors = await asyncio.gather(*reads, return_exceptions=True)
        assert _connections(deaf) == MAX_READS
    codes = [error.code for error in errors if isinstance(error, TransferError)]
    assert codes == ["lost"] * MAX_READS + ["unreachable"] * MAX_READS
    await reader.close()


def _connections(server: socket.socket) -> int:
    """How many came that nobody has accepted."""
    server.setblocking(False)
    count = 0
    with suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            count += 1
    return count
