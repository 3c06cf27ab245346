"""Checks block ids against the lengths of prompts, and finds the size of their blocks."""

from collections.abc import Iterable, Sequence

from kvmesh.runtime.quantities import counted
from kvmesh.workload.errors import Repairs
from kvmesh.workload.reading.rows import TraceRow
from kvmesh.workload.reading.source import TraceFile

MOST = 1 << 20


def match_block_ids(rows: list[TraceRow], files: Sequence[TraceFile], repairs: Repairs) -> None:
    """Make block ids and lengths agree: one id per started block, or per full block."""
    tails = bare = 0
    hint: str | None = None
    for row in rows:
        found = len(row.ids)
        bare += not found
        expected = -(-row.input_length // row.block_size)
        if found == expected or not found:
            continue
        if found == row.input_length // row.block_size:
            tails += 1
            continue
        hint = hint or _hint(rows)
        reason = (
            f"{found} hash_ids for {row.input_length} tokens, "
            f"which are {expected} blocks of {row.block_size}"
        )
        repairs.file = files[row.file].path
        if found > expected:
            repairs.note(row.line, reason, "dropped surplus hash_ids", hint)
            row.ids = row.ids[:expected]
        else:
            repairs.note(row.line, reason, "shortened the prompt to its hash_ids", hint)
            row.input_length = found * row.block_size
    if bare:
        repairs.assume(f"{counted(bare, 'request')} without hash_ids: nothing shares them")
    if tails:
        repairs.assume(
            f"{tails:,} prompts name no id for their partial last block: nothing shares it"
        )


def _hint(rows: list[TraceRow]) -> str:
    size = fitting_size(rows)
    if size is None:
        return "--trace-block-size states the tokens per id"
    return f"--trace-block-size {size} fits the ids of all rows"


def fitting_size(rows: Iterable[TraceRow]) -> int | None:
    """The block size that explains the number of ids of each prompt.

    Among several, the largest power of two, else the largest. None if there is none, or if no
    prompt has several ids, since then any large one would do.
    """
    low, high = 1, MOST
    for row in rows:
        count, tokens = len(row.ids), row.input_length
        if count:
            low = max(low, tokens // (count + 1) + 1)
            high = min(high, -(-tokens // (count - 1)) - 1 if count > 1 else high)
    if not low <= high < MOST:
        return None
    power = 1 << (high.bit_length() - 1)
    return power if power >= low else high
