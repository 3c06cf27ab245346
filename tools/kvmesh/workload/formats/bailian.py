"""Qwen-Bailian usage traces (KVCache in the Wild, ATC'25): JSONL with ids of 16-token blocks.

A row holds `chat_id`, `parent_chat_id` (-1 for a first turn), `timestamp` (seconds), `turn`,
lengths and `hash_ids`; an id identifies the tokens of one block, wherever it stands.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from kvmesh.workload.errors import Repairs
from kvmesh.workload.model import SomeTokens, Tokens
from kvmesh.workload.reading.assembly import Assembly, ReadTrace
from kvmesh.workload.reading.block_ids import match_block_ids
from kvmesh.workload.reading.options import ReadOptions
from kvmesh.workload.reading.rows import (
    TraceRow,
    decoded,
    packed,
    parsed,
    prompt_tokens,
    reason_of,
)
from kvmesh.workload.reading.source import TraceFile
from kvmesh.workload.reading.time_units import rescale_unix_times

BLOCK_SIZE = 16
SEVERAL = "files that count their chats anew are workloads of their own: read one at a time"


class BailianRow(Struct, kw_only=True):
    chat_id: str
    timestamp: float | str | None = None
    input_length: SomeTokens | None = None
    output_length: Tokens | None = None
    parent_chat_id: str = "-1"
    type: str = ""
    hash_ids: list[int] = []


def read(files: Sequence[TraceFile], options: ReadOptions, repairs: Repairs) -> ReadTrace:
    """The trace in the files, at its recorded times; raises TraceError or OSError."""
    rows: list[TraceRow] = []
    parents: dict[str, str] = {}
    chats: list[str] = []
    found = 0
    for number, file in enumerate(files):
        repairs.file = file.path
        for line, record in file.records() if file.is_json else file.table():
            found += 1
            try:
                one = parsed(decoded(record), BailianRow)
                row = _row(one, options, number, line, repairs)
            except (msgspec.MsgspecError, ValueError) as error:
                repairs.note(line, reason_of(error), "dropped the line")
                continue
            if one.chat_id in parents:
                reason = f"duplicate chat id {one.chat_id!r}"
                repairs.note(line, reason, "dropped the line", SEVERAL if number else "")
                continue
            rows.append(row)
            chats.append(one.chat_id)
            parents[one.chat_id] = one.parent_chat_id
    roots = {chat: _root(chat, parents) for chat in chats}
    if any(parents[root] in parents for root in roots.values()):
        repairs.assume("chats whose parents lead back to them are sessions of their own")
    for row, chat in zip(rows, chats, strict=True):
        row.session = f"chat-{roots[chat]}"
    rescale_unix_times(rows, options, "s", repairs)
    match_block_ids(rows, files, repairs)
    assembly = Assembly(files, repairs)
    assembly.by_content = True
    return assembly.trace(rows, found=found)


def _row(one: BailianRow, options: ReadOptions, file: int, line: int, repairs: Repairs) -> TraceRow:
    size = options.block_size(BLOCK_SIZE) if one.hash_ids else BLOCK_SIZE
    time = one.timestamp
    return TraceRow(
        line=line,
        file=file,
        input_length=prompt_tokens(one.input_length, one.hash_ids, size, repairs),
        output_length=one.output_length,
        ids=packed(one.hash_ids),
        block_size=size,
        time=None if time is None else options.moment(time, "s"),
        kind=one.type,
    )


def _root(chat: str, parents: dict[str, str]) -> str:
    """The first turn in the trace of a chat's conversation; shortens `parents` on the way."""
    path: list[str] = []
    while (parent := parents[chat]) in parents and parent not in path and parent != chat:
        path.append(chat)
        chat = parent
    for passed in path:
        parents[passed] = chat
    return chat
