"""Writes rows for load generators: turns as increments (AIPerf), or requests at their times."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from kvmesh.workload.formats.mooncake import BLOCK_SIZE
from kvmesh.workload.model import Workload
from kvmesh.workload.reading.window import TOKEN_S, planned_starts
from kvmesh.workload.writing.block_ids import BlockIds
from kvmesh.workload.writing.increments import Conversations, WrittenTurn


class RequestRow(Struct, kw_only=True, omit_defaults=True):
    """A row that AIPerf, GuideLLM and `vllm bench` read; `delay` is in milliseconds."""

    timestamp: float | None = None
    delay: float | None = None
    session_id: str | None = None
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_size: int | None = None


def write_increments(workload: Workload, file: Path, size: int) -> list[str]:
    """Write conversations with times in milliseconds; return the properties that are lost."""
    conversations = Conversations(workload)
    turns = list(conversations.turns())
    ids = BlockIds(workload, size)
    several = {turn.conversation for turn in turns if turn.start}
    _write(file, (
        RequestRow(
            timestamp=round(start * 1e3, 3) if turn.delay_s is None else None,
            delay=None if turn.delay_s is None else round(turn.delay_s * 1e3, 3),
            session_id=turn.conversation if turn.conversation in several else None,
            input_length=turn.tokens(workload),
            output_length=workload.rounds[turn.index].output_tokens,
            hash_ids=turn.ids(workload, ids),
            block_size=None if size == BLOCK_SIZE else size,
        )
        for start, turn in _ordered(workload, turns)
    ))  # fmt: skip
    return list(_unlike(workload, conversations))


def _ordered(workload: Workload, turns: list[WrittenTurn]) -> list[tuple[float, WrittenTurn]]:
    starts = planned_starts(workload, TOKEN_S)
    return sorted(((starts[turn.index], turn) for turn in turns), key=lambda each: each[0])


def _unlike(workload: Workload, conversations: Conversations) -> Iterator[str]:
    rounds = workload.rounds
    foreign = sum(
        any(rounds[before].session != round_.session for before in round_.after)
        for round_ in rounds
    )
    if foreign:
        yield f"waits for other sessions in {foreign:,} requests: children start at planned times"
    if conversations.broken:
        yield (
            f"{conversations.broken:,} turns that do not continue the prompt before: each begins "
            "a conversation of its own, at a planned time"
        )
    if conversations.longer:
        yield (
            f"{conversations.longer:,} turns whose recorded prompt leaves out the answer before: "
            "the client sends it"
        )


def write_timed(workload: Workload, file: Path, size: int, per_second: float = 1.0) -> list[str]:
    """Write whole prompts at their times, in seconds by default; return what is lost."""
    starts = planned_starts(workload, TOKEN_S)
    ids = BlockIds(workload, size)
    order = sorted(range(len(workload)), key=starts.__getitem__)
    alone = {members[0] for members in workload.by_session() if len(members) == 1}
    _write(file, (
        RequestRow(
            timestamp=round(starts[index] * per_second, 6),
            session_id=None if index in alone else workload.sessions[round_.session].name,
            input_length=round_.input_tokens,
            output_length=round_.output_tokens,
            hash_ids=ids.of(round_),
            block_size=None if size == BLOCK_SIZE else size,
        )
        for index in order
        for round_ in (workload.rounds[index],)
    ))  # fmt: skip
    waiting = sum(bool(round_.after) for round_ in workload.rounds)
    if not waiting:
        return []
    return [
        f"waits for earlier answers in {waiting:,} requests: they start at times planned with "
        f"{TOKEN_S * 1e3:g} ms per output token"
    ]


def _write(file: Path, rows: Iterator[RequestRow]) -> None:
    encode = msgspec.json.Encoder().encode
    with file.open("wb") as out:
        for row in rows:
            out.write(encode(row) + b"\n")
