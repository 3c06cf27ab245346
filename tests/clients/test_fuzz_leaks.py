"""No leaks: after many requests of all kinds a frontend holds only what it held before."""

import asyncio
import random

import pytest
from support.attack import Footprint, footprint, post_request, short_body, wait_until_idle
from support.mesh import Mesh
from support.wait import PATIENCE_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")
GENERATING = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
AT_ONCE = 32
SPARE_FILES = 8
SPARE_BYTES = 24 << 20


async def random_request(mesh: Mesh, rng: random.Random) -> None:
    """A request that is served, refused, abandoned, or incomplete."""
    path = rng.choice(GENERATING)
    tokens = rng.choice([1, 8, 2000])
    body = short_body(path, tokens, rng.random() < 0.7)
    kind = rng.choice(["read", "read", "abandoned", "malformed", "truncated"])
    if kind == "malformed":
        body = body.replace(b'"model"', rng.choice([b'"model', b'"mode"', b'"model":5,"x"']))
    data = post_request(path, body, "Connection: close")
    reader, writer = await asyncio.open_connection("127.0.0.1", mesh.port)
    try:
        writer.write(data[: rng.randrange(len(data))] if kind == "truncated" else data)
        if kind == "abandoned":
            await asyncio.wait_for(reader.read(1 << 16), PATIENCE_S)
        elif kind != "truncated" and tokens < 2000:
            await asyncio.wait_for(reader.read(), PATIENCE_S)
    finally:
        writer.transport.abort()


async def run_round(mesh: Mesh, count: int, seed: int) -> Footprint:
    """The frontend's footprint after `count` requests, once it is idle again."""
    rng = random.Random(seed)
    for _ in range(0, count, AT_ONCE):
        await asyncio.gather(*(random_request(mesh, rng) for _ in range(AT_ONCE)))
    await wait_until_idle(mesh)
    return footprint(mesh)


async def check_footprint(mesh: Mesh, count: int) -> None:
    """After a warm-up that fills caches and pools, equal rounds leave an equal footprint."""
    start = footprint(mesh).files
    await run_round(mesh, count, seed=0)
    first = await run_round(mesh, count, seed=1)
    second = await run_round(mesh, count, seed=2)
    await eventually(lambda: footprint(mesh).files <= start + SPARE_FILES, what="files are closed")
    assert second.memory - first.memory < SPARE_BYTES, (first, second)


async def test_a_few_hundred_requests_leave_nothing(mesh: Mesh) -> None:
    await check_footprint(mesh, 256)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_many_thousand_requests_leave_nothing(mesh: Mesh) -> None:
    await check_footprint(mesh, 8192)
