"""The torch core under random load: events, block manager, physical blocks and index agree."""

from array import array
from random import Random

import pytest

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

from msgspec.structs import replace
from support.tiny import tiny_model
from support.torch_core import SALT, Driver, hashes, load, make_core, make_work

from kvmesh.bus.messages import Cleared, KvEvent, Removed
from kvmesh.index import PrefixIndex, create_index

RANK = 3
BLOCKS = 40


def apply(index: PrefixIndex, events: list[KvEvent]) -> None:
    for event in events:
        if isinstance(event, Cleared):
            index.clear(RANK)
        elif isinstance(event, Removed):
            assert len(index.remove(RANK, event.tier, event.engine)) == len(event.engine)
        else:
            stored = (event.parent, event.engine, event.local, event.salt)
            assert index.store(RANK, event.tier, *stored)


def overlap(index: PrefixIndex, tokens: list[int]) -> int:
    found = array("I", index.find(hashes(tokens)[1]))
    return found[1] if found else 0


def check(driver: Driver, index: PrefixIndex, prompts: list[list[int]]) -> None:
    core = driver.core
    apply(index, driver.events)
    driver.events.clear()
    assert driver.held == core.blocks.contents == core.physical_blocks.contents
    for tokens in prompts:
        held = core.blocks.match_prefix(array("Q", hashes(tokens)[1])).matched
        assert overlap(index, tokens) == held


def random_prompts(rng: Random) -> list[list[int]]:
    """A few roots with many branches, some of them longer than others."""
    roots = [[rng.randrange(8000) for _ in range(64)] for _ in range(3)]
    tails = [[rng.randrange(8000) for _ in range(rng.randrange(1, 120))] for _ in range(12)]
    return [roots[i % 3][: 16 * (1 + i % 4)] + tail for i, tail in enumerate(tails)]


@pytest.mark.parametrize("seed", range(3))
def test_replayed_events_equal_the_contents(seed: int) -> None:
    rng = Random(seed)
    driver = Driver(make_core(load(tiny_model()), blocks=BLOCKS, budget=64, batch=4))
    index = create_index()
    prompts = random_prompts(rng)
    exported = None
    for turn in range(120):
        chance = rng.random()
        if chance < 0.45:
            tokens = rng.choice(prompts)
            work = make_work(f"r{turn}", tokens, rng.randrange(1, 40))
            driver.submit(replace(work, priority=rng.randrange(3)))
        elif chance < 0.55 and driver.core.scheduler.live:
            assert driver.core.abort(rng.choice(list(driver.core.scheduler.live)))
        elif chance < 0.58:
            driver.core.blocks.clear()
            driver.record(driver.core.take_events())
        elif chance < 0.64:
            exported = driver.copy_out(rng.choice(prompts))
        elif chance < 0.70 and exported is not None:
            driver.copy_in(exported)
        driver.step()
        check(driver, index, prompts)
    driver.run()
    check(driver, index, prompts)
    assert driver.core.blocks.active == 0
    assert driver.core.physical_blocks.free == BLOCKS - len(driver.held)
    dumped = create_index()
    apply(dumped, driver.core.blocks.dump())
    assert all(overlap(dumped, tokens) == overlap(index, tokens) for tokens in prompts)


def test_higher_priority_is_evicted_later() -> None:
    driver = Driver(make_core(load(tiny_model()), blocks=12))
    rng = Random(1)
    kept, lost = ([rng.randrange(8000) for _ in range(64)] for _ in range(2))
    driver.run(replace(make_work("kept", kept, 1), priority=5))
    driver.run(make_work("lost", lost, 1))
    driver.run(make_work("big", [rng.randrange(8000) for _ in range(125)], 1))
    assert set(array("Q", hashes(kept)[1])) <= driver.held
    assert not set(array("Q", hashes(lost)[1])) & driver.held


def test_a_request_aborted_during_a_step_has_no_output() -> None:
    driver = Driver(make_core(load(tiny_model())))
    driver.submit(make_work("a", list(range(40))))
    driver.submit(make_work("b", list(range(50, 90))))
    driver.step()
    step, _ = driver.core.plan(0.0)
    driver.core.run(step)
    assert driver.core.abort("a")
    deltas, _ = driver.core.commit(step, 0.0)
    assert [delta.request for delta in deltas] == ["b"]
    driver.run()
    assert driver.core.blocks.active == 0


def test_prompts_with_other_salts_share_no_blocks() -> None:
    driver = Driver(make_core(load(tiny_model())))
    tokens = list(range(100))
    driver.run(make_work("a", tokens, 1))
    driver.run(replace(make_work("b", tokens, 1), salt=SALT + 1))
    assert driver.cached("b") == 0
    assert [t for t, _ in driver.answer("a")] == [t for t, _ in driver.answer("b")]
