"""The requests of a batch as lines of JSON, and the faults of such lines. Pure."""

import mmap
import re
from collections import Counter
from collections.abc import Sequence

import msgspec
from msgspec import Raw, Struct

from kvmesh.frontend.batches.batch import LineFault

MAX_LINES = 50_000
MAX_FAULTS = 100  # that are reported
MAX_CUSTOM_ID = 512
METHOD = "POST"
WINDOW = 1 << 20  # bytes that one search holds the GIL for, at most
_BEGIN = re.compile(rb"\S")


class LineBody(Struct):
    """One line: the request's `body`, and the client's name for it."""

    custom_id: str
    method: str
    url: str
    body: Raw


class _Model(Struct):
    model: str = ""


Bytes = bytes | mmap.mmap
_lines = msgspec.json.Decoder(LineBody)
_models = msgspec.json.Decoder(_Model)


def spans(data: Bytes) -> list[slice]:
    """The lines of a file that are not blank, one more than MAX_LINES at most."""
    found: list[slice] = []
    start = 0
    while start < len(data) and len(found) <= MAX_LINES:
        begin = _BEGIN.search(data, start, start + WINDOW)
        if begin is None:
            start += WINDOW
            continue
        end = data.find(b"\n", begin.start())
        end = len(data) if end < 0 else end
        found.append(slice(begin.start(), end))
        start = end + 1
    return found


def decoded(line: bytes) -> LineBody:
    """A line that has been checked."""
    return _lines.decode(line)


def model_of(line: LineBody) -> str:
    """The model that a request names; empty if it names none."""
    try:
        return _models.decode(line.body).model
    except msgspec.MsgspecError:
        return ""


def check(data: Bytes, endpoint: str, found: Sequence[slice]) -> tuple[list[LineFault], set[str]]:
    """The faults of the lines of a batch for one endpoint, and the models that they name."""
    if not found:
        return [LineFault("empty_file", "The file has no requests.")], set()
    if len(found) > MAX_LINES:
        reason = f"The file has more than {MAX_LINES} requests."
        return [LineFault("too_many_requests", reason)], set()
    faults: list[LineFault] = []
    names: Counter[str] = Counter()
    models: set[str] = set()
    for number, span in enumerate(found, 1):
        try:
            text = data[span]
            text.decode()  # decoders do not check what they skip
            line = decoded(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            faults.append(LineFault("invalid_json_line", f"Not a request: {error}", None, number))
        else:
            names[line.custom_id] += 1
            fault = _fault(line, endpoint, names[line.custom_id], number)
            faults += [fault] if fault is not None else []
            models.add(model_of(line))
        if len(faults) == MAX_FAULTS:
            break
    return faults, models


def _fault(line: LineBody, endpoint: str, times: int, number: int) -> LineFault | None:
    name = line.custom_id
    if not 0 < len(name) <= MAX_CUSTOM_ID:
        reason = f"`custom_id` must have 1 to {MAX_CUSTOM_ID} characters."
        return LineFault("invalid_custom_id", reason, "custom_id", number)
    if times > 1:
        reason = f"`custom_id` {name!r} is that of an earlier request."
        return LineFault("duplicate_custom_id", reason, "custom_id", number)
    if line.method != METHOD:
        return LineFault("invalid_method", f"`method` must be {METHOD}.", "method", number)
    if line.url != endpoint:
        reason = f"`url` must be the endpoint of the batch, {endpoint}."
        return LineFault("invalid_url", reason, "url", number)
    if not bytes(line.body).startswith(b"{"):
        return LineFault("invalid_body", "`body` must be an object.", "body", number)
    return None
