"""The files of images in a worker, and the work and commands that name them."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kvmesh.bus.messages import (
    Capacity,
    MeasureImage,
    PromptImage,
    PutImage,
    Sampling,
    Work,
)
from kvmesh.demo import model_dir
from kvmesh.worker.capabilities import execute_command
from kvmesh.worker.engine import EngineError, EngineInfo, Rejected
from kvmesh.worker.images import ImageStore, check_measured, placeholder_of
from kvmesh.worker.requests.admission import rejection_reason

CAPACITY = Capacity(blocks=64, max_sequences=8, max_batched_tokens=64)


def put(data: bytes) -> PutImage:
    return PutImage(sha256(data).digest(), data)


def named(image: PutImage) -> PromptImage:
    return PromptImage(image.digest, 0, 1)


def test_the_files_used_last_are_kept() -> None:
    store, images = ImageStore(10), [put(bytes([n]) * 4) for n in range(3)]
    for image in images[:2]:
        store.put(image)
    assert store.missing([named(images[0])]) == []  # which is used so
    store.put(images[2])
    assert store.missing([*map(named, images), named(images[1])]) == [images[1].digest]
    assert store.files([named(images[2]), named(images[0])]) == [images[2].data, images[0].data]
    with pytest.raises(Rejected, match="no longer"):
        store.files([*map(named, images)])


@pytest.mark.parametrize("image", [PutImage(bytes(32), b"x"), PutImage(b"", b"x"), put(b"")])
def test_a_file_that_its_digest_does_not_name_is_refused(image: PutImage) -> None:
    with pytest.raises(EngineError, match="digest"):
        ImageStore().put(image)


def test_a_file_beyond_all_room_is_refused() -> None:
    with pytest.raises(EngineError, match="more than all"):
        ImageStore(3).put(put(b"four"))


@pytest.mark.parametrize("size", [(0, 1), (1, 0), (-1, -1), (1 << 20, 1 << 20)])
def test_impossible_sizes_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(EngineError, match="invalid: "):
        check_measured(*size)


@pytest.mark.asyncio
@pytest.mark.parametrize("command", [MeasureImage(1, 1), put(b"x")])
async def test_an_engine_without_images_says_its_name(command: Any) -> None:
    engine: Any = object()
    reply = await execute_command(engine, "torch", command)
    assert (reply.ok, reply.reason) == (False, "unsupported: the torch engine takes no images")


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([(1, 2), (3, 2)], ""),
        ([(1, 2), (2, 2)], "one behind the other"),
        ([(3, 1), (1, 1)], "one behind the other"),
        ([(-1, 2)], "one behind the other"),
        ([(1, 0)], "one behind the other"),
        ([(7, 2)], "one behind the other"),
    ],
)
def test_images_lie_within_the_prompt(images: list[tuple[int, int]], words: str) -> None:
    named = [PromptImage(bytes(32), start, length) for start, length in images]
    work = Work(
        request="r",
        frontend="f",
        tokens=bytes(4 * 8),
        sampling=Sampling(max_tokens=1),
        images=named,
    )
    info = EngineInfo(name="e", version="", context=64, block_size=4, capacity=CAPACITY)
    assert "takes no images" in rejection_reason(work, info)
    reads = EngineInfo(
        name="e", version="", context=64, block_size=4, capacity=CAPACITY, image_placeholder="x"
    )
    reason = rejection_reason(work, reads)
    assert words in reason
    assert bool(reason) == bool(words)


def test_the_placeholder_is_in_the_model_folder(tmp_path: Path) -> None:
    found = placeholder_of(model_dir())
    assert found is not None
    assert found[1] == "<|image|>"
    assert placeholder_of(tmp_path) is None
