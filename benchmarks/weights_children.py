"""Processes of benchmarks/weights.py: plain copies, and one that takes weights without end."""

import argparse
import json
import logging
import mmap
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from kvmesh.transfer import TransferError

BUFFER = 8 << 20
TAKERS = 2  # connections of a worker that takes weights
DONE = "RESULT "


def lower_priority(policy: str, nice: int) -> None:
    """Run at the priority of a weights process."""
    os.nice(nice)
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))


def send_raw(files: list[str]) -> None:
    """Serve the bytes of the files to one connection, from their page cache."""
    lower_priority("SCHED_IDLE", 19)
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(DONE + json.dumps({"port": server.getsockname()[1]}), flush=True)
        connection, _ = server.accept()
        started = time.process_time()
        with connection:
            for name in files:
                with open(name, "rb") as file:
                    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                    connection.sendall(memory)
    print(DONE + json.dumps({"cpu": time.process_time() - started}), flush=True)


def receive_raw(port: int, size: int, directory: str, fresh: bool = False) -> dict[str, float]:
    """Receive `size` bytes into shared memory; seconds from the connection to the last byte.

    `fresh`: the memory is taken from the system while the bytes arrive, as a new copy's is.
    """
    lower_priority("SCHED_BATCH", 10)
    path = Path(directory) / f"raw-{os.getpid()}"
    with path.open("w+b") as file:
        if fresh:
            os.ftruncate(file.fileno(), size)
        else:
            os.posix_fallocate(file.fileno(), 0, size)
        memory = memoryview(mmap.mmap(file.fileno(), size))
        path.unlink()
        began, started = time.perf_counter(), time.process_time()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            received = 0
            while received < size:
                count = connection.recv_into(memory[received : received + BUFFER])
                if not count:
                    raise RuntimeError("the sender has ended")
                received += count
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "cpu": time.process_time() - started}


def read_nixl(size: int) -> dict[str, float]:
    """GiB per second of one read of another process's memory through bare NIXL."""
    from transfer import bare_nixl

    lower_priority("SCHED_BATCH", 10)
    return {"seconds": 0.0, "rate": max(bare_nixl(size, 2)) * 1e9 / (1 << 30)}


def take_weights() -> None:
    """Read chunks of a copy as a starting worker does, over and over, until the input ends."""
    from kvmesh.transfer import Line
    from kvmesh.transfer.transport import decode_descriptor

    lower_priority("SCHED_BATCH", 10)
    options = json.loads(sys.stdin.readline())
    files = [decode_descriptor(bytes.fromhex(file)) for file in options["files"]]
    taken = [0] * TAKERS
    ended = threading.Event()

    def take(number: int) -> None:
        line, buffer = Line(files[0]), memoryview(bytearray(BUFFER))
        while not ended.is_set():
            for file, offset, size in options["chunks"][number::TAKERS]:
                try:
                    line.read(files[file].token, offset, buffer[:size])
                except TransferError as error:
                    if error.code != "busy":
                        raise
                    time.sleep(0.02)
                    continue
                taken[number] += size
                if ended.is_set():
                    return

    threads = [threading.Thread(target=take, args=(n,), daemon=True) for n in range(TAKERS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    sys.stdin.read()
    ended.set()
    seconds = time.perf_counter() - began
    print(DONE + json.dumps({"rate": sum(taken) / seconds / (1 << 30)}), flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("what", choices=["send", "receive", "nixl", "take"])
    arguments.add_argument("options")
    chosen = arguments.parse_args()
    logging.basicConfig(level=logging.INFO)
    if chosen.what == "take":
        take_weights()
        return
    options = json.loads(chosen.options)
    if chosen.what == "send":
        send_raw(options)
        return
    result = receive_raw(**options) if chosen.what == "receive" else read_nixl(**options)
    print(DONE + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
