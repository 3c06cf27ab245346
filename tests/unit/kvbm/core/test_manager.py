"""The block manager under random use: nothing in use is overwritten, all resources return."""

from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmesh.bus.messages import (
    Attach,
    Await,
    Clear,
    Cleared,
    Commit,
    Computed,
    Corrupt,
    Declined,
    Detach,
    Fetch,
    Fetched,
    Finish,
    KvEvent,
    KvLayout,
    LayerLayout,
    Offer,
    Pin,
    Prepare,
    Removed,
    Retain,
    Wanted,
    kv_events,
)
from kvmesh.kvbm.core.blocks.block import ARENA, DISK, REMOTE, CopyState
from kvmesh.kvbm.core.blocks.store import Move, MoveEnd, RemoteTierConfig
from kvmesh.kvbm.core.config import KvbmConfig
from kvmesh.kvbm.core.manager import Manager, ParkedFetch
from kvmesh.kvbm.core.transfers.mesh_claims import PeerSource
from kvmesh.kvbm.core.transfers.onboarding import Lookup

CAPACITIES = {ARENA: 384 << 10, DISK: 640 << 10}
SIZE = 4
LAYOUTS = [
    KvLayout(
        weights=str(size),
        dtype="uint8",
        item_bytes=1,
        block_size=SIZE,
        layers=[LayerLayout(1, size // (2 * SIZE), size // (2 * SIZE))],
    )
    for size in (16 << 10, 40 << 10)
]
GARBAGE = b""
CONFIG = KvbmConfig(
    CAPACITIES,
    disk_frequency=1.0,
    patience_s=5.0,
    max_moves=3,
    remote=RemoteTierConfig(30, 50.0),
    remote_frequency=2.0,
)


@dataclass
class Prompt:
    """A prompt whose blocks are identified by their prefixes, as by digests."""

    kind: int
    path: tuple[int, ...]

    def digests(self) -> list[bytes]:
        return [
            hash((self.kind, self.path[: n + 1])).to_bytes(8, "big", signed=True) * 2
            for n in range(len(self.path))
        ]

    def fields(self) -> tuple[bytes, bytes, bytes]:
        digests = self.digests()
        sequence = b"".join(digest[:8] for digest in digests)
        return b"".join(digests), sequence, sequence


@dataclass
class Use:
    """A worker's read ticket, with the digest expected at each offset."""

    worker: int
    prompt: Prompt
    next: int
    pending: int
    blocks: dict[int, bytes] = field(default_factory=dict)


def path(number: int) -> tuple[int, ...]:
    """One of many prompts with shared prefixes."""
    return tuple((number >> (index // 2)) & 1 for index in range(2 + number % 8))


paths = st.integers(0, 255).map(path)
retentions = st.lists(
    st.builds(
        Retain,
        st.integers(0, 8),
        st.none(),
        st.sampled_from([0, 35, 80]),
        st.sampled_from([None, 3.0]),
        st.sampled_from(["conversation", "thinking"]),
        st.booleans(),
    ),
    max_size=2,
)


class ManagerMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.now = 1.0
        self.manager = Manager(CONFIG, "k")
        self.shared: set[bytes] = set()
        self.lookups: list[Lookup] = []
        self.kinds: dict[int, int] = {}
        self.content: dict[int, dict[int, bytes]] = defaultdict(dict)
        self.writing: dict[int, tuple[int, list[tuple[int, bytes]]]] = {}
        self.reading: dict[int, Use] = {}
        self.parked: dict[int, Use] = {}
        self.moves: list[Move] = []
        self.events: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.numbers = count(1)
        for kind in (0, 0, 1):
            self.attach(kind)

    # workers

    @precondition(lambda self: len(self.kinds) < 4)
    @rule(kind=st.integers(0, 1))
    def attach(self, kind: int) -> None:
        message = Attach("w", f"m{kind}", LAYOUTS[kind], "lock")
        worker = self.manager.attach(message, next(self.numbers))
        assert not isinstance(worker, Declined)
        self.kinds[worker.number] = kind

    def worker(self, data: st.DataObject, path: tuple[int, ...]) -> tuple[int, Prompt]:
        """Some worker, and a prompt of its model."""
        worker = data.draw(st.sampled_from(sorted(self.kinds)))
        return worker, Prompt(self.kinds[worker], path)

    @precondition(lambda self: self.kinds)
    @rule(data=st.data(), path=paths)
    def put(self, data: st.DataObject, path: tuple[int, ...]) -> None:
        """Offer and write a whole prompt."""
        worker, prompt = self.worker(data, path)
        ticket = self.stage(worker, prompt, 0, None, [])
        if ticket:
            self.write(ticket, len(path))

    @precondition(lambda self: self.kinds)
    @rule(data=st.data(), path=paths, retention=retentions, session=st.sampled_from("ab "))
    def offer(
        self, data: st.DataObject, path: tuple[int, ...], retention: list[Retain], session: str
    ) -> None:
        worker, prompt = self.worker(data, path)
        first = data.draw(st.sampled_from([0, 0, 0, 1, len(path)]))
        self.stage(worker, prompt, first, session.strip() or None, retention)

    def stage(
        self, worker: int, prompt: Prompt, first: int, session: str | None, retain: list[Retain]
    ) -> int:
        message = Offer(worker, first, *prompt.fields(), 3, "t", session, retain)
        wanted = self.manager.answer(message, self.now)
        assert isinstance(wanted, Wanted)
        digests = prompt.digests()
        blocks = list(zip(array("Q", wanted.offsets), array("I", wanted.blocks), strict=True))
        for offset, _ in blocks:
            self.content[ARENA][offset] = GARBAGE
        if wanted.ticket:
            self.writing[wanted.ticket] = (worker, [(o, digests[index]) for o, index in blocks])
        self.collect()
        return wanted.ticket

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.writing)))
        self.write(ticket, data.draw(st.integers(0, len(self.writing[ticket][1]))))

    def write(self, ticket: int, count: int) -> None:
        worker, blocks = self.writing.pop(ticket)
        for offset, digest in blocks[:count]:
            self.content[ARENA][offset] = digest
        sums = array("Q", [sum_of(digest) for _, digest in blocks[:count]]).tobytes()
        self.manager.answer(Commit(worker, ticket, sums), self.now)
        self.collect()

    @precondition(lambda self: self.kinds)
    @rule(data=st.data(), path=paths)
    def load(self, data: st.DataObject, path: tuple[int, ...]) -> None:
        """Fetch a whole prompt from any tier."""
        worker, prompt = self.worker(data, path)
        message = Fetch(worker, "l", 0, *prompt.fields(), 3, 0.0, 0.0, 0.0, False, "t")
        self.receive_reply(Use(worker, prompt, 0, 0), self.manager.answer(message, self.now))
        self.end_moves()

    @precondition(lambda self: self.kinds)
    @rule(data=st.data(), path=paths, wait=st.sampled_from([0.0, 2.0]), computes=st.booleans())
    def fetch(
        self, data: st.DataObject, path: tuple[int, ...], wait: float, computes: bool
    ) -> None:
        worker, prompt = self.worker(data, path)
        held = data.draw(st.sampled_from([0, 0, 0, 1, len(path)]))
        request = data.draw(st.sampled_from("xyz"))
        message = Fetch(worker, request, held, *prompt.fields(), 3, 0.0, 0.0, wait, computes, "t")
        answer = self.manager.answer(message, self.now)
        self.receive_reply(Use(worker, prompt, held, 0), answer)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.reading)))
        use = self.reading.pop(ticket)
        self.receive_reply(use, self.manager.answer(Await(use.worker, ticket, 1.0), self.now))

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.reading)))
        use = self.reading.pop(ticket)
        self.manager.answer(Finish(use.worker, ticket), self.now)
        self.collect()

    @precondition(lambda self: self.kinds)
    @rule(data=st.data(), request=st.sampled_from("xyz"))
    def computed(self, data: st.DataObject, request: str) -> None:
        worker = data.draw(st.sampled_from(sorted(self.kinds)))
        self.manager.answer(Computed(worker, request), self.now)
        self.collect()

    @precondition(lambda self: self.kinds)
    @rule(data=st.data(), path=paths)
    def corrupt(self, data: st.DataObject, path: tuple[int, ...]) -> None:
        worker, prompt = self.worker(data, path)
        self.manager.answer(Corrupt(worker, 0, prompt.digests()[-1]), self.now)
        self.collect()

    @precondition(lambda self: self.kinds)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.kinds)))
        self.leave(worker)

    def leave(self, worker: int) -> None:
        del self.kinds[worker]
        self.writing = {t: w for t, w in self.writing.items() if w[0] != worker}
        self.reading = {t: use for t, use in self.reading.items() if use.worker != worker}
        self.parked = {t: use for t, use in self.parked.items() if use.worker != worker}
        self.manager.answer(Detach(worker), self.now)
        self.collect()

    # the mesh

    @rule(
        salt=st.sampled_from([None, 3, 3, 4]),
        tenant=st.sampled_from(["t", "t", "other"]),
        tiers=st.sampled_from([[1], [1], [2], []]),
        model=st.sampled_from([None, "m0", "m1", "m2"]),
    )
    def clear(self, salt: int | None, tenant: str, tiers: list[int], model: str | None) -> None:
        before = self.copies()
        dropped = self.manager.clear(Clear(salt, tiers, model, tenant), self.now)
        in_namespace = salt is None or (salt, tenant) == (3, "t")
        self.collect()
        left = self.copies()
        selected = {
            (name, tier, digest)
            for name, tier, digest in before
            if model in (None, name) and (not tiers or tier in tiers) and in_namespace
        }
        assert not left & selected
        assert dropped == len({digest for *_, digest in selected})

    def copies(self) -> set[tuple[str, int, bytes]]:
        """All copies, as (model, tier, digest)."""
        return {
            (block.space.model, copy.tier, block.digest)
            for block in self.manager.store.blocks.values()
            for copy in block.copies.values()
        }

    @rule(session=st.sampled_from("ab"))
    def release(self, session: str) -> None:
        self.manager.release([session], self.now)
        self.collect()

    @rule(path=paths, name=st.sampled_from("pq"), ttl=st.sampled_from([2.0, 50.0]))
    def pin(self, path: tuple[int, ...], name: str, ttl: float) -> None:
        sequence = Prompt(0, path).fields()[1]
        self.manager.pin(Pin(id=name, sequence_hashes=sequence, ttl_s=ttl), self.now)

    @rule(name=st.sampled_from("pq"))
    def unpin(self, name: str) -> None:
        self.manager.unpin(name, self.now)

    @rule(step=st.sampled_from([0.1, 1.0, 7.0]))
    def pass_time(self, step: float) -> None:
        self.now += step
        self.manager.tick(self.now)
        self.collect()

    @rule(share=st.sampled_from([0.0, 0.3, 0.6, 1.0]))
    def resize_the_disk(self, share: float) -> None:
        self.manager.resize_disk(int(CAPACITIES[DISK] * share), self.now)
        self.collect()

    @precondition(lambda self: self.moves)
    @rule()
    def end_moves(self) -> None:
        while self.moves:
            self.end_move(self.moves.pop(), MoveEnd.DONE)

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), end=st.sampled_from(MoveEnd))
    def end_one(self, data: st.DataObject, end: MoveEnd) -> None:
        move = self.moves.pop(data.draw(st.integers(0, len(self.moves) - 1)))
        self.end_move(move, end)

    def end_move(self, move: Move, end: MoveEnd) -> None:
        source, target, digest = move.source, move.target, move.source.block.digest
        if source.tier == REMOTE and end is MoveEnd.DONE:
            source.checksum = sum_of(digest)
            end = MoveEnd.DONE if digest in self.shared else MoveEnd.UNREADABLE
        if source.tier != REMOTE:
            assert self.content[source.tier][source.offset] == digest
        if end is MoveEnd.DONE and target.tier == REMOTE:
            self.shared.add(digest)
        elif end is MoveEnd.DONE:
            self.content[target.tier][target.offset] = digest
        self.manager.end_moves([(move, end)], self.now)
        self.collect()

    @precondition(lambda self: self.lookups)
    @rule(answers=st.booleans(), instance=st.sampled_from(["", "a", "z"]))
    def end_lookup(self, answers: bool, instance: str) -> None:
        """The store answers, or a peer that may have more."""
        lookup = self.lookups.pop(0)
        found = [digest in self.shared for digest in lookup.digests]
        count = (*found, False).index(False) if answers else 0
        peer = PeerSource(instance, len(lookup.prompt)) if instance else None
        self.manager.end_lookup(lookup, count, self.now, peer)
        self.collect()

    @rule(path=paths, instance=st.sampled_from("az"), number=st.integers(1, 2), ends=st.booleans())
    def another_node_computes(
        self, path: tuple[int, ...], instance: str, number: int, ends: bool
    ) -> None:
        digests = [] if ends else Prompt(0, path).digests()[::2]
        self.manager.peer_claims.receive(instance, number, digests, self.now + 3.0)

    @rule(path=paths, stored=st.booleans())
    def prepare(self, path: tuple[int, ...], stored: bool) -> None:
        """Another node requests a prompt."""
        digests = Prompt(0, path).digests()
        message = Prepare("m0", LAYOUTS[0], b"".join(digests), 0.0, 0.0, 0.25, stored)
        answer = self.manager.prepare(message, self.now)
        assert isinstance(answer, ParkedFetch) or answer.blocks <= len(digests)
        self.collect()

    @rule(data=st.data())
    def the_store_drops_a_block(self, data: st.DataObject) -> None:
        if self.shared:
            self.shared.discard(data.draw(st.sampled_from(sorted(self.shared))))

    # results

    def receive_reply(self, use: Use, answer: object) -> None:
        self.collect()
        if isinstance(answer, ParkedFetch):
            self.parked[answer.ticket] = use
        else:
            assert isinstance(answer, Fetched), answer
            self.get(use, answer)

    def get(self, use: Use, fetched: Fetched) -> None:
        digests = use.prompt.digests()
        offsets, sums = array("Q", fetched.offsets), array("Q", fetched.checksums)
        for offset, checksum in zip(offsets, sums, strict=True):
            use.blocks[offset] = digests[use.next]
            assert checksum == sum_of(digests[use.next])
            use.next += 1
        use.pending = fetched.pending
        assert use.next + use.pending <= len(digests)
        if fetched.ticket:
            self.reading[fetched.ticket] = use
        else:
            assert not use.pending
            assert not use.blocks

    def collect(self) -> None:
        for rank, events in self.manager.store.drain_events().items():
            self.receive(rank, events)
        for move in self.manager.store.drain_moves():
            if move.target.tier != REMOTE:
                self.content[move.target.tier][move.target.offset] = GARBAGE
            self.moves.append(move)
        self.lookups += self.manager.onboarding.drain_lookups()
        self.shared.difference_update(self.manager.store.drain_remote_drops())
        for ticket, answer in self.manager.drain_replies(self.now).items():
            use = self.parked.pop(ticket, None)
            if use is not None:
                assert isinstance(answer, Fetched)
                self.get(use, answer)

    def receive(self, rank: int, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                for tier in (1, 2, 3):
                    self.events[rank, tier].clear()
            elif isinstance(event, Removed):
                assert event.reason in kv_events.REASONS
                self.events[rank, event.tier].difference_update(array("Q", event.engine))
            else:
                self.events[rank, event.tier].update(array("Q", event.engine))

    # invariants

    @invariant()
    def blocks_in_use_are_intact(self) -> None:
        for use in (*self.reading.values(), *self.parked.values()):
            for offset, digest in use.blocks.items():
                assert self.content[ARENA][offset] == digest

    @invariant()
    def slots_are_disjoint_and_bounded(self) -> None:
        for number, tier in self.manager.store.tiers.items():
            ends = 0
            for offset, copy in sorted(tier.copies.items()):
                assert offset >= ends
                assert offset % 4096 == 0
                ends = offset + copy.block.space.block_bytes
                assert ends <= tier.slots.capacity or copy.state is CopyState.DROPPED
            assert ends <= CAPACITIES[number]
            assert tier.slots.used == sum(c.block.space.slot_bytes for c in tier.copies.values())

    @invariant()
    def registered_copies_are_found_and_published(self) -> None:
        here: dict[tuple[int, int], set[int]] = defaultdict(set)
        for digest, block in self.manager.store.blocks.items():
            assert block.digest == digest
            assert block.copies
            for tier, copy in block.copies.items():
                if copy.registered:
                    here[block.space.rank, tier].add(block.event_hash)
                if tier != REMOTE:
                    assert self.manager.store.tiers[tier].copies[copy.offset] is copy
                    assert not copy.registered or self.content[tier][copy.offset] == digest
        published = {key: names for key, names in self.events.items() if names}
        assert published == here

    @invariant()
    def a_dump_matches_the_events(self) -> None:
        for rank in range(len(self.manager.attachments.models)):
            published = {tier: set(self.events[rank, tier]) for tier in (1, 2, 3)}
            self.receive(rank, self.manager.dump(rank))
            assert {tier: self.events[rank, tier] for tier in (1, 2, 3)} == published

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for worker in list(self.kinds):
            self.leave(worker)
        while self.moves:
            self.end_move(self.moves.pop(), MoveEnd.DONE)
        self.pass_time(7.0)
        manager = self.manager
        assert not len(manager.peer_claims)
        assert not manager.onboarding.tickets
        assert not manager.write_through.tickets
        assert not manager.write_through.staged
        assert not len(manager.in_progress)
        copies = [c for tier in manager.store.tiers.values() for c in tier.copies.values()]
        assert all(copy.users == 0 and copy.registered for copy in copies)
        self.manager.unpin("p", self.now)
        self.manager.unpin("q", self.now)
        manager.clear(Clear(), self.now)
        assert not manager.store.blocks
        assert all(tier.slots.used == 0 for tier in manager.store.tiers.values())
        assert all(not tier.budget.charged for tier in manager.store.tiers.values())


def sum_of(digest: bytes) -> int:
    return int.from_bytes(digest[:7], "big")


ManagerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestManager = ManagerMachine.TestCase
