"""Structure of a workload: lengths, prefix sharing, ideal hit rate, waits."""

from array import array
from collections import Counter

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvmesh.workload.analysis.sharing import ideal_hits
from kvmesh.workload.model import HUMAN, PAUSE, TOOL, Workload
from kvmesh.workload.replay.summary import Spread, spread
from kvmesh.workload.tree import ROOT

VISITS = (1, 2, 10, 100)
BINS = 24
APPROVAL = "approval"


class Analysis(Struct, frozen=True, kw_only=True):
    """Sizes in tokens, times in seconds, shares from 0 to 1.

    `ideal_hit_share` is the share of prompt tokens that an infinite prefix cache would hold, in
    whole blocks of `block_size`; `hits_over_time` the same for equal parts of the workload.
    `read_write` is tokens hit per token written into such a cache, `reuse` prompt tokens per
    distinct one. `visits` maps the least number of prompts that contain a token to the shares of
    such tokens among the distinct ones and among all prompt tokens. `depth` is blocks per prompt.
    """

    block_size: int
    requests: int
    sessions: int
    child_sessions: int
    span_s: float
    input_tokens: int
    output_tokens: int
    unique_tokens: int
    ideal_hit_share: float
    read_write: float
    reuse: float
    hits_over_time: list[float]
    visits: dict[str, tuple[float, float]]
    input: Spread | None
    output: Spread | None
    new_tokens: Spread | None
    depth: Spread | None
    rounds_per_session: Spread | None
    waits: dict[str, Spread]
    wait_counts: dict[str, int]
    compactions: int
    compacting_sessions: float
    priorities: dict[str, int]
    input_histogram: list[tuple[float, int]]


def analyze(workload: Workload, block_size: int | None = None) -> Analysis:
    """Analyse a workload; hits are in blocks of `block_size` (default: the workload's own)."""
    size = block_size or workload.block_size
    rounds = workload.rounds
    hits = ideal_hits(workload, size)
    inputs = [round_.input_tokens for round_ in rounds]
    total, hit = sum(inputs), sum(hits)
    unique, visits = _visits(workload)
    compactions = _compactions(workload)
    return Analysis(
        block_size=size,
        requests=len(rounds),
        sessions=len(workload.sessions),
        child_sessions=sum(session.parent is not None for session in workload.sessions),
        span_s=max((r.at_s for r in rounds if not r.after), default=0.0),
        input_tokens=total,
        output_tokens=sum(round_.output_tokens for round_ in rounds),
        unique_tokens=unique,
        ideal_hit_share=hit / total if total else 0.0,
        read_write=hit / (total - hit) if total > hit else float("inf"),
        reuse=total / unique if unique else 0.0,
        hits_over_time=_over_time(inputs, hits),
        visits=visits,
        input=spread(inputs),
        output=spread(round_.output_tokens for round_ in rounds),
        new_tokens=spread(n - h for n, h in zip(inputs, hits, strict=True)),
        depth=spread(-(-n // size) for n in inputs),
        rounds_per_session=spread(Counter(round_.session for round_ in rounds).values()),
        waits=_waits(workload),
        wait_counts=dict(Counter(r.wait for r in rounds if r.wait).most_common()),
        compactions=sum(compactions.values()),
        compacting_sessions=len(compactions) / max(1, len(workload.sessions)),
        priorities={str(k): v for k, v in sorted(Counter(r.priority for r in rounds).items())},
        input_histogram=histogram(inputs),
    )


def _compactions(workload: Workload) -> Counter[int]:
    """Number of prompts below 0.6 of the length of their session's previous one, by session."""
    last: dict[int, int] = {}
    found: Counter[int] = Counter()
    for round_ in workload.rounds:
        if round_.input_tokens < 0.6 * last.get(round_.session, 0):
            found[round_.session] += 1
        last[round_.session] = round_.input_tokens
    return found


def _over_time(inputs: list[int], hits: list[int]) -> list[float]:
    parts = np.array_split(np.arange(len(inputs)), min(BINS, max(1, len(inputs))))
    totals, held = np.array(inputs), np.array(hits)
    return [float(held[p].sum() / totals[p].sum()) if len(p) else 0.0 for p in parts]


def _visits(workload: Workload) -> tuple[int, dict[str, tuple[float, float]]]:
    """Distinct prompt tokens, and their shares and those of all, by the number of prompts."""
    tokens, visits = _layers(_segments(workload))
    floors = np.searchsorted(VISITS, visits, side="right") - 1
    distinct = [int(tokens[floors == each].sum()) for each in range(len(VISITS))]
    passed = [int((tokens * visits)[floors == each].sum()) for each in range(len(VISITS))]
    total, references = max(1, sum(distinct)), max(1, sum(passed))
    return sum(distinct), {
        str(least): (one / total, all_ / references)
        for least, one, all_ in zip(VISITS, distinct, passed, strict=True)
    }


def _segments(workload: Workload) -> NDArray[np.int64]:
    """(branch, start, end) of each segment of each prompt."""
    parents, starts = workload.tree.parents, workload.tree.starts
    segments = array("q")
    for round_ in workload.rounds:
        branch, end = round_.branch, round_.input_tokens
        while branch != ROOT:
            start = starts[branch]
            if start < end:
                segments.append(branch)
                segments.append(start)
                segments.append(end)
                end = start
            branch = parents[branch]
    return np.frombuffer(segments, np.int64).reshape(-1, 3)


def _layers(segments: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(tokens, number of prompts) of the parts of branches between the ends of prompts.

    `segments` has rows of branch, start and end; those of a branch start at its start.
    """
    branches, starts, ends = segments[np.lexsort((segments[:, 2], segments[:, 0]))].T
    first = np.diff(branches, prepend=-1) != 0
    begins = np.where(first, starts, np.roll(ends, 1))
    bounds = np.append(np.flatnonzero(first), len(branches))
    visits = np.repeat(bounds[1:], np.diff(bounds)) - np.arange(len(branches))
    return ends - begins, visits


def _waits(workload: Workload) -> dict[str, Spread]:
    kinds: dict[str, list[float]] = {TOOL: [], APPROVAL: [], HUMAN: [], PAUSE: []}
    for round_ in workload.rounds:
        if round_.approval_s:
            kinds[APPROVAL].append(round_.at_s)
        elif round_.wait:
            kinds[(round_.waited_for() or [PAUSE])[0]].append(round_.at_s)
    return {kind: found for kind, values in kinds.items() if (found := spread(values))}


def histogram(values: list[int]) -> list[tuple[float, int]]:
    """(upper edge, count) of logarithmic bins."""
    low, high = max(1, min(values, default=1)), max(2, *values, 2)
    edges = np.geomspace(low, high + 1, BINS + 1)
    counts, _ = np.histogram(values, edges)
    return [(float(edge), int(count)) for edge, count in zip(edges[1:], counts, strict=True)]
