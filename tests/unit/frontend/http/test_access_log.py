"""Lines of the access log."""

import json
import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvmesh.frontend.http.access_log import AccessEntry, as_text, configure
from kvmesh.runtime.line_writer import LineWriter

ENTRY = AccessEntry(
    time=1.0, id="msg_1", method="POST", path="/v1/messages", api="messages", status=200,
    model="m", tenant="team a", key="ci", session="s\n1", prompt=170, cached=128, output=12,
    ttft=0.25, total=1.5, finish="stop", worker="worker-0-1", attempts=2,
)  # fmt: skip
REFUSED = AccessEntry(
    time=1.0, id="msg_2", client="c", method="GET", path="/x", api="other", status=404, total=0.0
)


def test_a_line_of_text_holds_one_request() -> None:
    assert as_text(ENTRY) == (
        "POST /v1/messages 200 1.500s ttft=0.250s tokens=170(128 cached)+12 finish=stop model=m"
        ' tenant="team a" key=ci session="s\\n1" worker=worker-0-1 attempts=2 id=msg_1'
    )
    assert as_text(REFUSED) == "GET /x 404 0.000s id=msg_2 client=c"


def test_no_value_forges_a_field_or_a_line() -> None:
    forged = replace(ENTRY, session='x" status=500\nPOST /', tenant="id=msg_9")
    line = as_text(forged)
    assert "\n" not in line
    assert 'session="x\\" status=500\\nPOST /"' in line
    assert 'tenant="id=msg_9"' in line


@pytest.mark.parametrize("mode", ["text", "json"])
def test_each_entry_is_one_line(mode: str, tmp_path: Path) -> None:
    file = tmp_path / "log"
    with file.open("w") as stream:
        writer = LineWriter(stream.fileno())
        log = configure(mode, "f-0", logging.Formatter("%(message)s"), writer)  # type: ignore[arg-type]
        assert log is not None
        log(ENTRY)
        writer.close(60)
    line = file.read_text().rstrip("\n")
    if mode == "text":
        assert line == as_text(ENTRY)
        return
    found = json.loads(line)
    assert (found["log"], found["service"]) == ("access", "f-0")
    assert (found["id"], found["cached"], found["session"]) == ("msg_1", 128, "s\n1")


def test_off_is_no_log() -> None:
    writer = LineWriter(1)
    assert configure("off", "f-0", logging.Formatter(), writer) is None
    writer.close(60)
