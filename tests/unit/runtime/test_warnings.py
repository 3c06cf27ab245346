"""Warnings and their hysteresis."""

import logging

import pytest
from prometheus_client import REGISTRY

from kvmesh.runtime.warnings import MAX_SHOWN, Streak, Warnings


def test_a_streak_starts_and_ends_after_consecutive_observations() -> None:
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


def test_the_metric_of_a_kind_exists_before_its_first_warning() -> None:
    def value(kind: str) -> float | None:
        return REGISTRY.get_sample_value("kvmesh_warnings", {"kind": kind})

    warnings = Warnings()
    assert value("rare") is None
    warnings.update("rare", {})
    assert value("rare") == 0
    warnings.update("rare", {"a": "a is rare"})
    assert value("rare") == 1
    warnings.update("rare", {})
    assert value("rare") == 0


def test_only_the_first_of_many_warnings_are_shown() -> None:
    warnings = Warnings()
    warnings.update("odd", {str(n): f"{n} is odd" for n in range(MAX_SHOWN + 5)})
    assert len(warnings.texts) == MAX_SHOWN + 1
    assert warnings.texts[-1] == "and 5 more warnings: see the log"
