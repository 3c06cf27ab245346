"""The two meanings of a session's later rows: whole prompts, or what a turn adds."""

from collections.abc import Iterator

from kvmesh.workload.errors import Repairs
from kvmesh.workload.reading.options import Turns
from kvmesh.workload.reading.rows import TraceRow

FEW = 0.05  # share of turns that may repeat their session's prompt by chance


def apply_turns(rows: list[TraceRow], turns: Turns | None, repairs: Repairs) -> None:
    """Mark the rows that add to the prompt before them; without `turns`, by their contents."""
    if turns == "whole":
        return
    pairs = list(_pairs(rows))
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
    """True if the rows show that (nearly) no turn contains its session's previous prompt."""
    compared = repeated = 0
    for before, after in pairs:
        if before.ids and after.ids:
            # A partial block has an id of its own in each prompt.
            if before.input_length >= before.block_size:
                compared += 1
                repeated += before.ids[0] == after.ids[0]
        elif not before.ids and not after.ids:
            compared += 1
            repeated += after.input_length >= before.input_length + before.output_length
    return compared > 0 and repeated <= FEW * compared
