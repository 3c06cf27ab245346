"""The window of active agents follows the tokens that agents lose."""

from math import inf

import pytest

from kvmesh.router.policies.agent_window import (
    BACK_OFF_S,
    FADE_S,
    FIRST,
    LEAST,
    PATIENCE,
    REVIEW_S,
    WIDEST,
    WORTH,
    AgentWindow,
)


def observe(window: AgentWindow, lost: int, now: float, turns: int = 10) -> None:
    for _ in range(turns):
        window.observe(1000, lost, now)


def follow(
    window: AgentWindow, lost: int, since: float, until: float, resting: bool = True
) -> float:
    """Review until a time, while each review sees ten turns."""
    now = since
    while now < until:
        observe(window, lost, now)
        window.review(resting, 0.0, now)
        now += REVIEW_S
    return now


def test_a_window_is_open_until_agents_lose_their_contexts() -> None:
    window = AgentWindow()
    follow(window, 50, 0.0, 100.0)
    assert window.open
    observe(window, 400, 100.0, 50)
    window.review(False, 0.0, 100.0)
    assert window.share == FIRST


@pytest.mark.parametrize("share", [0.5, 0.9, 1.1, 2.0])
def test_it_stays_open_where_lost_tokens_take_little_of_the_ranks_time(share: float) -> None:
    window = AgentWindow()
    observe(window, 400, 0.0, 50)
    lost_per_s = 50 * 400 / FADE_S
    window.review(False, lost_per_s / (share * WORTH), 0.0)
    assert window.open is (share < 1.0)


def test_it_narrows_to_a_least_share_while_they_lose() -> None:
    window = AgentWindow()
    follow(window, 400, 0.0, 6 * REVIEW_S)
    assert window.share == LEAST


def test_it_widens_and_opens_while_nothing_is_lost_and_agents_rest() -> None:
    window = AgentWindow()
    now = follow(window, 400, 0.0, REVIEW_S)
    now = follow(window, 0, now, now + 600.0, resting=False)
    assert window.share <= FIRST, "nobody rests: the share does not matter"
    now = follow(window, 0, now, now + 200.0)
    assert FIRST < window.share < WIDEST
    follow(window, 0, now, now + 3000.0)
    assert window.share == inf


def test_contexts_are_worth_keeping_if_pauses_are_short() -> None:
    window = AgentWindow()
    pays = [window.pays]
    for pause_s in (2.0, 60.0, 60.0, 60.0):
        window.observe_pause(1000, pause_s, 10.0, 0.0)
        pays.append(window.pays)
    assert pays == [False, True, False, False, False]


def test_few_turns_do_not_change_it() -> None:
    window = AgentWindow()
    observe(window, 1000, 0.0, 3)
    window.review(True, 0.0, 0.0)
    assert window.open


def test_old_turns_fade() -> None:
    window = AgentWindow()
    observe(window, 1000, 0.0, 50)
    window.review(True, 0.0, 1000.0)
    assert window.open


def test_it_is_given_up_for_longer_and_longer_where_rests_do_not_help() -> None:
    window = AgentWindow()
    now, given_up = 0.0, list[float]()
    while len(given_up) < 2 and now < 10_000.0:
        was_open = window.open
        now = follow(window, 900, now, now + REVIEW_S)
        if window.open and not was_open:
            given_up.append(now)
            assert now > PATIENCE * REVIEW_S
    assert given_up[1] - given_up[0] > BACK_OFF_S
    assert window.open
    follow(window, 900, now, now + 1.9 * BACK_OFF_S)
    assert window.open
    follow(window, 900, now + 1.9 * BACK_OFF_S, now + 2.1 * BACK_OFF_S)
    assert not window.open


def test_lost_tokens_are_bounded_by_the_prompt() -> None:
    window = AgentWindow()
    window.observe(10, 1_000_000, 0.0)
    window.observe(0, -5, 0.0)
    assert 0.0 <= window.lost_share <= 1.0
