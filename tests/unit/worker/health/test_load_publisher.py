"""The loads that a worker publishes, and when."""

from typing import cast

from support.wait import eventually

from kvmesh.bus.client import Bus
from kvmesh.bus.messages import Load
from kvmesh.bus.subjects import Subjects
from kvmesh.worker.health.load_publisher import LoadPublisher


def load(running: int, steps: int) -> Load:
    return Load(
        instance="w-1",
        rank=0,
        running=running,
        waiting=0,
        active_blocks=0,
        cached_blocks=0,
        total_blocks=10,
        prefill_tokens=0,
        steps=steps,
        prompt_tokens=0,
        cached_tokens=0,
        output_tokens=steps,
        requests=running,
    )


class Posts:
    """The part of a bus that is used, and the engine's load."""

    def __init__(self) -> None:
        self.subjects = Subjects()
        self.sent: list[Load] = []
        self.now = load(0, 0)

    def post(self, subject: str, message: Load) -> None:
        self.sent.append(message)


def publisher(posts: Posts, interval_s: float) -> LoadPublisher:
    return LoadPublisher(cast(Bus, posts), "w-1", interval_s, lambda: [posts.now])


async def test_output_carries_a_load_that_is_nearly_due() -> None:
    posts = Posts()
    loads = publisher(posts, 0.1)
    posts.now = load(1, 1)
    loads.send_with_output(1000.0)
    posts.now = load(2, 2)
    loads.send_with_output(1000.05)
    assert posts.sent == [load(1, 1)]
    loads.send_with_output(1000.08)
    assert posts.sent == [load(1, 1), load(2, 2)]


async def test_decoding_alone_is_reported_less_often() -> None:
    posts = Posts()
    loads = publisher(posts, 0.1)
    for step in range(100):
        posts.now = load(1, step)
        loads.send_with_output(1000.0 + step / 100)
    assert 3 <= len(posts.sent) <= 5
    posts.now = load(2, 100)
    loads.send_with_output(1001.1)
    assert posts.sent[-1] == load(2, 100)


async def test_a_load_is_published_without_output_and_repeated_only_slowly() -> None:
    posts = Posts()
    loads = publisher(posts, 0.001)
    loads.start()
    await eventually(lambda: posts.sent == [load(0, 0)])
    posts.now = load(1, 1)
    loads.changed()
    await eventually(lambda: posts.sent == [load(0, 0), load(1, 1)])
    posts.now = load(0, 1)  # of an engine that has requests, progress is seen without a call
    await eventually(lambda: posts.sent[2:] == [load(0, 1)])
    loads.close()
