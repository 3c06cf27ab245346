"""Nodes that tell each other what they compute: one does, the others wait for it, for a while."""

from array import array
from hashlib import blake2b
from math import nan

import pytest
from msgspec.structs import replace

from kvmesh.blocks.digests import split_digests
from kvmesh.bus.messages import (
    Attach,
    Clear,
    Commit,
    Computed,
    Declined,
    Fetch,
    Fetched,
    KvLayout,
    LayerLayout,
    Offer,
    Prepare,
    Prepared,
    Wanted,
)
from kvmesh.kvbm.core.attachment import AttachedWorker
from kvmesh.kvbm.core.blocks.block import ARENA, DISK, REMOTE, Space
from kvmesh.kvbm.core.blocks.store import MoveEnd, RemoteCounts
from kvmesh.kvbm.core.config import KvbmConfig
from kvmesh.kvbm.core.manager import Manager, ParkedFetch
from kvmesh.kvbm.core.transfers.mesh_claims import (
    MOST_MARKS,
    MOST_REPEATED,
    Claims,
    PeerClaims,
    PeerSource,
)
from kvmesh.kvbm.core.transfers.onboarding import Lookup
from kvmesh.kvbm.core.transfers.prompt_blocks import Digests, PromptBlocks

SIZE = 4
LAYOUT = KvLayout(
    weights="w", dtype="uint8", item_bytes=1, block_size=SIZE, layers=[LayerLayout(1, 512, 512)]
)
CAPACITIES = {ARENA: 4 << 20, DISK: 4 << 20}


def named(blocks: int, seed: int = 0, fork: int | None = None) -> bytes:
    """Digests of a prompt; those of equal seeds are equal up to block `fork`."""
    digest, packed = str(seed).encode(), b""
    for n in range(blocks):
        other = b"x" if fork is not None and n >= fork else b""
        digest = blake2b(digest + other, digest_size=16).digest()
        packed += digest
    return packed


def hashes(digests: bytes) -> bytes:
    return b"".join(digest[:8] for digest in split_digests(digests))


def prompt_of(digests: bytes) -> PromptBlocks:
    names = array("Q", hashes(digests))
    return PromptBlocks(Space(0, "m", LAYOUT), Digests(digests), names, names, 0, "", None, [])


class Node:
    """A manager with one worker; what nodes ask of each other goes through `Mesh`."""

    def __init__(self, name: str, **rules: object) -> None:
        self.name = name
        self.manager = Manager(
            KvbmConfig(CAPACITIES, patience_s=30.0, remote=RemoteCounts(999, 50.0), **rules),  # type: ignore[arg-type]
            name,
        )
        guest = self.manager.attach(Attach("w", "m", LAYOUT, "lock"), 1)
        assert isinstance(guest, AttachedWorker)
        self.guest = guest.number
        self.answers: dict[int, Fetched | Prepared] = {}
        self.asked: dict[int, tuple[Node, Lookup]] = {}

    def got(self, ticket: Fetched | int) -> tuple[int, bool] | None:
        """Blocks in the answer and whether more come; None while it waits."""
        answer = ticket if isinstance(ticket, Fetched) else self.answers.get(ticket)
        if answer is None:
            return None
        assert isinstance(answer, Fetched)
        return len(answer.offsets) // 8, answer.pending > 0

    def on(self, tier: int) -> int:
        """How many blocks are ready there."""
        return sum(block.ready(tier) is not None for block in self.manager.store.blocks.values())


class Mesh:
    """Nodes whose messages arrive when `settle` is called, and a store that has nothing."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.now = 1.0
        self.told = 0

    def fetch(self, node: Node, digests: bytes, request: str = "r", **more: float) -> Fetched | int:
        """The answer, or the number under which it comes later."""
        fields = {"compute_tps": 0.0, "load_bps": 0.0, "wait_s": 5.0, **more}
        names = hashes(digests)
        message = Fetch(node.guest, request, 0, digests, names, names, 0, **fields)  # type: ignore[arg-type]
        answer = node.manager.answer(message, self.now)
        if isinstance(answer, ParkedFetch):
            return answer.ticket
        assert isinstance(answer, Fetched)
        return answer

    def put(self, node: Node, digests: bytes) -> None:
        names = hashes(digests)
        wanted = node.manager.answer(Offer(node.guest, 0, digests, names, names, 0), self.now)
        assert isinstance(wanted, Wanted)
        sums = array("Q", [7] * (len(wanted.offsets) // 8)).tobytes()
        node.manager.answer(Commit(node.guest, wanted.ticket, sums), self.now)

    def computed(self, node: Node, request: str = "r") -> None:
        node.manager.answer(Computed(node.guest, request), self.now)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for node in self.nodes.values():
            node.manager.tick(self.now)
        self.settle()

    def settle(self) -> None:
        """Deliver everything until nothing is under way."""
        while sum(self._step(node) for node in self.nodes.values()):
            pass

    def _step(self, node: Node) -> bool:
        manager = node.manager
        moves, lookups = manager.store.take_moves(), manager.fetches.take_lookups()
        tellings, answers = manager.claims.take(), manager.take_answers(self.now)
        manager.moved([(move, MoveEnd.DONE) for move in moves], self.now)
        for _, number, marks in tellings:
            self.told += 1
            for other in self.nodes.values():
                if other is not node:
                    other.manager.others.hear(node.name, number, marks, self.now + 30.0)
        for lookup in lookups:
            self._look_up(node, lookup)
        for number, answer in answers.items():
            if number in node.asked:
                asker, lookup = node.asked.pop(number)
                assert isinstance(answer, Prepared)
                self._found(asker, lookup, answer)
            node.answers[number] = answer
        return bool(moves or lookups or tellings or answers)

    def _look_up(self, node: Node, lookup: Lookup) -> None:
        owner = self.nodes.get(lookup.further.owner) if lookup.further is not None else None
        if owner is None:
            node.manager.found(lookup, 0, self.now)
            return
        digests = b"".join(lookup.digests)
        tps, bps = lookup.engine.compute_tps, lookup.engine.load_bps
        message = Prepare("m", LAYOUT, digests, tps, bps, 0.25)
        answer = owner.manager.prepare(message, self.now)
        if isinstance(answer, ParkedFetch):
            owner.asked[answer.ticket] = (node, lookup)
        else:
            self._found(node, lookup, answer)

    def _found(self, node: Node, lookup: Lookup, reply: Prepared) -> None:
        further = lookup.further if reply.more else None
        node.manager.found(lookup, reply.blocks, self.now, further)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(Node("a"), Node("b"), Node("c"))


def test_what_one_node_computes_the_others_wait_for_and_load(mesh: Mesh) -> None:
    a, b, _ = mesh.nodes.values()
    digests = named(20)
    mesh.fetch(a, digests)
    mesh.settle()
    waiting = mesh.fetch(b, digests)
    mesh.settle()
    assert b.got(waiting) is None
    mesh.put(a, digests[: 16 * 12])
    mesh.settle()
    assert b.got(waiting) == (12, True)
    mesh.put(a, digests)
    mesh.computed(a)
    mesh.settle()
    assert b.on(ARENA) == 20
    assert a.manager.store.counts.prepared == 20
    assert b.manager.store.counts.further == 1
    assert mesh.told == 2


def test_who_gives_up_is_not_waited_for(mesh: Mesh) -> None:
    a, b, c = mesh.nodes.values()
    digests = named(20)
    mesh.fetch(a, digests)
    mesh.settle()
    waiting, queued = mesh.fetch(b, digests), mesh.fetch(c, digests)
    mesh.settle()
    mesh.computed(a)
    mesh.settle()
    assert sorted([b.got(waiting) is None, c.got(queued) is None]) == [False, True]
    computing, loading, ticket = (b, c, queued) if c.got(queued) is None else (c, b, waiting)
    mesh.put(computing, digests)
    mesh.settle()
    assert loading.got(ticket) == (20, False)


def test_nobody_waits_longer_than_it_may_or_without_a_word(mesh: Mesh) -> None:
    a, b, _ = mesh.nodes.values()
    digests = named(20)
    mesh.fetch(a, digests)
    mesh.settle()
    tickets = [mesh.fetch(b, digests, request) for request in ("first", "second")]
    for _ in range(5):
        mesh.pass_time(0.1)
    assert [b.got(ticket) for ticket in tickets] == [(0, True)] * 2, "they are told to ask again"
    readings = b.manager.fetches.readings.values()
    for _ in range(43):
        mesh.pass_time(0.1)
    assert all(reading.pending for reading in readings)
    for _ in range(4):
        mesh.pass_time(0.1)
    assert not any(reading.pending for reading in readings)
    mesh.put(a, digests)
    mesh.settle()
    assert b.on(ARENA) == 0


@pytest.mark.parametrize("told", [True, False])
def test_a_dead_node_is_not_waited_for(mesh: Mesh, told: bool) -> None:
    a, b, _ = mesh.nodes.values()
    digests = named(20)
    mesh.fetch(a, digests)
    mesh.settle()
    del mesh.nodes["a"]
    if told:
        b.manager.others.leave("a")
    waiting = mesh.fetch(b, digests)
    mesh.settle()
    assert b.got(waiting) == (0, False)


@pytest.mark.parametrize("first", ["a", "b"])
def test_of_two_at_once_one_computes(mesh: Mesh, first: str) -> None:
    a, b, _ = mesh.nodes.values()
    order = (a, b) if first == "a" else (b, a)
    digests = [named(20), named(30, fork=16)]
    tickets = {node.name: mesh.fetch(node, d) for node, d in zip(order, digests, strict=True)}
    mesh.settle()
    assert (a.got(tickets["a"]), b.got(tickets["b"])) == ((0, False), None)
    mesh.put(a, digests[order.index(a)])
    mesh.computed(a)
    mesh.settle()
    assert b.got(tickets["b"]) == (16, False)
    assert b.manager.claims.first((b.guest, "r")) == 0


def test_those_who_wait_do_not_wait_for_each_other(mesh: Mesh) -> None:
    """The second has heard of the first before it claims; the first hears of the second."""
    a, b, _ = mesh.nodes.values()
    digests = named(20)
    waiting = mesh.fetch(b, digests)
    for telling in b.manager.claims.take():
        a.manager.others.hear("b", telling.number, telling.marks, 99.0)
    late = mesh.fetch(a, digests)
    mesh.settle()
    assert (b.got(waiting), a.got(late)) == ((0, False), None)


def test_what_is_computed_at_once_is_not_told(mesh: Mesh) -> None:
    a, b, _ = mesh.nodes.values()
    mesh.fetch(a, named(20), compute_tps=20_000)
    mesh.settle()
    assert mesh.told == 0
    assert b.got(mesh.fetch(b, named(20), compute_tps=20_000)) is None
    mesh.settle()
    assert not b.manager.others


def test_what_is_beyond_the_node_is_not_claimed_for_long() -> None:
    """The first asks the store; the next finds out with it, and both load."""
    a = Node("a")
    mesh = Mesh(a)
    digests = named(20)
    first, next_ = mesh.fetch(a, digests, "first"), mesh.fetch(a, digests, "next")
    (lookup,) = a.manager.fetches.take_lookups()
    a.manager.found(lookup, 20, mesh.now)
    mesh.settle()
    assert a.manager.claims.first((a.guest, "first")) is None
    assert not len(a.manager.announced)
    got = [a.answers[t] for t in (first, next_) if isinstance(t, int)]
    assert [len(g.offsets) // 8 for g in got if isinstance(g, Fetched)] == [20, 20]


def test_claims_are_renewed_while_they_hold_and_lapse_after() -> None:
    claims = Claims(30.0)
    claims.make((1, "r"), prompt_of(named(8)), 2, 0.0)
    claims.make((1, "r"), prompt_of(named(8)), 4, 0.0)
    told = claims.take()
    assert [(t.model, len(t.marks)) for t in told] == [("m", 6)]
    claims.renew([(1, "r")], 10.0)
    assert claims.take() == []
    claims.renew([(1, "r")], 16.0)
    assert claims.take() == told
    claims.renew([], 40.0)
    claims.renew([], 47.0)
    assert (len(claims), claims.take()) == (0, [])


def test_what_is_under_way_is_told_to_newcomers() -> None:
    claims = Claims(30.0)
    prompts = [prompt_of(named(8, seed)) for seed in range(MOST_REPEATED + 3)]
    for number, prompt in enumerate(prompts):
        claims.make((1, str(number)), prompt, 0, 0.0)
    told = claims.take()
    assert claims.under_way("m") == told[-MOST_REPEATED:]
    for number in range(1, len(prompts)):
        claims.end((1, str(number)))
    assert claims.under_way("m") == told[:1]
    assert claims.under_way("n") == []


def test_a_long_prompt_is_told_of_in_a_few_digests() -> None:
    claims, others = Claims(30.0), PeerClaims()
    whole = prompt_of(named(10_000))
    claims.make((1, "r"), whole, 100, 0.0)
    (told,) = claims.take()
    assert len(told.marks) <= MOST_MARKS
    others.hear("a", told.number, told.marks, 30.0)
    assert others.find(whole, 0) == PeerSource("a", 10_000)
    found = others.find(prompt_of(named(9_000, fork=5_000)), 200)
    assert found is not None
    assert 5_000 - 10_000 / MOST_MARKS - 1 <= found.end <= 5_000
    assert others.find(prompt_of(named(50, seed=3)), 0) is None


def test_claims_of_others_end() -> None:
    others, prompt = PeerClaims(), prompt_of(named(10))
    marks = split_digests(named(10))
    others.hear("b", 1, marks, 5.0)
    others.hear("a", 7, marks[:4], 9.0)
    assert others.find(prompt, 0) == PeerSource("a", 4)
    others.drop("a", prompt, 2)
    assert others.find(prompt, 0) == PeerSource("b", 10)
    others.hear("b", 1, marks[:3], 5.0)
    assert others.find(prompt, 3) is None
    others.expire(6.0)
    assert len(others) == 0
    for number in range(2000):
        others.hear("c", number, split_digests(named(100, seed=number)), 9.0)
    assert len(others) * 100 <= 1 << 17
    others.leave("c")
    assert (len(others), others._of) == (0, {})


# what is made ready for others


def asked(node: Node, digests: bytes, tps: float = 0.0, stored: bool = False) -> Prepared | None:
    """The answer to another node that would have these; None if it comes later."""
    message = Prepare("m", LAYOUT, digests, tps, 0.0, 0.25, stored)
    answer = node.manager.prepare(message, 100.0)
    return answer if isinstance(answer, Prepared) else None


def stocked(tier: int, **rules: object) -> tuple[Node, Mesh, bytes]:
    """A node that has a prompt of 20 blocks there, and not in its arena if that is not the one."""
    node = Node("a", disk_frequency=1.0, **rules)
    mesh, digests = Mesh(node), named(20)
    mesh.put(node, digests)
    mesh.settle()
    assert node.on(tier) == 20
    if tier != ARENA:
        node.manager.clear(Clear(tiers=[ARENA]), mesh.now)
    return node, mesh, digests


def test_blocks_on_disk_come_up_for_others() -> None:
    node, mesh, digests = stocked(DISK)
    node.manager.store.traffic[DISK, ARENA].bps = 1e6
    mesh.now = 100.0
    assert asked(node, digests + named(4, seed=9)) is None
    mesh.settle()
    assert [a for a in node.answers.values() if isinstance(a, Prepared)] == [Prepared(20, False)]
    assert node.on(ARENA) == 20
    assert asked(node, digests) == Prepared(20, False)


def test_blocks_on_disk_stay_there_if_computing_is_faster() -> None:
    node, _, digests = stocked(DISK)
    node.manager.store.traffic[DISK, ARENA].bps = 1e3
    assert asked(node, digests, tps=1000.0) == Prepared(0, False)
    assert node.manager.store.take_moves() == []


def test_what_others_cannot_read_here_goes_to_the_store() -> None:
    node, mesh, digests = stocked(ARENA, shares=True, remote_frequency=2.0)
    assert node.on(REMOTE) == 0
    assert asked(node, digests, stored=True) == Prepared(0, True, True)
    mesh.settle()
    assert asked(node, digests, stored=True) == Prepared(20, False, True)


def test_a_node_without_a_store_says_so() -> None:
    node, _, digests = stocked(ARENA)
    assert asked(node, digests, stored=True) == Prepared(0, False)
    other = Prepare("other", LAYOUT, digests, 0.0, 0.0, 0.25)
    assert node.manager.prepare(other, 100.0) == Prepared(0, False)


@pytest.mark.parametrize(("cut", "wait_s"), [(1, 0.25), (0, -1.0), (0, nan)])
def test_what_makes_no_sense_is_not_prepared(cut: int, wait_s: float) -> None:
    node, _, digests = stocked(ARENA)
    message = Prepare("m", LAYOUT, digests[cut:], 0.0, 0.0, wait_s)
    assert node.manager.prepare(message, 100.0) == Prepared(0, False)
    assert not node.manager.fetches.readings


def test_a_model_that_does_not_fit_is_not_on_the_card() -> None:
    node = Node("a")
    huge = replace(LAYOUT, layers=[LayerLayout(1, 1 << 20, 1 << 20)])
    assert isinstance(node.manager.attach(Attach("w", "huge", huge, "lock"), 2), Declined)
    assert node.manager.models == ["m"]
