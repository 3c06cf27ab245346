"""What processes notice about what they believe: pure rules, each with its hysteresis."""

import logging
from typing import Any

import pytest

from kvmesh.bus.messages import Load
from kvmesh.frontend.generation.cache_expectations import MIN_REQUESTS, CacheExpectations
from kvmesh.runtime.warnings import MAX_SHOWN, Streak, Warnings
from kvmesh.worker.health.event_silence import SILENT_BLOCKS, SILENT_REQUESTS, EventSilence

SIZE = 16


def load(instance: str = "w-1", **fields: Any) -> Load:
    zeros = dict.fromkeys(Load.__struct_fields__, 0) | {"step_s": 0.0, "busy_s": 0.0}
    return Load(**{**zeros, "instance": instance, **fields})


def test_a_streak_holds_from_so_many_looks_until_so_many() -> None:
    streak = Streak(3, 2)
    seen = [True, True, False, True, True, True, False, True, False, False, True]
    assert [streak.observe(s) for s in seen] == [False] * 5 + [True] * 4 + [False] * 2


def test_a_warning_is_logged_when_it_begins_and_when_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warnings = Warnings()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            warnings.update("odd", {"a": "a is odd"})
        warnings.update("odd", {"b": "b is odd"})
    assert warnings.texts == ["b is odd"]
    assert caplog.messages == ["a is odd", "b is odd", "no longer: a is odd"]


def test_of_many_warnings_only_the_first_are_shown() -> None:
    warnings = Warnings()
    warnings.update("odd", {str(n): f"{n} is odd" for n in range(MAX_SHOWN + 5)})
    assert len(warnings.texts) == MAX_SHOWN + 1
    assert warnings.texts[-1] == "and 5 more warnings: see the log"


def computed(requests: int, blocks: int, aborted: int = 0) -> Load:
    tokens = (blocks + requests + aborted) * SIZE
    return load(requests=requests, computed_tokens=tokens, aborted=aborted)


def test_an_engine_that_computes_without_an_event_is_silent_until_the_next_one() -> None:
    silence = EventSilence("worker-0", SIZE)
    assert silence.check([computed(0, 0)], {}) == {}
    assert silence.check([computed(SILENT_REQUESTS, SILENT_BLOCKS - 1)], {}) == {}
    assert silence.check([computed(SILENT_REQUESTS - 1, SILENT_BLOCKS)], {}) == {}
    found = silence.check([computed(SILENT_REQUESTS, SILENT_BLOCKS)], {0: 0})
    assert list(found) == ["0"]
    assert "worker-0 rank 0 computes prompts and publishes no KV events" in found["0"]
    assert silence.check([computed(SILENT_REQUESTS, SILENT_BLOCKS)], {0: 1}) == {}
    assert silence.check([computed(2 * SILENT_REQUESTS, 2 * SILENT_BLOCKS - 1)], {0: 1}) == {}
    assert silence.check([computed(2 * SILENT_REQUESTS, 2 * SILENT_BLOCKS)], {0: 1})


def test_an_engine_without_events_is_silent_however_many_requests_are_aborted() -> None:
    silence = EventSilence("worker-0", SIZE)
    looks = [
        computed(n, n * SILENT_BLOCKS // SILENT_REQUESTS, aborted=n)
        for n in range(SILENT_REQUESTS + 1)
    ]
    found = [bool(silence.check([at], {})) for at in looks]
    assert found == [False] * SILENT_REQUESTS + [True]


def test_what_comes_from_the_cache_waits_or_is_aborted_early_is_not_computed() -> None:
    silence = EventSilence("worker-0", SIZE)
    silence.check([computed(0, 0)], {})
    many = 10 * SILENT_BLOCKS * SIZE
    cases: list[dict[str, Any]] = [
        {"cached_tokens": many},
        {"prefill_tokens": many},
        {"aborted": SILENT_REQUESTS},
    ]
    for fields in cases:
        assert (
            silence.check([load(requests=SILENT_REQUESTS, prompt_tokens=many, **fields)], {}) == {}
        )


def test_aborted_prompts_shorter_than_a_block_are_no_blocks() -> None:
    silence = EventSilence("worker-0", SIZE)
    silence.check([computed(0, 0)], {})
    short = (10 * SILENT_BLOCKS + SILENT_REQUESTS) * (SIZE - 1)
    told = load(requests=SILENT_REQUESTS, aborted=10 * SILENT_BLOCKS, computed_tokens=short)
    assert silence.check([told], {}) == {}


def test_a_worker_that_finds_less_than_half_of_what_is_expected_is_named() -> None:
    expectations = CacheExpectations()
    for _ in range(MIN_REQUESTS - 1):
        expectations.add("worker-0-ab", 1000, 100)
        expectations.add("worker-1-cd", 1000, 990)
        expectations.add("worker-2-ef", 0, 0)
    assert expectations.wrong() == {}
    expectations.add("worker-0-ab", 1000, 100)
    expectations.add("worker-1-cd", 1000, 5000)
    found = expectations.wrong()
    assert list(found) == ["worker-0-ab"]
    assert found["worker-0-ab"].startswith("worker-0 finds less than half of the cached tokens")
    for _ in range(100):
        expectations.add("worker-0-ab", 1000, 1000)
    assert expectations.wrong() == {}


def test_a_worker_that_has_gone_is_named_no_more() -> None:
    expectations = CacheExpectations()
    for _ in range(MIN_REQUESTS):
        expectations.add("worker-0-ab", 1000, 0)
    expectations.retain({"worker-0-ab"})
    assert expectations.wrong()
    expectations.retain({"worker-0-cd"})
    assert expectations.wrong() == {}
