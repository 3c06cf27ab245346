"""The process that compares: progress and figures, or the reason why there are none."""

import msgspec
from support.ended_requests import distinct

from kvmesh.bus.messages import encode
from kvmesh.runtime.piped_process import PipedProcess
from kvmesh.settings.schema import MockSettings, RouterSettings
from kvmesh.simulator.whatif.comparison import Alternative, LiveConfiguration, WhatIfAnswer
from kvmesh.simulator.whatif.process import (
    MODULE,
    ComparisonFailure,
    ComparisonProgress,
    ComparisonTask,
    Reply,
)

LIVE = LiveConfiguration(workers=[], router=RouterSettings(), mock=MockSettings())


async def ask(process: PipedProcess, messages: list[bytes], policy: str) -> list[Reply]:
    task = ComparisonTask(messages=messages, live=LIVE, other=Alternative(policy=policy))
    await process.send(encode(task))
    replies: list[Reply] = []
    while not replies or isinstance(replies[-1], ComparisonProgress):
        replies.append(msgspec.msgpack.decode(await process.receive(), type=Reply))
    return replies


async def test_it_answers_with_progress_and_figures_or_a_reason() -> None:
    captured = distinct(20, 5.0)
    messages = [encode(each.decision) for each in captured]
    messages += [encode(each.outcome) for each in captured]
    process = PipedProcess(MODULE)
    try:
        first, *_, last = await ask(process, messages, "round-robin")
        assert first == ComparisonProgress(name="present", done=0, total=20)
        assert isinstance(last, WhatIfAnswer)
        assert last.measured.requests == last.chosen.requests == 20
        [none] = await ask(process, [], "kv")
        assert none == ComparisonFailure(reason="no finished requests in this window")
        [unreadable] = await ask(process, [b"?"], "kv")
        assert isinstance(unreadable, ComparisonFailure)
        assert "cannot decode" in unreadable.reason
        *_, unknown = await ask(process, messages, "best")
        assert isinstance(unknown, ComparisonFailure)
        assert "best" in unknown.reason
    finally:
        await process.close()
