"""Merged log stream of `kvmesh up`; each line is prefixed with its process's name."""

import json
import logging
import re
import time
from collections.abc import Callable

from kvmesh.cli.supervisor.plan import ProcessSpec

COLOURS = {
    "frontend": 36,
    "router": 35,
    "indexer": 34,
    "kvbm": 31,
    "worker": 32,
    "planner": 95,
    "dashboard": 96,
    "nats": 33,
    "up": 1,
}
NATS_LINE = re.compile(r"^\[\d+\] \S+ (\d\d:\d\d:\d\d\.\d{3})\d* \[(\w)\w+\] ?(.*)$")
ERROR_LINE = re.compile(r"^\d\d:\d\d:\d\d\.\d{3} E \S+  (.+)$")
OWN = ProcessSpec("up", "up", (), {})


class LogForwarder(logging.Handler):
    """Forwards warnings and errors of the supervisor's own loggers to the log stream."""

    def __init__(self, stream: "LogStream") -> None:
        super().__init__(logging.WARNING)
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        self._stream.note(record.getMessage(), record.levelname[0])


def clean(spec: ProcessSpec, text: str) -> str | None:
    """A process's line without its name; None for routine lines of the NATS server."""
    if spec.role != "nats":
        return text.replace(f" {spec.name}  ", " ", 1)
    match = NATS_LINE.match(text)
    if match is None:
        return text
    # the plain-text token is in a file that only its user can read
    routine = match[2] in "ID" or match[3].startswith("Plaintext passwords detected")
    return None if routine else f"{match[1]} {match[2]} {match[3]}"


def logged_error(text: str) -> str:
    """The message of a service's line that logs an error; empty for other lines."""
    if match := ERROR_LINE.match(text):
        return match[1]
    if not text.startswith("{"):
        return ""
    try:
        line = json.loads(text)
    except ValueError:
        return ""
    return str(line.get("message", "")) if line.get("level") == "error" else ""


class LogStream:
    """Formats lines for `emit`, as prefixed text or one JSON object each.

    `on_line` is called with the process of each line of output.
    """

    def __init__(
        self, emit: Callable[[str], None], width: int, json_lines: bool, colour: bool
    ) -> None:
        self.emit = emit
        self._width = width
        self._json = json_lines
        self._colour = colour
        self.on_line: Callable[[ProcessSpec], None] = lambda _: None

    def line(self, spec: ProcessSpec, text: str) -> None:
        """Emit a line of a process's output."""
        self.on_line(spec)
        cleaned = clean(spec, text)
        if cleaned is not None:
            self.emit(self._format(spec, cleaned))

    def note(self, text: str, level: str = "I") -> None:
        """Emit a line of the supervisor's own."""
        if not self._json:
            text = f"{time.strftime('%H:%M:%S')}.{int(time.time() % 1 * 1000):03} {level} {text}"
        self.emit(self._format(OWN, text))

    def announce(self, text: str) -> None:
        """Emit several lines without prefix, for the user to copy from."""
        self.emit(json.dumps({"service": "up", "message": text}) if self._json else text)

    def _format(self, spec: ProcessSpec, text: str) -> str:
        if self._json and text.startswith("{"):
            return text
        if self._json:
            return json.dumps({"time": time.time(), "service": spec.name, "message": text})
        prefix = f"{spec.name:<{self._width}} |"
        return (
            f"\x1b[{COLOURS[spec.role]}m{prefix}\x1b[0m {text}"
            if self._colour
            else (f"{prefix} {text}")
        )
