"""A mesh under clients that come and go, for as long as it is told: no process grows."""

import asyncio
import os
import time
from pathlib import Path

import pytest
from support.growth import Growth, Visitors
from support.mesh import Mesh
from support.nats import NatsServer

SOAK_S = float(os.environ.get("SOAK_S", "600"))
CLIENTS = 24
SAMPLE_S = 2.0
WARM = 0.4  # the share of the time in which caches, pools and streams fill
BOUND = 2.0  # MiB a minute
# Small, so that caches and streams are full when the warm-up ends: they are bounded by these.
FULL_SOON = {
    "KVMESH_MOCK_BLOCKS": "2048",
    "KVMESH_MOCK_SPEEDUP": "20",
    "KVMESH_STREAMS_KV_BYTES": str(4 << 20),
    "KVMESH_STREAMS_ROUTE_BYTES": str(4 << 20),
    "KVMESH_STREAMS_SEQ_BYTES": str(2 << 20),
    "KVMESH_FRONTEND_PREPARE_CACHE_BYTES": str(2 << 20),
    "KVMESH_INDEXER_SNAPSHOT_THRESHOLD": "5000",
}


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_no_process_grows_under_clients_that_come_and_go(
    nats_server: NatsServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = Mesh(nats_server.url, tmp_path, FULL_SOON)
    try:
        mesh.start_all(workers=2)
        await mesh.ready()
        pids = {name: process.pid for name, process in mesh.processes.items()}
        growth = Growth({**pids, "nats": nats_server.pid})
        began = time.monotonic()
        async with Visitors(mesh.url, CLIENTS) as visitors:
            while (passed := time.monotonic() - began) < SOAK_S:
                growth.sample(passed / 60)
                await asyncio.sleep(SAMPLE_S)
        since = WARM * SOAK_S / 60
        with capsys.disabled():
            print(f"\n{visitors.served} answers in {SOAK_S:.0f} s, {visitors.left} left half-way")
            print(growth.table(since))
        assert visitors.served > SOAK_S
        grown = {name: slope for name, slope in growth.slopes(since).items() if slope > BOUND}
        assert not grown, growth.table(since)
    finally:
        mesh.stop()
