"""The conversation of a request, and whether it says anything, on all ways into an engine."""

import pytest
from msgspec.structs import replace
from support.engines import make_prefetch, prompt, work

from kvmesh.bus.messages import Work
from kvmesh.worker.adapters.prefetching.queue import prefetch_work
from kvmesh.worker.adapters.request_origin import origin_of_work
from kvmesh.worker.enginecore.retention_request import parse_retention

MAIN = 7 << 32 | 1
TURN = work("r", prompt(64), session="s", conversation=MAIN)


@pytest.mark.parametrize(
    ("of", "tentative"),
    [
        (TURN, False),
        (replace(TURN, generated=8), True),
        (replace(TURN, ephemeral=True), True),
        (
            prefetch_work(make_prefetch(prompt(64), session="s", conversation=MAIN), prompt(64)),
            True,
        ),
    ],
    ids=["turn", "resumed", "ephemeral", "prefetch"],
)
def test_the_conversation_reaches_the_engine(of: Work, tentative: bool) -> None:
    claims, origin = parse_retention(of, 16, {}), origin_of_work(of)
    assert claims is not None
    assert (claims.conversation, claims.tentative) == (MAIN, tentative)
    assert (origin.conversation, origin.tentative) == (MAIN, tentative)
