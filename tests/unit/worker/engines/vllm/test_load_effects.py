"""Changes that loading makes to a model besides its parameters."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra: pip install '.[torch]'")

import torch
from torch import nn

from kvmesh.worker.engines.vllm.weights.load_effects import (
    LoadEffects,
    UnkeptChange,
    apply_changes,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.names = ["a"]
        self.hidden = torch.zeros(2)
        self.tied = False


def set_plain(model: Any) -> None:
    model.layer.weight.data.fill_(3)
    model.tied = True
    model.layer.pending = {}
    model.layer.weight.shard = "q"


def test_plain_changes_are_made_again() -> None:
    model, later = Model(), Model()
    effects = LoadEffects(model)
    set_plain(model)
    apply_changes(later, effects.changes(model))
    layer: Any = later.layer
    assert (later.tied, layer.pending, layer.weight.shard) == (True, {}, "q")
    assert LoadEffects(later).changes(later) == "[]"


def drop(model: Any) -> None:
    del model.tied


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: setattr(model, "hidden", torch.ones(2)), "hidden"),
        (lambda model: model.hidden.add_(1), "hidden"),
        (lambda model: model.names.append("b"), "names"),
        (lambda model: setattr(model.layer, "scale", torch.ones(2)), "layer.scale"),
        (lambda model: setattr(model.layer.weight, "owner", object()), "layer.weight.owner"),
        (drop, "tied"),
    ],
)
def test_other_changes_are_named(change: Callable[[Any], object], name: str) -> None:
    model = Model()
    effects = LoadEffects(model)
    change(model)
    with pytest.raises(UnkeptChange, match=name.replace(".", r"\.")):
        effects.changes(model)
