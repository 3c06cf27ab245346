"""Sessions inferred from growing prompts."""

from array import array

import pytest

from kvmesh.frontend.preprocess.session_inference import MAX_TAILS, InferredSessions
from kvmesh.hashing import block_hashes

BLOCK = 4


@pytest.fixture
def sessions() -> InferredSessions:
    return InferredSessions(limit=50)


def observe(
    sessions: InferredSessions, tokens: list[int], salt: int = 0, tenant: str = ""
) -> str | None:
    packed = array("I", tokens).tobytes()
    return sessions.observe(tenant, block_hashes(packed, BLOCK, salt)[1], packed, BLOCK)


def test_a_growing_prompt_stays_in_one_session(sessions: InferredSessions) -> None:
    prompt = list(range(10))
    assert observe(sessions, prompt) is None
    first = observe(sessions, prompt + [50] * 9)
    assert first is not None
    assert observe(sessions, prompt + [50] * 9 + [60] * 30) == first


@pytest.mark.parametrize("shared", [8, 9, 10, 11])
def test_a_common_prefix_is_not_enough(sessions: InferredSessions, shared: int) -> None:
    common = list(range(shared))
    assert observe(sessions, [*common, 100, 101]) is None
    assert observe(sessions, [*common, 200, 201, 202, 203, 204]) is None


def test_conversations_with_a_common_prefix_are_distinct(sessions: InferredSessions) -> None:
    common = list(range(8))
    observe(sessions, [*common, 100])
    observe(sessions, [*common, 200])
    a = observe(sessions, [*common, 100, 7, 7, 7, 7])
    b = observe(sessions, [*common, 200, 7, 7, 7, 7])
    assert a is not None
    assert b is not None
    assert a != b
    assert observe(sessions, [*common, 100, 7, 7, 7, 7, 9]) == a


def test_a_repeated_prompt_starts_a_new_session(sessions: InferredSessions) -> None:
    prompt = list(range(12))
    assert observe(sessions, prompt) is None
    assert observe(sessions, prompt) is None


def test_prompts_with_different_salts_do_not_match(sessions: InferredSessions) -> None:
    prompt = list(range(12))
    observe(sessions, prompt, salt=1)
    assert observe(sessions, [*prompt, 1, 2], salt=2) is None
    assert observe(sessions, [*prompt, 1, 2], salt=1) is not None


def test_prompts_of_different_tenants_do_not_match(sessions: InferredSessions) -> None:
    prompt = list(range(12))
    observe(sessions, prompt, tenant="a")
    assert observe(sessions, [*prompt, 1, 2], tenant="b") is None
    assert observe(sessions, [*prompt, 1, 2], tenant="a") is not None


def test_less_than_a_block_has_no_session(sessions: InferredSessions) -> None:
    assert observe(sessions, [1, 2]) is None
    assert observe(sessions, [1, 2, 3]) is None


def test_memory_is_bounded(sessions: InferredSessions) -> None:
    for start in range(0, 4000, 8):
        observe(sessions, list(range(start, start + 8)))
    for tail in range(MAX_TAILS * 3):
        observe(sessions, [*range(8), tail])
    assert observe(sessions, [*range(8), 0, 1]) is None
    assert observe(sessions, [*range(8), MAX_TAILS * 3 - 1, 1]) is not None
