"""`nvext` of a response: what really happened to a request, for those who ask."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from kvmesh.bus.messages import Candidate, Retain
from kvmesh.frontend.dispatch.dispatcher import SequenceTask
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest
from kvmesh.frontend.preprocess.retention import directive_outcomes

HONOURED = "honoured"
UNKNOWN = "unknown"


def extras(
    prepared: PreparedRequest, jobs: list[SequenceTask], started: float, stopped: str | None
) -> dict[str, Any]:
    """The parts that `extra_fields` names, about the first sequence where there are several."""
    job = jobs[0]
    known: dict[str, Callable[[SequenceTask], Any]] = {
        "worker_id": _worker,
        "timing": lambda job: _timing(job, started),
        "cache": _cache,
        "routing": _routing,
        "stop_reason": lambda job: stopped or job.sequence.finish,
        "ignored": lambda job: prepared.request.ignored,
    }
    return {
        name: tell(job) for name, tell in known.items() if name in prepared.request.extra_fields
    }


def told(job: SequenceTask) -> list[tuple[Retain, str]]:
    """The directives for a sequence's prompt, each with what came of it."""
    return directive_outcomes(job.prompt.retention, job.sequence.retention)


def answered(job: SequenceTask) -> tuple[Retain, str] | None:
    """The directive for a sequence's answer with what came of it, as far as the engine has said."""
    asked = job.prepared.request.decode
    return None if asked is None else (asked, job.sequence.decode or UNKNOWN)


def all_outcomes(job: SequenceTask) -> list[str]:
    """What came of each directive, for prompt and answer."""
    answer = answered(job)
    return [outcome for _, outcome in (*told(job), *([answer] if answer else []))]


def kept_for(job: SequenceTask, ttl_s: float) -> int:
    """How much of a prompt's beginning is kept for so long, as asked and granted, in tokens."""
    ends = [
        job.prompt.count if entry.end is None else entry.end
        for entry, outcome in told(job)
        if entry.start == 0 and (entry.ttl_s or 0) >= ttl_s and outcome == HONOURED
    ]
    return max(ends, default=0)


def _worker(job: SequenceTask) -> dict[str, Any]:
    rank = job.routed.rank if job.routed else 0
    return {"instance": job.sequence.instance, "dp_rank": rank}


def _timing(job: SequenceTask, started: float) -> dict[str, Any]:
    now = asyncio.get_running_loop().time()
    first = job.sequence.first_at
    return {
        "ttft_ms": None if first is None else round((first - started) * 1000, 3),
        "total_ms": round((now - started) * 1000, 3),
    }


def _cache(job: SequenceTask) -> dict[str, Any]:
    cached = job.sequence.cached or []
    answer = answered(job)
    return {
        "cached_tokens": sum(cached),
        "tiers": cached,
        "prompt_tokens": job.prompt.count,
        "retention": [_directive(*found) for found in told(job)],
        **({} if answer is None else {"decode": _outcome(*answer)}),
    }


def _directive(entry: Retain, outcome: str) -> dict[str, Any]:
    return {"start": entry.start, "end": entry.end, **_outcome(entry, outcome)}


def _outcome(entry: Retain, outcome: str) -> dict[str, Any]:
    return {"priority": entry.priority, "duration_s": entry.ttl_s, "outcome": outcome}


def _routing(job: SequenceTask) -> dict[str, Any] | None:
    """The chosen worker's cost terms, and those of the best one that was not chosen."""
    decision = job.routed.decision if job.routed else None
    if decision is None:
        return None
    chosen = decision.chosen
    others = [
        c for c in decision.candidates if (c.instance, c.rank) != (chosen.instance, chosen.rank)
    ]
    best = min(others, key=lambda candidate: candidate.cost, default=None)
    return {
        "policy": decision.policy,
        "wait_ms": round(decision.wait_s * 1000, 3),
        "index_ms": round(decision.index_s * 1000, 3),
        "chosen": _candidate(chosen),
        "best_rejected": _candidate(best) if best is not None else None,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return msgspec.structs.asdict(candidate)
