#!/bin/sh
# A server on uvloop 0.23.0 accepts one connection in each pass of its loop, whatever its backlog; on asyncio's own loop it accepts all that
# wait in one pass. Where passes are long, since a burst of requests begins, a new client waits for as many passes as connections came
# before its own: with passes of 4 ms and 300 connections, over a second, however few its own requests are.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet uvloop==0.23.0
cat > "$folder/program.py" <<'EOF'
import asyncio
import socket

import uvloop

WAITING = 200


async def passes() -> int:
    """Passes of the loop until 200 connections that wait already are accepted."""
    loop = asyncio.get_running_loop()
    accepted, passed, done = 0, 0, loop.create_future()

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            nonlocal accepted
            accepted += 1

    server = await loop.create_server(Protocol, "127.0.0.1", 0, backlog=1024)
    address = server.sockets[0].getsockname()
    clients = [socket.create_connection(address) for _ in range(WAITING)]

    def next_pass() -> None:
        nonlocal passed
        passed += 1
        if accepted < WAITING:
            loop.call_soon(next_pass)
        else:
            done.set_result(None)

    next_pass()
    await done
    for client in clients:
        client.close()
    return passed


on_uvloop, on_asyncio = uvloop.run(passes()), asyncio.run(passes())
print(f"{WAITING} waiting connections are accepted in {on_uvloop} passes of uvloop, {on_asyncio} of asyncio's loop")
assert on_uvloop >= WAITING > 10 * on_asyncio
EOF
"$folder/venv/bin/python" -W ignore "$folder/program.py"
