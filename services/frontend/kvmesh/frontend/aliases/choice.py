"""The model of an alias that serves a request. Pure."""

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

from kvmesh._native import xxh3
from kvmesh.bus.messages import AliasTarget, ModelAlias

SCALE = 2.0**64


def choose_target(alias: ModelAlias, key: str, serves: Callable[[str], bool]) -> str:
    """The model for the session `key`, of those that serve if any does.

    All frontends choose the same one. Sessions are spread in the order of the targets: if weight
    moves from the last one to the one before it, only sessions of these two change their model.
    """
    targets = _serving(alias, serves)
    ends = list(accumulate(target.weight for target in targets))
    place = xxh3(f"{alias.name}\0{key}".encode()) / SCALE * ends[-1]
    return targets[min(bisect_right(ends, place), len(targets) - 1)].model


def shadows_of(alias: ModelAlias, key: str) -> list[str]:
    """The models to which the requests of the session `key` are copied.

    The weight of a shadow is the percentage of sessions that it gets; all frontends agree on them.
    """
    return [
        shadow.model
        for shadow in alias.shadows
        if xxh3(f"{alias.name}\0{shadow.model}\0shadow\0{key}".encode()) / SCALE * 100
        < shadow.weight
    ]


def main_target(alias: ModelAlias, serves: Callable[[str], bool]) -> str:
    """The model of most weight, of those that serve if any does."""
    return max(_serving(alias, serves), key=lambda target: target.weight).model


def _serving(alias: ModelAlias, serves: Callable[[str], bool]) -> list[AliasTarget]:
    weighted = [target for target in alias.targets if target.weight > 0]
    return [target for target in weighted if serves(target.model)] or weighted or alias.targets
