"""`kvmesh doctor` finds faults of operation: sync, open ports, lag, full disks, versions."""

import hashlib
import json
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.frontend import scripted_worker
from support.mesh import Mesh
from support.nats import NatsServer, free_port
from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import KvBatch
from kvmesh.bus.streams.configuration import StreamLimits
from kvmesh.cli.status.findings import READER_LAG


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    yield server
    server.stop()


@pytest_asyncio.fixture
async def mesh(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(nats_server.url, tmp_path)
    try:
        yield mesh
    finally:
        mesh.stop()


async def findings(mesh: Mesh, *arguments: str, **env: str) -> dict[tuple[str, str], str]:
    """The texts by severity and check."""
    done = await mesh.command("doctor", "--json", *arguments, **env)
    found: dict[tuple[str, str], str] = {}
    for line in done.stdout.splitlines():
        each = json.loads(line)
        key = (each["severity"], each["check"])
        text = f"{each['subject']}: {each['text']}; {each.get('action', '')}"
        found[key] = f"{found[key]}\n{text}" if key in found else text
    assert found, done.stderr
    return found


@pytest.mark.parametrize(
    ("jetstream", "severity", "words"),
    [
        ("", "fault", "JetStream syncs its files every 120 s"),
        ("sync_interval: 1s", "ok", "every 1 s"),
        ("sync_interval: always", "ok", "every message"),
    ],
)
async def test_how_nats_syncs(
    server: NatsServer, tmp_path: Path, jetstream: str, severity: str, words: str
) -> None:
    port = free_port()
    server.jetstream, server.settings = jetstream, f"http: 127.0.0.1:{port}"
    server.start()
    mesh = Mesh(server.url, tmp_path)
    found = await findings(mesh, "--monitoring", f"http://127.0.0.1:{port}")
    assert words in found[severity, "store"]
    assert ("sync_interval: 1s" in found[severity, "store"]) is (severity == "fault")


async def test_a_wrong_monitoring_port_is_one_fault(mesh: Mesh) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert (
        f"no answer of nats-server at {url}"
        in (await findings(mesh, "--monitoring", url))["fault", "store"]
    )


async def test_a_frontend_that_the_network_reaches_needs_keys(mesh: Mesh, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"own").hexdigest()
    keys.write_text(f'[[key]]\nname = "own"\nsha256 = "{digest}"\n')
    mesh.start_all(workers=1)
    await mesh.ready()
    assert ("fault", "ports") not in await findings(mesh)
    for name, settings in (
        ("open-0", {"KVMESH_FRONTEND_ALLOW_ANONYMOUS": "true"}),
        ("keyed-0", {"KVMESH_FRONTEND_KEYS_FILE": str(keys)}),
    ):
        port = str(free_port())
        more = {"KVMESH_FRONTEND_PORT": port, "KVMESH_FRONTEND_HOST": "0.0.0.0"}
        mesh.start("frontend", name, **more, **settings)

    async def told() -> bool:
        fault = (await findings(mesh)).get(("fault", "ports"), "")
        assert "keyed-0" not in fault
        return "open-0" in fault and "without an API key" in fault

    await eventually(told)


async def test_a_reader_that_lags_is_named(mesh: Mesh) -> None:
    mesh.start_all(workers=1)
    await mesh.ready()
    bus = await Bus.connect(mesh.options, "test")
    mesh.processes["indexer-0"].send_signal(signal.SIGSTOP)
    try:
        subject = bus.subjects.kv("kvmesh-demo", "nobody")
        # the server counts what it has not sent; its flow control lets 32 MiB be on their way
        for number in range(READER_LAG + 6000):
            bus.post(subject, KvBatch("n" * 8192, "nobody-1", 0, number, time.time(), []))
            if number % 500 == 0:
                await bus.flush()
        await bus.flush()

        async def told() -> bool:
            fault = (await findings(mesh)).get(("fault", "readers"), "")
            return "indexer-0" in fault and "messages of kvm-" in fault

        await eventually(told)
    finally:
        mesh.processes["indexer-0"].send_signal(signal.SIGCONT)
        await bus.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=False)


async def test_a_disk_that_is_nearly_full_is_named(mesh: Mesh, small_disk: Path) -> None:
    found = await findings(mesh, KVMESH_KVBM_DISK_PATH=str(small_disk))
    assert f"are free on the disk of {small_disk}" in found["fault", "disks"]
    assert "kvbm: " in found["fault", "disks"]


async def test_processes_of_several_versions_are_named(mesh: Mesh, limits: StreamLimits) -> None:
    mesh.start_all(workers=1)
    await mesh.ready()
    bus = await Bus.connect(mesh.options, "test")
    async with scripted_worker(bus, limits, "old"):

        async def told() -> bool:
            found = await findings(mesh)
            return any("old" in text for (_, check), text in found.items() if check == "versions")

        await eventually(told)
    await bus.close()
