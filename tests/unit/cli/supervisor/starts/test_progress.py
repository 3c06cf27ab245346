"""Signs of progress of starts, and the text on those that last."""

from kvmesh.bus.messages import Starting
from kvmesh.cli.supervisor.starts.progress import AwaitedStart, StartProgress, describe_starts

CLOCK = 1.8e9
LIMIT = 100.0


def report(phase: str, since: float, instance: str = "worker-0-abc") -> Starting:
    return Starting(
        instance=instance, model="m", engine="vllm", phase=phase, since=since, started=CLOCK
    )


def test_a_phase_is_told_with_its_time_and_that_of_the_start() -> None:
    progress = StartProgress()
    assert progress.on_starting(report("weights", CLOCK + 10), 40.0, CLOCK + 30)
    assert progress.awaited({"worker-0": 10.0, "router-0": 30.0}, 50.0) == [
        AwaitedStart("worker-0", "weights", 30.0, 40.0),
        AwaitedStart("router-0", "", 0.0, 20.0),
    ]


def test_a_phase_of_an_earlier_run_is_forgotten() -> None:
    progress = StartProgress()
    progress.on_starting(report("weights", CLOCK), 40.0, CLOCK)
    assert progress.awaited({"worker-0": 45.0}, 50.0) == [AwaitedStart("worker-0", "", 0.0, 5.0)]


def test_the_same_phase_again_is_no_progress() -> None:
    progress = StartProgress()
    assert progress.on_starting(report("weights", CLOCK), 1.0, CLOCK)
    assert not progress.on_starting(report("weights", CLOCK), 2.0, CLOCK + 1)
    assert progress.on_starting(report("compile", CLOCK + 2), 3.0, CLOCK + 2)


def test_a_start_without_progress_is_told_once_until_it_goes_on() -> None:
    progress, started = StartProgress(), {"worker-0": 0.0}
    progress.sign("worker-0", 50.0)
    assert not progress.stalled(started, LIMIT, 150.0)
    assert [each.name for each in progress.stalled(started, LIMIT, 151.0)] == ["worker-0"]
    assert not progress.stalled(started, LIMIT, 152.0)
    progress.sign("worker-0", 160.0)
    assert progress.stalled(started, LIMIT, 261.0)


def test_a_process_that_gives_no_sign_is_measured_from_its_start() -> None:
    progress = StartProgress()
    assert not progress.stalled({"worker-0": 500.0}, LIMIT, 600.0)
    assert progress.stalled({"worker-0": 500.0}, LIMIT, 601.0)


def test_the_text_names_phases_and_times() -> None:
    starts = [AwaitedStart("worker-0", "weights", 83.4, 130.0), AwaitedStart("router-0", "", 0, 3)]
    text = "worker-0 (weights for 1m23s of 2m10s), router-0 (no report yet, 3s)"
    assert describe_starts(starts) == text
    assert describe_starts([], "JetStream") == "JetStream"
    assert describe_starts([]) == ""


def test_many_starts_are_counted() -> None:
    starts = [AwaitedStart(f"worker-{n}", "imports", 7200, 7300) for n in range(11)]
    assert describe_starts(starts).endswith("worker-7 (imports for 2h00m of 2h01m), 3 more")


def test_a_restarted_process_has_not_joined_by_the_card_of_its_earlier_run() -> None:
    progress = StartProgress()
    assert progress.has_joined("worker-0", 0.0, {"worker-0-old"})
    progress.on_starting(report("weights", CLOCK, "worker-0-new"), 11.0, CLOCK)
    assert not progress.has_joined("worker-0", 10.0, {"worker-0-old"})
    assert progress.has_joined("worker-0", 10.0, {"worker-0-old", "worker-0-new"})
    assert not progress.has_joined("router-0", 0.0, ())
