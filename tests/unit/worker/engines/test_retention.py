"""Retention, release and pins on the engines that run anywhere."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.engines import ENGINES, StartedEngine, running
from support.retention_suite import RetentionSuite


@pytest_asyncio.fixture(params=ENGINES)
async def started(request: pytest.FixtureRequest) -> AsyncIterator[StartedEngine]:
    async with running(request.param) as engine:
        yield engine


class TestRetention(RetentionSuite):
    """Engines that need an environment of their own are in tests/engines."""
