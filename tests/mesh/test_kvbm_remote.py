"""Stores of tier 3: common behaviour, and failures of server or disk."""

import gc
import os
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
from support.redis import RedisServer
from support.wait import eventually

from kvmesh.kvbm.tiers.remote.factory import open_store
from kvmesh.kvbm.tiers.remote.folder import THREADS, FolderStore
from kvmesh.kvbm.tiers.remote.interface import RemoteBlock, RemoteError, RemoteStore
from kvmesh.kvbm.tiers.remote.redis import BATCH_BYTES, batches

LEASE_S = 60.0
CAPACITY = 1 << 20


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


def opened(url: str, lease_s: float = LEASE_S) -> RemoteStore:
    return open_store(url, "test", lease_s, 5.0, CAPACITY)


@pytest_asyncio.fixture(params=["redis", "folder"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return f"file://{tmp_path}"
    server: RedisServer = request.getfixturevalue("redis")
    await answering(server)
    return server.url


async def answering(server: RedisServer) -> None:
    store = opened(server.url)

    async def connected() -> bool:
        try:
            return await store.find([b"none"]) == 0
        except RemoteError:
            return False

    await eventually(connected)
    await store.close()


@pytest_asyncio.fixture
async def store(url: str) -> AsyncIterator[RemoteStore]:
    store = opened(url)
    yield store
    await store.close()


def block(number: int, size: int = 100) -> RemoteBlock:
    content = memoryview(bytes([number % 251]) * size)
    return RemoteBlock(bytes([number]) * 16, f"note {number}".encode(), content)


def names(*numbers: int) -> list[bytes]:
    return [block(number).digest for number in numbers]


def buffers(count: int, size: int = 100) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in range(count)]


async def test_a_block_is_returned_with_its_note(store: RemoteStore) -> None:
    await store.put([block(1), block(2)])
    into = buffers(3)
    assert await store.get(names(1, 3, 2), into) == [b"note 1", None, b"note 2"]
    assert [bytes(buffer[:1]) for buffer in into] == [b"\1", b"\0", b"\2"]


async def test_only_leading_blocks_are_found(store: RemoteStore) -> None:
    await store.put([block(1), block(3)])
    assert await store.find(names(1, 2, 3)) == 1
    assert await store.find(names(1, 3)) == 2
    assert await store.find([]) == 0


@pytest.mark.parametrize("missing", [0, 63, 64, 200, 255])
async def test_a_long_prefix_is_found_to_its_end(store: RemoteStore, missing: int) -> None:
    """The store looks a long prefix up in parts."""
    await store.put([block(number) for number in range(256) if number != missing])
    assert await store.find(names(*range(256))) == missing
    await store.put([block(missing)])
    assert await store.find(names(*range(256))) == 256


async def test_a_block_is_never_changed(store: RemoteStore) -> None:
    await store.put([block(1)])
    other = RemoteBlock(block(1).digest, b"other", memoryview(b"x" * 100))
    await store.put([other])
    assert await store.get(names(1), buffers(1)) == [b"note 1"]


async def test_a_block_of_another_size_counts_as_missing(store: RemoteStore) -> None:
    await store.put([block(1)])
    assert await store.get(names(1), buffers(1, size=99)) == [None]
    assert await store.get(names(1), buffers(1, size=101)) == [None]


async def test_dropped_blocks_are_gone(store: RemoteStore) -> None:
    await store.put([block(1), block(2)])
    await store.drop(names(1, 3))
    assert await store.get(names(1, 2), buffers(2)) == [None, b"note 2"]


async def test_an_empty_store_is_known_as_such(store: RemoteStore) -> None:
    assert await store.is_empty()
    await store.put([block(1)])
    assert not await store.is_empty()
    await store.drop(names(1))
    assert await store.is_empty()


async def test_another_process_sees_the_blocks(store: RemoteStore, url: str) -> None:
    await store.put([block(1)])
    other = opened(url)
    assert await other.find(names(1)) == 1
    await other.close()


async def test_a_lease_ends(url: str) -> None:
    store = opened(url, lease_s=0.05)
    await store.put([block(1)])

    async def expired() -> bool:
        into = buffers(1)
        await store.tend()
        return await store.get(names(1), into) == [None]

    await eventually(expired)
    assert await store.find(names(1)) == 0
    await store.close()


async def test_blocks_of_many_batches(store: RemoteStore) -> None:
    size = BATCH_BYTES // 3
    await store.put([block(n, size) for n in range(5)])
    into = buffers(5, size)
    assert None not in await store.get(names(*range(5)), into)
    assert [buffer[-1] for buffer in into] == list(range(5))


def test_batches_hold_a_block_at_least() -> None:
    assert batches([]) == [0]
    assert batches([BATCH_BYTES * 2]) == [0, 1]
    assert batches([BATCH_BYTES // 2] * 3 + [BATCH_BYTES]) == [0, 2, 3, 4]


async def test_a_dead_server_raises_until_it_returns(redis: RedisServer) -> None:
    await answering(redis)
    store = opened(redis.url)
    await store.put([block(1)])
    redis.kill()
    for call in (store.find(names(1)), store.put([block(1)]), store.drop(names(1))):
        with pytest.raises(RemoteError):
            await call
    with pytest.raises(RemoteError, match="get"):
        await store.get(names(1), buffers(1))
    redis.start()
    await answering(redis)
    assert await store.get(names(1), buffers(1)) == [None]
    await store.close()


async def test_a_full_folder_drops_its_oldest_files(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, LEASE_S, 5.0, capacity=1000)
    await store.put([block(n, 200) for n in range(8)])
    for age, path in enumerate(files(tmp_path)[::-1]):
        age_by(path, age)
    await store.tend()
    left = [n for n in range(8) if await store.find(names(n))]
    assert left == [4, 5, 6, 7]
    await store.close()


async def test_an_unfinished_write_is_not_a_block(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, LEASE_S, 5.0, CAPACITY)
    await store.put([block(1)])
    cut(files(tmp_path)[0])
    assert await store.get(names(1), buffers(1)) == [None]
    await store.close()


@pytest.mark.parametrize(("group", "mode"), [(False, 0o700), (True, 0o770)])
async def test_file_modes_follow_the_group_setting(tmp_path: Path, group: bool, mode: int) -> None:
    folder = tmp_path / "shared"
    before = os.umask(0o022)
    try:
        store = FolderStore(folder, LEASE_S, 5.0, CAPACITY, group)
        await store.put([block(1)])
    finally:
        os.umask(before)
    made = [folder, *folder.rglob("*")]
    assert len(made) == 4
    for path in made:
        assert path.stat().st_mode & 0o777 == (mode if path.is_dir() else mode & 0o666)
    await store.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*"))


def age_by(path: Path, seconds: float) -> None:
    status = path.stat()
    os.utime(path, (status.st_atime, status.st_mtime - seconds))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("url", ["", "http://host", "redis://host:port", "file:///proc/none"])
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(RemoteError):
        opened(url)


async def test_a_frozen_folder_blocks_only_its_threads(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, LEASE_S, 0.2, CAPACITY)
    pipe = tmp_path / block(1).digest.hex()[:2] / block(1).digest.hex()
    pipe.parent.mkdir()
    os.mkfifo(pipe)  # opening it waits for a writer
    refused = buffers(THREADS + 4)
    for buffer in refused:
        with pytest.raises(RemoteError, match="timed out"):
            await store.get(names(1), [buffer])
    kept = [weakref.ref(buffer) for buffer in refused]
    del refused, buffer
    gc.collect()
    assert sum(ref() is not None for ref in kept) <= THREADS + 1  # one more for the last error

    async def answers() -> bool:
        os.close(os.open(pipe, os.O_RDWR))
        with suppress(RemoteError):
            return await store.find(names(2)) == 0
        return False

    await eventually(answers)
    await store.close()
