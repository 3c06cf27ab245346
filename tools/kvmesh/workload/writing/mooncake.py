"""Writes Mooncake traces as kvmesh reads them: plain, or agentic with waits of its own spelling."""

from pathlib import Path

import msgspec

from kvmesh.workload.formats.mooncake import BLOCK_SIZE, MooncakeRow
from kvmesh.workload.model import HUMAN, Round, Workload
from kvmesh.workload.writing.block_ids import BlockIds


def write(workload: Workload, file: Path, block_size: int | None = None) -> None:
    """Write one row per round, with ids of `block_size` tokens (default: the workload's own).

    Sharing within a block is lost.
    """
    size = block_size or (workload.block_size if workload.block_size > 1 else BLOCK_SIZE)
    ids = BlockIds(workload, size)
    agentic = is_agentic(workload)
    encode = msgspec.json.Encoder().encode
    with file.open("wb") as out:
        for index, round_ in enumerate(workload.rounds):
            row = MooncakeRow(
                input_length=round_.input_tokens,
                output_length=round_.output_tokens,
                hash_ids=ids.of(round_),
                priority=round_.priority,
                fair_class=round_.fair_class,
                abort_after=round_.abort_after,
                block_size=None if size == BLOCK_SIZE else size,
            )
            _time(row, round_)
            if agentic:
                _relate(row, workload, index)
            out.write(encode(row) + b"\n")


def is_agentic(workload: Workload) -> bool:
    """True if requests wait for others or belong together."""
    return any(round_.after for round_ in workload.rounds) or any(
        len(members) > 1 for members in workload.by_session()
    )


def _time(row: MooncakeRow, round_: Round) -> None:
    milliseconds = round(round_.at_s * 1e3, 3)
    if not round_.after:
        row.timestamp = milliseconds
    elif round_.wait in ("", HUMAN):
        row.delay = milliseconds
    else:
        row.tool_wait_ms = milliseconds


def _relate(row: MooncakeRow, workload: Workload, index: int) -> None:
    round_ = workload.rounds[index]
    session = workload.sessions[round_.session]
    row.request_id = f"r{index}"
    row.session_id = session.name
    row.wait_for = [f"r{before}" for before in round_.after]
    if session.parent is not None:
        row.parent_session_id = workload.sessions[session.parent].name
