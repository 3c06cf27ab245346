"""Log lines escape control characters in foreign text."""

import json
import logging
import sys

from kvmesh.runtime.logs import JsonFormatter, TextFormatter

HOSTILE = "\x1b[2Jone\r\ntwo\x07\x9b31m\u2028"


def record(message: str, *, raising: str = "") -> logging.LogRecord:
    found = None
    if raising:
        try:
            raise ValueError(raising)
        except ValueError:
            found = sys.exc_info()
    return logging.LogRecord("a", logging.WARNING, "f", 1, "%s", (message,), found)


def test_a_text_line_stays_one_line_without_control_characters() -> None:
    line = TextFormatter("router").format(record(HOSTILE))
    assert line.isprintable()
    assert line.endswith(r"\x1b[2Jone\r\ntwo\x07\x9b31m\u2028")


def test_a_traceback_keeps_its_line_breaks_only() -> None:
    text = TextFormatter("router").format(record("failed", raising=HOSTILE))
    assert text.count("\n") > 2
    assert text.replace("\n", "").isprintable()


def test_printable_unicode_is_unchanged() -> None:
    assert TextFormatter("router").format(record("Größe 漢字 …")).endswith("Größe 漢字 …")


def test_a_json_line_has_the_same_message() -> None:
    line = JsonFormatter("router").format(record(HOSTILE))
    assert line.isprintable()
    assert json.loads(line)["message"] == HOSTILE
