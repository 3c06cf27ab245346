"""`kvmesh doctor` finds and repairs a wrong index; `kvmesh fleet drain` has a worker leave."""

import json
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
from support.frontend import MODEL, Client, client_session
from support.mesh import Mesh
from support.nats import NatsServer
from support.wait import PATIENCE_S, eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import ControlReply, Dump, KvBatch, MessageDecoder, Stored, encode

REPLIES = MessageDecoder(ControlReply)
FORGED = struct.pack("<Q", 77)


@pytest_asyncio.fixture
async def mesh(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Mesh]:
    env = {"KVMESH_MOCK_SPEEDUP": "20", "KVMESH_INDEXER_CHECK_INTERVAL_S": "0"}
    mesh = Mesh(nats_server.url, tmp_path, env)
    yield mesh
    mesh.stop()


async def doctor(mesh: Mesh) -> tuple[int, list[dict[str, Any]]]:
    done = await mesh.command("doctor", "--json")
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


async def ask(mesh: Mesh, text: str) -> None:
    async with client_session() as session:
        message = {"role": "user", "content": f"{text} " * 60}
        body = {"model": MODEL, "messages": [message], "max_tokens": 40}
        status, _ = await Client(mesh.url, session).post("/v1/chat/completions", body)
        assert status == 200


async def forge(mesh: Mesh, instance: str) -> None:
    """Publish an event in the worker's name, so that its own next one counts as a repeat."""
    bus = await Bus.connect(mesh.options, "forger")
    question = Dump(0, digest=True)
    reply = await bus.request(bus.subjects.dump(instance), question, REPLIES, PATIENCE_S)
    assert reply.next_event is not None
    stored = Stored(0, None, FORGED, FORGED)
    batch = KvBatch("worker-0", instance, 0, reply.next_event, time.time(), [stored])
    await bus.store(bus.subjects.kv(MODEL, "worker-0"), encode(batch), PATIENCE_S)
    await bus.close()


async def worker(mesh: Mesh) -> str:
    report = json.loads((await mesh.command("status", "--json")).stdout)
    cards = [member["card"] for member in report["instances"]]
    return str(next(card["instance"] for card in cards if card["role"] == "worker"))


async def test_the_doctor_finds_a_wrong_index_and_has_it_repaired(mesh: Mesh) -> None:
    mesh.start("indexer", "indexer-0")
    mesh.start("router", "router-0")
    mesh.start("worker", "worker-0")
    mesh.start("frontend", "frontend-0")
    await mesh.ready()
    await ask(mesh, "The first.")

    async def sound() -> bool:
        code, found = await doctor(mesh)
        compared = [finding for finding in found if finding["subject"] == "index"]
        return code == 0 and bool(compared) and "0 blocks" not in compared[0]["text"][-9:]

    await eventually(sound, what="the index equals the worker")
    instance = await worker(mesh)
    await forge(mesh, instance)
    await ask(mesh, "Another one.")
    code, found = await doctor(mesh)
    assert code == 1
    faults = [finding for finding in found if finding["severity"] == "fault"]
    assert f"rank 0 of {instance}" in faults[0]["subject"]
    assert "1 that are gone; it is dumped anew" in faults[0]["text"]
    await eventually(sound, what="a dump has repaired the index")
    log = (mesh.folder / "indexer-0.log").read_text()
    assert log.count(f"the index is wrong about rank 0 of {instance}") == 1
    drained = await mesh.command("fleet", "drain", "worker-0", "--wait", str(PATIENCE_S))
    assert (drained.returncode, drained.stdout) == (0, f"{instance}: drains\n")
    code, found = await doctor(mesh)
    assert code == 1
    (fault,) = [finding for finding in found if finding["text"] == "none is ready"]
    assert (fault["severity"], fault["subject"]) == ("fault", "worker")
    assert (fault["check"], fault["action"].split(",")[0]) == ("processes", "start one")
    unknown = await mesh.command("fleet", "drain", "worker-0")
    assert (unknown.returncode, unknown.stdout) == (1, "")


async def test_an_indexer_checks_itself(mesh: Mesh) -> None:
    mesh.start("indexer", "indexer-0", KVMESH_INDEXER_CHECK_INTERVAL_S="0.05")
    mesh.start("router", "router-0")
    mesh.start("worker", "worker-0")
    mesh.start("frontend", "frontend-0")
    await mesh.ready()
    await ask(mesh, "The first.")
    await forge(mesh, await worker(mesh))
    await ask(mesh, "Another one.")
    log = mesh.folder / "indexer-0.log"
    await eventually(
        lambda: "the index is wrong about rank 0" in log.read_text(), what="the check has found it"
    )
    assert "and has it dumped anew" in log.read_text()
