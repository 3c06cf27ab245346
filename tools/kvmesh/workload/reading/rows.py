"""Requests as readers find them, and the fields of one record."""

import json
import re
from array import array
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from kvmesh.runtime.quantities import counted
from kvmesh.workload.errors import SHOWN, Repairs
from kvmesh.workload.model import Priority, SomeTokens, Tokens

# Assumed where a trace does not say how long an answer is.
OUTPUT_TOKENS = 128
# Fields, at any depth, whose values are names, and those that are ids of blocks.
NAMES = {
    *("request_id", "session_id", "trajectory_id", "play_id", "chat_id", "agent_id"),
    *("parent_session_id", "parent_trajectory_id", "parent_chat_id", "wait_for"),
    *("session", "prefix"),
}
IDS = {"hash_ids", "input_sequence_hashes"}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9]\d*|0[xX][\da-fA-F]+)")
_FLOAT = re.compile(r"[-+]?\d+\.\d*(?:[eE][-+]?\d+)?")
EXACT = 1 << 53  # up to here each integer is a float of its own
T = TypeVar("T")


class TraceRow(Struct, kw_only=True, gc=False):
    """One request of a trace, with times in milliseconds.

    `line` is its place in file number `file`. The prompt is named by `ids` of blocks of
    `block_size` tokens in the namespace `scope`, or by a `branch` of the tree; without either it
    shares nothing. `time` is the recorded arrival. A row with `wait_for` (names of requests) or
    with `chained` waits for those, or for the previous row of its session, and starts `delay`
    after their end; `wait` names the client's activity meanwhile. An `output_length` of None is not
    known.
    """

    line: int
    input_length: SomeTokens
    output_length: Tokens | None
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
    wait_for: Sequence[str] = ()
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


def note_outputs(missing: int, repairs: Repairs) -> None:
    """State the assumption for requests without an output length."""
    if missing:
        repairs.assume(
            f"{counted(missing, 'request')} without an output length: "
            f"{OUTPUT_TOKENS} tokens assumed"
        )


def prompt_tokens(stated: int | None, ids: Sequence[int], size: int, repairs: Repairs) -> int:
    """The stated length of a prompt, else that of its blocks; raises msgspec.ValidationError."""
    if stated:
        return stated
    if not ids:
        raise msgspec.ValidationError("Object missing required field `input_length`")
    repairs.assume("prompts without `input_length` are as long as their hash_ids")
    return len(ids) * size


def note_unread(fields: Iterable[str], known: Collection[str], repairs: Repairs) -> None:
    """State which fields of a record are not read, since one may be spelled in another way."""
    unread = [name for name in fields if name and name not in known]
    if unread:
        more = " …" if len(unread) > SHOWN else ""
        repairs.assume(f"fields that are not read: {', '.join(unread[:SHOWN])}{more}")


def packed(ids: list[int]) -> Sequence[int]:
    """Block ids in 4 or 8 bytes each, where they fit 64 bits with or without a sign."""
    for code in ("i", "q", "Q"):
        try:
            return array(code, ids)
        except OverflowError:
            continue
    return ids


def decoded(record: bytes | str | dict[str, Any]) -> dict[str, Any]:
    """The fields of a JSON object, or of a table's row; raises msgspec.MsgspecError.

    `NaN` and `Infinity`, which Python writes, are null. A text is the reason why a row has none.
    """
    if isinstance(record, str):
        raise msgspec.ValidationError(record)
    if isinstance(record, dict):
        return record
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


def parsed(fields: dict[str, Any], type_: type[T]) -> T:
    """A record of `type_` from fields as other tools spell them; raises msgspec.ValidationError.

    At any depth, a null or an empty text is an absent field, an integer may be spelled as a float
    without fraction or as text, a name (NAMES) as a number, an id of a block (IDS) as any text.
    """
    return msgspec.convert(_present(fields), type_, strict=False)


def record_of(record: bytes, type_: type[T]) -> T:
    """A JSON record of `type_`, decoded at once if it has the usual spelling, else as `parsed`.

    Raises msgspec.MsgspecError.
    """
    try:
        return msgspec.json.decode(record, type=type_)
    except msgspec.MsgspecError:
        return parsed(decoded(record), type_)


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _value(key, value)
        for key, value in fields.items()
        if value is not None and value != ""
    }


def _value(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return _present(value)
    if key in NAMES:
        return [name_of(each) for each in value] if isinstance(value, list) else name_of(value)
    if key in IDS:
        return _ids(value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_present(each) if isinstance(each, dict) else each for each in value]
    return value


def name_of(value: Any) -> Any:
    """A name as text: of numbers, 7 and 7.0 are one name."""
    if isinstance(_exact(value), float) and value.is_integer():
        value = int(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if number else value


def _ids(value: Any) -> Any:
    """Ids of blocks as numbers: those that are text by their hash, those of a table as a list.

    Raises msgspec.ValidationError for what a writer has abridged: lists, as numpy does, or numbers.
    """
    if isinstance(value, str):
        if "..." in value:
            raise msgspec.ValidationError("an abridged list (`...`) - at `hash_ids`")
        value = re.findall(r"[^\s,;\[\]()'\"]+", value)
    if not isinstance(value, list):
        return value
    return [_exact(_id(each) if isinstance(each, str) else each) for each in value]


def _exact(value: Any) -> Any:
    """A number; raises msgspec.ValidationError for a float that cannot tell integers apart."""
    if isinstance(value, float) and abs(value) > EXACT:
        raise msgspec.ValidationError(f"{value:g} is a float without its last digits")
    return value


def _id(text: str) -> int | float:
    if _INTEGER.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def reason_of(error: Exception) -> str:
    """The reason of a refused record, with the names of its fields."""
    return str(error).replace("`$.", "`")
