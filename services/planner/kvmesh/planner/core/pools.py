"""Pools of equal workers: parsing of `planner.pools`, and the pool of a worker's card."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from kvmesh.bus.messages import Instance
from kvmesh.planner.errors import PlannerConfigError
from kvmesh.step_times.profile import StepProfile

LABEL = "pool"  # the label of a worker that names its pool
T = TypeVar("T")
Serves = Literal["aggregated", "prefill", "decode"]
SERVES: tuple[Serves, ...] = ("aggregated", "prefill", "decode")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_KEYS = (
    *("serves", "min", "max", "cost", "devices", "model", "target", "kind", "profile"),
    *("parked", "asleep"),
)


@dataclass(frozen=True)
class Pool:
    """A pool of workers that are started and stopped alike; `min` and `max` bound their number.

    `cost` is the price of one worker for an hour in any currency, `devices` the number that it
    occupies. `model` limits the pool to workers of that model. `target` is the name under which the
    connector's place knows it; empty stands for a default that depends on the place. Pools of one
    `kind` exchange workers, which change their role for it; empty: none. `profile` is the name or
    file of the step times of its workers, `step_profile` its content. `parked` workers of the pool
    wait to be promoted, beside those that serve; all of its workers then start parked. Up to
    `asleep` more sleep in place of being stopped.
    """

    name: str
    serves: Serves = "aggregated"
    min: int = 1
    max: int = 8
    cost: float = 1.0
    devices: int = 1
    model: str = ""
    target: str = ""
    profile: str = ""
    step_profile: StepProfile | None = None
    kind: str = ""
    parked: int = 0
    asleep: int = 0

    @property
    def promotes(self) -> bool:
        """True if workers of the pool wait to be promoted, or may."""
        return self.parked > 0 or self.asleep > 0


def parse_pools(texts: Iterable[str]) -> list[Pool]:
    """Parse `NAME[:KEY=VALUE,…]`, one or several pools per text, in order.

    Environment variables and flags split lists at commas, so a text `KEY=VALUE` continues the pool
    before it. Raises PlannerConfigError.
    """
    pools: list[Pool] = []
    for name, pairs in _split(texts):
        if not _NAME.fullmatch(name):
            raise _error(name, "a name consists of letters, digits, dots, dashes and underscores")
        if any(pool.name == name for pool in pools):
            raise _error(name, "is given twice")
        pool = _pool(name, pairs)
        same = next((p.name for p in pools if pool.target and p.target == pool.target), None)
        if same is not None:
            raise _error(name, f"has the same target as pool {same}")
        for other in pools:
            _check_kinds(pool, other)
        pools.append(pool)
    if not pools:
        raise PlannerConfigError("planner.pools: no pool is given")
    return pools


def pool_of(card: Instance, pools: Sequence[Pool]) -> Pool | None:
    """The pool that a worker's label `pool` names, else the first that fits its card.

    A worker that serves another role than the pool of its label belongs to the pool of that kind
    with that role. None if the label names another pool, or if none fits.
    """
    if label := card.labels.get(LABEL):
        own = next((pool for pool in pools if pool.name == label), None)
        if own is None or not own.kind or own.serves == card.serves:
            return own
        return next(
            (pool for pool in pools if (pool.kind, pool.serves) == (own.kind, card.serves)), own
        )
    model = card.model.name if card.model else card.parked_for
    return next(
        (p for p in pools if p.serves == card.serves and p.model in ("", model)),
        None,
    )


def _check_kinds(pool: Pool, other: Pool) -> None:
    """Refuse pools of one kind that differ in more than the role, or not in that."""
    if not pool.kind or pool.kind != other.kind:
        return
    if pool.serves == other.serves:
        raise _error(pool.name, f"serves {pool.serves} as pool {other.name} of its kind does")
    for key in ("cost", "devices", "model"):
        if getattr(pool, key) != getattr(other, key):
            raise _error(pool.name, f"its {key} differs from that of {other.name}, of one kind")


def _split(texts: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Each pool's name and the texts of its keys."""
    found: list[tuple[str, list[str]]] = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        head, equals, _ = part.partition("=")
        if equals and ":" not in head:
            if not found:
                raise PlannerConfigError(f"planner.pools: {part!r} belongs to no pool")
            found[-1][1].append(part)
        elif part:
            name, colon, first = part.partition(":")
            found.append((name.strip(), [first] if colon else []))
    return found


def _pool(name: str, pairs: list[str]) -> Pool:
    values: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = (word.strip() for word in pair.partition("="))
        if not equals or not value:
            raise _error(name, f"{pair!r} is not of the form KEY=VALUE")
        if key not in _KEYS:
            raise _error(name, f"unknown key {key}; the keys are {', '.join(_KEYS)}")
        if key in values:
            raise _error(name, f"{key} is given twice")
        values[key] = value
    pool = Pool(
        name,
        serves=_read(name, values, "serves", _serves, "aggregated"),
        min=_read(name, values, "min", _count(0), 1),
        max=_read(name, values, "max", _count(1), 8),
        cost=_read(name, values, "cost", _cost, 1.0),
        devices=_read(name, values, "devices", _count(1), 1),
        model=values.get("model", ""),
        target=values.get("target", ""),
        profile=values.get("profile", ""),
        kind=values.get("kind", ""),
        parked=_read(name, values, "parked", _count(0), 0),
        asleep=_read(name, values, "asleep", _count(0), 0),
    )
    if pool.asleep and pool.kind:
        raise _error(name, "its workers change their role, so none of them sleep: remove asleep")
    if pool.min > pool.max:
        raise _error(name, f"min {pool.min} exceeds max {pool.max}")
    return pool


def _read(
    name: str, values: Mapping[str, str], key: str, parse: Callable[[str], T], default: T
) -> T:
    if key not in values:
        return default
    try:
        return parse(values[key])
    except ValueError as error:
        raise _error(name, f"{key}={values[key]}: {error}") from None


def _serves(text: str) -> Serves:
    for role in SERVES:
        if text == role:
            return role
    raise ValueError(f"must be one of {', '.join(SERVES)}")


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) < least:
            raise ValueError(f"must be a whole number of at least {least}")
        return int(text)

    return parse


def _cost(text: str) -> float:
    try:
        cost = float(text)
    except ValueError:
        cost = math.nan
    if not math.isfinite(cost) or cost < 0:
        raise ValueError("must be a finite number of at least 0")
    return cost


def _error(pool: str, reason: str) -> PlannerConfigError:
    return PlannerConfigError(f"planner.pools: pool {pool}: {reason}")
