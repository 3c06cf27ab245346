"""Phases of vLLM's start: what its processes tell the worker."""

import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.wait import eventually

from kvmesh.bus.messages import StartPhase
from kvmesh.worker.engines.vllm.start_phases import enter, log_records, record
from kvmesh.worker.engines.vllm.start_phases.listener import (
    ToldError,
    imports_follow,
    start_phases_told,
)
from kvmesh.worker.engines.vllm.start_phases.sender import SOCKET_VARIABLE, PhaseReport
from kvmesh.worker.start.timeline import StartTimeline


def test_nothing_is_sent_unless_a_worker_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    record(StartPhase.WEIGHTS, time.time() - 1, time.time())
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "gone"))
    enter(StartPhase.WEIGHTS)
    assert SOCKET_VARIABLE not in os.environ, "it tries only once"


def test_unix_times_become_times_of_the_monotonic_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(path := str(tmp_path / "socket"))
        monkeypatch.setenv(SOCKET_VARIABLE, path)
        record(StartPhase.WEIGHTS, time.time() - 5, time.time() - 2)
        report = msgspec.msgpack.decode(channel.recv(1024), type=PhaseReport)
    assert (report.pid, report.phase, report.outer) == (os.getpid(), "weights", False)
    assert report.began == pytest.approx(time.monotonic() - 5, abs=0.5)
    assert report.ended == pytest.approx(time.monotonic() - 2, abs=0.5)


def told(messages: list[tuple[str, float]]) -> list[tuple[str, float, float, bool]]:
    """Phase, beginning, end and `outer` of what is recorded for these log records."""
    found: list[tuple[str, float, float, bool]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_records, "enter", lambda name: None)
        patch.setattr(
            log_records,
            "record",
            lambda name, began, ended, outer=False: found.append((str(name), began, ended, outer)),
        )
        phases = log_records.PhasesOfRecords()
        for text, created in messages:
            phases.take(text, created)
    return found


def test_the_log_of_a_worker_on_the_cpu() -> None:
    assert told(
        [
            ("Starting to load model tiny...", 10.0),
            ("Initializing model took 0.500000 seconds", 10.5),
            ("Loading weights took 2.00 seconds", 13.0),
            ("Warming up model for the compilation...", 14.0),
            ("[backbone] saved AOT compiled function to /root/model", 24.0),
            ("[backbone] Initial profiling/warmup run took 1.00 s", 26.0),
            ("Warming up done.", 27.0),
        ]
    ) == [
        ("weights", 11.0, 13.0, False),
        ("post-processing", 13.0, 14.0, False),
        ("compile", 14.0, 24.0, False),
        ("compile", 24.0, 25.0, False),
        ("warm-up", 25.0, 26.0, False),
        ("warm-up", 26.0, 27.0, False),
    ]


def test_the_log_of_a_worker_on_the_cpu_that_compiles_nothing_ahead_of_time() -> None:
    assert told(
        [
            ("Loading weights took 2.00 seconds", 13.0),
            ("Warming up model for the compilation...", 14.0),
            ("Warming up done.", 27.0),
        ]
    ) == [
        ("weights", 11.0, 13.0, False),
        ("post-processing", 13.0, 14.0, False),
        ("compile", 14.0, 27.0, False),
    ]


def test_the_log_of_a_worker_on_a_gpu() -> None:
    assert told(
        [
            ("Loading weights took 2.00 seconds", 13.0),
            ("Model loading took 3.25 GiB memory and 6.000000 seconds", 15.0),
            (
                "torch.compile and initial profiling/warmup run together took 4.00 s in total",
                20.0,
            ),
            ("Directly load AOT compilation from path /root/model", 20.0),
            ("Initial profiling/warmup run took 1.00 s", 22.0),
            ("Graph capturing finished in 6 secs, took 0.50 GiB", 30.0),
        ]
    ) == [
        ("weights", 11.0, 13.0, False),
        ("post-processing", 13.0, 15.0, False),
        ("compile", 16.0, 20.0, False),
        ("warm-up", 21.0, 22.0, False),
        ("warm-up", 24.0, 30.0, False),
    ]


def test_the_log_of_the_engine_core() -> None:
    assert told(
        [
            ("GPU KV cache size: 1,024 tokens, Maximum concurrency for 1,024 tokens: 1.00x", 20.0),
            ("init engine (profile, create kv cache, warmup model) took 9.00 s", 21.0),
        ]
    ) == [("KV allocation", 20.0, 21.0, True), ("warm-up", 12.0, 21.0, True)]


def test_other_words_tell_nothing() -> None:
    assert told([("Weights came in 2.00 seconds", 1.0), ("init engine took a while", 2.0)]) == []


@pytest.fixture
def factory() -> Iterator[None]:
    before = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(before)


async def test_log_records_of_vllm_reach_the_worker(
    tmp_path: Path, factory: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_records, "_installed", False)
    log_records.observe_records()
    timeline = StartTimeline(created=time.monotonic() - 10)
    caplog.set_level(logging.INFO)
    async with start_phases_told(tmp_path, timeline):
        logging.getLogger("other").info("Loading weights took %.2f seconds", 0.2)
        logging.getLogger("vllm.loader").info("Starting to load model %s...", "tiny")
        await eventually(lambda: (timeline.present() or ("",))[0] == "weights")
        logging.getLogger("vllm.loader").info("Loading weights took %.2f seconds", 0.2)
        await eventually(lambda: timeline.row())
    assert [(p.name, p.seconds) for p in timeline.row()] == [("weights", 0.2)]
    assert timeline.present() is None
    assert SOCKET_VARIABLE not in os.environ
    assert "vLLM told no times of: imports, warm-up" in caplog.text


async def test_the_log_goes_on_if_its_records_cannot_be_read(
    tmp_path: Path, factory: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_records, "_installed", False)
    monkeypatch.setattr(log_records, "_PATTERNS", [()])
    log_records.observe_records()
    caplog.set_level(logging.INFO)
    async with start_phases_told(tmp_path, StartTimeline()):
        logging.getLogger("vllm").info("one")
        logging.getLogger("vllm").info("two")
    found = [r.getMessage() for r in caplog.records if "phases" in r.msg or r.name == "vllm"]
    assert found[0].startswith("cannot tell the phases of vLLM's start: ValueError")
    assert found[1:] == ["one", "two"]


async def test_a_start_fails_with_the_first_error_that_a_process_logs(
    tmp_path: Path, factory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_records, "_installed", False)
    log_records.observe_records()

    def fails(text: str, message: str) -> None:
        try:
            raise RuntimeError(text)
        except RuntimeError:
            logging.getLogger("vllm.v1").exception(message)

    async def start(*logged: tuple[str, str]) -> None:
        async with start_phases_told(tmp_path, StartTimeline()):
            for text, message in logged:
                fails(text, message)
            raise RuntimeError("see the root cause above")

    harmless = "harmless", "an optional part is missing"
    root = "no weights\n  in that folder", "WorkerProc failed to start."
    with pytest.raises(ToldError, match=r"^RuntimeError: no weights in that folder$") as told:
        await start(harmless, root, ("a process has failed", "EngineCore failed to start."))
    assert str(told.value.__cause__) == "see the root cause above"
    with pytest.raises(RuntimeError, match="root cause above"):
        await start(harmless)


async def test_processes_import_until_they_tell_another_phase(tmp_path: Path) -> None:
    timeline = StartTimeline(created=time.monotonic() - 10)

    def present() -> str:
        return (timeline.present() or ("",))[0]

    async with start_phases_told(tmp_path, timeline):
        imports_follow(timeline)
        assert present() == "imports"
        report = PhaseReport(pid=1, phase="imports", began=time.monotonic(), ended=time.monotonic())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(msgspec.msgpack.encode(report), os.environ[SOCKET_VARIABLE])
        await eventually(timeline.row)
        assert present() == "imports", "of the next process"
        enter(StartPhase.WEIGHTS)
        await eventually(lambda: present() == "weights")
    assert timeline.present() is None


async def test_malformed_and_absurd_datagrams_are_ignored(tmp_path: Path) -> None:
    timeline = StartTimeline(created=time.monotonic() - 10)
    async with start_phases_told(tmp_path, timeline):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            for data in (b"", b"\xff" * 4096, msgspec.msgpack.encode(["x"] * 5)):
                channel.sendto(data, os.environ[SOCKET_VARIABLE])
        record("tea", time.time() - 1, time.time())
        record(StartPhase.WEIGHTS, time.time() + 50, time.time() + 60)
        record(StartPhase.IMPORTS, time.time() - 1, time.time())  # of the worker itself
        record(StartPhase.WARM_UP, time.time() - 2, time.time() + 60)
    (phase,) = timeline.row()
    assert phase.name == "warm-up"
    assert phase.seconds == pytest.approx(2.0, abs=0.5)


async def test_a_folder_without_room_for_a_socket_costs_the_phases_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    async with start_phases_told(folder, StartTimeline()):
        assert SOCKET_VARIABLE not in os.environ
    assert "cannot tell the phases of their start" in caplog.text
