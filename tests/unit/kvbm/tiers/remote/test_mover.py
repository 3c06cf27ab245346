"""Drops from a remote store that fails: its blocks are found no more, and dropped later."""

from collections.abc import Sequence
from typing import Any

import pytest
from support.wait import PATIENCE_S, eventually

from kvmesh.kvbm.tiers.remote import mover
from kvmesh.kvbm.tiers.remote.interface import RemoteError
from kvmesh.kvbm.tiers.remote.mover import RemoteMover

DIGESTS = [bytes([n]) * 16 for n in range(4)]


class FailingStore:
    """A store of digests that may be down."""

    def __init__(self) -> None:
        self.held = set(DIGESTS)
        self.down = False

    async def find(self, digests: Sequence[bytes]) -> int:
        held = (n for n, digest in enumerate(digests) if digest not in self.held)
        return next(held, len(digests))

    async def drop(self, digests: Sequence[bytes]) -> None:
        if self.down:
            raise RemoteError("drop", "it is down")
        self.held -= set(digests)

    async def is_empty(self) -> bool:
        if self.down:
            raise RemoteError("look", "it is down")
        return not self.held

    async def tend(self) -> None:
        pass

    async def close(self) -> None:
        pass


def made(store: FailingStore) -> tuple[RemoteMover, list[float]]:
    """A mover and the time of its clock."""
    unused: Any = None
    now = [100.0]
    return RemoteMover(store, unused, unused, lambda ends: None, lambda: now[0]), now  # type: ignore[arg-type]  # a part of a store


async def test_dropped_blocks_are_gone_once_that_is_told() -> None:
    store = FailingStore()
    moving, _ = made(store)
    moving.drop(DIGESTS[:2])
    assert await moving.undropped(PATIENCE_S) == 0
    assert store.held == set(DIGESTS[2:])
    assert not await moving.is_empty()
    await moving.close()


async def test_what_a_store_fails_to_drop_is_not_found_and_dropped_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mover, "TEND_S", 0.01)
    store = FailingStore()
    moving, now = made(store)
    store.down = True
    moving.drop(DIGESTS[1:2])
    assert await moving.undropped(PATIENCE_S) == 1
    assert moving.paused
    assert not await moving.is_empty()
    store.down = False
    now[0] += 60.0
    assert await moving.find(DIGESTS) == 1
    assert await moving.find(DIGESTS[:1]) == 1
    assert await moving.undropped(PATIENCE_S) == 1
    moving._tasks.start(moving.tend())
    await eventually(lambda: DIGESTS[1] not in store.held)
    await moving.close()
