"""Claims, budgets, outcomes, pins, and block segments from token ranges."""

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.bus.messages import Retain
from kvmesh.retention.budget import RetentionBudget, directives
from kvmesh.retention.claims import (
    THINKING_LEVEL,
    UNCLAIMED,
    BlockRetention,
    EvictionRank,
    RetentionWish,
)
from kvmesh.retention.outcomes import Directive, DirectiveOutcome
from kvmesh.retention.pins import Pinned, PinTable
from kvmesh.retention.token_ranges import (
    DEFAULTS,
    RetentionError,
    RetentionSegment,
    parse_defaults,
    retained_end,
    segments,
    with_prefix,
)

WISHES = st.builds(
    RetentionWish, st.integers(0, 100), st.one_of(st.none(), st.integers(1, 20).map(float))
)


def directive(tenant: str = "t") -> Directive:
    return Directive(tenant, 80, None)


# --- claims ------------------------------------------------------------------------------------


@given(st.lists(st.tuples(WISHES, st.integers(0, 20)), max_size=6), st.integers(0, 30))
def test_the_highest_valid_claim_counts(
    requested: list[tuple[RetentionWish, int]], later: int
) -> None:
    keep, promises = BlockRetention("t"), RetentionBudget(max_size=10, unlimited_ttl_s=inf)
    used = 0
    held: list[RetentionWish] = []
    for wish, wait in requested:
        used += wait
        held = [old for old in held if old.ttl_s is None or old.ttl_s > wait]
        if wish.needs_budget:
            assert promises.claim(keep, 1, wish, float(used), exclusive=False)
            held.append(wish)
        else:
            promises.touch(keep, 1, float(used))
    held = [old for old in held if old.ttl_s is None or old.ttl_s > later]
    ends = [EvictionRank(w.level, inf if w.ttl_s is None else used + w.ttl_s) for w in held]
    assert keep.eviction_rank(float(used + later)) == max(ends, default=UNCLAIMED)


def test_a_hit_renews_a_claim_which_then_expires() -> None:
    promises, keep = RetentionBudget(max_size=10), BlockRetention("t")
    promises.claim(keep, 1, RetentionWish(80, 10.0), now=0.0)
    promises.touch(keep, 1, now=8.0)
    assert keep.eviction_rank(17.0) == EvictionRank(80, 18.0)
    assert promises.expire(keep, 1, now=18.0) == UNCLAIMED
    assert not keep
    assert promises.charged == {}


def test_unlimited_claims_expire_without_use() -> None:
    promises, keep = RetentionBudget(max_size=10, unlimited_ttl_s=50.0), BlockRetention("t")
    promises.claim(keep, 1, RetentionWish(80), now=0.0)
    promises.touch(keep, 1, now=40.0)
    assert keep.eviction_rank(89.0) == EvictionRank(80, 90.0)
    promises.expire(keep, 1, now=90.0)
    assert promises.charged == {}


def test_an_exclusive_wish_replaces_claims_and_a_shared_one_does_not() -> None:
    promises, keep = RetentionBudget(max_size=10), BlockRetention("t")
    promises.claim(keep, 1, RetentionWish(80), now=0.0)
    promises.claim(keep, 1, RetentionWish(10), now=1.0, exclusive=False)
    assert keep.eviction_rank(1.0).level == 80
    promises.claim(keep, 1, RetentionWish(10), now=1.0, exclusive=True)
    assert keep.eviction_rank(1.0).level == 10
    assert promises.charged == {}


def test_a_default_use_drops_low_claims() -> None:
    promises, keep = RetentionBudget(max_size=10), BlockRetention("t")
    promises.claim(keep, 1, RetentionWish(THINKING_LEVEL), now=0.0)
    promises.touch(keep, 1, now=1.0)
    assert keep.eviction_rank(1.0) == UNCLAIMED
    promises.claim(keep, 1, RetentionWish(10), now=2.0, exclusive=False)
    assert keep.eviction_rank(2.0) == UNCLAIMED, "others who use it have asked for nothing"


def test_a_short_high_claim_and_a_long_low_one_follow_each_other() -> None:
    promises, keep = RetentionBudget(max_size=10), BlockRetention("t")
    promises.claim(keep, 1, RetentionWish(80, 10.0), now=0.0)
    promises.claim(keep, 1, RetentionWish(40, 100.0), now=0.0, exclusive=False)
    assert keep.eviction_rank(5.0) == EvictionRank(80, 10.0)
    assert promises.expire(keep, 1, 10.0) == EvictionRank(40, 100.0)


# --- budgets and outcomes ----------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["claim", "touch", "lapse", "pin", "unpin", "evict"]),
            st.integers(0, 4),
            WISHES,
            st.integers(0, 10),
        ),
        max_size=40,
    )
)
def test_the_budget_of_a_tenant_is_never_exceeded(
    calls: Sequence[tuple[str, int, RetentionWish, int]],
) -> None:
    sizes = [1, 2, 3, 1, 5]
    keeps = [BlockRetention("t" if i < 4 else "u") for i in range(5)]
    promises = RetentionBudget(max_size=4)
    now = 0.0
    for call, i, wish, wait in calls:
        now += wait
        keep, size = keeps[i], sizes[i]
        match call:
            case "claim":
                promises.claim(keep, size, wish, now, directive(), exclusive=wait % 2 == 0)
            case "touch":
                promises.touch(keep, size, now)
            case "lapse":
                promises.expire(keep, size, now)
            case "pin":
                promises.pin(keep, size, "p", wish.level, now + 5, directive())
            case "unpin":
                promises.unpin(keep, size, "p")
            case _:
                promises.on_evicted(keep, size, now)
                keeps[i] = BlockRetention(keep.tenant)
        held = {"t": 0, "u": 0}
        for k, s in zip(keeps, sizes, strict=True):
            assert k.charged == k.needs_budget
            held[k.tenant] += s * k.charged
        assert {tenant: used for tenant, used in held.items() if used} == promises.charged
        assert all(used <= 4 for used in held.values())


def test_a_directive_over_budget_is_clipped() -> None:
    reported: list[tuple[Directive, DirectiveOutcome]] = []
    promises = RetentionBudget(
        max_size=3, on_outcome=lambda requested, outcome: reported.append((requested, outcome))
    )
    requested = directive()
    assert promises.claim(BlockRetention("t"), 2, RetentionWish(80), 0.0, requested)
    assert not promises.claim(BlockRetention("t"), 2, RetentionWish(80), 0.0, requested)
    assert promises.grantable(BlockRetention("t"), 2, RetentionWish(80)) == 1
    assert promises.claim(BlockRetention("other"), 2, RetentionWish(80), 0.0)
    assert promises.outcomes.record_grant(requested) == DirectiveOutcome.CLIPPED
    assert reported == [(requested, DirectiveOutcome.CLIPPED)]
    assert (requested.granted_blocks, requested.requested_blocks) == (2, 4)


def test_a_directive_ends_once() -> None:
    promises, requested = RetentionBudget(max_size=10), directive()
    one, two = BlockRetention("t"), BlockRetention("t")
    for keep in (one, two):
        promises.claim(keep, 1, RetentionWish(80, 10.0), 0.0, requested)
    assert promises.outcomes.record_grant(requested) == DirectiveOutcome.HONOURED
    promises.on_evicted(one, 1, now=5.0)
    promises.expire(two, 1, now=11.0)
    assert promises.outcomes.counts[DirectiveOutcome.EVICTED] == 1
    assert promises.outcomes.counts[DirectiveOutcome.EXPIRED] == 0


# --- pins --------------------------------------------------------------------------------------


def pin(name: str, prompt: list[int], deadline: float) -> Pinned[int]:
    return Pinned(name, prompt, 100, deadline, directive())


def test_the_same_id_replaces_and_the_table_is_bounded() -> None:
    table: PinTable[int] = PinTable(max_pins=2)
    first, again = pin("a", [1, 2], 10.0), pin("a", [1, 3], 20.0)
    assert table.put(first) == []
    assert table.put(again) == [first]
    assert table.put(pin("b", [1, 3, 4], 30.0)) == []
    assert table.put(pin("c", [5], 40.0)) == [again]
    assert [(found.id, n) for found, n in table.matching([1, 3, 9], 1.0)] == [("b", 2)]
    assert list(table.matching([1, 3], 30.0)) == []
    assert table.remove("b") is None, "it ended"
    assert len(table) == 1


def test_a_full_pin_table_replaces_a_pin_of_the_largest_owner() -> None:
    table: PinTable[int] = PinTable(max_pins=3)
    greedy, modest = Directive("greedy", 100, 9.0), Directive("modest", 100, 9.0)

    def put(name: str, deadline: float, directive: Directive) -> list[str]:
        return [over.id for over in table.put(Pinned(name, [1], 100, deadline, directive))]

    assert put("m", 1.0, modest) == []
    assert put("a", 30.0, greedy) == put("b", 20.0, greedy) == []
    assert put("c", 40.0, greedy) == ["b"]
    assert put("n", 50.0, modest) == ["a"]
    assert put("d", 60.0, greedy) == ["m"], "both have as many as they can"


# --- from tokens to blocks ---------------------------------------------------------------------

RETAINS = st.builds(
    Retain,
    start=st.integers(0, 40),
    end=st.one_of(st.none(), st.integers(0, 45)),
    priority=st.integers(0, 100),
    ttl_s=st.one_of(st.none(), st.just(9.0)),
    kind=st.sampled_from(["system", "conversation", "tool"]),
    explicit=st.booleans(),
)


def brute_force(retention: list[Retain], tokens: int, size: int) -> list[RetentionWish]:
    wishes = [RetentionWish() for _ in range(-(-tokens // size) * size)]
    explicit = 0
    for retain in retention:
        wish = RetentionWish()
        if retain.explicit:
            wish = RetentionWish(retain.priority, retain.ttl_s, explicit)
            explicit += 1
        for token in range(retain.start, min(tokens, retain.end or tokens)):
            wishes[token] = wish
    blocks = [wishes[i : i + size] for i in range(0, len(wishes), size)]
    return [max(block, key=wish_order) for block in blocks]


def wish_order(wish: RetentionWish) -> tuple[int, float]:
    ttl = wish.ttl_s
    return wish.level, (0.0 if wish.level == 35 else inf) if ttl is None else ttl


@settings(max_examples=300, deadline=None)
@given(st.lists(RETAINS, max_size=5), st.integers(1, 45), st.integers(1, 5))
def test_a_block_takes_the_highest_wish_of_its_tokens(
    retention: list[Retain], tokens: int, size: int
) -> None:
    retention = [r for r in retention if r.end != 0]
    expected = [wish_order(wish) for wish in brute_force(retention, tokens, size)]
    found = [wish_order(RetentionWish())] * len(expected)
    for segment in segments(retention, None, tokens, size):
        for block in range(segment.first, len(found) if segment.end is None else segment.end):
            found[block] = wish_order(segment.wish)
    assert found == expected


def test_default_wishes_make_no_segments() -> None:
    assert segments([], None, 100, 16) == []
    assert segments([Retain(0, 50, kind="system"), Retain(50, None)], None, 100, 16) == []


def test_an_explicit_default_overrides_an_earlier_wish() -> None:
    default = Retain(32, 64, 35, explicit=True)
    assert segments([default], None, 100, 16) == [
        RetentionSegment(2, 4, RetentionWish(35, None, 0))
    ]
    promises, keep = RetentionBudget(max_size=10), BlockRetention("t")
    promises.claim(keep, 1, RetentionWish(80), 0.0, directive())
    promises.claim(keep, 1, RetentionWish(THINKING_LEVEL), 1.0)
    assert keep.eviction_rank(1.0).level == 80, "a default revises nothing"
    promises.claim(keep, 1, RetentionWish(35, None, 0), 2.0, directive())
    assert not keep


def test_only_blocks_wholly_inside_thinking_count_as_such() -> None:
    retention = [Retain(0, 20, kind="system"), Retain(20, 50, kind="thinking"), Retain(50, None)]
    first = RetentionWish(THINKING_LEVEL)
    assert segments(retention, None, 70, 16) == [RetentionSegment(2, 3, first)]
    retention.append(Retain(32, 40, 60, explicit=True))
    assert segments(retention, None, 80, 16) == [RetentionSegment(2, 3, RetentionWish(60, None, 0))]


def test_preceding_blocks_are_retained_and_charged() -> None:
    retention = [Retain(0, 32, 50, explicit=True), Retain(48, 80, 90, 60.0, explicit=True)]
    requested = segments([*retention, Retain(80, 96, kind="thinking")], None, 112, 16)
    first, second = RetentionWish(90, 60.0, 0), RetentionWish(90, 60.0, 1)
    assert with_prefix(requested) == [
        RetentionSegment(0, 2, first),
        RetentionSegment(2, 5, second),
        RetentionSegment(5, 6, RetentionWish(THINKING_LEVEL)),
    ]
    low = segments([Retain(32, None, 10, explicit=True)], None, 64, 16)
    assert with_prefix(low) == low
    decode = Retain(0, None, 70, kind="decode", explicit=True)
    assert with_prefix(segments([], decode, 40, 16)) == [
        RetentionSegment(0, None, RetentionWish(70, None, 0))
    ]


def test_generated_tokens_have_their_own_wish() -> None:
    decode = Retain(0, None, 70, 60.0, kind="decode", explicit=True)
    prompt = [Retain(0, 32, 90, explicit=True)]
    assert segments(prompt, decode, 40, 16) == [
        RetentionSegment(0, 2, RetentionWish(90, None, 0)),
        RetentionSegment(2, None, RetentionWish(70, 60.0, 1)),
    ]
    assert [d.priority for d in directives([*prompt, decode], "t")] == [90, 70]


def test_defaults_can_be_changed() -> None:
    table = parse_defaults(["tool=20", "system=60/300", "thinking=35"])
    assert table == {
        "thinking": RetentionWish(),
        "tool": RetentionWish(20),
        "system": RetentionWish(60, 300.0),
    }
    found = segments([Retain(0, 64, kind="tool")], None, 64, 16, table)
    assert found == [RetentionSegment(0, 4, RetentionWish(20))]
    assert parse_defaults([]) == dict(DEFAULTS)


@pytest.mark.parametrize("text", ["tool", "tool=", "tool=101", "tool=x", "pet=3", "tool=3/-1"])
def test_a_malformed_default_is_named(text: str) -> None:
    with pytest.raises(RetentionError, match="KIND=PRIORITY") as caught:
        parse_defaults([text])
    assert caught.value.text == text


def test_a_retained_prefix_ends_with_the_last_range_that_fits() -> None:
    system = Retain(0, 100, kind="system")
    kept, longer = Retain(0, 300, 60, explicit=True), Retain(300, 900, 60, explicit=True)
    low = Retain(300, 500, 10, explicit=True)
    assert retained_end([system], 800) == 0
    assert retained_end([system], 800, {"system": RetentionWish(60)}) == 100
    assert retained_end([system, kept, low, longer], 800) == 300
    assert retained_end([kept, longer], 900) == 900
    assert retained_end([Retain(0, None, 60, explicit=True)], 900) == 0
