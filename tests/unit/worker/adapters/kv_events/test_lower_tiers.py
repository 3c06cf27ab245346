"""Blocks in lower tiers: engines say less of them, in any order, and later than of the others."""

from array import array
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.index_events import apply_to_index

from kvmesh.bus.messages import Sampling, Stored, Work
from kvmesh.hashing import block_hashes, salt
from kvmesh.index import create_index
from kvmesh.worker.adapters.kv_events import ledger
from kvmesh.worker.adapters.kv_events.cache_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
)
from kvmesh.worker.adapters.kv_events.decoder import CLEARED
from kvmesh.worker.adapters.kv_events.ledger import CacheLedger
from kvmesh.worker.adapters.kv_events.salts import PromptSalts

SIZE = 4
PLAIN = salt("m")
TENANT = 0xAB


class Book:
    """A ledger, with the index that its events make."""

    def __init__(self, tenants: bool = False) -> None:
        salts = PromptSalts("m", SIZE)
        if tenants:
            assert salts.cache_salt(a_work())
        self.ledger = CacheLedger(SIZE, salts.root_salt)
        self.index = create_index()

    def apply(self, *events: CacheEvent) -> None:
        for event in self.ledger.apply(events):
            apply_to_index(self.index, event)

    def tokens(self, prompt: list[int], seed: int = PLAIN) -> list[int]:
        """Leading tokens of a prompt by the tier in which the index has them."""
        found = self.index.find(block_hashes(pack(prompt), SIZE, seed)[1])
        row = memoryview(found).cast("I").tolist()[1:] if found else [0] * 4
        return [SIZE * blocks for blocks in row]


def a_work() -> Work:
    return Work(
        request="r",
        frontend="f",
        tokens=pack([1]),
        sampling=Sampling(max_tokens=1),
        salt=TENANT,
        tenant="t",
    )


def pack(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def names(prompt: list[int], seed: int = PLAIN) -> list[int]:
    """The engine's hashes: of all tokens up to the block's end, and of the salt."""
    ends = range(SIZE, len(prompt) + 1, SIZE)
    return [hash((seed, *prompt[:end])) & (1 << 64) - 1 for end in ends]


def device(prompt: list[int], seed: int = PLAIN) -> BlocksStored:
    hashes = names(prompt, seed)
    told = None if seed == PLAIN else seed
    return BlocksStored(hashes, None, pack(prompt[: SIZE * len(hashes)]), SIZE, salt=told)


def host(prompt: list[int], seed: int = PLAIN, tier: int = 1) -> list[BlocksStored]:
    """One event per block, without the salt."""
    hashes = names(prompt, seed)
    return [
        BlocksStored(
            [engine_hash],
            hashes[n - 1] if n else None,
            pack(prompt[SIZE * n : SIZE * (n + 1)]),
            *(SIZE, tier),
        )
        for n, engine_hash in enumerate(hashes)
    ]


def unplaced(book: Book) -> int:
    return book.ledger.counts(0, 0, "").unplaced


PROMPT = list(range(16))


def test_a_child_may_come_before_its_parent() -> None:
    book = Book()
    book.apply(*reversed(host(PROMPT)))
    assert book.tokens(PROMPT) == [0, 16, 0, 0]
    assert unplaced(book) == 0


def test_a_host_copy_may_be_told_after_the_device_copy_is_gone() -> None:
    book = Book(tenants=True)
    book.apply(device(PROMPT, TENANT), BlocksRemoved(names(PROMPT, TENANT)))
    book.apply(*reversed(host(PROMPT, TENANT)))
    assert book.tokens(PROMPT, TENANT) == [0, 16, 0, 0]
    assert book.tokens(PROMPT) == [0, 0, 0, 0]


def test_a_lower_tier_that_speaks_first_waits_for_the_salt() -> None:
    book = Book(tenants=True)
    book.apply(*host(PROMPT, TENANT, tier=2))
    assert book.tokens(PROMPT) == book.tokens(PROMPT, TENANT) == [0, 0, 0, 0]
    assert unplaced(book) == 4
    book.apply(device(PROMPT, TENANT))
    book.apply(BlocksRemoved(names(PROMPT, TENANT)))
    assert book.tokens(PROMPT, TENANT) == [0, 0, 16, 0]
    assert unplaced(book) == 0


def test_a_later_event_with_the_salt_corrects_what_was_misread() -> None:
    book = Book()
    book.apply(*host(PROMPT, TENANT, tier=2))
    assert book.tokens(PROMPT) == [0, 0, 16, 0]  # no tenant has been seen
    book.apply(device(PROMPT[:8], TENANT))
    assert book.tokens(PROMPT) == [0, 0, 0, 0]
    assert book.tokens(PROMPT, TENANT) == [8, 0, 8, 0]
    assert book.ledger.dump()
    book.apply(BlocksRemoved(names(PROMPT[:8], TENANT)))
    assert book.tokens(PROMPT, TENANT) == [0, 0, 16, 0]


def test_blocks_named_by_their_hashes_alone_are_those_of_the_device() -> None:
    book = Book()
    hashes = names(PROMPT)
    early = BlocksStored(hashes[2:], None, b"", 0, 1)
    book.apply(early)
    assert unplaced(book) == 2
    book.apply(device(PROMPT), BlocksStored(hashes[:2], None, b"", 0, 1), BlocksRemoved(hashes))
    assert book.tokens(PROMPT) == [0, 16, 0, 0]
    book.apply(BlocksRemoved(hashes, 1))
    assert book.tokens(PROMPT) == [0, 0, 0, 0]


def test_chunks_of_several_blocks_are_split() -> None:
    book = Book()
    book.apply(device(PROMPT[:4]))
    # the second has the token after it, too
    first, second = pack(PROMPT[:8]), pack([*PROMPT[8:], 99])
    book.apply(BlocksStored([501], None, first, 8, 1), BlocksStored([502], 501, second, 8, 1))
    assert book.tokens(PROMPT) == [4, 12, 0, 0]
    book.apply(BlocksRemoved([502], 1))
    assert book.tokens(PROMPT) == [4, 4, 0, 0]
    book.apply(BlocksStored([502, 503], 501, pack(PROMPT[8:] + PROMPT[:8]), 8, 1))
    assert book.tokens(PROMPT + PROMPT[:8]) == [4, 20, 0, 0]
    book.apply(BlocksRemoved([501, 502, 503], 1))
    assert book.tokens(PROMPT) == [4, 0, 0, 0]
    assert not book.ledger.dropped


def test_a_chunk_that_ends_within_a_block_has_its_whole_blocks() -> None:
    book = Book()
    book.apply(BlocksStored([501], None, pack(PROMPT[:10]), 10, 1))
    assert book.tokens(PROMPT) == [0, 8, 0, 0]
    book.apply(BlocksRemoved([501], 1))
    assert book.tokens(PROMPT) == [0, 0, 0, 0]


def test_a_chunk_stored_twice_is_held_until_both_copies_are_gone() -> None:
    book = Book()
    chunk = BlocksStored([501], None, pack(PROMPT[:8]), 8, 1)
    book.apply(chunk, chunk, BlocksRemoved([501], 1))
    assert book.tokens(PROMPT) == [0, 8, 0, 0]
    book.apply(BlocksRemoved([501], 1))
    assert book.tokens(PROMPT) == [0, 0, 0, 0]


@pytest.mark.parametrize(("size", "extras"), [(SIZE, (0, 0, 7, 0)), (2 * SIZE, (0, 7))])
def test_blocks_under_other_keys_are_in_no_prompt_of_the_mesh(
    size: int, extras: tuple[int, ...]
) -> None:
    book = Book()
    event = BlocksStored(names(PROMPT)[-len(extras) :], None, pack(PROMPT), size, extras=extras)
    book.apply(event)
    assert book.tokens(PROMPT) == [8, 0, 0, 0]
    assert len(book.ledger) == 4


def test_waiting_blocks_are_bounded() -> None:
    book = Book()
    for number in range(9_000):
        book.apply(BlocksStored([2 * number + 1], 2 * number + 2, pack([1, 2, 3, 4]), SIZE, 1))
    assert unplaced(book) == 8_192
    assert book.ledger.dropped["unknown_position"] == [0, 9_000 - 8_192, 0, 0]
    book.apply(AllCleared())
    assert unplaced(book) == 0


def test_a_tier_without_removals_keeps_its_newest_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "UNREMOVED_BLOCKS", 2)
    book = Book()
    book.apply(*host(PROMPT, tier=2), *host(PROMPT))
    assert book.tokens(PROMPT) == [0, 0, 0, 0]  # the oldest were the first of the prompt
    assert book.ledger.dropped == {"never_removed": [0, 2, 2, 0]}
    book.apply(BlocksRemoved(names(PROMPT)[:1], 1), *host(PROMPT))
    assert book.tokens(PROMPT) == [0, 16, 0, 0]
    dumped = [event for event in book.ledger.dump() if isinstance(event, Stored)]
    assert sum(len(event.engine) // 8 for event in dumped if event.tier == 2) == 2


def test_stores_of_one_tier_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of a `MultiConnector`: vLLM's own, in chunks, and one that tells no removals."""
    monkeypatch.setattr(ledger, "UNREMOVED_BLOCKS", 4)
    hashes, chunked = names(PROMPT), pack(PROMPT)
    chunks = BlocksStored([hashes[1], hashes[3]], None, chunked, 2 * SIZE, 1)
    other = [replace(event, source="cpu") for event in host(PROMPT)]
    book = Book()
    book.apply(device(PROMPT), chunks, *other, BlocksRemoved(hashes, 0))
    assert book.tokens(PROMPT) == [0, 16, 0, 0]
    book.apply(BlocksRemoved([hashes[1], hashes[3]], 1))
    assert book.tokens(PROMPT) == [0, 16, 0, 0]
    later = [n + 100 for n in PROMPT]
    book.apply(*(replace(event, source="cpu") for event in host(later)))
    assert (book.tokens(PROMPT), book.tokens(later)) == ([0] * 4, [0, 16, 0, 0])
    assert book.ledger.dropped == {"never_removed": [0, 4, 0, 0]}
    book = Book()
    book.apply(device(PROMPT), chunks, *other, BlocksRemoved(hashes, 0))
    book.apply(BlocksRemoved(hashes, 1, source="cpu"))
    assert book.tokens(PROMPT) == [0, 16, 0, 0]  # of the chunks


def test_a_reset_leaves_files_and_names_the_hosts_blocks_that_it_may_have_left() -> None:
    book = Book()
    book.apply(device(PROMPT), *host(PROMPT), *host(PROMPT, tier=2))
    book.apply(*CLEARED)
    assert book.tokens(PROMPT) == [0, 0, 16, 0]
    assert book.ledger.dropped == {"reset": [0, 4, 0, 0]}
    book.apply(*host(PROMPT), AllCleared(1))  # of a clear that names the medium
    assert book.tokens(PROMPT) == [0, 0, 16, 0]
    assert book.ledger.dropped == {"reset": [0, 4, 0, 0]}


def test_a_restart_names_the_files_that_the_engine_may_find_again() -> None:
    book = Book()
    book.apply(device(PROMPT), *host(PROMPT), *host(PROMPT, tier=2), *host(PROMPT, tier=3))
    book.ledger.clear()
    assert book.ledger.dropped == {"reset": [0, 0, 4, 4]}


PROMPTS = [[first, *range(7 + 4 * first)] for first in range(5)]
SEEDS = [PLAIN, TENANT, 0xCD]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["compute", "offload", "evict", "drop"]), st.integers())),
    st.randoms(use_true_random=False),
)
def test_the_index_is_what_the_tiers_hold(actions: list[tuple[str, int]], random: Random) -> None:
    """The host tier's blocks are told late and shuffled, when device copies may be gone."""
    book = Book(tenants=True)
    held: list[dict[int, int]] = [{}, {}]
    late: list[BlocksStored] = []
    for action, number in actions:
        prompt, seed = PROMPTS[number % 5], SEEDS[number // 5 % 3]
        hashes = names(prompt, seed)
        if action == "compute":
            book.apply(device(prompt, seed))
            for engine_hash in hashes:
                held[0][engine_hash] = held[0].get(engine_hash, 0) + 1
        elif action == "offload":
            late += [e for e in host(prompt, seed) if e.hashes[0] in held[0]]
        else:
            tier = int(action == "drop")
            if tier:
                random.shuffle(late)
                book.apply(*late)
                for event in late:
                    held[1][event.hashes[0]] = held[1].get(event.hashes[0], 0) + 1
                late.clear()
            if held[tier]:
                gone = sorted(held[tier])[number % len(held[tier])]
                book.apply(BlocksRemoved([gone], tier))
                held[tier][gone] -= 1
                if not held[tier][gone]:
                    del held[tier][gone]
    rebuilt = Book()
    for change in book.ledger.dump():
        apply_to_index(rebuilt.index, change)
    for prompt in PROMPTS:
        for seed in SEEDS:
            hashes = names(prompt, seed)
            near, all_ = (leading(hashes, *held[: tiers + 1]) for tiers in (0, 1))
            expected = [SIZE * near, SIZE * (all_ - near), 0, 0]
            assert book.tokens(prompt, seed) == rebuilt.tokens(prompt, seed) == expected
    assert unplaced(book) == 0
    assert not book.ledger.dropped


def leading(hashes: list[int], *held: dict[int, int]) -> int:
    """The number of leading blocks that one of these tiers holds."""
    missing = (n for n, h in enumerate(hashes) if not any(h in tier for tier in held))
    return next(missing, len(hashes))
