"""The log stream of `kvmesh up`."""

import json

import pytest

from kvmesh.cli.supervisor.console import LogStream, logged_error
from kvmesh.cli.supervisor.plan import ProcessSpec

WORKER = ProcessSpec("worker-0", "worker", (), {})
NATS = ProcessSpec("nats", "nats", (), {})


def stream(lines: list[str], json_lines: bool = False, colour: bool = False) -> LogStream:
    return LogStream(lines.append, 8, json_lines, colour)


@pytest.mark.parametrize(
    ("spec", "text", "shown"),
    [
        (WORKER, "12:00:00.000 I worker-0  hello", ["worker-0 | 12:00:00.000 I hello"]),
        (
            WORKER,
            "Traceback (most recent call last):",
            ["worker-0 | Traceback (most recent call last):"],
        ),
        (NATS, "[7] 2026/11/21 12:00:00.123456 [INF] Server is ready", []),
        (NATS, "[7] 2026/11/21 12:00:00.123456 [INF]", []),
        (NATS, "[7] 2026/11/21 12:00:00.123456 [WRN] slow", ["nats     | 12:00:00.123 W slow"]),
        (NATS, "nats-server: bad option", ["nats     | nats-server: bad option"]),
    ],
)
def test_a_line_is_prefixed_and_has_its_name_once(
    spec: ProcessSpec, text: str, shown: list[str]
) -> None:
    lines: list[str] = []
    stream(lines).line(spec, text)
    assert lines == shown


def test_colour_marks_the_process_only() -> None:
    lines: list[str] = []
    stream(lines, colour=True).line(WORKER, "x")
    assert lines == ["\x1b[32mworker-0 |\x1b[0m x"]


def test_as_json_every_line_is_an_object() -> None:
    lines: list[str] = []
    log = stream(lines, json_lines=True)
    log.line(WORKER, '{"service": "worker-0", "message": "hello"}')
    log.line(WORKER, "Traceback")
    log.note("ready")
    log.announce("two\nlines")
    parsed = [json.loads(line) for line in lines]
    assert [(line["service"], line["message"]) for line in parsed] == [
        ("worker-0", "hello"),
        ("worker-0", "Traceback"),
        ("up", "ready"),
        ("up", "two\nlines"),
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "12:00:00.000 E worker-0  vLLM failed to start: no memory",
            "vLLM failed to start: no memory",
        ),
        ("12:00:00.000 W worker-0  slow", ""),
        ("ERROR 11-30 12:00:00 [core.py:1] EngineCore failed to start.", ""),
        ('{"time": 1.0, "level": "error", "service": "worker-0", "message": "gone"}', "gone"),
        ('{"time": 1.0, "level": "info", "service": "worker-0", "message": "here"}', ""),
        ('{"message"', ""),
        ("{}", ""),
    ],
)
def test_errors_are_told_from_other_lines(text: str, error: str) -> None:
    assert logged_error(text) == error
