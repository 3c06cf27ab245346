"""Requests of many clients at one instant: callers take turns, however many each has sent."""

import asyncio
import hashlib
import json
import signal
from collections import Counter
from pathlib import Path

from support.mesh import Mesh
from support.nats import NatsServer
from support.tap import Tap

MANY = 300


def keys_file(folder: Path) -> Path:
    path = folder / "keys.toml"
    for name in ("many", "few"):
        digest = hashlib.sha256(name.encode()).hexdigest()
        with path.open("a") as file:
            file.write(f'[[key]]\nname = "{name}"\ntenant = "{name}"\nsha256 = "{digest}"\n')
    return path


def request(key: str, number: int) -> bytes:
    prompt = f"{key} {number} asks for a word. " * 8
    body = json.dumps({"model": "kvmesh-demo", "prompt": prompt, "max_tokens": 1}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def test_one_request_passes_hundreds_of_another_tenant(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    mesh = Mesh(nats_server.url, tmp_path)
    mesh.env["KVMESH_FRONTEND_KEYS_FILE"] = str(keys_file(tmp_path))
    mesh.env["KVMESH_MOCK_MAX_SEQUENCES"] = str(MANY + 1)
    try:
        mesh.start_all(workers=1)
        await mesh.ready()
        keys = ["many"] * MANY + ["few"]
        opened = [await asyncio.open_connection("127.0.0.1", mesh.port) for _ in keys]

        async def answer(reader: asyncio.StreamReader) -> None:
            assert b" 200 " in await reader.readline()

        waiting = [answer(reader) for reader, _ in opened]
        frontend = mesh.processes["frontend-0"]
        frontend.send_signal(signal.SIGSTOP)  # until all are there
        for number, (key, (_, writer)) in enumerate(zip(keys, opened, strict=True)):
            writer.write(request(key, number))  # that of `few` is the last
            await writer.drain()
        async with Tap().listening(mesh.options) as tap:
            frontend.send_signal(signal.SIGCONT)
            await asyncio.gather(*waiting)
        for _, writer in opened:
            writer.close()
            await writer.wait_closed()
    finally:
        mesh.stop()
    # in the order in which the frontend sent them on: a step of the engine may answer all at once
    sent = [work.tenant for work in tap.works]
    assert sorted(Counter(sent).values()) == [1, MANY]
    assert sent.index(min(sent, key=sent.count)) < MANY / 3
