"""The prefix tree against a plain count of (slot, block) pairs."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from support.routing import sequence

from kvmesh.hashing import HASH_BYTES
from kvmesh.router.state.predicted_prefixes import PredictedPrefixes
from kvmesh.router.state.prefix_tree import PrefixNode, PrefixTree

PROMPTS = st.lists(st.integers(0, 1), max_size=12).map(lambda blocks: sequence(*blocks))
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 40), PROMPTS), max_size=60)


class Counted:
    """The blocks of each slot, one by one."""

    def __init__(self) -> None:
        self.held: Counter[tuple[int, bytes]] = Counter()

    def blocks(self, prompt: bytes) -> list[bytes]:
        return [prompt[at : at + HASH_BYTES] for at in range(0, len(prompt), HASH_BYTES)]

    def change(self, slot: int, prompt: bytes, by: int) -> int:
        """Returns how many blocks the slot holds more, or less."""
        before = sum(1 for key, count in self.held.items() if key[0] == slot and count)
        for block in self.blocks(prompt):
            self.held[slot, block] += by
        after = sum(1 for key, count in self.held.items() if key[0] == slot and count)
        return abs(after - before)

    def depth(self, slot: int, prompt: bytes) -> int:
        depth = 0
        for block in self.blocks(prompt):
            if not self.held[slot, block]:
                break
            depth += 1
        return depth


@given(STEPS)
def test_the_tree_counts_the_blocks_of_each_slot(steps: list[tuple[bool, int, bytes]]) -> None:
    tree, counted = PrefixTree(), Counted()
    live: list[tuple[PrefixNode, int, bytes]] = []
    for drops, slot, prompt in steps:
        if drops and live:
            end, of, held = live.pop(slot % len(live))
            assert tree.drop(end, of) == counted.change(of, held, -1)
        else:
            end, new = tree.add(slot, prompt)
            assert new == counted.change(slot, prompt, 1)
            live.append((end, slot, prompt))
        assert tree.depths(prompt, 48).tolist() == [counted.depth(s, prompt) for s in range(48)]
    for end, slot, _ in live:
        tree.drop(end, slot)
    assert tree.empty


@given(STEPS, st.integers(0, 40))
def test_prompts_of_a_slot_can_be_dropped(steps: list[tuple[bool, int, bytes]], gone: int) -> None:
    predicted = PredictedPrefixes(ttl=10.0, patience=300.0)
    for at, (computed, slot, prompt) in enumerate(steps):
        predicted.add(f"r{at % 7}", slot, prompt, float(at))
        if computed:
            predicted.computed(f"r{at % 5}", float(at))
    predicted.forget([gone])
    for _, _, prompt in steps:
        depths = predicted.depths(prompt, 48)
        assert depths is None or depths[gone] == 0
    predicted.expire(1000.0)
    assert len(predicted) == 0
