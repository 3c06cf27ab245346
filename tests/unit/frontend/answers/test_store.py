"""Generated answers in memory and in the bucket of all frontends."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from support.wait import PATIENCE_S, eventually
from unit.frontend.dialects.recorded import user

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.connection.jetstream import Bucket
from kvmesh.bus.errors import BusError, NotFound
from kvmesh.bus.subjects import Subjects
from kvmesh.frontend.answers import store as store_module
from kvmesh.frontend.answers.answer import Answer, AnswerRun
from kvmesh.frontend.answers.store import READ_S, AnswerStore
from kvmesh.frontend.conversation import Block, Generated, Text, Thinking, ToolCall
from kvmesh.frontend.dialects.output import call_id

BLOCKS: list[Block] = [
    Thinking("I see."),
    Text("Let me."),
    ToolCall("call_1", "read", '{"a": 1}', "files"),
    ToolCall("call_2", "patch", "*** Begin", custom=True),
]


TALK = 7  # key of the conversation


def answer(size: int = 10, forced: bool = False) -> Answer:
    return Answer("digest", BLOCKS, Generated("<assistant>", "x" * size, b"\1\0\0\0"), forced)


class FakeBucket:
    """A bucket in memory; `failure` is raised by each operation, after `delay_s`."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.failure: Exception | None = None
        self.delay_s = 0.0
        self.reads = 0
        self.looks = 0
        self.posted = 0

    async def get_msg(self, stream: str, subject: str, **query: object) -> None:
        """Look for any value of a conversation."""
        bucket = Subjects().answers_bucket
        assert (stream, query) == (f"KV_{bucket}", {"seq": 1, "next": True})
        assert subject.endswith(".>")
        self.looks += 1
        await self._pass()
        prefix = subject.removeprefix(f"$KV.{bucket}.").removesuffix(">")
        if not any(key.startswith(prefix) for key in self.values):
            raise NotFound(subject)

    async def get(self, key: str) -> Any:
        self.reads += 1
        await self._pass()
        if key not in self.values:
            raise NotFound(key)
        return SimpleNamespace(value=self.values[key])

    async def store(self, subject: str, value: bytes, timeout: float) -> None:
        await self._pass()
        self.values[subject.removeprefix(f"$KV.{Subjects().answers_bucket}.")] = value

    def post(self, subject: str, value: msgspec.Raw) -> None:
        self.posted += 1
        self.values[subject.removeprefix(f"$KV.{Subjects().answers_bucket}.")] = bytes(value)

    async def _pass(self) -> None:
        await asyncio.sleep(self.delay_s)
        if self.failure is not None:
            raise self.failure


class Store(AnswerStore):
    """A frontend's store over the fake bucket."""

    def __init__(self, bucket: FakeBucket, max_bytes: int = 1 << 20, stored: int = 1 << 20) -> None:
        bus = SimpleNamespace(
            connected=True,
            max_payload=1 << 20,
            subjects=Subjects(),
            store=bucket.store,
            post=bucket.post,
            bucket=lambda _: cast(Bucket, bucket),
            options=BusOptions(),
            js=SimpleNamespace(stored_through=str, get_msg=bucket.get_msg),
            keeper=None,
            specs={},
        )
        super().__init__(cast(Bus, bus), max_bytes, stored, 60.0)

    async def found(self, tenant: str, *names: str) -> Answer | None:
        """The last of the answers of a conversation."""
        runs = [AnswerRun(0, 1, [], name, number) for number, name in enumerate(names, 1)]
        known = (await self.find(tenant, TALK, runs)).get(names[-1])
        return known.answer if known is not None else None


@pytest.fixture
def bucket() -> FakeBucket:
    return FakeBucket()


async def test_another_frontend_reads_what_one_has_stored(bucket: FakeBucket) -> None:
    one, other = Store(bucket), Store(bucket)
    one.record("t", TALK, "name", answer(forced=True))
    assert await one.found("t", "name") == answer(forced=True)
    assert bucket.reads == 0
    await one.close()
    assert await other.found("t", "name") == answer(forced=True)
    assert await other.found("t", "name") == answer(forced=True)
    assert bucket.reads == 1


async def test_a_server_that_stores_is_not_waited_for(bucket: FakeBucket) -> None:
    store = Store(bucket)
    store.record("t", TALK, "first", answer())
    await store.close()
    for number in range(5):
        store.record("t", TALK, f"name{number}", answer())
    await store.close()
    assert (bucket.posted, len(bucket.values)) == (5, 6)
    assert await Store(bucket).found("t", "name4") == answer()


async def test_a_tenant_s_answers_are_its_own(bucket: FakeBucket) -> None:
    one = Store(bucket)
    one.record("t", TALK, "name", answer())
    await one.close()
    assert await one.found("u", "name") is None
    assert await Store(bucket).found("u", "name") is None
    (key,) = bucket.values
    for found in ("u", ""):  # even if keys were alike
        bucket.get = _any_key(bucket, key)  # type: ignore[method-assign]
        assert await Store(bucket).found(found, "name") is None
    assert await Store(bucket).found("t", "name") == answer()


def _any_key(bucket: FakeBucket, key: str) -> Any:
    async def get(_: str) -> Any:
        return SimpleNamespace(value=bucket.values[key])

    return get


@pytest.mark.parametrize(
    "value", [b"", b"x", b"\x28\xb5\x2f\xfd\x20\x01\x09\x00\x00\x90", b"\0" * 1000]
)
async def test_malformed_answers_are_absent(bucket: FakeBucket, value: bytes) -> None:
    one = Store(bucket)
    one.record("t", TALK, "name", answer())
    await one.close()
    bucket.values = dict.fromkeys(bucket.values, value)
    assert await Store(bucket).found("t", "name") is None


async def test_absent_answers_are_looked_up_once_until_they_are_generated(
    bucket: FakeBucket,
) -> None:
    store = Store(bucket)
    for _ in range(3):
        assert await store.found("t", "name") is None
    assert bucket.reads == 1
    store.record("t", TALK, "name", answer())
    assert await store.found("t", "name") == answer()


async def test_one_request_tells_that_a_conversation_has_no_answers(bucket: FakeBucket) -> None:
    names = [f"name{number}" for number in range(66)]
    one, other = Store(bucket), Store(bucket)
    one.record("t", TALK + 1, "name7", answer())
    one.record("u", TALK, "name7", answer())
    await one.close()
    for _ in range(2):
        assert await other.found("t", *names) is None
    assert (bucket.looks, bucket.reads) == (1, 0)
    one.record("t", TALK, names[-1], answer())
    await one.close()
    assert await Store(bucket).found("t", *names) == answer()
    assert (bucket.looks, bucket.reads) == (2, 66)


@pytest.mark.parametrize("kept", ["", "name"])
async def test_an_answer_given_here_is_not_looked_for_elsewhere(
    bucket: FakeBucket, kept: str
) -> None:
    store, messages = Store(bucket), [user("hi")]
    store.served("t", messages, kept)
    place = store.names.place("t", messages, 1, 0)
    assert not await store.find("t", TALK, [AnswerRun(1, 2, [], "other", place)])
    assert bucket.reads == 0
    await store.find("t", TALK, [AnswerRun(1, 2, [], "name", place)])
    assert bucket.reads == bool(kept)  # memory may have lost what was recorded


@pytest.mark.parametrize("fault", ["slow", "failing"])
async def test_a_prompt_does_not_wait_for_a_bad_bucket(
    bucket: FakeBucket, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "slow":
        bucket.delay_s = 60.0
    else:
        bucket.failure = BusError("no bucket")
    store = Store(bucket)
    loop = asyncio.get_running_loop()
    began = loop.time()
    with caplog.at_level(logging.WARNING):
        await store.found("t", *(f"name{n}" for n in range(100)))
        assert loop.time() - began < READ_S + 5
        reads = bucket.reads
        await store.found("t", "other")
    assert bucket.reads == reads  # it pauses
    assert len(caplog.records) == 1


async def test_the_newest_answer_may_be_arriving(
    bucket: FakeBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a busy machine may take longer to store it
    monkeypatch.setattr(store_module, "ARRIVING_S", 0.3)
    monkeypatch.setattr(store_module, "READ_S", PATIENCE_S)
    one, other = Store(bucket), Store(bucket)
    name = call_id()
    finding = asyncio.create_task(other.found("t", "older", name))
    await eventually(lambda: bucket.looks == 1, what="the first look")
    one.record("t", TALK, name, answer())
    assert await finding == answer()


async def test_no_read_is_left_behind_by_the_failure_of_another(bucket: FakeBucket) -> None:
    bucket.delay_s = 0.01
    bucket.failure = BusError("no bucket")
    before = asyncio.all_tasks()
    await Store(bucket).found("t", *(f"name{n}" for n in range(100)))
    assert asyncio.all_tasks() == before


async def test_an_answer_that_cannot_be_stored_is_known_here(
    bucket: FakeBucket, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.failure = BusError("no space")
    store = Store(bucket)
    with caplog.at_level(logging.WARNING):
        for number in range(10):
            store.record("t", TALK, f"name{number}", answer())
        await store.close()
    assert store.lookup("t", "name9") is not None
    assert len(caplog.records) == 1
    assert not bucket.values


async def test_without_storage_the_bucket_is_not_used(bucket: FakeBucket) -> None:
    store = Store(bucket, stored=0)
    store.record("t", TALK, "name", answer())
    assert await store.found("t", "other") is None
    await store.close()
    assert not bucket.values
    assert bucket.reads == 0


async def test_memory_is_bounded_and_the_largest_tenant_pays(bucket: FakeBucket) -> None:
    store = Store(bucket, max_bytes=100_000, stored=0)
    store.record("small.x", TALK, "kept", answer())
    for number in range(1000):
        store.record(f"large{number % 3}.x", TALK, f"name{number}", answer(number % 300 * 20))
        assert store.size <= 100_000
    assert store.lookup("small.x", "kept") is not None
    assert store.lookup("large0.x", "name999") is not None
    store.record("small.x", TALK, "huge", answer(1_000_000))
    assert store.size <= 100_000
    assert not Store(bucket, max_bytes=0).enabled
