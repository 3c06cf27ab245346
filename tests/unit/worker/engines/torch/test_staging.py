"""Allocation of staging slots for KV handoffs."""

import asyncio

import pytest

from kvmesh.worker.engines.torch.handoff import Staging


async def test_staging_is_first_come_first_served() -> None:
    staging = Staging(4)
    assert await staging.allocate(3) == [0, 1, 2]
    large = asyncio.create_task(staging.allocate(3))
    small = asyncio.create_task(staging.allocate(1))
    await asyncio.sleep(0)
    staging.release([1])
    await asyncio.sleep(0)
    assert not small.done()
    staging.release([0])
    assert await large == [0, 1, 3]
    staging.release([3])
    assert await small == [3]
    with pytest.raises(ValueError, match="exceed"):
        await staging.allocate(5)
