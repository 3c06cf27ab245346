"""Restart delays and states of a supervised process."""

import pytest

from kvmesh.cli.supervisor.restart_policy import ProcessRecord, ProcessState, RestartPolicy


def crash(record: ProcessRecord, now: float, lived: float) -> float | None:
    record.started(now, 42)
    return record.exited(now + lived)


def test_short_runs_double_the_delay_up_to_the_maximum() -> None:
    record = ProcessRecord(RestartPolicy(first_s=0.5, max_s=3.0, stable_s=10.0))
    assert [crash(record, 0.0, 0.1) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert (record.state, record.pid, record.restarts, record.failures) == (
        ProcessState.WAITING,
        None,
        4,
        5,
    )


def test_a_stable_run_resets_the_delay() -> None:
    record = ProcessRecord(RestartPolicy(first_s=0.5, max_s=3.0, stable_s=10.0))
    for _ in range(4):
        crash(record, 0.0, 0.1)
    assert crash(record, 100.0, 10.0) == 0.5
    assert crash(record, 200.0, 9.9) == 1.0


@pytest.mark.parametrize("failures", [1, 10, 10_000])
def test_the_delay_is_bounded(failures: int) -> None:
    assert 0 < RestartPolicy().delay(failures) <= RestartPolicy().max_s


def test_an_exit_after_a_stop_is_final() -> None:
    record = ProcessRecord()
    record.started(0.0, 42)
    record.stopping()
    states = [record.state]
    assert record.exited(1.0) is None
    assert [*states, record.state] == [ProcessState.STOPPING, ProcessState.STOPPED]
    assert record.failures == 0


def test_a_process_that_never_ran_stops_at_once() -> None:
    record = ProcessRecord()
    record.stopping()
    assert record.state is ProcessState.STOPPED
    assert record.restarts == 0


def test_starts_that_fail_are_counted_however_long_each_took() -> None:
    record = ProcessRecord(RestartPolicy(stable_s=10.0))
    for count in (1, 2):
        crash(record, 100.0 * count, 60.0)
        assert (record.failed_starts, record.failures) == (count, 1)
    record.started(300.0, 42)
    record.joined = True
    record.exited(301.0)
    assert record.failed_starts == 0
    crash(record, 400.0, 60.0)
    assert record.failed_starts == 1
