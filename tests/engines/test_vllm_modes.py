"""vLLM with several data-parallel ranks."""

import asyncio
import socket
from pathlib import Path

import pytest
from support.vllm import VllmRun, prompt, work
from support.wait import eventually

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]


async def test_each_rank_has_its_own_cache(tiny_model: Path) -> None:
    run = await VllmRun.start(tiny_model, "data_parallel_size=2")
    assert run.info.capacity.dp_ranks == 2
    await run.run_works(work("first", prompt(80), rank=0))
    await run.run_works(work("second", prompt(80), rank=1))
    assert run.sink.cached("second") == 0
    await run.run_works(work("again", prompt(80), rank=1))
    assert run.sink.cached("again") == 64
    assert run.sink.tokens("first") == run.sink.tokens("again")
    await eventually(lambda: len(run.sink.held) == 2, what="both ranks tell their blocks")
    assert [load.requests for load in run.engine.load("i")] == [1, 2]
    assert not [address for address in listening() if speaks_zeromq(*address)]
    await asyncio.wait_for(run.engine.drain(), 60)
    await run.engine.close()


def listening() -> list[tuple[str, int]]:
    """Addresses at which other machines may connect to vLLM's processes."""
    psutil = pytest.importorskip("psutil")
    mine = psutil.Process()
    found = [c for p in (mine, *mine.children(recursive=True)) for c in p.net_connections("tcp")]
    addresses = [tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN]
    return [
        address
        for address in addresses
        if not address[0].startswith("127.") and address[0] != "::1"
    ]


def speaks_zeromq(host: str, port: int) -> bool:
    """True if a ZeroMQ socket listens there: ZeroMQ sends its greeting first."""
    with socket.create_connection((host, port), timeout=5) as client:
        client.settimeout(1)
        try:
            return client.recv(10)[:1] == b"\xff"
        except TimeoutError:
            return False
