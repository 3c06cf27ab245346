"""The models of the mesh on one machine."""

import os
from pathlib import Path

import pytest

from kvmesh.weights.errors import ModelStoreError
from kvmesh.weights.models.cache import ModelCache

A, B, C = ("a" * 64, "b" * 64, "c" * 64)
SIZE = 256 << 10


def fill(cache: ModelCache, digest: str, used_at: float) -> None:
    place = cache.use("m", digest, SIZE)
    (place.folder / "file").write_bytes(os.urandom(SIZE))
    place.close()
    os.utime(place.root / "use.lock", (used_at, used_at))


def digests(cache: ModelCache) -> list[str]:
    return [model.digest for model in cache.list()]


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "models", 3 * SIZE)


def test_the_least_recently_used_model_makes_room(cache: ModelCache) -> None:
    fill(cache, A, 200.0)
    fill(cache, B, 100.0)
    assert digests(cache) == [B, A]
    fill(cache, C, 300.0)
    assert digests(cache) == [A, C]


def test_a_model_in_use_stays_and_a_new_one_is_refused(cache: ModelCache) -> None:
    fill(cache, A, 100.0)
    place = cache.use("m", A, SIZE)
    assert not cache.evict(A)
    with pytest.raises(ModelStoreError, match="do not fit"):
        cache.use("m", B, 3 * SIZE)
    assert digests(cache) == [A]
    place.close()
    cache.use("m", B, 5 * SIZE // 2).close()
    assert digests(cache) == [B]
    assert cache.evict(B)
    assert digests(cache) == []


def test_what_is_there_of_a_model_needs_no_more_room(cache: ModelCache) -> None:
    fill(cache, A, 100.0)
    fill(cache, B, 200.0)
    cache.use("m", A, SIZE).close()
    assert set(digests(cache)) == {A, B}


def test_a_removal_that_was_broken_off_is_ended(cache: ModelCache, tmp_path: Path) -> None:
    fill(cache, A, 100.0)
    (tmp_path / "models" / A).rename(tmp_path / "models" / ".removed-1234")
    cache.use("m", B, 5 * SIZE // 2).close()
    assert not list((tmp_path / "models").glob(".removed-*"))


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ModelStoreError, match="others may write"):
        ModelCache(tmp_path / "open", SIZE).use("m", A, SIZE)
