"""Each removal that a kvbm publishes names its reason and the request in need, as engines' do."""

from support.kvbm_manager import BLOCK_BYTES, LEASE_S, ManagedNode, prompt

from kvmesh.bus.messages import Clear, Corrupt, Fetch, Pin, Retain
from kvmesh.kvbm.core.blocks.block import ARENA, DISK, REMOTE
from kvmesh.kvbm.core.blocks.store import MoveEnd

KEPT = [Retain(0, None, 90, explicit=True)]
BRIEF = [Retain(0, None, 90, 1.0, explicit=True)]


def test_the_least_recently_used_are_evicted_for_a_request() -> None:
    node = ManagedNode()
    node.put("old", prompt(6, 1))
    node.put("new", prompt(5, 2))
    assert node.removed == {(ARENA, "evicted", "new"): 3}


def test_the_second_prompt_on_a_new_line_supersedes_what_the_session_has_left() -> None:
    node = ManagedNode()
    node.put("old", prompt(6, 1, head=2), session="s", conversation=4 << 32)
    node.get("new", prompt(4, 2, head=2), session="s", conversation=4 << 32)
    node.get("new", prompt(5, 2, head=2), session="s", conversation=4 << 32)
    assert not node.removed, "it is the same request"
    node.get("next", prompt(6, 2, head=2), session="s", conversation=4 << 32)
    assert node.removed == {(ARENA, "superseded", "next"): 4}


def test_what_a_session_may_have_left_is_evicted_first() -> None:
    node = ManagedNode()
    node.put("old", prompt(4, 1, head=1), session="s")
    node.put("other", prompt(2, 3))
    node.get("new", prompt(3, 2, head=1), session="s")
    node.put("more", prompt(4, 4))
    assert node.removed == {(ARENA, "superseded", "more"): 2}
    node.get("back", prompt(4, 1, head=1), session="s")
    node.put("again", prompt(2, 5))
    assert node.removed[ARENA, "superseded", "again"] == 0


def test_interleaved_conversations_of_a_session_leave_each_other_alone() -> None:
    main, side = prompt(6, 1, head=2), prompt(4, 2, head=2)
    for fields, first in (
        ({"conversation": 5 << 32}, 0),
        ({"conversation": 4 << 32 | 2}, 4),
        ({"conversation": 4 << 32 | 1, "tentative": True}, 0),
    ):
        node = ManagedNode(arena=12)
        node.put("old", main, session="s", conversation=4 << 32 | 1)
        node.put("plain", prompt(2, 6))
        for number in range(3):
            node.get(f"side-{number}", side[: 16 * (number + 2)], session="s", **fields)
        assert not node.removed
        node.put("more", prompt(8, 7))
        assert node.removed[ARENA, "superseded", "more"] == first


def test_release_leaves_what_a_conversation_of_another_session_uses() -> None:
    node = ManagedNode()
    node.put("parent", prompt(5, 1, head=2), session="parent", conversation=1)
    node.put("child", prompt(4, 2, head=2), session="child", conversation=1)
    node.get("child again", prompt(3, 3, head=2), session="child", conversation=1)
    assert node.manager.release(["parent"], node.now) == 3
    assert (node.held(prompt(5, 1, head=2)), node.held(prompt(4, 2, head=2))) == (2, 4)


def test_a_released_session_drops_its_blocks() -> None:
    node = ManagedNode()
    node.put("r", prompt(4, 1), session="s")
    assert node.manager.release(["s"], node.now) == 4
    node.settle()
    assert node.removed == {(ARENA, "released", None): 4}


def test_blocks_are_evicted_after_their_retention() -> None:
    node = ManagedNode()
    node.put("brief", prompt(4, 1), retention=BRIEF)
    node.now += 2.0
    node.put("new", prompt(8, 2))
    assert node.removed == {(ARENA, "expired", "new"): 4}


def test_a_use_after_the_retention_makes_an_eviction_ordinary() -> None:
    node = ManagedNode()
    node.put("brief", prompt(4, 1), retention=BRIEF)
    node.now += 2.0
    node.get("later", prompt(4, 1))
    node.put("new", prompt(8, 2))
    assert node.removed == {(ARENA, "evicted", "new"): 4}


def test_blocks_beyond_the_budget_are_evicted_as_clipped() -> None:
    node = ManagedNode()
    node.put("kept", prompt(6, 1), retention=KEPT)
    node.put("new", prompt(4, 2))
    assert node.removed == {(ARENA, "clipped", "new"): 2}


def test_pinned_blocks_are_evicted_as_others_once_the_pin_is_removed() -> None:
    node = ManagedNode()
    digests = prompt(4, 1)
    node.put("r", digests)
    pin = Pin(id="p", sequence_hashes=node.names(digests), ttl_s=60.0)
    assert node.manager.pin(pin, node.now) == 4
    assert node.manager.unpin("p", node.now) == 4
    node.put("new", prompt(8, 2))
    assert node.removed == {(ARENA, "evicted", "new"): 4}


def test_a_clear_and_wrong_content_name_no_request() -> None:
    node = ManagedNode()
    node.put("r", prompt(4, 1))
    node.manager.answer(Corrupt(1, 0, prompt(4, 1)[-16:]), node.now)
    node.manager.clear(Clear(), node.now)
    node.settle()
    assert node.removed == {(ARENA, "corrupt", None): 1, (ARENA, "cleared", None): 3}


def test_each_tier_evicts_for_the_request_whose_blocks_it_takes() -> None:
    node = ManagedNode(arena=8, disk=4)
    node.put("a", prompt(4, 1))
    node.put("b", prompt(4, 2))
    assert node.removed == {(DISK, "evicted", "b"): 4}


def test_blocks_loaded_from_disk_evict_others_for_the_request_that_loads_them() -> None:
    node = ManagedNode(arena=8, disk=64)
    node.put("a", prompt(8, 1))
    node.put("b", prompt(8, 2))
    node.removed.clear()
    node.get("c", prompt(8, 1))
    assert node.removed == {(ARENA, "evicted", "c"): 8}


def test_a_smaller_disk_and_a_bad_one_name_no_request() -> None:
    node = ManagedNode(arena=16, disk=8)
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
    node = ManagedNode(arena=16, remote=4)
    node.put("a", prompt(4, 1))
    node.put("b", prompt(2, 2))
    assert node.removed == {(REMOTE, "evicted", "b"): 2}
    node.removed.clear()
    node.now += LEASE_S
    node.manager.tick(node.now)
    node.settle()
    assert node.removed == {(REMOTE, "expired", None): 4}
