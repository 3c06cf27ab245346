"""Log formats of a service on standard error: text, or JSON for collectors."""

import json
import logging
import sys
import time
from functools import lru_cache
from typing import Any

from kvmesh.settings.schema import LogSettings
from kvmesh.tracing.tracer import current_trace_id

_CONTROLS = {n: f"\\x{n:02x}" for n in (*range(0x20), *range(0x7F, 0xA0))}
_LINE_ESCAPES = {
    **_CONTROLS,
    0x09: "\\t",
    0x0A: "\\n",
    0x0D: "\\r",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}
_TRACE_ESCAPES = {n: text for n, text in _LINE_ESCAPES.items() if n != 0x0A}


def printable(text: str) -> str:
    """`text` on one line with control characters escaped, so that terminals do not obey them."""
    return text if text.isprintable() else text.translate(_LINE_ESCAPES)


@lru_cache(maxsize=1)
def _clock(second: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(second))


class TextFormatter(logging.Formatter):
    """`12:00:00.123 W router  message`, with the trace id of a traced request after it."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = _clock(int(record.created))
        text = printable(record.getMessage())
        if trace_id := current_trace_id.get():
            text = f"{text} trace_id={trace_id}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info).translate(_TRACE_ESCAPES)}"
        return f"{clock}.{record.msecs:03.0f} {record.levelname[0]} {self._service}  {text}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (Unix seconds), level, service, logger, message, trace id."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if trace_id := current_trace_id.get():
            line["trace_id"] = trace_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(options: LogSettings, service: str) -> None:
    """Send this process's log to standard error in the configured format."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = JsonFormatter if options.format == "json" else TextFormatter
    handler.setFormatter(formatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    _set_level(root, logging.getLevelNamesMapping()[options.level.upper()])
    _set_level(logging.getLogger("nats"), logging.CRITICAL)


def _set_level(logger: logging.Logger, level: int) -> None:
    if logger.level != level:  # a call writes to all loggers, which forks share
        logger.setLevel(level)
