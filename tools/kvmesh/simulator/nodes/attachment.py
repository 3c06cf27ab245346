"""A simulated worker's attachment to its node: loads before prefills, write-through after steps."""

from functools import partial
from typing import Protocol

from kvmesh.blocks.kvbm_client import TierSpeeds
from kvmesh.bus.messages import Attach, Await, Declined, Fetch, Fetched, Finish
from kvmesh.simulator.nodes.links import VirtualLink
from kvmesh.simulator.nodes.node import SimulatedNode
from kvmesh.simulator.nodes.prompts import NodePrompt, node_prompt, simulated_layout
from kvmesh.simulator.nodes.write_through import SimulatedWriteThrough
from kvmesh.worker.adapters.throughput import MIN_MEASURED_TOKENS, Throughput
from kvmesh.worker.enginecore.sequence import Sequence, SequenceState
from kvmesh.worker.engines.mock.core import MockCore
from kvmesh.worker.engines.mock.node_tiers import OnboardedPrefix

TIERS = 4
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
            self._touch(sequence)
        if sequence.full_blocks > self._offered.get(request, 0):
            self._filled[request] = node_prompt(sequence, sequence.full_blocks)

    def on_prompt(self, sequence: Sequence) -> None:
        self._prompted.append(sequence.request.id)

    def poll(self) -> None:
        """Start the loads of sequences that wait, and cancel those of others."""
        for sequence in [s for s in self._loads if s.state is not SequenceState.LOADING]:
            self._loads.pop(sequence).cancel()
        for sequence in self.core.scheduler.loading:
            if sequence not in self._loads and sequence.ready_at == float("inf"):
                self._looked_up.add(sequence.request.id)
                self._loads[sequence] = load = _Load(self, sequence)
                load.start()

    def settle(self, seconds: float) -> None:
        """Offer the blocks of a step of `seconds` that has ended."""
        computed = self.core.counters.computed_tokens
        tokens, self._computed_tokens = computed - self._computed_tokens, computed
        if tokens >= MIN_MEASURED_TOKENS:
            self.compute_speed.record(tokens, seconds)
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
        self._writer.closed = True
        for load in self._loads.values():
            load.closed = True
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
            tenant=prompt.tenant,
            session=prompt.session,
            retention=prompt.retention,
        )

    def finish(self, sequence: Sequence, loaded: list[int]) -> None:
        """Let a sequence continue once its load has ended."""
        if self._loads.pop(sequence, None) is not None:
            self.core.finish_loading(sequence, loaded, self.node.clock.now)

    def wake(self) -> None:
        self._worker.wake()

    def _touch(self, sequence: Sequence) -> None:
        """Let the node record the use of a prompt that did not wait for it."""
        self._looked_up.add(sequence.request.id)
        fetch = self.fetch(sequence, len(sequence.reusable), 0.0)
        self.node.ask(fetch, self._touched)

    def _touched(self, reply: object) -> None:
        if isinstance(reply, Fetched) and reply.ticket:
            self.node.tell(Finish(self.number, reply.ticket))


class _Load:
    """The load of one sequence's prefix: fetch, copy the parts as they come, finish."""

    def __init__(self, attachment: SimulatedAttachment, sequence: Sequence) -> None:
        self._attachment = attachment
        self._node = attachment.node
        self._sequence = sequence
        self._prefix = OnboardedPrefix(attachment.core.blocks, sequence)
        self._first = self._prefix.held
        self._loaded = [0] * TIERS
        self._began = self._node.clock.now
        self._deadline = self._began + self._node.options.deadline_s
        self._ticket = 0
        self.closed = False

    def start(self) -> None:
        fetch = self._attachment.fetch(self._sequence, self._first, self._node.options.wait_s)
        self._node.ask(fetch, self._receive)

    def cancel(self) -> None:
        """Return the ticket: the sequence no longer waits."""
        self.closed = True
        self._return_ticket()
        self._prefix.release()

    def _receive(self, reply: object) -> None:
        if not isinstance(reply, Fetched):
            if not self.closed:
                self._finish()
            return
        self._ticket = reply.ticket
        if self.closed:
            self._return_ticket()
            return
        count = len(reply.offsets) // 8
        if not count:
            self._next(reply, 0)
            return
        skipped = self._prefix.extend(self._first) - self._first
        if skipped < 0:
            self._finish()
            return
        reserved = self._prefix.reserve(count - skipped)
        size = reserved * self._node.block_bytes
        self._node.totals.to_engines += size
        now = self._node.clock.now
        ends = self._attachment.to_engine.reserve(now, size)
        self._node.clock.at(ends, partial(self._copied, reply, skipped, reserved, now))

    def _copied(self, reply: Fetched, skipped: int, reserved: int, since: float) -> None:
        attachment, node, prefix = self._attachment, self._node, self._prefix
        if self.closed:
            attachment.core.blocks.free_private(reserved)
            return
        attachment.load_speed.record(reserved * node.block_bytes, node.clock.now - since)
        prefix.commit(reserved, reserved)
        for tier in reply.tiers[skipped : skipped + reserved]:
            self._loaded[tier] += 1
        prefix.inherit(reply.retention, attachment.core.options.limits.block_size)
        count = len(reply.offsets) // 8
        if prefix.covers(self._first + count):
            self._next(reply, count)
        else:
            self._finish()

    def _next(self, reply: Fetched, count: int) -> None:
        self._first += count
        if not reply.pending or self._node.clock.now > self._deadline:
            self._finish()
            return
        self._node.ask(Await(self._attachment.number, self._ticket, AWAIT_S), self._receive)

    def _finish(self) -> None:
        self.closed = True
        self._return_ticket()
        self._count()
        self._attachment.finish(self._sequence, self._loaded)
        self._prefix.release()
        self._attachment.wake()

    def _return_ticket(self) -> None:
        if self._ticket:
            ticket, self._ticket = self._ticket, 0
            self._node.tell(Finish(self._attachment.number, ticket))

    def _count(self) -> None:
        """Count the load, and compare it with computing its blocks on an idle engine."""
        node, options = self._node, self._attachment.core.options
        took = node.clock.now - self._began
        blocks = sum(self._loaded)
        if not blocks and took <= 2 * node.options.message_s:
            return
        step, tokens = options.limits.max_batched_tokens, blocks * options.limits.block_size
        steps, rest = divmod(tokens, step)
        computing = steps * options.model.prefill(step) + (
            options.model.prefill(rest) if rest else 0.0
        )
        totals = node.totals
        totals.loads += 1
        lost = took - computing / options.speedup
        if lost > 0:
            totals.lost_loads += 1
            totals.lost_s += lost
