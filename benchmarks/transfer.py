"""Speed of block bytes between two processes of this machine, beside that of bare calls.

Each transport is measured beside its own limit: TCP beside plain blocking sockets, NIXL beside one
bare NIXL read, both beside a copy within one process.
"""

import asyncio
import importlib
import importlib.util
import logging
import mmap
import multiprocessing
import random
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import uvloop
from common import Report, parser

from kvmesh.settings.schema import TransferSettings
from kvmesh.transfer import Transport

Lender = Callable[[Connection, int], None]
GRANT_S = 3600.0


def memory(size: int) -> mmap.mmap:
    """Memory with its pages already mapped."""
    area = mmap.mmap(-1, size)
    np.frombuffer(area, np.uint8)[:] = 1
    return area


@contextmanager
def other_process(lender: Lender, size: int) -> Iterator[Connection]:
    """`lender` in its own process, and the pipe to it."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=lender, args=(theirs, size))
    process.start()
    yield ours
    process.kill()
    process.join()


def lend_socket(pipe: Connection, size: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        area = memory(size)
        while connection.recv(1):
            connection.sendall(area)


def lend_memory(pipe: Connection, size: int) -> None:
    area = memory(size)
    agent, address = _bare_agent(area)
    pipe.send((agent.get_agent_metadata(), address))
    pipe.recv()


def lend_grants(pipe: Connection, size: int) -> None:
    async def lend() -> None:
        options = msgspec.convert({"via": await asyncio.to_thread(pipe.recv)}, TransferSettings)
        region = (await Transport.open(options)).register(memory(size))
        pipe.send(region.grant([(0, size)], GRANT_S).descriptor)
        await asyncio.Event().wait()

    uvloop.run(lend())


def copy_within(size: int, runs: int) -> list[float]:
    source, target = (np.frombuffer(memory(size), np.uint8) for _ in range(2))
    return [size / _timed(lambda: np.copyto(target, source)) / 1e9 for _ in range(runs)]


def bare_socket(size: int, runs: int) -> list[float]:
    area = memoryview(memory(size))

    def fill(connection: socket.socket) -> None:
        connection.sendall(b"!")
        done = 0
        while done < size:
            done += connection.recv_into(area[done:])

    with (
        other_process(lend_socket, size) as pipe,
        socket.create_connection(("127.0.0.1", pipe.recv())) as connection,
    ):
        return [size / _timed(lambda: fill(connection)) / 1e9 for _ in range(runs)]


def bare_nixl(size: int, runs: int) -> list[float]:
    """One read of everything in one piece, without grants."""
    area = memory(size)
    agent, address = _bare_agent(area)
    with other_process(lend_memory, size) as pipe:
        metadata, base = pipe.recv()
        owner = agent.add_remote_agent(metadata)

        def read() -> None:
            here = agent.get_xfer_descs([(address, size, 0)], "DRAM")
            there = agent.get_xfer_descs([(base, size, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", here, there, owner)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)

        read()
        return [size / _timed(read) / 1e9 for _ in range(runs)]


def _bare_agent(area: mmap.mmap) -> tuple[Any, int]:
    api = importlib.import_module("nixl._api")
    logging.getLogger("nixl").setLevel(logging.WARNING)
    agent = api.nixl_agent(secrets.token_hex(4), api.nixl_agent_config(backends=["UCX"]))
    address = int(np.frombuffer(area, np.uint8).ctypes.data)
    agent.register_memory([(address, len(area), 0, "")], "DRAM")
    return agent, address


def transport(via: str, size: int, block: int, runs: int) -> list[float]:
    """Blocks of `block` bytes at offsets in random order; 0: everything in one piece."""
    return uvloop.run(_transport(via, size, block or size, runs))


async def _transport(via: str, size: int, block: int, runs: int) -> list[float]:
    places = list(range(0, size, block))
    random.Random(1).shuffle(places)
    pieces = [(remote, i * block, block) for i, remote in enumerate(places)]
    reader = await Transport.open(msgspec.convert({"via": via}, TransferSettings))
    region = reader.register(memory(size))
    rates = []
    with other_process(lend_grants, size) as pipe:
        pipe.send(via)
        descriptor = await asyncio.to_thread(pipe.recv)
        for _ in range(runs + 1):
            begun = time.perf_counter()
            await reader.read(descriptor, region, pieces, timeout=60, final=False)
            rates.append(size / (time.perf_counter() - begun) / 1e9)
    await reader.close()
    return rates[1:]


def _timed(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--mib", type=int, default=256, metavar="N", help="bytes per read (256)")
    arguments.add_argument("--runs", type=int, default=7, metavar="N", help="of each figure (7)")
    chosen = arguments.parse_args()
    size, runs = chosen.mib << 20, chosen.runs
    report = Report(f"Moving {chosen.mib} MiB between two processes", "bare")
    report.add_runs("copy within a process", copy_within(size, runs), "GB/s")
    limits = {"tcp": bare_socket(size, runs)}
    if importlib.util.find_spec("nixl"):
        limits["nixl"] = bare_nixl(size, runs)
    shares = []
    for via, bare in limits.items():
        limit = statistics.median(bare)
        for name, block in (("one piece", 0), ("1 MiB blocks", 1 << 20), ("64 KiB", 64 << 10)):
            rates = transport(via, size, block, runs)
            report.add_runs(f"{via}, {name}", rates, "GB/s", f"{limit:.2f}", "≥ 0.8 of bare")
            if not block:
                shares.append(f"{via} {statistics.median(rates) / limit:.2f}")
    report.finish(f"block transfers: {', '.join(shares)} of the bare rate", chosen.json)


if __name__ == "__main__":
    main()
