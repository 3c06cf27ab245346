"""Parameters and buffers of a model that are kept for its next start."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kvmesh.weights.store import WeightStore
from kvmesh.weights.stored_copy import StoredCopy
from kvmesh.worker.adapters.weights.engine_form import (
    FormKey,
    disk_identity,
    distinct_tensors,
    fill,
    find_form,
    form_key,
    keep_form,
    note_of,
)


class Model(nn.Module):
    """Tied weights, buffers of two kinds, parameters that overlap, and one that is transposed."""

    def __init__(self, seed: int, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(10, width)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.Linear(width, 3, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.randn(()))
        self.register_buffer("table", torch.randn(5), persistent=False)
        self.register_buffer("counts", torch.randint(9, (7,)))
        whole = torch.randn(4, 6)
        self.left = nn.Parameter(whole[:2])
        self.right = nn.Parameter(whole[2:])
        self.turned = nn.Parameter(torch.randn(3, 5).T)
        self.empty = nn.Parameter(torch.empty(0))


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store", 1 << 20)


@pytest.fixture
def form(store: WeightStore) -> Iterator[StoredCopy]:
    kept = keep_form(store, form_key("e", Model(1), {}), Model(1), "note")
    assert kept is not None
    yield kept
    kept.close()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in distinct_tensors(model).items()}


def test_a_kept_model_is_found_and_fills_another(store: WeightStore, form: StoredCopy) -> None:
    model = Model(2)
    assert form_key("e", model, {}) == form_key("e", Model(1), {})
    found = find_form(store, [form_key("e", model, {})])
    assert found is not None
    assert found.keep
    assert note_of(found) == "note"
    assert fill(model, found)
    expected = values(Model(1))
    assert values(model).keys() == expected.keys()
    assert all(torch.equal(t, expected[name]) for name, t in values(model).items())
    assert model.head.weight is model.embed.weight
    assert model.left.untyped_storage().data_ptr() == model.right.untyped_storage().data_ptr()
    found.close()


def test_large_parameters_share_the_memory_but_keep_what_is_written(form: StoredCopy) -> None:
    first, second = Model(2), Model(3)
    assert fill(first, form)
    assert fill(second, form)
    first.embed.weight.data.zero_()
    assert torch.equal(second.embed.weight, Model(1).embed.weight)
    assert second.embed.weight.data_ptr() % 64 == form.manifest.tensors[0].offset % 64 == 0


@pytest.mark.parametrize(
    "key",
    [
        form_key("other", Model(1), {}),
        form_key("e", Model(1), {"version": "2"}),
        form_key("e", Model(1, width=32), {}),
        form_key("e", Model(1), {}, rank=1, ranks=2),
    ],
)
def test_another_engine_version_shape_or_rank_finds_nothing(
    store: WeightStore, form: StoredCopy, key: FormKey
) -> None:
    assert find_form(store, [key]) is None


def test_untied_weights_are_another_model() -> None:
    untied = Model(1)
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    assert form_key("e", untied, {}) != form_key("e", Model(1), {})


def test_a_form_that_lacks_a_tensor_changes_nothing(form: StoredCopy) -> None:
    model = Model(2)
    model.more = nn.Parameter(torch.ones(3))
    before = values(model)
    assert not fill(model, form)
    assert all(torch.equal(t, before[name]) for name, t in values(model).items())


def test_a_form_of_another_type_changes_nothing(form: StoredCopy) -> None:
    assert not fill(Model(2).double(), form)


def test_a_full_store_keeps_nothing_and_does_not_fail(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store", 1000)
    assert keep_form(store, form_key("e", Model(1), {}), Model(1)) is None
    assert not any(path for path in (tmp_path / "store").iterdir() if path.is_dir())


def test_parameters_without_values_are_not_kept(store: WeightStore) -> None:
    model = Model(1)
    model.norm.to("meta")
    assert keep_form(store, form_key("e", model, {}), model) is None


def test_files_that_change_have_another_identity(tmp_path: Path) -> None:
    assert disk_identity(tmp_path) == ""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1")
    first = disk_identity(tmp_path)
    file.write_bytes(b"22")
    assert first != disk_identity(tmp_path) != ""
