"""The two meanings of a session's later rows: whole prompts, or what a turn adds."""

from collections.abc import Iterator
from itertools import pairwise

from kvmesh.workload.errors import Repairs
from kvmesh.workload.reading.options import ReadOptions
from kvmesh.workload.reading.rows import TraceRow

FEW = 0.05  # share of turns that may repeat their session's prompt by chance


def apply_turns(rows: list[TraceRow], options: ReadOptions, repairs: Repairs) -> None:
    """Mark the rows that add to the prompt before them; without `--turns`, by their contents."""
    turns = options.turns
    options.used.add("turns")
    if turns == "whole":
        return
    pairs = list(_pairs(rows))
    if not pairs and turns == "delta":
        repairs.assume("--turns delta changes nothing: no session has several rows")
    if turns is None:
        if not _increments(pairs):
            return
        evidence = "no turn of a session repeats the blocks before it"
        if any(not after.waits for _, after in pairs):
            repairs.assume(f"{evidence}: if the rows are increments, use --turns delta")
            return
        repairs.assume(
            f"{evidence}, so the rows are read as increments (--turns delta, as AIPerf writes "
            "them); --turns whole reads them as whole prompts"
        )
    for _, after in pairs:
        after.grows = True


def _pairs(rows: list[TraceRow]) -> Iterator[tuple[TraceRow, TraceRow]]:
    """Each row of a session after its first, behind the row before it."""
    last: dict[str, TraceRow] = {}
    for row in rows:
        if row.session is None:
            continue
        before = last.get(row.session)
        last[row.session] = row
        if before is not None:
            yield before, row


def _increments(pairs: list[tuple[TraceRow, TraceRow]]) -> bool:
    """True if the rows show that (nearly) no turn contains its session's previous prompt.

    Ids of full blocks decide; without any, lengths do, as a partial block's id is in one prompt.
    """
    full = [
        before.ids[0] == after.ids[0]
        for before, after in pairs
        if before.ids and after.ids and before.input_length >= before.block_size
    ]
    repeats = full or [
        after.input_length >= before.input_length + (before.output_length or 0)
        for before, after in pairs
        if bool(before.ids) == bool(after.ids)
    ]
    return bool(repeats) and sum(repeats) <= FEW * len(repeats)


def note_overlaps(rows: list[TraceRow], files: int, repairs: Repairs) -> None:
    """State that several files have requests at the same times."""
    if files < 2:
        return
    spans: dict[int, tuple[float, float]] = {}
    for row in rows:
        if row.time is not None:
            first, last = spans.get(row.file, (row.time, row.time))
            spans[row.file] = (min(first, row.time), max(last, row.time))
    ordered = sorted(spans.values())
    if any(after[0] < before[1] for before, after in pairwise(ordered)):
        repairs.assume("the times of the files overlap: their requests run side by side")
