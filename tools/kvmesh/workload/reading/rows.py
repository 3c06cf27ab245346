"""Requests as readers find them, and the fields of one record."""

import json
from array import array
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from kvmesh.workload.model import Priority, SomeTokens, Tokens

# Assumed where a trace does not say how long an answer is.
OUTPUT_TOKENS = 128
T = TypeVar("T")


class TraceRow(Struct, kw_only=True, gc=False):
    """One request of a trace, with times in milliseconds.

    `line` is its place in file number `file`. The prompt is named by `ids` of blocks of
    `block_size` tokens in the namespace `scope`, or by a `branch` of the tree; without either it
    shares nothing. `time` is the recorded arrival. A row with `wait_for` (names of requests) or
    with `chained` waits for those, or for the previous row of its session, and starts `delay`
    after their end; `wait` names the client's activity meanwhile.
    """

    line: int
    input_length: SomeTokens
    output_length: Tokens
    file: int = 0
    ids: Sequence[int] = ()
    block_size: SomeTokens = 1
    scope: int = 0
    branch: int | None = None
    grows: bool = False
    time: float | None = None
    end: float | None = None
    request_id: str | None = None
    session: str | None = None
    parent: str | None = None
    kind: str = ""
    wait_for: list[str] = []
    chained: bool = False
    delay: float = 0.0
    wait: str = ""
    priority: Priority = 0
    fair_class: str = ""
    abort_after: SomeTokens | None = None
    ends: bool = False

    @property
    def waits(self) -> bool:
        return self.chained or bool(self.wait_for)


def packed(ids: list[int]) -> Sequence[int]:
    """Block ids in 8 bytes each, where they fit 64 bits with or without a sign."""
    for code in ("q", "Q"):
        try:
            return array(code, ids)
        except OverflowError:
            continue
    return ids


def decoded(record: bytes) -> dict[str, Any]:
    """The fields of a JSON object; `NaN` and `Infinity`, which Python writes, are null.

    Raises msgspec.MsgspecError.
    """
    try:
        return msgspec.json.decode(record, type=dict[str, Any])
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        if not any(name in record for name in (b"NaN", b"Infinity")):
            raise
        try:
            fields = json.loads(record, parse_constant=lambda _: None)
        except ValueError as error:
            raise msgspec.DecodeError(f"JSON is malformed: {error}") from error
        return msgspec.convert(fields, dict[str, Any])


def moment(value: float | str, unit_ms: float) -> float:
    """Milliseconds of a number of units, or of a date in ISO 8601; raises ValueError.

    A date may have any number of digits; without a zone it is UTC.
    """
    try:
        return float(value) * unit_ms
    except ValueError:
        time = datetime.fromisoformat(str(value).strip())
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1e3


def parsed(fields: dict[str, Any], type_: type[T], names: Iterable[str] = ()) -> T:
    """A record of `type_` from fields as other tools spell them; raises msgspec.ValidationError.

    A null is an absent field at any depth, an integer may be spelled as a float without fraction or
    as text, and a name (the fields `names`, or their items) as a number.
    """
    present = _without_nulls(fields)
    for name in names:
        if isinstance(value := present.get(name), list):
            present[name] = [_spelled(each) for each in value]
        elif name in present:
            present[name] = _spelled(value)
    return msgspec.convert(present, type_, strict=False)


def record_of(record: bytes, type_: type[T]) -> T:
    """A JSON record of `type_`, decoded at once if it has the usual spelling, else as `parsed`.

    Raises msgspec.MsgspecError.
    """
    try:
        return msgspec.json.decode(record, type=type_)
    except msgspec.MsgspecError:
        return parsed(decoded(record), type_)


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: _present(value) for key, value in fields.items() if value is not None}


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return _without_nulls(value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_present(each) for each in value]
    return value


def _spelled(name: Any) -> Any:
    number = isinstance(name, int | float) and not isinstance(name, bool)
    return f"{name:.17g}" if number else name


def reason_of(error: msgspec.MsgspecError) -> str:
    """The reason of a refused record, with the names of its fields."""
    return str(error).replace("`$.", "`")
