"""Properties of a simulated mesh that must hold always or once its faults have ended."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, TypeAlias

from kvmesh.bus.messages import KvBatch, MessageDecoder, OverlapQuery, SeqWait
from kvmesh.bus.subjects import Subjects
from kvmesh.hashing import HASH_BYTES
from kvmesh.indexer.queries.reply import answer
from kvmesh.indexer.service import IndexerService
from kvmesh.router.model_router import ModelRouter
from kvmesh.router.state.active_sequences import TrackedRequest
from kvmesh.router.state.prefix_tree import PrefixNode
from kvmesh.router.waiting.queue import PlacementQueue
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
RankLoad: TypeAlias = tuple[float, float, float]
LOSSY_FAULTS = {"rewind", "recreate", "purge"}  # faults that remove messages from the KV stream
_batches = MessageDecoder(KvBatch)


def violations(world: "World") -> list[str]:
    """Violated properties of a healed mesh without requests."""
    found = [f"{p.node} has ended" for p in world.processes if p.ended]
    found += [f"no stream {name}" for name in (KV, SEQ) if name not in world.server.streams]
    if found:
        return found
    found += [
        f"{c.name} has {c.open_requests} open requests" for c in world.callers if c.open_requests
    ]
    workers = world.alive(WorkerProcess)
    found += [f"{w.node} is not up" for w in workers if not w.ready]
    if not all(w.ready for w in workers):
        return found
    for auditor in world.alive(AuditorProcess):
        found += (
            _unread_messages(auditor, world.server)
            if auditor.ready
            else [f"{auditor.node} is not up"]
        )
    if not world.faults.chosen & LOSSY_FAULTS:
        found += _event_gaps(world.server.streams[KV])
    for process in world.alive(IndexerProcess):
        indexer = process.indexer
        if indexer is None or not indexer.ready:
            found.append(f"{process.node} is not ready")
        else:
            found += [f"{process.node} {text}" for text in _index_errors(indexer, workers)]
    for router in world.alive(RouterProcess):
        model = _model(router)
        if model is None:
            found.append(f"{router.node} is not ready")
        else:
            found += [f"{router.node} {text}" for text in _leftover_load(model)]
            if router.router is not None and router.router._sequences.reader._stale.is_set():
                found.append(f"{router.node} does not read the active sequences yet")
            if router.known_workers() != {worker.node for worker in workers}:
                found.append(f"{router.node} has the workers {router.known_workers()}")
    return found


def _index_errors(indexer: IndexerService, workers: list[WorkerProcess]) -> list[str]:
    """Differences between the stored blocks and those that the index finds."""
    holdings = indexer.states
    found = [f"does not know {holdings.unknown} ranks"] if holdings.unknown else []
    wrong = indexer.checker.counts.index_differences
    found += [f"found itself wrong in {wrong} checks"] if wrong else []
    for blocks in prompts():
        truth = {w.node: w.contents.depth(blocks) for w in workers}
        truth = {node: depth for node, depth in truth.items() if depth}
        overlaps = depths(
            answer(
                holdings.index,
                holdings.keys,
                OverlapQuery([prompt(blocks)]),
                0.0,
                holdings.removed,
            )
        )
        if overlaps != truth:
            found.append(f"reports {overlaps} for {blocks[0]}/{len(blocks)} instead of {truth}")
    return found


def _unread_messages(auditor: AuditorProcess, server: JetStream) -> list[str]:
    """Messages of a stream that its readers have not read."""
    return [
        f"{auditor.node} has not read the stored message {seq} of {name}"
        for name, read in auditor.read.items()
        for seq, message in server.streams[name].messages.items()
        if read.get(seq) != message.data
    ][:3]


def _event_gaps(stream: Stream) -> list[str]:
    """Gaps in the numbering of a worker's events."""
    found, expected = [], dict[str, int]()
    for message in stream.messages.values():
        batch = _batches.decode(message.data)
        if batch.first > expected.get(batch.instance, batch.first):
            found.append(f"events of {batch.instance} before {batch.first} are not on the stream")
        end = batch.first + len(batch.events)
        expected[batch.instance] = max(expected.get(batch.instance, 0), end)
    return found


def _leftover_load(model: ModelRouter) -> list[str]:
    """Load and waiting requests of a router although nothing runs."""
    table, waiting = model.core.table, model.queue.waiting
    found = [f"has {waiting} requests waiting"] if waiting else []
    if len(model.core.active):
        found.append(f"has {len(model.core.active)} active requests")
    for column in ("requests", "prefill_tokens", "active_blocks"):
        total = float(abs(getattr(table, column)).sum())
        if total:
            found.append(f"has {column} of {total:g}")
    return found


def _model(process: RouterProcess) -> ModelRouter | None:
    router = process.router
    return router._models.get(MODEL) if router is not None and router.ready else None


def accounting_errors(world: "World") -> list[str]:
    """Differences between a rank's load in a router's table and the sum over its requests."""
    models = {p.node: _model(p) for p in world.alive(RouterProcess)}
    return [
        f"{node} has a load of {recorded} for slot {slot} instead of {summed}"
        for node, model in models.items()
        if model is not None
        for slot, recorded, summed in _accounting(model)
        if not all(map(_is_close, recorded, summed))
    ]


def _is_close(recorded: float, summed: float) -> bool:
    return math.isclose(recorded, summed, rel_tol=1e-5, abs_tol=1e-8)


def _accounting(model: ModelRouter) -> Iterator[tuple[int, RankLoad, RankLoad]]:
    """Requests, prefill tokens and blocks by slot: from the table, and summed."""
    table, active = model.core.table, model.core.active
    running = defaultdict[int, list[TrackedRequest]](list)
    for each in active._active.values():
        running[each.slot].append(each)
    for slot, tracked in running.items():
        nodes = {id(node): node for each in tracked for node in _ancestors(each.prefix_end)}
        shared = sum(len(node.label) // HASH_BYTES for node in nodes.values())
        blocks = shared + sum(each.partial_blocks + each.output_blocks for each in tracked)
        summed = len(tracked), sum(each.prefill_tokens for each in tracked), blocks
        columns = (table.requests, table.prefill_tokens, table.active_blocks)
        requests, prefill, held = (float(column[slot]) for column in columns)
        yield slot, (requests, prefill, held), summed


def _ancestors(node: PrefixNode | None) -> Iterator[PrefixNode]:
    while node is not None:
        yield node
        node = node.parent


def order_differences(world: "World") -> list[str]:
    """Replicas with the same events and queue entries but different orders."""
    last = world.server.streams[SEQ].last if SEQ in world.server.streams else -1
    models = [
        _model(p)
        for p in world.alive(RouterProcess)
        if p.router is not None and p.router._sequences.reader.last_seq == last
    ]
    queues = [m.queue for m in models if m is not None]
    if len(queues) < 2:
        return []
    first, *others = queues
    entries = _entries(first)
    same = [_order(other) for other in others if entries and _entries(other) == entries]
    world.compared += len(same) if len(entries) > 1 else 0
    expected = _order(first) if same else {}
    return [
        f"replicas of equal state would place {order} and {expected}"
        for order in same
        if order != expected
    ]


def _entries(queue: PlacementQueue) -> dict[str, SeqWait]:
    return queue.common.order.entries


def _order(queue: PlacementQueue) -> dict[tuple[int, str], list[str]]:
    """The order in which the requests of each tier and class would leave.

    The order of classes may differ for a moment: a replica counts its own placements before it
    reads them from the stream.
    """
    shared = {
        id(entry): entry for entry in _entries(queue).values()
    }  # never changed, so not copied
    copied, order = deepcopy(queue.common.order, shared), dict[tuple[int, str], list[str]]()
    while (head := copied.head(0.0)) is not None:
        order.setdefault((head.tier, head.fair_class), []).append(head.request)
        copied.remove(head.request, placed=True)
    return order


def differing_replies(answers: Mapping[str, set[bytes]]) -> list[str]:
    """Queries with more than one reply; a router may send one again."""
    return [f"{len(found)} replies to one query" for found in answers.values() if len(found) > 1]
