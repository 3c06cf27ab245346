"""Token inbox: delivery of chunks to streams, and the flushes of their consumers."""

import asyncio
from itertools import pairwise

from kvmesh.bus.messages import Chunk, StepOutput
from kvmesh.frontend.dispatch.token_inbox import TokenInbox
from kvmesh.frontend.dispatch.token_stream import TokenStream

INTERVAL_S = 0.05


def dispatched(name: str = "r") -> TokenStream:
    stream = TokenStream(name, 0.0)
    stream.next_attempt()
    stream.dispatched("w", 0.0)
    return stream


def step(*chunks: Chunk) -> StepOutput:
    return StepOutput("w", list(chunks))


async def test_messages_that_arrive_together_share_a_flush() -> None:
    inbox, stream = TokenInbox(INTERVAL_S), dispatched()
    flushes: list[int] = []
    inbox.add(stream, lambda: flushes.append(len(stream.tokens)))
    for offset in range(3):
        inbox.receive(step(Chunk(stream.ref, offset, [offset])))
    assert not flushes
    await asyncio.sleep(0)
    assert flushes == [3]


async def test_flushes_of_a_stream_keep_the_interval() -> None:
    inbox, stream = TokenInbox(INTERVAL_S), dispatched()
    loop, flushes = asyncio.get_running_loop(), list[float]()
    inbox.add(stream, lambda: flushes.append(loop.time()))
    for offset in range(8):
        inbox.receive(step(Chunk(stream.ref, offset, [offset])))
        await asyncio.sleep(INTERVAL_S / 4)
    await asyncio.sleep(2 * INTERVAL_S)
    gaps = [later - sooner for sooner, later in pairwise(flushes)]
    assert gaps
    assert min(gaps) > INTERVAL_S / 2


async def test_a_gap_is_returned_and_adds_nothing() -> None:
    inbox, whole, broken = TokenInbox(0.0), dispatched(), dispatched("s")
    for stream in (whole, broken):
        inbox.add(stream, lambda: None)
    assert inbox.receive(step(Chunk(whole.ref, 0, [1]), Chunk(broken.ref, 1, [2]))) == [broken]
    assert (whole.tokens, broken.tokens) == ([1], [])


async def test_removed_and_ended_streams_receive_nothing() -> None:
    inbox, removed, ended = TokenInbox(0.0), dispatched(), dispatched("s")
    for stream in (removed, ended):
        inbox.add(stream, lambda: None)
    inbox.remove(removed)
    ended.stop("stop")
    inbox.receive(step(Chunk(removed.ref, 0, [1]), Chunk(ended.ref, 0, [1])))
    assert not removed.tokens + ended.tokens
    assert len(inbox) == 1


async def test_a_cancelled_stream_is_not_flushed() -> None:
    inbox, stream = TokenInbox(0.0), dispatched()
    flushes: list[None] = []
    inbox.add(stream, lambda: flushes.append(None))
    inbox.receive(step(Chunk(stream.ref, 0, [1])))
    inbox.remove(stream)
    stream.stop("cancelled")
    await asyncio.sleep(0)
    assert not flushes


async def test_an_answer_that_cannot_be_rendered_fails_its_stream_alone() -> None:
    inbox, good, bad = TokenInbox(0.0), dispatched(), dispatched("s")
    flushes: list[None] = []
    inbox.add(bad, lambda: [][0])
    inbox.add(good, lambda: flushes.append(None))
    inbox.receive(step(Chunk(bad.ref, 0, [1]), Chunk(good.work, 0, [1])))
    await asyncio.sleep(0)
    assert flushes
    assert bad.error is not None
    assert good.error is None


async def test_a_worker_reaches_only_the_attempt_that_it_has() -> None:
    inbox, stream, own = TokenInbox(0.0), dispatched(), dispatched("s")
    for each in (stream, own):
        inbox.add(each, lambda: None)
    inbox.receive(StepOutput("other", [Chunk(stream.ref, 0, [1]), Chunk(stream.work, 0, [1])]))
    guesses = [Chunk(name, 0, [1]) for name in ("r", "r.1", "r-1", "s.1")]
    inbox.receive(StepOutput("w", guesses))
    assert not stream.tokens + own.tokens


async def test_names_of_later_attempts_do_not_follow_from_earlier_ones() -> None:
    stream = dispatched()
    before = {stream.work, stream.ref}
    stream.next_attempt()
    assert not {stream.work, stream.ref} & before
    token = stream.ref.removeprefix("#")
    assert stream.work.endswith(token)
    assert not any(token in name for name in before)
