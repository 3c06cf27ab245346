"""Answers that pages share: asked while a page shows them, one at a time, with their failures."""

import asyncio

from support.wait import eventually

from kvmesh.bus.errors import NoResponder, NotPermitted
from kvmesh.dashboard import polled
from kvmesh.dashboard.polled import Polled


class Asked:
    """A question whose answers a test gives."""

    def __init__(self) -> None:
        self.times = 0
        self.answers: asyncio.Queue[object] = asyncio.Queue()

    async def __call__(self) -> object:
        self.times += 1
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_viewers_share_one_question_at_a_time() -> None:
    asked = Asked()
    shared = Polled(asked, 3600.0)
    assert shared.poll() is None
    shared.poll()
    asked.answers.put_nowait("first")
    await eventually(lambda: shared.value == "first")
    shared.poll()
    await asyncio.sleep(0)
    assert asked.times == 1


async def test_a_failure_keeps_the_latest_answer_and_tells_why() -> None:
    asked = Asked()
    shared = Polled(asked, 0.0)
    for answer, fault in (
        ("answer", ""),
        (NotPermitted("kvm.x.index.m"), "credentials of this dashboard do not permit"),
        (NoResponder("kvm.x.index.m"), "no process listens on kvm.x.index.m"),
        (ValueError("x"), "ValueError"),
        ("answer", ""),
    ):
        asked.answers.put_nowait(answer)

        def is_told(expected: str = fault) -> bool:
            shared.poll()
            return bool(shared.value) and (
                expected in shared.fault if expected else not shared.fault
            )

        await eventually(is_told)
        assert shared.value == "answer"


async def test_an_answer_that_does_not_come_is_given_up() -> None:
    limit, polled.DEADLINE_S = polled.DEADLINE_S, 0.01
    try:
        shared = Polled(Asked(), 3600.0)
        shared.poll()
        await eventually(lambda: shared.fault == "No answer: timed out.")
    finally:
        polled.DEADLINE_S = limit
