"""Claims between nodes: one node computes a prompt, the others wait for it for a while."""

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
from kvmesh.kvbm.core.blocks.prompt_blocks import Digests, PromptBlocks
from kvmesh.kvbm.core.blocks.store import MoveEnd, RemoteTierConfig
from kvmesh.kvbm.core.config import KvbmConfig
from kvmesh.kvbm.core.manager import Manager, ParkedFetch
from kvmesh.kvbm.core.transfers.mesh_claims import (
    MAX_CLAIM_DIGESTS,
    MAX_REPEATED,
    Claims,
    PeerClaims,
    PeerSource,
)
from kvmesh.kvbm.core.transfers.onboarding import Lookup

SIZE = 4
LAYOUT = KvLayout(
    weights="w", dtype="uint8", item_bytes=1, block_size=SIZE, layers=[LayerLayout(1, 512, 512)]
)
CAPACITIES = {ARENA: 4 << 20, DISK: 4 << 20}


def named(blocks: int, seed: int = 0, fork: int | None = None) -> bytes:
    """Digests of a prompt; prompts with equal seeds agree up to block `fork`."""
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
    """A manager with one worker; `Mesh` delivers its messages to other nodes."""

    def __init__(self, name: str, **rules: object) -> None:
        self.name = name
        self.manager = Manager(
            KvbmConfig(CAPACITIES, patience_s=30.0, remote=RemoteTierConfig(999, 50.0), **rules),  # type: ignore[arg-type]
            name,
        )
        worker = self.manager.attach(Attach("w", "m", LAYOUT, "lock"), 1)
        assert isinstance(worker, AttachedWorker)
        self.worker = worker.number
        self.answers: dict[int, Fetched | Prepared] = {}
        self.preparing: dict[int, tuple[Node, Lookup]] = {}

    def got(self, ticket: Fetched | int) -> tuple[int, bool] | None:
        """Blocks in the reply and whether more are pending; None while it is parked."""
        answer = ticket if isinstance(ticket, Fetched) else self.answers.get(ticket)
        if answer is None:
            return None
        assert isinstance(answer, Fetched)
        return len(answer.offsets) // 8, answer.pending > 0

    def on(self, tier: int) -> int:
        """Number of blocks registered in a tier."""
        return sum(
            block.registered(tier) is not None for block in self.manager.store.blocks.values()
        )


class Mesh:
    """Nodes whose messages arrive when `settle` is called, and an empty store."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.now = 1.0
        self.sent = 0

    def fetch(self, node: Node, digests: bytes, request: str = "r", **more: float) -> Fetched | int:
        """The reply, or the ticket of a parked one."""
        fields = {"compute_tps": 0.0, "load_bps": 0.0, "wait_s": 5.0, **more}
        names = hashes(digests)
        message = Fetch(node.worker, request, 0, digests, names, names, 0, **fields)  # type: ignore[arg-type]
        answer = node.manager.answer(message, self.now)
        if isinstance(answer, ParkedFetch):
            return answer.ticket
        assert isinstance(answer, Fetched)
        return answer

    def put(self, node: Node, digests: bytes) -> None:
        names = hashes(digests)
        wanted = node.manager.answer(Offer(node.worker, 0, digests, names, names, 0), self.now)
        assert isinstance(wanted, Wanted)
        sums = array("Q", [7] * (len(wanted.offsets) // 8)).tobytes()
        node.manager.answer(Commit(node.worker, wanted.ticket, sums), self.now)

    def computed(self, node: Node, request: str = "r") -> None:
        node.manager.answer(Computed(node.worker, request), self.now)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for node in self.nodes.values():
            node.manager.tick(self.now)
        self.settle()

    def settle(self) -> None:
        """Deliver messages until none is in flight."""
        while sum(self._step(node) for node in self.nodes.values()):
            pass

    def _step(self, node: Node) -> bool:
        manager = node.manager
        moves, lookups = manager.store.drain_moves(), manager.onboarding.drain_lookups()
        messages, answers = manager.claims.drain(), manager.drain_replies(self.now)
        manager.end_moves([(move, MoveEnd.DONE) for move in moves], self.now)
        for _, number, digests in messages:
            self.sent += 1
            for other in self.nodes.values():
                if other is not node:
                    other.manager.peer_claims.receive(node.name, number, digests, self.now + 30.0)
        for lookup in lookups:
            self._look_up(node, lookup)
        for number, answer in answers.items():
            if number in node.preparing:
                requester, lookup = node.preparing.pop(number)
                assert isinstance(answer, Prepared)
                self._found(requester, lookup, answer)
            node.answers[number] = answer
        return bool(moves or lookups or messages or answers)

    def _look_up(self, node: Node, lookup: Lookup) -> None:
        peer = self.nodes.get(lookup.peer.instance) if lookup.peer is not None else None
        if peer is None:
            node.manager.end_lookup(lookup, 0, self.now)
            return
        digests = b"".join(lookup.digests)
        tps, bps = lookup.engine.compute_tps, lookup.engine.load_bps
        message = Prepare("m", LAYOUT, digests, tps, bps, 0.25)
        answer = peer.manager.prepare(message, self.now)
        if isinstance(answer, ParkedFetch):
            peer.preparing[answer.ticket] = (node, lookup)
        else:
            self._found(node, lookup, answer)

    def _found(self, node: Node, lookup: Lookup, reply: Prepared) -> None:
        peer = lookup.peer if reply.more else None
        node.manager.end_lookup(lookup, reply.blocks, self.now, peer)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(Node("a"), Node("b"), Node("c"))


def test_other_nodes_wait_for_a_claimed_prompt_and_load_it(mesh: Mesh) -> None:
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
    assert b.manager.store.counts.peer_waits == 1
    assert mesh.sent == 2


def test_waiting_ends_when_the_claimant_gives_up(mesh: Mesh) -> None:
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


def test_waiting_is_bounded_and_answered_meanwhile(mesh: Mesh) -> None:
    a, b, _ = mesh.nodes.values()
    digests = named(20)
    mesh.fetch(a, digests)
    mesh.settle()
    tickets = [mesh.fetch(b, digests, request) for request in ("first", "second")]
    for _ in range(5):
        mesh.pass_time(0.1)
    assert [b.got(ticket) for ticket in tickets] == [(0, True)] * 2, (
        "each is answered and waits again"
    )
    readings = b.manager.onboarding.tickets.values()
    for _ in range(43):
        mesh.pass_time(0.1)
    assert all(reading.pending for reading in readings)
    for _ in range(4):
        mesh.pass_time(0.1)
    assert not any(reading.pending for reading in readings)
    mesh.put(a, digests)
    mesh.settle()
    assert b.on(ARENA) == 0


@pytest.mark.parametrize("detected", [True, False])
def test_waiting_for_a_dead_node_ends(mesh: Mesh, detected: bool) -> None:
    a, b, _ = mesh.nodes.values()
    digests = named(20)
    mesh.fetch(a, digests)
    mesh.settle()
    del mesh.nodes["a"]
    if detected:
        b.manager.peer_claims.drop_peer("a")
    waiting = mesh.fetch(b, digests)
    mesh.settle()
    assert b.got(waiting) == (0, False)


@pytest.mark.parametrize("first", ["a", "b"])
def test_one_of_two_concurrent_claimants_computes(mesh: Mesh, first: str) -> None:
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
    assert b.manager.claims.first((b.worker, "r")) == 0


def test_waiting_nodes_do_not_wait_for_each_other(mesh: Mesh) -> None:
    """The second receives the first claim before it claims; the first receives the second."""
    a, b, _ = mesh.nodes.values()
    digests = named(20)
    waiting = mesh.fetch(b, digests)
    for message in b.manager.claims.drain():
        a.manager.peer_claims.receive("b", message.number, message.digests, 99.0)
    late = mesh.fetch(a, digests)
    mesh.settle()
    assert (b.got(waiting), a.got(late)) == ((0, False), None)


def test_a_fast_computation_is_not_claimed(mesh: Mesh) -> None:
    a, b, _ = mesh.nodes.values()
    mesh.fetch(a, named(20), compute_tps=20_000)
    mesh.settle()
    assert mesh.sent == 0
    assert b.got(mesh.fetch(b, named(20), compute_tps=20_000)) is None
    mesh.settle()
    assert not b.manager.peer_claims


def test_a_claim_ends_when_the_store_has_the_blocks() -> None:
    """The first looks up in the store, the next waits for it, and both load."""
    a = Node("a")
    mesh = Mesh(a)
    digests = named(20)
    first, next_ = mesh.fetch(a, digests, "first"), mesh.fetch(a, digests, "next")
    (lookup,) = a.manager.onboarding.drain_lookups()
    a.manager.end_lookup(lookup, 20, mesh.now)
    mesh.settle()
    assert a.manager.claims.first((a.worker, "first")) is None
    assert not len(a.manager.in_progress)
    got = [a.answers[t] for t in (first, next_) if isinstance(t, int)]
    assert [len(g.offsets) // 8 for g in got if isinstance(g, Fetched)] == [20, 20]


def test_claims_are_renewed_and_expire() -> None:
    claims = Claims(30.0)
    claims.start((1, "r"), prompt_of(named(8)), 2, 0.0)
    claims.start((1, "r"), prompt_of(named(8)), 4, 0.0)
    sent = claims.drain()
    assert [(t.model, len(t.digests)) for t in sent] == [("m", 6)]
    claims.renew([(1, "r")], 10.0)
    assert claims.drain() == []
    claims.renew([(1, "r")], 16.0)
    assert claims.drain() == sent
    claims.renew([], 40.0)
    claims.renew([], 47.0)
    assert (len(claims), claims.drain()) == (0, [])


def test_current_claims_are_the_newest_of_a_model() -> None:
    claims = Claims(30.0)
    prompts = [prompt_of(named(8, seed)) for seed in range(MAX_REPEATED + 3)]
    for number, prompt in enumerate(prompts):
        claims.start((1, str(number)), prompt, 0, 0.0)
    sent = claims.drain()
    assert claims.current("m") == sent[-MAX_REPEATED:]
    for number in range(1, len(prompts)):
        claims.end((1, str(number)))
    assert claims.current("m") == sent[:1]
    assert claims.current("n") == []


def test_a_long_prompt_is_claimed_by_few_digests() -> None:
    claims, peer_claims = Claims(30.0), PeerClaims()
    whole = prompt_of(named(10_000))
    claims.start((1, "r"), whole, 100, 0.0)
    (sent,) = claims.drain()
    assert len(sent.digests) <= MAX_CLAIM_DIGESTS
    peer_claims.receive("a", sent.number, sent.digests, 30.0)
    assert peer_claims.find(whole, 0) == PeerSource("a", 10_000)
    found = peer_claims.find(prompt_of(named(9_000, fork=5_000)), 200)
    assert found is not None
    assert 5_000 - 10_000 / MAX_CLAIM_DIGESTS - 1 <= found.end <= 5_000
    assert peer_claims.find(prompt_of(named(50, seed=3)), 0) is None


def test_peer_claims_end() -> None:
    peer_claims, prompt = PeerClaims(), prompt_of(named(10))
    digests = split_digests(named(10))
    peer_claims.receive("b", 1, digests, 5.0)
    peer_claims.receive("a", 7, digests[:4], 9.0)
    assert peer_claims.find(prompt, 0) == PeerSource("a", 4)
    peer_claims.drop("a", prompt, 2)
    assert peer_claims.find(prompt, 0) == PeerSource("b", 10)
    peer_claims.receive("b", 1, digests[:3], 5.0)
    assert peer_claims.find(prompt, 3) is None
    peer_claims.expire(6.0)
    assert len(peer_claims) == 0
    for number in range(2000):
        peer_claims.receive("c", number, split_digests(named(100, seed=number)), 9.0)
    assert len(peer_claims) * 100 <= 1 << 17
    peer_claims.drop_peer("c")
    assert (len(peer_claims), peer_claims._by_digest) == (0, {})


# preparation for other nodes


def prepared(node: Node, digests: bytes, tps: float = 0.0, stored: bool = False) -> Prepared | None:
    """The reply to another node's request; None if it is parked."""
    message = Prepare("m", LAYOUT, digests, tps, 0.0, 0.25, stored)
    answer = node.manager.prepare(message, 100.0)
    return answer if isinstance(answer, Prepared) else None


def stocked(tier: int, **rules: object) -> tuple[Node, Mesh, bytes]:
    """A node with a prompt of 20 blocks in one tier only."""
    node = Node("a", disk_frequency=1.0, **rules)
    mesh, digests = Mesh(node), named(20)
    mesh.put(node, digests)
    mesh.settle()
    assert node.on(tier) == 20
    if tier != ARENA:
        node.manager.clear(Clear(tiers=[ARENA]), mesh.now)
    return node, mesh, digests


def test_blocks_on_disk_are_loaded_for_others() -> None:
    node, mesh, digests = stocked(DISK)
    node.manager.store.traffic[DISK, ARENA].bps = 1e6
    mesh.now = 100.0
    assert prepared(node, digests + named(4, seed=9)) is None
    mesh.settle()
    assert [a for a in node.answers.values() if isinstance(a, Prepared)] == [Prepared(20, False)]
    assert node.on(ARENA) == 20
    assert prepared(node, digests) == Prepared(20, False)


def test_blocks_on_disk_stay_there_if_computing_is_faster() -> None:
    node, _, digests = stocked(DISK)
    node.manager.store.traffic[DISK, ARENA].bps = 1e3
    assert prepared(node, digests, tps=1000.0) == Prepared(0, False)
    assert node.manager.store.drain_moves() == []


def test_blocks_for_nodes_without_transfers_go_to_the_store() -> None:
    node, mesh, digests = stocked(ARENA, shares=True, remote_frequency=2.0)
    assert node.on(REMOTE) == 0
    assert prepared(node, digests, stored=True) == Prepared(0, True, True)
    mesh.settle()
    assert prepared(node, digests, stored=True) == Prepared(20, False, True)


def test_a_node_without_a_store_prepares_nothing_for_it() -> None:
    node, _, digests = stocked(ARENA)
    assert prepared(node, digests, stored=True) == Prepared(0, False)
    other = Prepare("other", LAYOUT, digests, 0.0, 0.0, 0.25)
    assert node.manager.prepare(other, 100.0) == Prepared(0, False)


@pytest.mark.parametrize(("cut", "wait_s"), [(1, 0.25), (0, -1.0), (0, nan)])
def test_invalid_requests_prepare_nothing(cut: int, wait_s: float) -> None:
    node, _, digests = stocked(ARENA)
    message = Prepare("m", LAYOUT, digests[cut:], 0.0, 0.0, wait_s)
    assert node.manager.prepare(message, 100.0) == Prepared(0, False)
    assert not node.manager.onboarding.tickets


def test_a_model_that_does_not_fit_is_not_listed() -> None:
    node = Node("a")
    huge = replace(LAYOUT, layers=[LayerLayout(1, 1 << 20, 1 << 20)])
    assert isinstance(node.manager.attach(Attach("w", "huge", huge, "lock"), 2), Declined)
    assert node.manager.attachments.models == ["m"]
