"""Retention over the bus: sessions that share a prefix, pins, and engines that cannot."""

from array import array

from support.wait import eventually
from support.worker import FAST, SALT, ScriptedFrontend, Workers, prompt, work

from kvmesh.bus.messages import (
    Clear,
    Pin,
    Release,
    Retain,
    Unpin,
)
from kvmesh.hashing import block_hashes

RANK = ("w-1", 0)


def blocks(tokens: bytes) -> list[int]:
    return list(array("Q", block_hashes(tokens, 16, SALT)[1]))


async def test_release_removes_only_unshared_blocks_of_the_session(
    frontend: ScriptedFrontend, workers: Workers
) -> None:
    await workers.start(FAST)
    shared = prompt(64)
    one, two = shared + prompt(64, first=900), shared + prompt(32, first=2000)
    for name, tokens in (("A", one), ("B", two)):
        await frontend.dispatch("w-1", work(name, tokens, max_tokens=1, session=name))
        await frontend.done(name)
    everything = {*blocks(one), *blocks(two)}
    await eventually(lambda: frontend.contents.held.get(RANK) == everything)
    reply = await frontend.control("w-1", Release(sessions=["A"]))
    assert (reply.ok, reply.blocks) == (True, 4)
    await eventually(lambda: frontend.contents.held[RANK] == set(blocks(two)))
    published = frontend.contents.next_id[RANK]
    for sessions in (["A"], ["unknown", "A"]):
        reply = await frontend.control("w-1", Release(sessions=sessions, reason="compaction"))
        assert (reply.ok, reply.blocks) == (True, 0)
    await frontend.dispatch("w-1", work("B2", two, max_tokens=1, session="B"))
    await frontend.done("B2")
    assert frontend.chunks["B2"][0].cached == [80]
    assert frontend.contents.next_id[RANK] == published


async def test_pins_and_directives_are_answered(
    frontend: ScriptedFrontend, workers: Workers
) -> None:
    started = await workers.start(FAST)
    kept = [Retain(0, None, 80, 60.0, explicit=True)]
    await frontend.dispatch("w-1", work("a", prompt(64), max_tokens=1, retention=kept, tenant="t"))
    await frontend.done("a")
    assert frontend.chunks["a"][0].retention == ["honoured"]
    pin = Pin(
        id="p", sequence_hashes=array("Q", blocks(prompt(64))).tobytes(), ttl_s=60, tenant="t"
    )
    assert (await frontend.control("w-1", pin)).blocks == 4
    ragged = await frontend.control("w-1", Pin(id="q", sequence_hashes=b"abc", ttl_s=60))
    assert ragged.reason == "invalid: 3 bytes are not a list of block hashes"
    (state,) = started.node.retention()
    assert (state.pins, state.charged_blocks, state.outcomes["honoured"]) == (1, 4, 2)
    assert (await frontend.control("w-1", Unpin("p"))).blocks == 4
    assert (await frontend.control("w-1", Clear(salt=SALT + 1))).blocks == 0
    assert (await frontend.control("w-1", Clear(salt=SALT))).blocks == 0
    assert (await frontend.control("w-1", Clear(salt=SALT, tenant="t"))).blocks == 4
    await eventually(lambda: not frontend.contents.held[RANK])
