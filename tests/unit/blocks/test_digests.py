"""Digests depend on everything that a block's KV depends on, and on nothing else."""

from array import array

import pytest
from msgspec.structs import replace

from kvmesh.blocks.digests import (
    FINGERPRINT_BYTES,
    KEY_BYTES,
    DigestChain,
    chain_digests,
    fingerprint,
    part_digests,
    root_digest,
    split_digests,
)
from kvmesh.bus.messages import KvLayout, LayerLayout, incompatible_models

KEY = bytes(range(32))
LAYOUT = KvLayout(
    weights="w", dtype="float32", item_bytes=4, block_size=4, layers=[LayerLayout(2, 8, 8)]
)
TOKENS = array("I", range(18)).tobytes()


def digests(
    key: bytes = KEY, names: tuple[str, str, str] = ("m", "", ""), layout: KvLayout = LAYOUT
) -> list[bytes]:
    root = root_digest(key, *names, layout)
    return split_digests(chain_digests(key, root, TOKENS, layout.block_size))


def test_only_full_blocks_have_digests() -> None:
    assert len(set(digests())) == 4


@pytest.mark.parametrize(
    "other",
    [
        digests(key=bytes(32)),
        digests(names=("n", "", "")),
        digests(names=("m", "a", "")),
        digests(names=("m", "", "a")),
        digests(layout=replace(LAYOUT, weights="v")),
        digests(layout=replace(LAYOUT, dtype="bfloat16", item_bytes=2)),
        digests(layout=replace(LAYOUT, layers=[LayerLayout(1, 16, 16)])),
    ],
)
def test_every_part_of_the_namespace_counts(other: list[bytes]) -> None:
    assert not set(digests()) & set(other)


def test_each_part_of_a_block_has_its_own_digests() -> None:
    lead = b"".join(digests())
    parts = [replace(LAYOUT, part=part, parts=3) for part in range(3)]
    of_parts = [part_digests(KEY, lead, part) for part in parts]
    assert of_parts[0] == lead
    split = [split_digests(packed) for packed in of_parts]
    assert len(set().union(*split)) == 12
    assert part_digests(KEY, lead[:32], parts[1]) == of_parts[1][:32]
    assert part_digests(bytes(32), lead, parts[1]) != of_parts[1]
    other = replace(parts[1], layers=[LayerLayout(1, 16, 16)])
    assert part_digests(KEY, lead, other) != of_parts[1]


def test_a_changed_token_changes_all_that_follow() -> None:
    changed = array("I", TOKENS)
    changed[5] += 1
    root = root_digest(KEY, "m", "", "", LAYOUT)
    other = split_digests(chain_digests(KEY, root, changed.tobytes(), 4))
    assert other[0] == digests()[0]
    assert not set(other[1:]) & set(digests()[1:])


def test_a_chain_continues_from_a_digest() -> None:
    root = root_digest(KEY, "m", "", "", LAYOUT)
    first = chain_digests(KEY, root, TOKENS[:32], 4)
    rest = chain_digests(KEY, split_digests(first)[-1], TOKENS[32:], 4)
    assert split_digests(first + rest) == digests()


def test_a_growing_prompt_is_digested_once() -> None:
    tokens = array("I", TOKENS)
    chain = DigestChain("m", "", "", LAYOUT)
    whole = b"".join(digests())
    assert chain.upto(KEY, tokens[:9], 2) == whole[:32]
    assert chain.upto(KEY, tokens, 4) == whole
    assert chain.upto(KEY, tokens, 1) == whole[:16]
    assert chain.upto(bytes(32), tokens, 4) == b"".join(digests(key=bytes(32)))


def test_a_fingerprint_identifies_a_key() -> None:
    prints = {fingerprint(bytes([n]) * KEY_BYTES) for n in range(200)}
    assert len(prints) == 200
    assert {len(text) for text in prints} == {2 * FINGERPRINT_BYTES}
    assert not any(digest.hex().startswith(fingerprint(KEY)) for digest in digests())


def test_layout_summary() -> None:
    small, large = LayerLayout(1, 4, 4), LayerLayout(2, 8, 8)
    mixed = replace(LAYOUT, layers=[large, large, small])
    assert mixed.summary == (
        "float32 of 4 bytes, 4 tokens a block, 2 layers of 2 heads of 8+8,"
        " 1 layers of 1 heads of 4+4, weights w"
    )
    assert mixed.summary != replace(mixed, layers=[large, small, large]).summary


def test_models_without_a_common_layout_are_incompatible() -> None:
    ours = {"m": ["a", "b"], "n": ["a"], "o": ["a"], "p": []}
    theirs = {"m": ["b"], "n": ["b"], "p": ["a"]}
    assert incompatible_models(ours, theirs) == incompatible_models(theirs, ours) == ["n"]
