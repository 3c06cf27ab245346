"""Writes Dynamo's agentic Mooncake, version 2: a header, and requests with their dependencies."""

import hashlib
from pathlib import Path

import msgspec

from kvmesh.runtime.quantities import counted
from kvmesh.workload.formats.agentic_mooncake import (
    SCHEMA,
    VERSION,
    AgenticDependency,
    AgenticHeader,
    AgenticRow,
)
from kvmesh.workload.model import Workload
from kvmesh.workload.writing.block_ids import BlockIds

# The format requires a name of the model; a workload has none, and replays use their own.
MODEL = "recorded"
FORMAT = "kvmesh.workload.v1"


def write(workload: Workload, file: Path, size: int) -> list[str]:
    """Write one row per round, with ids of `size` tokens that mean the same in all plays.

    Returns what the format cannot hold: parents of children that none of their requests starts.
    """
    ids = BlockIds(workload, size)
    plays = _plays(workload)
    spawners = _spawners(workload)
    row_encoder, digest = msgspec.json.Encoder(), hashlib.sha256()
    lost = {number for number, each in enumerate(workload.sessions) if each.parent is not None}
    with file.open("wb") as out:
        out.write(_header(size, digest.hexdigest()))
        for index in range(len(workload)):
            fields = _row(workload, index, plays, spawners, ids)
            if any(each.relation == "spawn" for each in fields.dependencies):
                lost.discard(workload.rounds[index].session)
            row = row_encoder.encode(fields) + b"\n"
            digest.update(row)
            out.write(row)
        out.seek(0)
        out.write(_header(size, digest.hexdigest()))
    early = counted(len(lost), "child session")
    return [f"parents of {early} that no request of the parent starts"] if lost else []


def _header(size: int, digest: str) -> bytes:
    header = AgenticHeader(
        schema=SCHEMA,
        version=VERSION,
        block_size=size,
        hash_id_scope="local",
        source={"format": FORMAT, "digest": digest},
    )
    return msgspec.json.encode(header) + b"\n"


def _row(
    workload: Workload, index: int, plays: list[int], spawners: dict[int, int], ids: BlockIds
) -> AgenticRow:
    round_ = workload.rounds[index]
    session = workload.sessions[round_.session]
    milliseconds = round(round_.at_s * 1e3, 3)
    dependencies = [
        AgenticDependency(
            request_id=f"r{before}",
            delay_ms=milliseconds,
            relation=_relation(workload, before, index),
        )
        for before in round_.after
    ]
    if index in spawners:
        since = workload.rounds[spawners[index]].at_s
        dependencies.append(
            AgenticDependency(
                request_id=f"r{spawners[index]}",
                trigger="dispatch",
                delay_ms=round((round_.at_s - since) * 1e3, 3),
                relation="spawn",
            )
        )
    return AgenticRow(
        request_id=f"r{index}",
        play_id=workload.sessions[plays[round_.session]].name,
        session_id=session.name,
        model=MODEL,
        input_length=round_.input_tokens,
        output_length=round_.output_tokens,
        hash_ids=ids.of(round_),
        not_before_ms=0.0 if dependencies else milliseconds,
        priority=round_.priority,
        policy_class=round_.fair_class,
        dependencies=dependencies,
    )


def _spawners(workload: Workload) -> dict[int, int]:
    """The parent's request at or before the start of each child that waits for nothing.

    Such a child starts at its time, which counts from that request's.
    """
    rounds = workload.rounds
    timed: dict[int, list[int]] = {}
    begun: set[int] = set()
    found: dict[int, int] = {}
    for index, round_ in enumerate(rounds):
        parent = workload.sessions[round_.session].parent
        if round_.session not in begun and parent is not None and not round_.after:
            before = [each for each in timed.get(parent, ()) if rounds[each].at_s <= round_.at_s]
            if before:
                found[index] = max(before, key=lambda each: rounds[each].at_s)
        begun.add(round_.session)
        if not round_.after:
            timed.setdefault(round_.session, []).append(index)
    return found


def _relation(workload: Workload, before: int, index: int) -> str:
    """A later turn of one session, the first of a child, or the wait for another session."""
    one, other = workload.rounds[before].session, workload.rounds[index].session
    if one == other:
        return "sequence"
    return "spawn" if workload.sessions[other].parent == one else "join"


def _plays(workload: Workload) -> list[int]:
    """The first session of each session's play: those that wait for one another are one play."""
    first = list(range(len(workload.sessions)))

    def root(session: int) -> int:
        while first[session] != session:
            first[session] = first[first[session]]
            session = first[session]
        return session

    def join(one: int, other: int) -> None:
        low, high = sorted((root(one), root(other)))
        first[high] = low

    for session, each in enumerate(workload.sessions):
        if each.parent is not None:
            join(session, each.parent)
    for round_ in workload.rounds:
        for before in round_.after:
            join(round_.session, workload.rounds[before].session)
    return [root(session) for session in range(len(first))]
