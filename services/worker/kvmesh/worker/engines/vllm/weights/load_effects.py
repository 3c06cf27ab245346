"""Changes that `load_weights` makes to a model besides its parameters and buffers.

A model that starts from these alone needs the changes too; those that are plain values can be kept.
"""

import json
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

OWN = {"_parameters", "_buffers", "_modules"}  # which are compared otherwise
MOST = 64  # elements of a container that are looked at
_SAME = object()
_VALUES = (bool, int, float, str, bytes, Enum, torch.dtype, torch.device, torch.Size, type(None))
_PLAIN = (bool, int, float, str, type(None))


class _Place(NamedTuple):
    """An attribute of the module or parameter with a name."""

    kind: str
    owner: str
    attribute: str


class UnkeptChange(Exception):
    """Loading changes what cannot be kept; the message names it."""


class LoadEffects:
    """Attributes of a model's modules and parameters before it is loaded."""

    def __init__(self, model: nn.Module) -> None:
        self._held: list[Any] = []  # no other object may get the id of one of these
        self._tokens = {place: self._token(value) for place, value in _attributes(model)}

    def changes(self, model: nn.Module) -> str:
        """Since then, as text for `apply_changes`; raises UnkeptChange."""
        now = dict(_attributes(model))
        gone = self._tokens.keys() - now.keys()
        if gone:
            raise UnkeptChange(f"{min(gone).owner}.{min(gone).attribute}")
        found = []
        for place, value in now.items():
            if self._tokens.get(place, _SAME) != self._token(value):
                if not (isinstance(value, _PLAIN) or value == [] or value == {}):
                    raise UnkeptChange(f"{place.owner}.{place.attribute}")
                found.append([*place, value])
        return json.dumps(found)

    def _token(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, _VALUES):
            return value
        self._held.append(value)
        if isinstance(value, torch.Tensor):
            return id(value), value.data_ptr() if not value.is_meta else 0, value._version
        if isinstance(value, (list, tuple)) and not depth:
            return len(value), [self._token(each, 1) for each in value[:MOST]]
        if isinstance(value, dict) and not depth:
            items = list(value.items())[:MOST]
            return len(value), [(str(key), self._token(each, 1)) for key, each in items]
        return id(value), len(value) if isinstance(value, (list, tuple, dict, set)) else 0


def apply_changes(model: nn.Module, changes: str) -> None:
    """Make the changes that loading made to a model of the same structure."""
    owners: dict[str, dict[str, Any]] = {
        "module": dict(model.named_modules()),
        "parameter": dict(model.named_parameters()),
    }
    for kind, owner, attribute, value in json.loads(changes):
        setattr(owners[kind][owner], attribute, value)


def _attributes(model: nn.Module) -> Iterator[tuple[_Place, Any]]:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in OWN:
                yield _Place("module", name, key), value
    for name, parameter in model.named_parameters():
        for key, value in vars(parameter).items():
            yield _Place("parameter", name, key), value
