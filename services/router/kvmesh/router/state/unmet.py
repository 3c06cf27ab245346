"""The constraint of a request that no worker meets, as text for the caller."""

import difflib
from collections.abc import Sequence
from typing import NamedTuple

from kvmesh.bus.messages import TAINT, Instance, Placement

SHOWN = 3  # names in a text


class Unmet(NamedTuple):
    """`param` names the field at fault if no wait helps: a missing instance or rank."""

    reason: str
    param: str = ""


def unmet_constraint(workers: Sequence[Instance], placement: Placement) -> Unmet:
    """The first constraint that leaves none of the workers that serve requests now."""
    named = [card for card in workers if placement.instance in (None, card.instance)]
    if not named:
        return Unmet(_unknown_instance(workers, placement.instance or ""), "backend_instance_id")
    rank = placement.rank
    ranks = max(card.capacity.dp_ranks if card.capacity else 1 for card in named)
    if rank is not None and rank >= ranks:
        return Unmet(f"no worker has the rank {rank}; ranks are 0 to {ranks - 1}", "dp_rank")
    for key, value in placement.labels.items():
        if all(card.labels.get(key) != value for card in named):
            return Unmet(f"no worker has the label {key}={value}{_values(workers, key)}")
    for taint in placement.taints:
        if all(TAINT + taint not in card.labels for card in named):
            return Unmet(f"no worker has the taint {taint!r}")
    if placement.allow and not any(card.instance in placement.allow for card in named):
        return Unmet("none of the instances that `allow` lists serves this model")
    if all(card.instance in placement.exclude for card in named):
        return Unmet("`exclude` leaves no worker of this model")
    return Unmet("no worker of this model meets all the constraints of the request")


def _unknown_instance(workers: Sequence[Instance], wanted: str) -> str:
    text = f"no instance of a worker is called {wanted!r}"
    same_name = [card.instance for card in workers if card.name == wanted]
    if same_name:
        return f"{text}; the instance of the worker with this name is {same_name[0]}"
    close = difflib.get_close_matches(wanted, [card.instance for card in workers], 1)
    return f"{text}; did you mean {close[0]}?" if close else text


def _values(workers: Sequence[Instance], key: str) -> str:
    """A suffix with the values that the label has."""
    values = sorted({card.labels[key] for card in workers if key in card.labels})
    return f"; {key} is {', '.join(values[:SHOWN])}" if values else ""
