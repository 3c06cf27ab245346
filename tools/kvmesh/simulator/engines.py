"""The engines of a simulation: those of the [mock] settings, or like those of live workers."""

from collections import Counter
from collections.abc import Container, Iterable
from typing import NamedTuple

import msgspec

from kvmesh.bus.messages import Capacity, Instance, ModelCard
from kvmesh.settings.schema import MockSettings
from kvmesh.simulator.options import Serves, WorkerOptions
from kvmesh.worker.enginecore.block_manager import DEFAULTS
from kvmesh.worker.enginecore.retention_options import RetentionOptions
from kvmesh.worker.engines.mock.core_options import core_options

BLOCK_SIZE = 16  # without a live worker
Fleet = tuple[WorkerOptions, ...]


class EngineKind(NamedTuple):
    """The properties by which live workers are grouped for the simulation."""

    serves: str
    block_size: int
    blocks: int
    max_sequences: int
    max_batched_tokens: int
    host_blocks: int
    disk_blocks: int


def live_fleet(
    workers: Iterable[Instance],
    mock: MockSettings,
    fixed: Container[str] = (),
    block_size: int | None = None,
    retention: RetentionOptions = DEFAULTS,
) -> Fleet:
    """One engine per live rank with the properties of its worker's card.

    Those in `fixed` are the settings' own, and `block_size` is that of all engines if given. The
    card has no speed, and `retention` is the settings'. Without any card, the fleet is one engine
    of the settings. Raises StepProfileError.
    """
    ranks: Counter[EngineKind] = Counter()
    for card in sorted(workers, key=lambda card: (card.serves == "prefill", card.name)):
        if card.capacity is not None and card.model is not None:
            ranks[_kind(card, card.model, card.capacity)] += card.capacity.dp_ranks
    if not ranks:
        return (WorkerOptions(1, core_options(mock, block_size or BLOCK_SIZE, retention)),)
    return tuple(
        _group(mock, kind, count, fixed, block_size, retention) for kind, count in ranks.items()
    )


def of_size(fleet: Fleet, workers: int) -> Fleet:
    """So many engines like those of the first group."""
    return (WorkerOptions(workers, fleet[0].core),)


def _kind(card: Instance, model: ModelCard, capacity: Capacity) -> EngineKind:
    host, disk, *_ = [*capacity.tier_blocks, 0, 0]
    return EngineKind(
        serves=card.serves,
        block_size=model.block_size,
        blocks=capacity.blocks,
        max_sequences=capacity.max_sequences,
        max_batched_tokens=capacity.max_batched_tokens,
        host_blocks=host,
        disk_blocks=disk,
    )


def _group(
    mock: MockSettings,
    kind: EngineKind,
    count: int,
    fixed: Container[str],
    block_size: int | None,
    retention: RetentionOptions,
) -> WorkerOptions:
    live = {
        key: value
        for key, value in kind._asdict().items()
        if key in MockSettings.__struct_fields__ and key not in fixed
    }
    own = msgspec.structs.replace(mock, **live)
    core = core_options(own, block_size or kind.block_size, retention)
    return WorkerOptions(count, core, msgspec.convert(kind.serves, Serves))
