"""Requests that an HTTP port refuses while their senders go on sending."""

import asyncio
import contextlib

POST = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\n"
CHUNK = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
REFUSED = [
    (POST + b"Content-Length: %d\r\n\r\n" % (16 << 20), bytes(1 << 20), 16),
    (POST + b"Transfer-Encoding: chunked\r\n\r\n", CHUNK, 256),
    (POST + b"Content-Length: many\r\n\r\n", bytes(1 << 20), 8),
    (b"NONSENSE\r\n\r\n", bytes(1 << 20), 8),
    (POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", bytes(1 << 20), 8),
]


async def answer_after(port: int, head: bytes, rest: bytes, times: int) -> tuple[bytes, int]:
    """The answer to a client that sends everything, as far as it can, and the bytes sent.

    Returns at the end of the connection.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer, sent = b"", 0

    async def read() -> None:
        nonlocal answer
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 16):
                answer += part

    reading = asyncio.create_task(read())
    writer.write(head)
    with contextlib.suppress(ConnectionError):
        for _ in range(times):
            writer.write(rest)
            await writer.drain()
            sent += len(rest)
    await reading
    writer.close()
    return answer, sent
