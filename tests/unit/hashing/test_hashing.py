"""Block hashes against the published XXH3 implementation (PyPI `xxhash`)."""

from struct import pack

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.tenants import EVIL, FORGED, VICTIM, unkeyed

from kvmesh._native import xxh3
from kvmesh.frontend.namespaces import TenantNamespaces
from kvmesh.hashing import block_hashes, salt, sequence_hashes

U64 = st.integers(0, 2**64 - 1)


def reference(tokens: bytes, block_size: int, previous: int) -> tuple[bytes, bytes]:
    width = 4 * block_size
    local, sequence = [], []
    for at in range(0, len(tokens) - width + 1, width):
        local.append(xxhash.xxh3_64_intdigest(tokens[at : at + width], 1337))
        previous = xxhash.xxh3_64_intdigest(pack("<QQ", previous, local[-1]), 1337)
        sequence.append(previous)
    return pack(f"<{len(local)}Q", *local), pack(f"<{len(sequence)}Q", *sequence)


@pytest.mark.parametrize("length", [*range(300), 511, 512, 513, 1024, 1025, 2048, 4096, 70_001])
@pytest.mark.parametrize("seed", [0, 1, 1337, 2**64 - 1])
def test_every_length_class_equals_the_published_hash(length: int, seed: int) -> None:
    data = bytes((i * 131 + length) % 251 for i in range(length))
    assert xxh3(data, seed) == xxhash.xxh3_64_intdigest(data, seed)


@given(st.binary(max_size=3000), U64)
def test_any_input_equals_the_published_hash(data: bytes, seed: int) -> None:
    assert xxh3(data, seed) == xxhash.xxh3_64_intdigest(data, seed)


@given(st.binary(max_size=600), st.sampled_from([1, 2, 4, 16, 32, 64, 100]), U64)
def test_block_hashes_chain_from_the_previous_hash(
    data: bytes, block_size: int, previous: int
) -> None:
    tokens = data * 4
    assert block_hashes(tokens, block_size, previous) == reference(tokens, block_size, previous)


@given(st.binary(min_size=128, max_size=640), st.integers(0, 10), U64)
def test_hashing_continues_from_a_known_prefix(data: bytes, blocks: int, root: int) -> None:
    tokens = data[: len(data) // 4 * 4]
    local, sequence = block_hashes(tokens, 4, root)
    known = min(blocks, len(local) // 8)
    previous = int.from_bytes(sequence[8 * known - 8 : 8 * known], "little") if known else root
    rest = block_hashes(memoryview(tokens)[16 * known :], 4, previous)
    assert rest == (local[8 * known :], sequence[8 * known :])
    assert sequence_hashes(local, root) == sequence


def test_unaligned_and_writable_buffers_are_read_as_they_are() -> None:
    tokens = bytes(range(128))
    shifted = memoryview(b"\0" + tokens)[1:]
    assert block_hashes(shifted, 4) == block_hashes(tokens, 4) == block_hashes(bytearray(tokens), 4)


@pytest.mark.parametrize(("tokens", "block_size"), [(b"123", 16), (b"1234", 0)])
def test_ragged_tokens_and_empty_blocks_are_refused(tokens: bytes, block_size: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        block_hashes(tokens, block_size)


def test_a_block_size_beyond_the_prompt_hashes_nothing() -> None:
    assert block_hashes(b"1234" * 10, 2**62) == (b"", b"")


def test_ragged_hashes_are_refused() -> None:
    with pytest.raises(ValueError, match="64-bit"):
        sequence_hashes(b"1234567")


def test_salts_do_not_run_fields_together() -> None:
    triples = [("ab", "", ""), ("a", "b", ""), ("a", "", "b"), ("", "ab", ""), ("", "", "ab")]
    assert len({salt(*triple) for triple in triples}) == len(triples)
    assert salt("m") == salt("m", "", "")


def test_a_tenant_s_salt_is_keyed_and_nobody_s_is_not() -> None:
    assert salt("m", "a", "t", b"one") != salt("m", "a", "t", b"two")
    assert salt("m", "a", key=b"one") == salt("m", "a", key=b"two") == salt("m", "a")


def test_a_collision_of_the_unkeyed_hash_gains_nothing() -> None:
    model, forged = "kvmesh-demo", f"{EVIL}\x1f{FORGED}"
    assert unkeyed(model, forged) == unkeyed(model, VICTIM)
    assert salt(model, "", forged, b"secret") != salt(model, "", VICTIM, b"secret")
    tenants = TenantNamespaces(bytes(32))
    mine, theirs = tenants.tag(VICTIM), tenants.tag(EVIL, FORGED)
    assert mine != theirs
    assert tenants.salt(model, "", mine) != tenants.salt(model, "", theirs)
