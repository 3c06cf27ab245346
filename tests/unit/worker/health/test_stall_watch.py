"""Detection of engines without progress."""

from msgspec.structs import replace
from support.loads import LOAD

from kvmesh.worker.health.stall_watch import StallWatch


def test_an_engine_with_work_and_no_steps_is_stalled() -> None:
    watch = StallWatch(3)
    idle = replace(LOAD, rank=0, running=0, waiting=0)
    for steps in (1, 1, 1, 2, 2, 2):
        watch.observe([idle, replace(LOAD, steps=steps)])
    assert not watch.stalled
    watch.observe([idle, replace(LOAD, steps=2)])
    assert watch.stalled


def test_an_engine_that_had_a_rest_is_not_stalled() -> None:
    watch = StallWatch(3)
    for running in (1, 1, 1, 0, 1, 1, 1):
        watch.observe([replace(LOAD, running=running, waiting=0)])
    assert not watch.stalled
