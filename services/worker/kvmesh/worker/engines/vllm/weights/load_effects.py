"""Detects what `load_weights` of a model changes besides its parameters and buffers.

Such a model cannot start from its parameters and buffers alone.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch import nn

OWN = {"_parameters", "_buffers", "_modules"}  # which are compared otherwise
MOST = 64  # elements of a container that are looked at
_VALUES = (bool, int, float, str, bytes, Enum, torch.dtype, torch.device, torch.Size, type(None))


class LoadEffects:
    """Attributes of a model's modules and parameters at one time."""

    def __init__(self, model: nn.Module) -> None:
        self._held: list[Any] = []  # no other object may get the id of one of these
        self._tokens = {place: self._token(value) for place, value in _attributes(model)}

    def first_change(self, model: nn.Module) -> str:
        """The first attribute that differs from then; empty if none does."""
        now = LoadEffects(model)._tokens
        places = [*self._tokens, *now]
        return next((p for p in places if self._tokens.get(p) != now.get(p)), "")

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


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in OWN:
                yield f"{name}.{key}", value
    for name, parameter in model.named_parameters():
        for key, value in vars(parameter).items():
            yield f"{name}.{key}", value
