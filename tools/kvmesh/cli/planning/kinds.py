"""Kinds of workers for `kvmesh plan size`: `--kind` with its profile, tiers and prices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated

import msgspec
from msgspec import Meta

from kvmesh.settings.schema import MockSettings
from kvmesh.simulator.options import SimulationError, WorkerOptions
from kvmesh.simulator.sizing.fleets import WorkerKind
from kvmesh.step_times.registry import load_step_profile
from kvmesh.worker.engines.mock.core import CoreOptions
from kvmesh.worker.engines.mock.core_options import core_options

BLOCK_SIZE = 64
GIB = 1 << 30
MOST_SIZES = 8
LISTS = ("host_gib", "disk_gib")
HELP = (
    "a kind of worker with profile, speedup, blocks, cost (per hour), max, host_gib and disk_gib"
    " (sizes of tiers: 0|64|256), host_gib_cost and disk_gib_cost (per GiB and hour); repeatable"
)
Price = Annotated[float, Meta(ge=0, le=1e9)]
Size = Annotated[float, Meta(ge=0, le=1e6)]
Sizes = Annotated[list[Size], Meta(min_length=1, max_length=MOST_SIZES)]


class _Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of --kind."""

    profile: str = ""
    speedup: Annotated[float, Meta(gt=0)] | None = None
    blocks: Annotated[int, Meta(ge=1)] | None = None
    cost: Price = 1.0
    max: Annotated[int, Meta(ge=1, le=1024)] = 64
    host_gib: Sizes = msgspec.field(default_factory=lambda: [0.0])
    disk_gib: Sizes = msgspec.field(default_factory=lambda: [0.0])
    host_gib_cost: Price = 0.0
    disk_gib_cost: Price = 0.0


@dataclass(frozen=True)
class TieredKind:
    """A kind with one choice of its tiers; `tiers_cost` is their part of its cost per hour."""

    kind: WorkerKind
    host_gib: float
    disk_gib: float
    tiers_cost: float

    @property
    def text(self) -> str:
        """Its name, with its tiers."""
        tiers = [("host", self.host_gib), ("disk", self.disk_gib)]
        sizes = [f"{size:g} GiB {name}" for name, size in tiers if size]
        return f"{self.kind.name} with {' and '.join(sizes)}" if sizes else self.kind.name


def tier_choices(
    texts: Sequence[str], profile: str, mock: MockSettings
) -> list[tuple[TieredKind, ...]]:
    """The combinations of the tiers of all kinds, the cheapest tiers first.

    `profile` is that of the kinds that name none. Raises SimulationError or StepProfileError.
    """
    kinds = [_choices(text, profile, mock) for text in texts or ["worker"]]
    names = [choices[0].kind.name for choices in kinds]
    if len(set(names)) < len(names):
        raise SimulationError("--kind: a name is given twice")
    return sorted(product(*kinds), key=lambda chosen: sum(each.tiers_cost for each in chosen))


def _choices(text: str, profile: str, mock: MockSettings) -> list[TieredKind]:
    """One kind with each choice of its tiers."""
    name, _, rest = text.partition(":")
    try:
        pairs = dict(part.split("=", 1) for part in rest.split(",") if part)
        lists = {key: pairs[key].split("|") for key in LISTS if key in pairs}
        keys = msgspec.convert({**pairs, **lists}, _Keys, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        raise SimulationError(f"--kind {text}: {error}") from None
    core = _core(keys, profile, mock)
    bytes_per_block = BLOCK_SIZE * core.tiers.bytes_per_token
    found = []
    for host, disk in product(keys.host_gib, keys.disk_gib):
        tiers = core.tiers
        if "host_gib" in pairs:
            tiers = replace(tiers, host_blocks=int(host * GIB / bytes_per_block))
        if "disk_gib" in pairs:
            tiers = replace(tiers, disk_blocks=int(disk * GIB / bytes_per_block))
        cost = host * keys.host_gib_cost + disk * keys.disk_gib_cost
        options = WorkerOptions(1, replace(core, tiers=tiers), cost=keys.cost + cost)
        found.append(TieredKind(WorkerKind(name, options, keys.max), host, disk, cost))
    return found


def _core(keys: _Keys, profile: str, mock: MockSettings) -> CoreOptions:
    """The engine of a kind: that of [mock], with the step times and limits of its profile."""
    changed = {
        key: value for key in ("speedup", "blocks") if (value := getattr(keys, key)) is not None
    }
    core = core_options(msgspec.structs.replace(mock, **changed), BLOCK_SIZE)
    if not (keys.profile or profile):
        return core
    model = load_step_profile(keys.profile or profile)
    limits = model.limits
    if limits is None:
        return replace(core, model=model)
    own = replace(
        core.limits,
        max_sequences=limits.max_sequences,
        max_batched_tokens=limits.max_batched_tokens,
    )
    per_token = limits.kv_bytes_per_token or core.tiers.bytes_per_token
    return replace(
        core,
        model=model,
        limits=own,
        blocks=keys.blocks or max(limits.kv_tokens // BLOCK_SIZE, 1),
        tiers=replace(core.tiers, bytes_per_token=per_token),
    )
