"""Faults of a connection reach all observers, or the log."""

from collections.abc import Mapping

import pytest

from kvmesh.bus.faults import REFUSED, STALLED, BusFaults


def test_observers_get_the_present_faults_and_each_change() -> None:
    seen: list[tuple[str, dict[str, str]]] = []

    def observe(kind: str, found: Mapping[str, str]) -> None:
        seen.append((kind, dict(found)))

    faults = BusFaults()
    faults.set(REFUSED, "a", "a is refused")
    faults.observe(observe)
    faults.set(REFUSED, "b", "b is refused")
    faults.set(REFUSED, "b", "b is refused")
    faults.set(REFUSED, "a", "")
    faults.set(STALLED, "s", "")
    assert seen == [
        (REFUSED, {"a": "a is refused"}),
        (REFUSED, {"a": "a is refused", "b": "b is refused"}),
        (REFUSED, {"b": "b is refused"}),
    ]
    assert faults.texts(REFUSED) == ["b is refused"]
    faults.ignore(observe)
    faults.ignore(observe)
    faults.set(REFUSED, "b", "")
    assert len(seen) == 3


def test_without_observers_each_new_fault_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    faults = BusFaults()
    faults.set(REFUSED, "a", "a is refused")
    faults.set(REFUSED, "b", "b is refused")
    assert caplog.messages == ["a is refused", "b is refused"]
