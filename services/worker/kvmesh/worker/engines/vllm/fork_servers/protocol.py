"""Messages between a launcher and a fork server, over a socket in a private folder.

The launcher sends a request with its file descriptors, then a byte for each signal that it gets.
The server answers with lines: FORKED, then STOPPED when the new process is stopped, and at last its
wait status in decimal digits.
"""

import json
import os
import socket
from typing import NamedTuple

FORKED, STOPPED = b"forked\n", b"stopped\n"
FOLDER_OF_REQUESTS = "asked"  # one file for each process that was asked for
FLAG = "--multiprocessing-fork"  # by which Python's multiprocessing marks a child's arguments
MAX_DESCRIPTORS = 253  # SCM_MAX_FD of Linux
MAX_REQUEST = 16 << 20
HEADER_BYTES = 4


class ForkRequest(NamedTuple):
    """A process to make: Python's arguments, and the numbers that `descriptors` have in it."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    numbers: list[int]
    process: int
    descriptors: list[int]


def send_request(channel: socket.socket, request: ForkRequest) -> None:
    """Raises OSError, or ValueError for too many descriptors."""
    if len(request.descriptors) > MAX_DESCRIPTORS:
        raise ValueError(f"{len(request.descriptors)} file descriptors")
    body = json.dumps(request[:-1], ensure_ascii=True).encode()
    socket.send_fds(channel, [len(body).to_bytes(HEADER_BYTES, "big")], request.descriptors)
    channel.sendall(body)


def receive_request(channel: socket.socket) -> ForkRequest:
    """Raises OSError, or ValueError for nonsense."""
    header, descriptors, _, _ = socket.recv_fds(channel, HEADER_BYTES, MAX_DESCRIPTORS)
    try:
        return _request(channel, header, descriptors)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _request(channel: socket.socket, header: bytes, descriptors: list[int]) -> ForkRequest:
    size = int.from_bytes(header, "big")
    if len(header) != HEADER_BYTES or size > MAX_REQUEST:
        raise ValueError("a malformed request")
    body = bytearray()
    while len(body) < size:
        part = channel.recv(size - len(body))
        if not part:
            raise ValueError("a request that was cut off")
        body += part
    arguments, environment, folder, numbers, process = json.loads(body)
    if len(numbers) != len(descriptors):
        raise ValueError(f"{len(descriptors)} file descriptors instead of {len(numbers)}")
    return ForkRequest(arguments, environment, folder, numbers, process, descriptors)
