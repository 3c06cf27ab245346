"""The native workload file: the internal form as one JSON document, lossless."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from kvmesh.workload.errors import Problem, Repairs, TraceError
from kvmesh.workload.model import Round, Session, SomeTokens, Workload
from kvmesh.workload.reading.assembly import ReadTrace
from kvmesh.workload.reading.options import ReadOptions
from kvmesh.workload.reading.source import TraceFile
from kvmesh.workload.reading.window import planned_starts
from kvmesh.workload.tree import ROOT, Tree


class NativeDocument(Struct, kw_only=True):
    """A native workload file; `branches` holds [parent, start] per branch, parents first."""

    format: Literal["kvmesh.workload.v1"] = "kvmesh.workload.v1"
    block_size: SomeTokens
    branches: list[tuple[int, int]]
    sessions: list[Session]
    rounds: list[Round]


def write(workload: Workload, file: Path) -> None:
    tree = workload.tree
    document = NativeDocument(
        block_size=workload.block_size,
        branches=[tree.parent(branch) for branch in range(len(tree))],
        sessions=workload.sessions,
        rounds=workload.rounds,
    )
    file.write_bytes(msgspec.json.encode(document) + b"\n")


def read(files: Sequence[TraceFile], options: ReadOptions, repairs: Repairs) -> ReadTrace:
    """Read a file; raises TraceError for malformed documents and dangling references."""
    if len(files) > 1:
        raise files[1].error(1, "a native workload is one file")
    workload = _workload(files[0])
    return ReadTrace(workload=workload, starts=planned_starts(workload))


def _workload(source: TraceFile) -> Workload:
    file = source.path
    try:
        document = msgspec.json.decode(source.read(), type=NativeDocument)
        tree = Tree()
        for parent, start in document.branches:
            tree.fork(parent, start)
    except (msgspec.MsgspecError, ValueError) as error:
        raise TraceError(file, [Problem(1, str(error).replace("`$.", "`"), "")]) from error
    problems = [
        Problem(1, f"sessions[{index}]: the parent must precede the session", "")
        for index, session in enumerate(document.sessions)
        if session.parent is not None and not ROOT < session.parent < index
    ]
    problems += [
        Problem(1, f"rounds[{index}]: {reason}", "")
        for index, round_ in enumerate(document.rounds)
        if (reason := _defect(document, tree, index, round_))
    ]
    if not document.rounds:
        problems.append(Problem(1, "no requests in this file", ""))
    if problems:
        raise TraceError(file, problems)
    return Workload(
        tree=tree,
        sessions=document.sessions,
        rounds=document.rounds,
        block_size=document.block_size,
    )


def _defect(document: NativeDocument, tree: Tree, index: int, round_: Round) -> str | None:
    branches = range(len(tree))
    if round_.branch not in branches or round_.output_branch not in branches:
        return f"unknown branch {round_.branch} or {round_.output_branch}"
    if not 0 <= round_.session < len(document.sessions):
        return f"unknown session {round_.session}"
    if any(not ROOT < before < index for before in round_.after):
        return "waits for a round that does not precede it"
    tokens = round_.input_tokens
    if any(end > tokens for end, _ in round_.marks):
        return "a cache mark after the end of the prompt"
    if round_.rendered is not None and round_.rendered[0] not in branches:
        return f"unknown branch {round_.rendered[0]}"
    same = round_.output_branch == round_.branch
    blocks = tokens // document.block_size * document.block_size
    if not same and tree.shared(round_.branch, round_.output_branch, blocks) < blocks:
        return "the output branch does not continue the prompt"
    return None
