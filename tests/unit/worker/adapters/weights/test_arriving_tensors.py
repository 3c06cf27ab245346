"""Tensors of a copy that arrives, fails, and is completed from the folder."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.stored_weights import StoredWeights
from support.weights import CHUNK, make_weights, write_safetensors
from torch import Tensor

from kvmesh.weights.errors import WeightsLost
from kvmesh.worker.adapters.weights.arriving_tensors import ArrivingTensors

Named = tuple[str, Tensor]


def read_all(stored: StoredWeights, stall_s: float, folder: Path | None = None) -> list[Named]:
    tensors = ArrivingTensors(stored.copy, folder or stored.source, stall_s)
    return [(entry.name, tensors.read(entry)) for entry in tensors.entries]


def contents(folder: Path) -> dict[str, Tensor]:
    return {
        n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()
    }


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    as_bytes = {name: t.flatten().view(torch.uint8) for name, t in found.items()}
    return found.keys() == expected.keys() and all(
        torch.equal(as_bytes[name], t.flatten().view(torch.uint8)) for name, t in expected.items()
    )


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[StoredWeights]:
    stored = StoredWeights(tmp_path, make_weights(tmp_path / "model"))
    yield stored
    stored.copy.close()


def test_tensors_come_in_the_order_of_the_files_while_they_arrive(stored: StoredWeights) -> None:
    with stored.arriving(pace_s=0.002):
        found = read_all(stored, 10)
    assert [name for name, _ in found] == [f"layer.{f}.{t}" for f in range(2) for t in range(4)]
    assert equal(dict(found), contents(stored.source))


def test_each_tensor_waits_only_for_its_own_chunks(stored: StoredWeights) -> None:
    first, *_, last = stored.manifest.tensors
    stored.arrive(stored.manifest.chunks_of(first))
    tensors = ArrivingTensors(stored.copy, stored.source, 0.01)
    assert tensors.entries[0] == first
    tensors.read(first)
    with ThreadPoolExecutor(1) as threads:
        later = threads.submit(ArrivingTensors(stored.copy, stored.source, 10).read, last)
        assert not later.done()
        stored.arrive(stored.manifest.chunks_of(last))
        assert later.result(10).nbytes == last.size


def test_what_a_loader_writes_changes_neither_the_copy_nor_its_neighbours(
    stored: StoredWeights,
) -> None:
    expected, found = contents(stored.source), {}
    with stored.arriving(pace_s=0.002):
        tensors = ArrivingTensors(stored.copy, stored.source, 10)
        for entry in tensors.entries:
            tensor = tensors.read(entry)
            found[entry.name] = tensor.clone()
            tensor.zero_()
    assert equal(found, expected)
    assert equal(contents(stored.copy.folder), expected)


@pytest.mark.parametrize("seed", range(10))
def test_a_copy_that_fails_is_completed_from_the_folder(stored: StoredWeights, seed: int) -> None:
    stored.arrive(range(random.Random(seed).randrange(len(stored.chunks))))
    found = dict(read_all(stored, 0.01))
    assert equal(found, contents(stored.source))


def test_several_threads_read_a_copy_that_fails(stored: StoredWeights) -> None:
    stored.arrive(range(len(stored.chunks) // 2))
    tensors = ArrivingTensors(stored.copy, stored.source, 0.01)
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda entry: (entry.name, tensors.read(entry)), tensors.entries)
        assert equal(dict(found), contents(stored.source))


def test_the_log_tells_what_has_arrived_of_a_slow_copy(
    stored: StoredWeights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvmesh.worker.adapters.weights.arriving_tensors.PROGRESS_S", -1)
    caplog.set_level("INFO")
    stored.arrive()
    read_all(stored, 10)
    assert "100 % of the weights are here" in caplog.text


def test_other_weights_in_the_folder_are_never_mixed_with_a_copy(stored: StoredWeights) -> None:
    stored.arrive(range(4))
    file = sorted(stored.source.glob("*.safetensors"))[1]
    write_safetensors(file, {f"layer.1.{n}": 200_000 for n in range(4)}, seed=99)
    with pytest.raises(WeightsLost, match="other weights"):
        read_all(stored, 0.01)


def test_a_folder_without_the_files_does_not_help(stored: StoredWeights, tmp_path: Path) -> None:
    with pytest.raises(WeightsLost, match="cannot read"):
        read_all(stored, 0.01, tmp_path)


def test_tensors_at_odd_places_and_without_elements(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    write_safetensors(source / "m.safetensors", {"a": 2, "empty": 0, "b": CHUNK + 6, "c": 4})
    data = (source / "m.safetensors").read_bytes()
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    odd = header + b" " * (1 - len(header) % 2)
    odd += b" " * (len(odd) % 2 == 0)
    (source / "m.safetensors").write_bytes(
        len(odd).to_bytes(8, "little") + odd + data[8 + len(header) :]
    )
    stored = StoredWeights(tmp_path, source)
    stored.arrive()
    found = dict(read_all(stored, 1))
    assert equal(found, contents(source))
    stored.copy.close()
