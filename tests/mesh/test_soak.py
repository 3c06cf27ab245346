"""A mesh under short-lived clients for a given time: no process grows."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.growth import Growth, ShortLivedClients
from support.mesh import Mesh
from support.nats import NatsServer

from kvmesh.cli.supervisor.nats import server_environ
from kvmesh.settings.schema import StreamSettings

SOAK_S = float(os.environ.get("SOAK_S", "600"))
CLIENTS = 24
SAMPLE_S = 2.0
WARM = 4  # minutes in which caches, pools and streams fill
JUDGED = 6  # minutes at least: fewer are too noisy for a NATS server
BOUND = 2.0  # MiB a minute
SEQ_BYTES = 2 << 20
# Small bounds, so that caches and streams are full when the warm-up ends.
FULL_SOON = {
    "KVMESH_MOCK_BLOCKS": "2048",
    "KVMESH_MOCK_SPEEDUP": "20",
    "KVMESH_STREAMS_KV_BYTES": str(4 << 20),
    "KVMESH_STREAMS_ROUTE_BYTES": str(4 << 20),
    "KVMESH_STREAMS_SEQ_BYTES": str(SEQ_BYTES),
    "KVMESH_FRONTEND_PREPARE_CACHE_BYTES": str(2 << 20),
    "KVMESH_INDEXER_SNAPSHOT_THRESHOLD": "5000",
}


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of its own, started as `kvmesh up` starts it."""
    server = NatsServer(tmp_path / "nats")
    server.environ = server_environ(StreamSettings(seq_bytes=SEQ_BYTES), os.environ)
    server.start()
    yield server
    server.stop()


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_no_process_grows_under_clients_that_come_and_go(
    nats_server: NatsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert SOAK_S >= 60 * (WARM + JUDGED), f"SOAK_S: at least {60 * (WARM + JUDGED)} seconds"
    mesh = Mesh(nats_server.url, tmp_path, FULL_SOON)
    try:
        mesh.start_all(workers=2)
        await mesh.ready()
        pids = {name: process.pid for name, process in mesh.processes.items()}
        growth = Growth({**pids, "nats": nats_server.pid})
        began = time.monotonic()
        async with ShortLivedClients(mesh.url, CLIENTS) as visitors:
            while (passed := time.monotonic() - began) < SOAK_S:
                growth.sample(passed / 60)
                await asyncio.sleep(SAMPLE_S)
        with capsys.disabled():
            print(
                f"\n{visitors.served} answers in {SOAK_S:.0f} s, {visitors.abandoned} left half-way"
            )
            print(growth.table(WARM))
        assert visitors.served > SOAK_S
        grown = {name: slope for name, slope in growth.slopes(WARM).items() if slope > BOUND}
        assert not grown, growth.table(WARM)
    finally:
        mesh.stop()
