"""The mesh's own workload file: the internal form as one JSON document, without loss."""

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from kvmesh.workload.errors import Problem, TraceError
from kvmesh.workload.model import ROOT, Round, Session, Tree, Workload


class Document(Struct, kw_only=True):
    """`branches` holds [parent, start] per branch of the tree, parents first."""

    format: Literal["kvmesh.workload.v1"] = "kvmesh.workload.v1"
    block_size: int
    branches: list[tuple[int, int]]
    sessions: list[Session]
    rounds: list[Round]


def write(workload: Workload, file: Path) -> None:
    tree = workload.tree
    document = Document(
        block_size=workload.block_size,
        branches=[tree.parent(branch) for branch in range(len(tree))],
        sessions=workload.sessions,
        rounds=workload.rounds,
    )
    file.write_bytes(msgspec.json.encode(document) + b"\n")


def read(file: Path) -> Workload:
    """Raises TraceError for a document that is malformed or refers to what it does not hold."""
    try:
        document = msgspec.json.decode(file.read_bytes(), type=Document)
        tree = Tree()
        for parent, start in document.branches:
            tree.fork(parent, start)
    except (msgspec.MsgspecError, ValueError) as error:
        raise TraceError(file, [Problem(1, str(error).replace("`$.", "`"), "")]) from error
    problems = [
        Problem(1, f"rounds[{index}]: {reason}", "")
        for index, round_ in enumerate(document.rounds)
        if (reason := _defect(document, index, round_))
    ]
    if problems:
        raise TraceError(file, problems)
    return Workload(
        tree=tree,
        sessions=document.sessions,
        rounds=document.rounds,
        block_size=document.block_size,
    )


def _defect(document: Document, index: int, round_: Round) -> str | None:
    branches = range(len(document.branches))
    if round_.branch not in branches or round_.answer not in branches:
        return f"no branch {round_.branch} or {round_.answer}"
    if not 0 <= round_.session < len(document.sessions):
        return f"no session {round_.session}"
    if any(not ROOT < before < index for before in round_.after):
        return "waits for a round that does not come before it"
    if round_.input_tokens < 1 or round_.output_tokens < 0 or round_.at_s < 0:
        return "a length or time is negative"
    return None
