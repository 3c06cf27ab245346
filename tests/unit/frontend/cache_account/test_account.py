"""Accounts of prompts: each token is in one class, and each loss has the cause that came first."""

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.bus.messages import (
    LOSS_REASONS,
    CacheAccount,
    CacheLoss,
    ComputedAhead,
    Elsewhere,
    PossibleHits,
    Removal,
)
from kvmesh.frontend import metrics
from kvmesh.frontend.cache_account.account import cache_account, lost_by_reason
from kvmesh.frontend.cache_account.comparison import PromptComparison
from kvmesh.frontend.generation.accounts import count_tokens

SIZE = 16


def earlier(
    common: int, length: int, *, same_salt: bool = True, done: bool = True
) -> PromptComparison:
    return PromptComparison(
        request="before",
        time=100.0,
        common=common,
        length=length,
        computed=min(common, length - 1),
        same_salt=same_salt,
        done=done,
    )


def reasons(account: CacheAccount) -> list[tuple[int, int, str]]:
    return [(loss.first, loss.tokens, loss.reason) for loss in account.losses]


def test_a_first_prompt_is_new_but_for_what_others_have_computed() -> None:
    account = cache_account(100, SIZE, 32, PossibleHits(chosen=2))
    assert (account.shared, account.new, account.possible) == (32, 68, 32)
    assert account.losses == []


def test_the_tokens_of_the_sessions_last_prompt_are_its_own() -> None:
    account = cache_account(100, SIZE, 64, PossibleHits(chosen=4), earlier(70, 70))
    assert (account.own, account.shared, account.new) == (64, 0, 36)
    assert account.previous == "before"


def test_a_prompt_that_an_engine_holds_whole_computes_its_last_block() -> None:
    account = cache_account(64, SIZE, 48, PossibleHits(chosen=4))
    assert (account.losses, account.new, account.possible) == ([], 16, 48)


def test_removed_blocks_are_lost_for_the_reason_of_their_removal() -> None:
    removals = [
        Removal(1, 2, "w", 0, 5.0, "evicted", "other"),
        Removal(3, 1, "v", 1, 6.0, "superseded"),
    ]
    account = cache_account(100, SIZE, 16, PossibleHits(chosen=1, removals=removals))
    assert account.losses == [
        CacheLoss(
            first=16, tokens=32, reason="evicted", worker="w", tier=0, time=5.0, request="other"
        ),
        CacheLoss(first=48, tokens=16, reason="superseded", worker="v", tier=1, time=6.0),
    ]
    assert (account.new, account.possible) == (36, 64)


def test_what_another_rank_holds_is_lost_to_the_placement() -> None:
    other = Elsewhere(instance="w-1-abcd", rank=0, blocks=4, reason="room")
    account = cache_account(100, SIZE, 16, PossibleHits(chosen=1, elsewhere=other))
    assert reasons(account) == [(16, 48, "elsewhere:room")]
    assert account.losses[0].worker == "w-1"


def test_what_the_chosen_rank_was_to_have_is_not_found() -> None:
    assert reasons(cache_account(100, SIZE, 16, PossibleHits(chosen=3))) == [(16, 32, "not_found")]


def test_what_a_running_request_computes_is_unfinished() -> None:
    account = cache_account(100, SIZE, 0, PossibleHits(running=2))
    assert reasons(account) == [(0, 32, "unfinished")]


def test_blocks_of_the_session_that_the_index_does_not_know() -> None:
    session = earlier(48, 48)
    known_since = PossibleHits(since=50.0)
    account = cache_account(100, SIZE, 16, known_since, session)
    assert reasons(account) == [(16, 16, "never_announced")]
    assert reasons(cache_account(100, SIZE, 16, PossibleHits(since=150.0), session)) == [
        (16, 16, "forgotten")
    ]
    assert reasons(cache_account(100, SIZE, 16, None, session)) == [(16, 16, "unknown")]
    running = earlier(48, 48, done=False)
    assert reasons(cache_account(100, SIZE, 16, known_since, running)) == [(16, 16, "unfinished")]


def test_a_changed_prompt_loses_what_the_earlier_one_had_after_the_change() -> None:
    account = cache_account(200, SIZE, 32, PossibleHits(chosen=2), earlier(40, 150))
    assert reasons(account) == [(40, 110, "diverged")]
    assert (account.own, account.new, account.possible) == (32, 58, 32)


def test_a_shorter_prompt_loses_no_more_than_it_has() -> None:
    account = cache_account(100, SIZE, 32, PossibleHits(chosen=2), earlier(40, 900))
    assert reasons(account) == [(40, 60, "diverged")]


def test_another_salt_is_another_namespace() -> None:
    session = earlier(96, 96, same_salt=False)
    account = cache_account(100, SIZE, 0, PossibleHits(), session)
    assert reasons(account) == [(0, 80, "other_namespace")]
    assert (account.own, account.possible, account.new) == (0, 0, 20)


def test_tokens_computed_ahead_are_neither_the_sessions_own_nor_others() -> None:
    ahead = ComputedAhead(prefetch="p", after="before", first=48, tokens=32, used=32)
    account = cache_account(100, SIZE, 80, PossibleHits(chosen=5), earlier(49, 49), ahead)
    assert (account.own, account.ahead, account.shared) == (48, 32, 0)


BLOCKS = st.integers(0, 12)
REMOVALS = st.lists(
    st.builds(
        Removal,
        BLOCKS,
        st.integers(1, 4),
        st.sampled_from("ab"),
        st.integers(0, 3),
        st.floats(0, 9),
        st.sampled_from(["evicted", "expired"]),
    ),
    max_size=4,
)
POSSIBLE = st.builds(
    PossibleHits,
    chosen=BLOCKS,
    running=BLOCKS,
    elsewhere=st.none()
    | st.builds(
        Elsewhere,
        instance=st.just("w-1"),
        rank=st.just(0),
        blocks=BLOCKS,
        reason=st.sampled_from(["load", "room"]),
    ),
    removals=REMOVALS,
    since=st.sampled_from([0.0, 200.0]),
)


@given(
    prompt=st.integers(1, 220),
    cached=st.integers(0, 240),
    possible=st.none() | POSSIBLE,
    shared=st.integers(0, 230),
    more=st.integers(0, 100),
    compares=st.booleans(),
    same_salt=st.booleans(),
    done=st.booleans(),
    used=st.integers(0, 60),
)
def test_every_token_is_in_exactly_one_class(
    prompt: int,
    cached: int,
    possible: PossibleHits | None,
    shared: int,
    more: int,
    compares: bool,
    same_salt: bool,
    done: bool,
    used: int,
) -> None:
    common = min(shared, prompt)
    before = earlier(common, common + more + 1, same_salt=same_salt, done=done)
    ahead = ComputedAhead(prefetch="p", after="before", first=0, tokens=60, used=used)
    account = cache_account(
        prompt, SIZE, cached, possible, before if compares else None, ahead if used else None
    )
    assert account.reused == min(cached, prompt)
    assert account.reused + account.lost + account.new == prompt
    assert min(account.own, account.ahead, account.shared, account.new) >= 0
    assert account.reused <= account.possible <= prompt
    at = account.reused
    for loss in account.losses:
        assert loss.tokens > 0
        assert at <= loss.first
        at = loss.first + loss.tokens
    assert at <= prompt
    assert sum(lost_by_reason(account.losses).values()) == account.lost


def test_an_index_without_a_record_of_removals_does_not_blame_the_events() -> None:
    session = earlier(70, 70)
    older = PossibleHits()  # of an older indexer, or one with `removed_blocks` 0
    assert reasons(cache_account(100, SIZE, 16, older, session)) == [(16, 48, "forgotten")]


def test_metrics_have_no_reasons_but_the_known_ones() -> None:
    account = CacheAccount(
        prompt_tokens=8,
        losses=[
            CacheLoss(first=0, tokens=2, reason="evicted"),
            CacheLoss(first=2, tokens=2, reason="\x1b[31m1"),
            CacheLoss(first=4, tokens=4, reason="elsewhere:2"),
        ],
    )
    count_tokens(metrics.FrontendModelMetrics("of-unknown-reasons"), account)
    (family,) = metrics.prompt_cache_tokens.collect()
    counted = {
        sample.labels["reason"]: sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
        and sample.labels["model"] == "of-unknown-reasons"
        and sample.labels["class"] == "lost"
    }
    assert counted == dict.fromkeys(LOSS_REASONS, 0.0) | {"evicted": 2.0, "other": 6.0}
