"""A simulated worker's attachment to its node: loads during prefills, write-through after steps."""

from functools import partial
from typing import Protocol

from kvmesh.blocks.kvbm_client import TierSpeeds
from kvmesh.bus.messages import Attach, Await, Declined, Fetch, Fetched, Finish, Retain
from kvmesh.simulator.nodes.links import VirtualLink
from kvmesh.simulator.nodes.node import SimulatedNode
from kvmesh.simulator.nodes.prompts import NodePrompt, node_prompt, simulated_layout
from kvmesh.simulator.nodes.write_through import SimulatedWriteThrough
from kvmesh.worker.adapters.throughput import MIN_MEASURED_TOKENS, Throughput
from kvmesh.worker.enginecore.backward_load import BackwardLoad, LoadBatch
from kvmesh.worker.enginecore.sequence import Sequence
from kvmesh.worker.engines.mock.core import MockCore

AWAIT_S = 0.5  # as `kvmesh.blocks.kvbm_client`


class SteppingWorker(Protocol):
    """The worker on the virtual clock, as its attachment uses it."""

    instance: str
    core: MockCore

    def wake(self) -> None:
        """Take the next step if the worker waits."""
        ...

    def may_change_blocks(self) -> bool:
        """True between steps; otherwise ends planned steps early and calls `settle` then."""
        ...


class SimulatedAttachment:
    """Implements `NodeTiers` for the core of a worker."""

    available = True

    def __init__(self, node: SimulatedNode, worker: SteppingWorker, model: str) -> None:
        core, options = worker.core, node.options
        layout = simulated_layout(core.options.limits.block_size, options.bytes_per_token)
        attached = node.attach(Attach(worker.instance, model, layout, ""))
        if isinstance(attached, Declined):
            raise ValueError(attached.reason)
        self.number = attached.number
        self.node = node
        self.core = core
        self._worker = worker
        self._options = options
        self._layout = layout
        self._loads: dict[Sequence, _Load] = {}
        self._closed = False
        speed = options.links.host * core.options.speedup
        self.to_engine = VirtualLink(speed)
        self._filled: dict[str, NodePrompt] = {}
        self._prompted: list[str] = []
        self._offered: dict[str, int] = {}
        self._looked_up: set[str] = set()
        self._computed_tokens = 0
        self.compute_speed = Throughput()
        self.load_speed = Throughput()
        self._writer = SimulatedWriteThrough(
            node,
            attached.number,
            core.blocks,
            VirtualLink(speed),
            worker.may_change_blocks,
            worker.wake,
        )
        core.node_tiers = self

    # the core's side

    @property
    def load_ratio(self) -> float:
        return self._speeds.load_ratio(self._layout)

    @property
    def _speeds(self) -> TierSpeeds:
        return TierSpeeds(compute_tps=self.compute_speed.value, load_bps=self.load_speed.value)

    def on_filled(self, sequence: Sequence) -> None:
        request = sequence.request.id
        if request not in self._looked_up:
            # Let the node record the use of a prompt that did not wait for it
            self._looked_up.add(sequence.request.id)
            fetch = self.fetch(sequence, len(sequence.reusable), 0.0)
            self.node.ask(fetch, self._touched)
        if sequence.full_blocks > self._offered.get(request, 0):
            self._filled[request] = node_prompt(sequence, sequence.full_blocks)

    def on_prompt(self, sequence: Sequence) -> None:
        self._prompted.append(sequence.request.id)

    def poll(self) -> None:
        """Start the loads of sequences that wait, and end those of which nothing is needed."""
        for sequence, load in list(self._loads.items()):
            if not sequence.awaits_blocks or load.is_over:
                del self._loads[sequence]
                load.inherit()
                load.cancel()
        for sequence in self.core.scheduler.loading:
            if sequence not in self._loads and sequence.ready_at == float("inf"):
                self._looked_up.add(sequence.request.id)
                self._loads[sequence] = started = _Load(self, sequence)
                started.start()
        self.move()

    def move(self) -> None:
        """Start the next transfer to the engine, unless one is running."""
        now = self.node.clock.now
        if self._closed:
            return
        chosen = self.core.scheduler.backward.next_batch(now)
        if chosen is None:
            return
        sequence, batch = chosen
        size = len(batch) * self.node.block_bytes
        self.node.totals.to_engines += size
        ends = self.to_engine.reserve(now, size)
        self.node.clock.at(ends, partial(self._moved, sequence, batch))

    def _moved(self, sequence: Sequence, batch: LoadBatch) -> None:
        backward, now = self.core.scheduler.backward, self.node.clock.now
        self.load_speed.record(len(batch) * self.node.block_bytes, now - batch.started)
        backward.block_s = self.node.block_bytes / self.load_speed.value
        load = self._loads.get(sequence)
        if load is not None and not batch.abandoned:
            load.copied(len(batch))
        backward.finish(sequence, batch, len(batch))
        self.move()
        self.wake()

    def settle(self, seconds: float) -> None:
        """Offer the blocks of a step of `seconds` that has ended."""
        computed = self.core.counters.computed_tokens
        tokens, self._computed_tokens = computed - self._computed_tokens, computed
        if tokens >= MIN_MEASURED_TOKENS:
            self.compute_speed.record(tokens, seconds)
            self.core.scheduler.backward.token_s = 1 / self.compute_speed.value
        filled, self._filled = self._filled, {}
        for request, prompt in filled.items():
            if self._writer.put(request, prompt, self._offered.get(request, 0)):
                self._offered[request] = prompt.blocks
        prompted, self._prompted = self._prompted, []
        for request in prompted:
            self._writer.end(request)
        self._writer.start()

    def ended(self, request: str) -> None:
        """Forget a request that has left the engine."""
        self._offered.pop(request, None)
        self._looked_up.discard(request)

    def close(self) -> None:
        """Detach: the worker is gone."""
        self._writer.closed = self._closed = True
        for load in self._loads.values():
            load.closed = True
        self._loads.clear()
        self.node.detach(self.number)

    # loads

    def fetch(self, sequence: Sequence, held: int, wait_s: float) -> Fetch:
        """The message that asks for a prompt's blocks after the first `held`."""
        prompt, speeds = node_prompt(sequence, len(sequence.reusable)), self._speeds
        return Fetch(
            attachment=self.number,
            request=sequence.request.id,
            held=held,
            digests=prompt.digests,
            sequence_hashes=prompt.hashes.tobytes(),
            local=prompt.local.tobytes(),
            salt=prompt.salt,
            compute_tps=speeds.compute_tps,
            load_bps=speeds.load_bps,
            wait_s=wait_s,
            overlaps=True,
            tenant=prompt.tenant,
            session=prompt.session,
            retention=prompt.retention,
        )

    def finish(self, sequence: Sequence) -> None:
        """Let a sequence continue for which the node has no blocks."""
        if self._loads.pop(sequence, None) is not None:
            self.core.scheduler.end_loading(sequence, self.node.clock.now)

    def wake(self) -> None:
        self._worker.wake()

    def _touched(self, reply: object) -> None:
        if isinstance(reply, Fetched) and reply.ticket:
            self.node.tell(Finish(self.number, reply.ticket))


class _Load:
    """The blocks of one sequence that its node holds: fetched, then loaded from the last one on."""

    def __init__(self, attachment: SimulatedAttachment, sequence: Sequence) -> None:
        self._attachment = attachment
        self._node = attachment.node
        self._sequence = sequence
        self._held = sequence.full_blocks
        self._retention: list[Retain] = []
        self._loaded = 0
        self._began = self._node.clock.now
        self._deadline = self._began + self._node.options.deadline_s
        self._ticket = 0
        self.arriving: BackwardLoad | None = None
        self.closed = False

    @property
    def is_over(self) -> bool:
        """True if the sequence needs no more blocks."""
        return self.arriving is not None and self.arriving is not self._sequence.arriving

    def start(self) -> None:
        fetch = self._attachment.fetch(self._sequence, self._held, self._node.options.wait_s)
        self._node.ask(fetch, self._receive)

    def cancel(self) -> None:
        """Return the ticket: the sequence needs no more blocks."""
        self.closed = True
        self._return_ticket()
        self._count()

    def inherit(self) -> None:
        """Apply the claims that the loaded blocks bring along."""
        if self._retention:
            self._attachment.core.scheduler.inherit_claims(self._sequence, self._retention)

    def copied(self, blocks: int) -> None:
        """Count blocks that have arrived."""
        self._loaded += blocks

    def _receive(self, reply: object) -> None:
        if not isinstance(reply, Fetched):
            self._end()
            return
        self._ticket = reply.ticket
        if self.closed:
            self._return_ticket()
            return
        if reply.tiers:
            self._retention += reply.retention
            self._offer(reply.tiers)
        if reply.pending and self._node.clock.now <= self._deadline:
            self._attachment.wake()
            self._node.ask(Await(self._attachment.number, self._ticket, AWAIT_S), self._receive)
        else:
            self._end()

    def _offer(self, tiers: bytes) -> None:
        """Let the sequence compute while these blocks are loaded."""
        attachment, load = self._attachment, self.arriving
        if load is None:
            scheduler = attachment.core.scheduler
            load = self.arriving = scheduler.begin_backward(self._sequence, self._node.clock.now)
            self._node.clock.at(self._deadline, self._expire)
        load.extend(tiers[max(0, load.end - self._held) :])
        self._held += len(tiers)
        attachment.move()

    def _expire(self) -> None:
        if not self.closed and self.arriving is not None:
            self._attachment.core.scheduler.backward.stop(self._sequence, self.arriving)
            self._attachment.wake()

    def _end(self) -> None:
        """The node has no more blocks."""
        if self.closed:
            return
        if self.arriving is None:
            self._attachment.finish(self._sequence)
        else:
            self.arriving.pending = False
        self._attachment.wake()

    def _return_ticket(self) -> None:
        if self._ticket:
            ticket, self._ticket = self._ticket, 0
            self._node.tell(Finish(self._attachment.number, ticket))

    def _count(self) -> None:
        """Count the load if it brought blocks or made the sequence wait."""
        node = self._node
        if self._loaded or node.clock.now - self._began > 2 * node.options.message_s:
            node.totals.loads += 1
