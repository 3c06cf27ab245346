"""The gate at which parked ranks of vLLM wait, with threads as ranks; what cannot be parked."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
from support.wait import eventually

from kvmesh.worker.engine import EngineConfigError
from kvmesh.worker.engines.vllm.parking.configuration import park_ranks
from kvmesh.worker.engines.vllm.parking.gate import (
    CLASS_VARIABLE,
    SOCKET_VARIABLE,
    WORKER_CLASS,
    ParkingGate,
)
from kvmesh.worker.engines.vllm.parking.waiting import ParkingEnded, wait_at


@pytest_asyncio.fixture
async def gate(tmp_path: Path) -> AsyncIterator[ParkingGate]:
    made = ParkingGate(tmp_path)
    await made.open()
    yield made
    await made.close()


def config(**fields: object) -> SimpleNamespace:
    own = {
        "distributed_executor_backend": "mp",
        "nnodes": 1,
        "world_size": 2,
        "data_parallel_size_local": 1,
        "worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker",
        **fields,
    }
    return SimpleNamespace(parallel_config=SimpleNamespace(**own))


def rank(path: str) -> "asyncio.Task[None]":
    return asyncio.create_task(asyncio.to_thread(wait_at, path))


async def test_all_ranks_wait_and_go_on_together(gate: ParkingGate) -> None:
    made = config()
    park_ranks(made, "auto", gate)
    assert made.parallel_config.worker_cls == WORKER_CLASS
    assert os.environ[CLASS_VARIABLE] == "vllm.v1.worker.cpu_worker.CPUWorker"
    path = os.environ[SOCKET_VARIABLE]
    parked = asyncio.create_task(gate.parked())
    first = rank(path)
    await asyncio.sleep(0)
    assert not parked.done(), "one of two ranks waits at most"
    second = rank(path)
    await parked
    assert not first.done()
    assert not second.done()
    await gate.release()
    await asyncio.gather(first, second)
    assert SOCKET_VARIABLE not in os.environ
    assert CLASS_VARIABLE not in os.environ


async def test_ranks_end_with_the_worker_that_parked_them(gate: ParkingGate) -> None:
    park_ranks(config(world_size=1), "auto", gate)
    path = os.environ[SOCKET_VARIABLE]
    waiting = rank(path)
    await gate.parked()
    await gate.close()
    with pytest.raises(ParkingEnded):
        await waiting
    with pytest.raises(ParkingEnded, match="gone"):
        await rank(path)


async def test_a_rank_that_dies_does_not_count(gate: ParkingGate) -> None:
    park_ranks(config(), "auto", gate)
    path = os.environ[SOCKET_VARIABLE]
    _, writer = await asyncio.open_unix_connection(path)
    await eventually(lambda: gate.waiting == 1)
    writer.close()
    await eventually(lambda: gate.waiting == 0)


@pytest.mark.parametrize(
    ("chosen", "fields", "reason"),
    [
        ("my.Worker", {}, "my.Worker"),
        ("auto", {"distributed_executor_backend": "ray"}, "on this machine"),
        ("auto", {"nnodes": 2}, "on this machine"),
    ],
)
async def test_a_vllm_that_cannot_wait_is_refused(
    gate: ParkingGate, chosen: str, fields: dict[str, object], reason: str
) -> None:
    with pytest.raises(EngineConfigError, match=reason):
        park_ranks(config(**fields), chosen, gate)
    assert SOCKET_VARIABLE not in os.environ
