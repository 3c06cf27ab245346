"""The native core's blocks of an engine, beside a plain model; and columns out of MessagePack."""

from array import array
from time import process_time
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.engine_blocks import PlainEngineBlocks

from kvmesh._native import EngineBlocks, folded_hashes, packed_tokens
from kvmesh.hashing import block_hashes

SIZE = 2  # tokens per block
U64 = st.integers(0, (1 << 64) - 1)
NAMES = st.integers(1, 12)
CHAINS = st.lists(NAMES, min_size=1, max_size=4, unique=True)
TIER = st.integers(0, 3)
ACTIONS = st.one_of(
    st.tuples(
        *(st.just("store"), TIER, CHAINS, st.none() | NAMES),
        *(st.integers(0, 2), st.integers(0, 3), st.booleans()),
    ),
    st.tuples(st.just("hold"), TIER, CHAINS, st.booleans()),
    st.tuples(st.just("release"), TIER, st.lists(NAMES, max_size=6)),
    st.tuples(st.just("clear"), TIER),
    st.tuples(st.just("forget")),
)


def tokens_of(names: list[int], change: int) -> bytes:
    return array("I", [token for name in names for token in (name, change)]).tobytes()


def act(blocks: EngineBlocks | PlainEngineBlocks, action: tuple[Any, ...]) -> Any:
    kind, *values = action
    if kind == "store":
        tier, names, parent, salt, change, has_extras = values
        extras = tuple(range(len(names))) if has_extras else ()
        if parent in names:
            return None
        return blocks.store(tier, names, parent, salt, tokens_of(names, change), extras)
    if kind == "hold":
        tier, names, again = values
        return blocks.hold(tier, [n for n in names if blocks.position(n)], again)
    return getattr(blocks, kind)(*values)


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, max_size=30), st.integers(0, 5), st.booleans())
@example(
    [
        ("store", 0, [2, 3, 1], None, 0, 0, False),
        ("clear", 0),
        ("hold", 0, [1, 3], False),  # the child first: its parent is not there yet
    ],
    2,
    False,
)
def test_the_blocks_are_those_of_the_model(
    actions: list[tuple[Any, ...]], recent: int, counted: bool
) -> None:
    native, plain = EngineBlocks(recent, counted), PlainEngineBlocks(recent, counted)
    for action in actions:
        assert sorted_moves(act(native, action)) == sorted_moves(act(plain, action))
        for name in range(1, 13):
            assert native.position(name) == plain.position(name)
            assert [native.copies(t, name) for t in range(4)] == [
                plain.copies(t, name) for t in range(4)
            ]
        assert [native.held(tier) for tier in range(4)] == [plain.held(t) for t in range(4)]
        assert native.kept() == plain.kept()
        assert native.dump() == plain.dump()
        for salt in range(3):
            for parent in range(1, 13):
                sequence = block_hashes(tokens_of([parent, parent + 1], 0), SIZE, salt)[1]
                assert native.leading(sequence) == plain.leading(sequence)


def sorted_moves(result: Any) -> Any:
    """The result of an action; blocks that have moved come in any order of siblings."""
    if not isinstance(result, tuple) or len(result) != 2 or not result[1]:
        return result
    if isinstance(result[0], bytes):
        return result
    runs, moved = result
    return runs, [(tier, sorted(array("Q", names)), len(again)) for tier, names, again in moved]


def test_to_move_a_block_takes_no_longer_in_a_larger_cache() -> None:
    seconds = []
    for chains in (100, 10_000):
        blocks = EngineBlocks(4, True)
        for first in range(0, 20 * chains, 20):
            names = list(range(first, first + 20))
            blocks.store(1, names, None, 1, tokens_of(names, 0), ())
        blocks.store(0, [0], None, 2, tokens_of([0], 0), ())  # the first move looks at all blocks
        started = process_time()
        for first in range(20, 2000, 20):
            stored = blocks.store(0, [first], None, 2, tokens_of([first], 0), ())
            assert stored is not None
            assert [(tier, len(names)) for tier, names, _ in stored[1]] == [(1, 20 * 8)]
        seconds.append(process_time() - started)
    assert seconds[1] < 10 * seconds[0]


def test_arguments_that_fit_no_block_are_refused() -> None:
    blocks = EngineBlocks(4, True)
    for names, tokens, extras in (
        ([], b"", ()),
        ([1, 2], bytes(12), ()),
        ([1, 2], bytes(16), (1,)),
        ([1], bytes(6), ()),
    ):
        with pytest.raises(ValueError, match=r"block"):
            blocks.store(0, names, None, 0, tokens, extras)
    with pytest.raises(ValueError, match="tier"):
        blocks.store(4, [1], None, 0, bytes(8), ())
    with pytest.raises(ValueError, match="position"):
        blocks.hold(0, [1])
    with pytest.raises(OverflowError):
        blocks.release(0, [-1])
    with pytest.raises(TypeError):
        blocks.release(0, ["a"])  # type: ignore[list-item]  # the fault under test
    assert blocks.dump() == [[], [], [], []]


@given(st.lists(st.integers(0, (1 << 32) - 1)))
def test_tokens_are_packed(tokens: list[int]) -> None:
    assert packed_tokens(msgspec.msgpack.encode(tokens)) == array("I", tokens).tobytes()
    pairs = [[token, 0] for token in tokens]
    assert packed_tokens(msgspec.msgpack.encode(pairs)) == array("I", tokens).tobytes()


@given(st.lists(st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=40)))
def test_hashes_are_folded(hashes: list[int | bytes]) -> None:
    expected = [
        int.from_bytes(each[-8:], "big") if isinstance(each, bytes) else each & ((1 << 64) - 1)
        for each in hashes
    ]
    assert folded_hashes(msgspec.msgpack.encode(hashes)) == expected


@pytest.mark.parametrize("value", [None, 7, "abc", b"abc", {}, [1.5], ["a"], [None], [[]], [True]])
def test_other_values_are_no_column(value: Any) -> None:
    raw = msgspec.msgpack.encode(value)
    for read in (packed_tokens, folded_hashes):
        with pytest.raises(ValueError, match=r"array|integer|pairs"):
            read(raw)


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], [5, [6, 7]], [[5, 6], 7], [[1, 2, 3]], [[1]]])
def test_other_tokens_are_no_column(tokens: Any) -> None:
    with pytest.raises(ValueError, match=r"uint32|integer|array|pairs"):
        packed_tokens(msgspec.msgpack.encode(tokens))
    with pytest.raises(ValueError, match=r"uint32|integer|array|pairs"):
        packed_tokens(msgspec.msgpack.encode([1] * 40 + tokens + [1] * 40))


@given(st.binary(max_size=60), st.integers(0, 70))
def test_any_bytes_are_a_column_or_an_error(junk: bytes, cut: int) -> None:
    whole = msgspec.msgpack.encode([1 << 20, 1 << 40, b"12345678", *junk])
    for raw in (junk, whole[:cut], whole + junk[:1]):
        for read in (packed_tokens, folded_hashes):
            try:
                read(raw)
            except ValueError:
                continue
