"""The log of a background response."""

import random
from unittest.mock import AsyncMock

import pytest

from kvmesh.frontend.http.responses.log import MAX_BODY, ResponseLog, RunHead


@pytest.mark.parametrize(
    ("body", "most", "kept"),
    [
        (random.Random(0).randbytes(4000), 5000, True),
        (random.Random(0).randbytes(6000), 5000, False),
        (bytes(6000), 5000, True),  # it takes little once compressed
        (bytes(MAX_BODY + 1), 1 << 20, False),
    ],
)
async def test_a_head_leaves_out_a_body_with_which_nats_would_refuse_it(
    body: bytes, most: int, kept: bool
) -> None:
    bucket = AsyncMock()
    log = ResponseLog(bucket, AsyncMock(), "tenant.response", most)
    await log.begin(RunHead("frontend", "token", 0, body, {}, b"{}", "target"))
    (key, stored), _ = bucket.create.await_args
    assert key == "tenant.response.head"
    assert len(stored) <= most
    bucket.get.return_value.value = stored
    bucket.get.return_value.revision = 1
    head, _ = await log.head()
    assert head.body == (body if kept else b"")
    assert head.target == "target"
