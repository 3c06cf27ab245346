"""The one log stream of `kvmesh up`, with the name of its process in front of each line."""

import json
import logging
import re
import time
from collections.abc import Callable

from kvmesh.cli.supervisor.plan import Spec

COLOURS = {
    "frontend": 36,
    "router": 35,
    "indexer": 34,
    "kvbm": 31,
    "worker": 32,
    "nats": 33,
    "up": 1,
}
NATS_LINE = re.compile(r"^\[\d+\] \S+ (\d\d:\d\d:\d\d\.\d{3})\d* \[(\w)\w+\] ?(.*)$")
OWN = Spec("up", "up", (), {})


class Notes(logging.Handler):
    """Sends what the supervisor's own libraries log into the stream."""

    def __init__(self, stream: "LogStream") -> None:
        super().__init__(logging.WARNING)
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        self._stream.note(record.getMessage(), record.levelname[0])


def clean(spec: Spec, text: str) -> str | None:
    """A process's line without its own name; None for the NATS server's routine notices."""
    if spec.role != "nats":
        return text.replace(f" {spec.name}  ", " ", 1)
    match = NATS_LINE.match(text)
    if match is None:
        return text
    # the token is plain text in a file of its user's own
    routine = match[2] in "ID" or match[3].startswith("Plaintext passwords detected")
    return None if routine else f"{match[1]} {match[2]} {match[3]}"


class LogStream:
    """Forms lines and hands them to `emit`: text for people, or one JSON object per line."""

    def __init__(
        self, emit: Callable[[str], None], width: int, json_lines: bool, colour: bool
    ) -> None:
        self.emit = emit
        self._width = width
        self._json = json_lines
        self._colour = colour

    def line(self, spec: Spec, text: str) -> None:
        """A line that a process wrote."""
        cleaned = clean(spec, text)
        if cleaned is not None:
            self.emit(self._form(spec, cleaned))

    def note(self, text: str, level: str = "I") -> None:
        """A line of the supervisor's own."""
        if not self._json:
            text = f"{time.strftime('%H:%M:%S')}.{int(time.time() % 1 * 1000):03} {level} {text}"
        self.emit(self._form(OWN, text))

    def announce(self, text: str) -> None:
        """Several lines for the user, who may want to copy from them."""
        self.emit(json.dumps({"service": "up", "message": text}) if self._json else text)

    def _form(self, spec: Spec, text: str) -> str:
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
