"""One log line for each cause and interval, with a count of the failures that it stands for."""

from collections.abc import Callable

from kvmesh.frontend.failure_log import INTERVAL_S, RequestFailures


def test_failures_of_one_cause_are_counted() -> None:
    lines: list[str] = []
    timers: list[Callable[[], None]] = []

    def later(seconds: float, function: Callable[[], None]) -> None:
        assert seconds == INTERVAL_S
        timers.append(function)

    failures = RequestFailures(lines.append)
    for number in range(4):
        failures.failed("overloaded", f"r{number}", "busy", later)
    failures.failed("internal", "r9", "bug", later)
    assert lines == ["request r0 failed: busy", "request r9 failed: bug"]
    timers.pop(0)()
    assert lines[2:] == ["3 more requests failed within 10 s, last r3: busy"]
    failures.failed("overloaded", "r4", "busy", later)
    timers.pop()()
    assert lines[3:] == ["1 more request failed within 10 s, last r4: busy"]
    while timers:
        timers.pop()()
    failures.failed("overloaded", "r5", "busy", later)
    assert lines[4:] == ["request r5 failed: busy"]
