"""Phases of vLLM's start: what its processes tell the worker."""

import os
import socket
import time
from pathlib import Path

import msgspec
import pytest

from kvmesh.bus.messages import StartPhase
from kvmesh.worker.engines.vllm.start_phases import enter, record
from kvmesh.worker.engines.vllm.start_phases.sender import SOCKET_VARIABLE, PhaseReport


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
