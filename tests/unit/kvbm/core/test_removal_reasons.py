"""Each removal that a kvbm publishes names its reason and the request in need, as engines' do."""

from array import array
from collections import Counter

from msgspec.structs import replace

from kvmesh.bus.messages import (
    Attach,
    Clear,
    Commit,
    Corrupt,
    Fetch,
    Fetched,
    Finish,
    KvLayout,
    LayerLayout,
    Offer,
    Pin,
    Removed,
    Retain,
    Wanted,
)
from kvmesh.kvbm.core.attachment import AttachedWorker
from kvmesh.kvbm.core.blocks.block import ARENA, DISK, REMOTE
from kvmesh.kvbm.core.blocks.store import MoveEnd, RemoteTierConfig
from kvmesh.kvbm.core.config import KvbmConfig
from kvmesh.kvbm.core.manager import Manager, ParkedFetch

LAYOUT = KvLayout(
    weights="w", dtype="uint8", item_bytes=1, block_size=4, layers=[LayerLayout(1, 16384, 16384)]
)
BLOCK_BYTES = LAYOUT.block_bytes
LEASE_S = 50.0
KEPT = [Retain(0, None, 90, explicit=True)]
BRIEF = [Retain(0, None, 90, 1.0, explicit=True)]


def prompt(blocks: int, seed: int, head: int = 0) -> bytes:
    """Digests of a prompt, the first `head` of which all prompts share."""
    return b"".join(bytes([n, 0 if n < head else seed]) * 8 for n in range(blocks))


class Node:
    """A manager with one attached worker; tiers have these numbers of blocks."""

    def __init__(self, arena: int = 8, disk: int = 0, remote: int = 0, share: float = 0.5) -> None:
        capacities = {ARENA: arena * BLOCK_BYTES} | ({DISK: disk * BLOCK_BYTES} if disk else {})
        config = KvbmConfig(
            capacities,
            share,
            disk_frequency=1.0,
            remote=RemoteTierConfig(remote, LEASE_S) if remote else None,
            shares=bool(remote),
            remote_frequency=1.0,
        )
        self.manager = Manager(config)
        self.now = 1.0
        self.removed: Counter[tuple[int, str | None, str | None]] = Counter()
        attached = self.manager.attach(Attach("w", "m", LAYOUT, "lock"), 1)
        assert isinstance(attached, AttachedWorker)

    def put(
        self,
        request: str,
        digests: bytes,
        session: str | None = None,
        retention: list[Retain] | None = None,
    ) -> None:
        """Offer and write a prompt, two blocks at a time: more must not be staged at once."""
        names = self.names(digests)
        offer = Offer(1, 0, digests, names, names, 5, request=request)
        offer = replace(offer, session=session, retention=retention or [])
        for first in range(0, len(digests) // 16, 2):
            end = first + 2
            part = replace(
                offer,
                first=first,
                digests=digests[: 16 * end],
                sequence_hashes=names[: 8 * end],
                local=names[: 8 * end],
            )
            wanted = self.manager.answer(part, self.now)
            assert isinstance(wanted, Wanted)
            sums = array("Q", [7] * (len(wanted.blocks) // 4)).tobytes()
            if wanted.ticket:
                self.manager.answer(Commit(1, wanted.ticket, sums), self.now)
            self.settle()

    def get(self, request: str, digests: bytes, session: str | None = None) -> None:
        """Fetch a prompt's blocks, without a reply from elsewhere, and return them."""
        names = self.names(digests)
        fetch = Fetch(1, request, 0, digests, names, names, 5, 0.0, 0.0, 0.0, session=session)
        reply = self.manager.answer(fetch, self.now)
        self.settle()
        parked = list(self.manager.drain_replies(self.now).values())
        fetched = parked[0] if isinstance(reply, ParkedFetch) else reply
        assert isinstance(fetched, Fetched)
        if fetched.ticket:
            self.manager.answer(Finish(1, fetched.ticket), self.now)
        self.settle()

    def settle(self, end: MoveEnd = MoveEnd.DONE) -> None:
        """End all moves and count the removed blocks by tier, reason and request."""
        while moves := self.manager.store.drain_moves():
            self.manager.end_moves([(move, end) for move in moves], self.now)
        for event in self.manager.store.drain_events().get(0, []):
            if isinstance(event, Removed):
                key = event.tier, event.reason, event.request
                self.removed[key] += len(event.engine) // 8

    def names(self, digests: bytes) -> bytes:
        return b"".join(digests[at : at + 8] for at in range(0, len(digests), 16))


def test_the_least_recently_used_are_evicted_for_a_request() -> None:
    node = Node()
    node.put("old", prompt(6, 1))
    node.put("new", prompt(5, 2))
    assert node.removed == {(ARENA, "evicted", "new"): 3}


def test_a_new_prompt_of_a_session_supersedes_its_last_one() -> None:
    node = Node()
    node.put("old", prompt(6, 1, head=2), session="s")
    node.get("new", prompt(4, 2, head=2), session="s")
    assert node.removed == {(ARENA, "superseded", "new"): 4}


def test_a_released_session_drops_its_blocks() -> None:
    node = Node()
    node.put("r", prompt(4, 1), session="s")
    assert node.manager.release(["s"], node.now) == 4
    node.settle()
    assert node.removed == {(ARENA, "released", None): 4}


def test_blocks_are_evicted_after_their_retention() -> None:
    node = Node()
    node.put("brief", prompt(4, 1), retention=BRIEF)
    node.now += 2.0
    node.put("new", prompt(8, 2))
    assert node.removed == {(ARENA, "expired", "new"): 4}


def test_a_use_after_the_retention_makes_an_eviction_ordinary() -> None:
    node = Node()
    node.put("brief", prompt(4, 1), retention=BRIEF)
    node.now += 2.0
    node.get("later", prompt(4, 1))
    node.put("new", prompt(8, 2))
    assert node.removed == {(ARENA, "evicted", "new"): 4}


def test_blocks_beyond_the_budget_are_evicted_as_clipped() -> None:
    node = Node()
    node.put("kept", prompt(6, 1), retention=KEPT)
    node.put("new", prompt(4, 2))
    assert node.removed == {(ARENA, "clipped", "new"): 2}


def test_pinned_blocks_are_evicted_as_others_once_the_pin_is_removed() -> None:
    node = Node()
    digests = prompt(4, 1)
    node.put("r", digests)
    pin = Pin(id="p", sequence_hashes=node.names(digests), ttl_s=60.0)
    assert node.manager.pin(pin, node.now) == 4
    assert node.manager.unpin("p", node.now) == 4
    node.put("new", prompt(8, 2))
    assert node.removed == {(ARENA, "evicted", "new"): 4}


def test_a_clear_and_wrong_content_name_no_request() -> None:
    node = Node()
    node.put("r", prompt(4, 1))
    node.manager.answer(Corrupt(1, 0, prompt(4, 1)[-16:]), node.now)
    node.manager.clear(Clear(), node.now)
    node.settle()
    assert node.removed == {(ARENA, "corrupt", None): 1, (ARENA, "cleared", None): 3}


def test_each_tier_evicts_for_the_request_whose_blocks_it_takes() -> None:
    node = Node(arena=8, disk=4)
    node.put("a", prompt(4, 1))
    node.put("b", prompt(4, 2))
    assert node.removed == {(DISK, "evicted", "b"): 4}


def test_blocks_loaded_from_disk_evict_others_for_the_request_that_loads_them() -> None:
    node = Node(arena=8, disk=64)
    node.put("a", prompt(8, 1))
    node.put("b", prompt(8, 2))
    node.removed.clear()
    node.get("c", prompt(8, 1))
    assert node.removed == {(ARENA, "evicted", "c"): 8}


def test_a_smaller_disk_and_a_bad_one_name_no_request() -> None:
    node = Node(arena=16, disk=8)
    node.put("a", prompt(8, 1))
    node.manager.resize_disk(4 * BLOCK_BYTES, node.now)
    node.settle()
    assert node.removed == {(DISK, "evicted", None): 4}
    node.removed.clear()
    node.manager.clear(Clear(tiers=[ARENA]), node.now)
    node.settle()
    node.removed.clear()
    names = node.names(prompt(4, 1))
    fetch = Fetch(1, "r", 0, prompt(4, 1), names, names, 5, 0.0, 0.0, 0.0)
    node.manager.answer(fetch, node.now)
    node.settle(MoveEnd.UNREADABLE)
    assert set(node.removed) == {(DISK, "corrupt", None)}


def test_the_index_of_the_remote_store_is_bounded_and_expires() -> None:
    node = Node(arena=16, remote=4)
    node.put("a", prompt(4, 1))
    node.put("b", prompt(2, 2))
    assert node.removed == {(REMOTE, "evicted", "b"): 2}
    node.removed.clear()
    node.now += LEASE_S
    node.manager.tick(node.now)
    node.settle()
    assert node.removed == {(REMOTE, "expired", None): 4}
