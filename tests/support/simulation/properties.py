"""What must be true of a simulated mesh, always or once its faults have ended."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from kvmesh.bus.messages import KvBatch, OverlapQuery, SeqWait
from kvmesh.bus.subjects import Subjects
from kvmesh.hashing import HASH_BYTES
from kvmesh.indexer.queries.reply import answer
from kvmesh.indexer.service import IndexerService
from kvmesh.router.model_router import ModelRouter
from kvmesh.router.placement.queue import PlacementQueue
from kvmesh.router.state.active_sequences import ActiveRequest
from kvmesh.router.state.prefix_tree import PrefixNode
from support.events import MODEL, depths, prompt
from support.simulation.callers import prompts
from support.simulation.jetstream import JetStream, Stream
from support.simulation.processes import (
    AuditorProcess,
    IndexerProcess,
    RouterProcess,
    WorkerProcess,
)

if TYPE_CHECKING:
    from support.simulation.world import World

SEQ = Subjects("sim").seq_stream
KV = Subjects("sim").kv_stream
Booked: TypeAlias = tuple[float, float, float]
LOSING = {"rewind", "recreate", "purge"}  # faults that take messages off the KV stream
_batches = msgspec.msgpack.Decoder(KvBatch)


def wrong(world: "World") -> list[str]:
    """What is not as it must be once the mesh has healed and nobody asks for anything."""
    found = [f"{p.node} has ended" for p in world.processes if p.ended]
    found += [
        f"there is no stream {name}" for name in (KV, SEQ) if name not in world.server.streams
    ]
    if found:
        return found
    found += [f"{c.name} still waits for {c.open} requests" for c in world.callers if c.open]
    workers = world.alive(WorkerProcess)
    found += [f"{w.node} is not up" for w in workers if not w.ready]
    if not all(w.ready for w in workers):
        return found
    for auditor in world.alive(AuditorProcess):
        found += _unread(auditor, world.server) if auditor.ready else [f"{auditor.node} is not up"]
    if not world.faults.chosen & LOSING:
        found += _holes(world.server.streams[KV])
    for process in world.alive(IndexerProcess):
        indexer = process.indexer
        if indexer is None or not indexer.ready:
            found.append(f"{process.node} is not ready")
        else:
            found += [f"{process.node} {text}" for text in _untrue(indexer, workers)]
    for router in world.alive(RouterProcess):
        model = _model(router)
        if model is None:
            found.append(f"{router.node} is not ready")
        else:
            found += [f"{router.node} {text}" for text in _unsettled(model)]
            if router.router is not None and router.router._sequences._stale.is_set():
                found.append(f"{router.node} does not read the active sequences yet")
            if router.knows() != {worker.node for worker in workers}:
                found.append(f"{router.node} knows the workers {router.knows()}")
    return found


def _untrue(indexer: IndexerService, workers: list[WorkerProcess]) -> list[str]:
    """Stored means findable, and nothing else is found."""
    holdings = indexer.states
    found = [f"does not know {holdings.unknown} ranks"] if holdings.unknown else []
    for blocks in prompts():
        truth = {w.node: w.contents.depth(blocks) for w in workers}
        truth = {node: depth for node, depth in truth.items() if depth}
        told = depths(answer(holdings.index, holdings.keys, OverlapQuery([prompt(blocks)]), 0.0))
        if told != truth:
            found.append(f"tells {told} of {blocks[0]}/{len(blocks)}, and the truth is {truth}")
    return found


def _unread(auditor: AuditorProcess, server: JetStream) -> list[str]:
    """What a stream has, its readers have read."""
    return [
        f"{auditor.node} has not read message {seq} of {name} as it is stored"
        for name, read in auditor.read.items()
        for seq, message in server.streams[name].messages.items()
        if read.get(seq) != message.data
    ][:3]


def _holes(stream: Stream) -> list[str]:
    """The events of a worker are numbered without a hole."""
    found, expected = [], dict[str, int]()
    for message in stream.messages.values():
        batch = _batches.decode(message.data)
        if batch.first > expected.get(batch.instance, batch.first):
            found.append(f"events of {batch.instance} before {batch.first} are not on the stream")
        end = batch.first + len(batch.events)
        expected[batch.instance] = max(expected.get(batch.instance, 0), end)
    return found


def _unsettled(model: ModelRouter) -> list[str]:
    """Nothing runs, so nothing may be booked and nobody may wait."""
    table, waiting = model.core.table, model.queue.waiting
    found = [f"has {waiting} requests waiting"] if waiting else []
    if len(model.core.active):
        found.append(f"books {len(model.core.active)} active requests")
    for column in ("requests", "prefill_tokens", "active_blocks"):
        total = float(abs(getattr(table, column)).sum())
        if total:
            found.append(f"books {column} of {total:g}")
    return found


def _model(process: RouterProcess) -> ModelRouter | None:
    router = process.router
    return router._models.get(MODEL) if router is not None and router.ready else None


def miscounted(world: "World") -> list[str]:
    """What a router books of a rank is the sum of what it knows to run there, at any time."""
    models = {p.node: _model(p) for p in world.alive(RouterProcess)}
    return [
        f"{node} books {booked} of slot {slot}, where {summed} run"
        for node, model in models.items()
        if model is not None
        for slot, booked, summed in _books(model)
        if not all(map(_near, booked, summed))
    ]


def _near(booked: float, summed: float) -> bool:
    return math.isclose(booked, summed, rel_tol=1e-5, abs_tol=1e-8)


def _books(model: ModelRouter) -> Iterator[tuple[int, Booked, Booked]]:
    """For each slot, requests, prefill tokens and blocks: as the table has them, and summed."""
    table, active = model.core.table, model.core.active
    running = defaultdict[int, list[ActiveRequest]](list)
    for each in active._active.values():
        running[each.slot].append(each)
    for slot, there in running.items():
        nodes = {id(node): node for each in there for node in _upwards(each.prefix_end)}
        shared = sum(len(node.label) // HASH_BYTES for node in nodes.values())
        blocks = shared + sum(each.partial_blocks + each.output_blocks for each in there)
        summed = len(there), sum(each.prefill_tokens for each in there), blocks
        columns = (table.requests, table.prefill_tokens, table.active_blocks)
        requests, prefill, held = (float(column[slot]) for column in columns)
        yield slot, (requests, prefill, held), summed


def _upwards(node: PrefixNode | None) -> Iterator[PrefixNode]:
    while node is not None:
        yield node
        node = node.parent


def disagreement(world: "World") -> list[str]:
    """Replicas that have read the same events and know the same entries give the same order."""
    last = world.server.streams[SEQ].last if SEQ in world.server.streams else -1
    models = [
        _model(p)
        for p in world.alive(RouterProcess)
        if p.router is not None and p.router._sequences.last_seq == last
    ]
    dispatchers = [m.queue for m in models if m is not None]
    if len(dispatchers) < 2:
        return []
    first, *others = dispatchers
    entries = _entries(first)
    same = [_order(other) for other in others if entries and _entries(other) == entries]
    world.compared += len(same) if len(entries) > 1 else 0
    expected = _order(first) if same else {}
    return [
        f"replicas that know the same would place {order} and {expected}"
        for order in same
        if order != expected
    ]


def _entries(dispatcher: PlacementQueue) -> dict[str, SeqWait]:
    return dispatcher._queue.entries


def _order(dispatcher: PlacementQueue) -> dict[tuple[int, str], list[str]]:
    """In which order the requests of each tier and class would leave.

    Which class has its turn may differ for a moment: a replica counts its own placements before
    they come back from the stream.
    """
    shared = {id(entry): entry for entry in _entries(dispatcher).values()}  # nobody changes them
    queue, order = deepcopy(dispatcher._queue, shared), dict[tuple[int, str], list[str]]()
    while (head := queue.head(0.0)) is not None:
        order.setdefault((head.tier, head.fair_class), []).append(head.request)
        queue.remove(head.request, placed=True)
    return order


def double(answers: Counter[str]) -> list[str]:
    """Questions that were answered more than once."""
    return [f"{n} answers to one question" for n in answers.values() if n > 1]
