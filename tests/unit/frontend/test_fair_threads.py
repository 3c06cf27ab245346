"""Fairness and cancellation of the thread pool."""

import asyncio
import threading

from kvmesh.frontend.fair_threads import FairThreads, Steps
from kvmesh.runtime.fair_slots import FairQueue


def test_owners_alternate() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.add(item[0], item)
    order = []
    while queue:
        order.append(queue.next())
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_other_owners_run_between_the_steps_of_a_long_job() -> None:
    threads, order = FairThreads(1), []

    def job(name: str, steps: int) -> Steps[str]:
        for _ in range(steps):
            order.append(name)
            yield
        return name

    jobs = [threads.run_steps("big", job(f"big{n}", 50), at_once=False) for n in range(3)]
    jobs.append(threads.run_steps("small", job("small", 1), at_once=False))
    assert await asyncio.gather(*jobs) == ["big0", "big1", "big2", "small"]
    assert order.index("small") < 8


async def test_a_cancelled_call_frees_its_thread() -> None:
    threads, gate = FairThreads(1), threading.Event()
    first = asyncio.create_task(threads.call("a", gate.wait))
    waiting = [asyncio.create_task(threads.call("b", lambda: True)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    first.cancel()
    gate.set()
    assert await asyncio.gather(*waiting[1:]) == [True, True]
    assert await threads.call("c", lambda: 7) == 7
