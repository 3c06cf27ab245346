"""The `nvext` object of a response: worker, timing, cache and routing facts of a request."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvmesh.bus.messages import Candidate, RankKey, Retain, instance_number
from kvmesh.frontend.dispatch.task import SequenceTask
from kvmesh.frontend.dispatch.token_stream import TokenStream
from kvmesh.frontend.generation.accounts import account_of, loss_object
from kvmesh.frontend.preprocess.preprocessor import PromptTokens
from kvmesh.frontend.preprocess.retention import directive_outcomes

HONOURED = "honoured"
UNKNOWN = "unknown"


def nvext(tasks: Sequence[SequenceTask], started: float, stopped_by: str | None) -> dict[str, Any]:
    """The parts that `extra_fields` names, mostly for the first sequence of a request.

    `started` is the request's arrival on the loop's clock.
    """
    task, request = tasks[0], tasks[0].prepared.request
    parts: dict[str, Callable[[], Any]] = {
        "worker_id": lambda: worker_ids(task),
        "timing": lambda: _timing(task, started),
        "cache": lambda: _cache(task),
        "routing": lambda: _routing(task),
        "stop_reason": lambda: stopped_by or task.stream.finish,
        "detailed_finish_reason": lambda: _of_each([each.stream.finish for each in tasks]),
        "completion_token_ids": lambda: _of_each([each.stream.tokens for each in tasks]),
        "ignored": lambda: request.ignored,
    }
    return {name: make() for name, make in parts.items() if name in request.extra_fields}


def prompt_outcomes(prompt: PromptTokens, stream: TokenStream) -> list[tuple[Retain, str]]:
    """The retention directives for a prompt, each with its outcome."""
    return directive_outcomes(prompt.retention, stream.retention_outcomes)


def decode_outcome(task: SequenceTask) -> tuple[Retain, str] | None:
    """The retention directive for generated tokens with its outcome, as far as it is known."""
    directive = task.prepared.request.decode
    return None if directive is None else (directive, task.stream.decode_outcome or UNKNOWN)


def all_outcomes(task: SequenceTask) -> list[str]:
    """The outcome of each retention directive, for prompt and generated tokens."""
    decode = decode_outcome(task)
    found = [*prompt_outcomes(task.prompt, task.stream), *([decode] if decode else [])]
    return [outcome for _, outcome in found]


def retained_tokens(prompt: PromptTokens, stream: TokenStream, ttl_s: float) -> int:
    """Length in tokens of the prefix that the engine has agreed to retain for at least `ttl_s`."""
    ends = [
        prompt.count if entry.end is None else entry.end
        for entry, outcome in prompt_outcomes(prompt, stream)
        if entry.start == 0 and (entry.ttl_s or 0) >= ttl_s and outcome == HONOURED
    ]
    return max(ends, default=0)


def worker_ids(task: SequenceTask) -> dict[str, Any]:
    """The worker that generates and the one that computed the prompt, also by their numbers."""
    state, instance = task.dispatch, task.stream.instance
    routed = state.routed
    rank = RankKey(instance, routed.rank if routed else 0)
    apart = routed is not None and state.handoff is not None
    prefill = routed.prefill if routed is not None and apart and routed.prefill else rank
    return {
        "instance": instance,
        "dp_rank": rank.rank,
        "prefill_worker_id": instance_number(prefill.instance),
        "prefill_dp_rank": prefill.rank,
        "decode_worker_id": instance_number(instance),
        "decode_dp_rank": rank.rank,
    }


def _timing(task: SequenceTask, started: float) -> dict[str, Any]:
    """Milliseconds, and the arrival as Unix time in milliseconds."""
    now, stream = asyncio.get_running_loop().time(), task.stream
    first, count = stream.first_token_at, len(stream.tokens)
    total, ttft = now - started, None if first is None else first - started
    waited = task.dispatch.began - started + task.dispatch.route_s + (stream.engine_wait_s or 0.0)
    computed = None if ttft is None else max(ttft - waited, 0.0)
    between = (now - first) / (count - 1) if first is not None and count > 1 else None
    return {
        "request_received_ms": round((time.time() - total) * 1000),
        "prefill_wait_time_ms": None if ttft is None else _ms(min(waited, ttft)),
        "prefill_time_ms": _ms(computed),
        "ttft_ms": _ms(ttft),
        "itl_ms": _ms(between),
        "total_ms": _ms(total),
        "total_time_ms": _ms(total),
        "kv_hit_rate": round(sum(stream.cached or []) / task.prompt.count, 6),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _of_each(values: list[Any]) -> Any:
    """The value of the only choice, or the list of those of all choices."""
    return values if len(values) > 1 else values[0]


def _cache(task: SequenceTask) -> dict[str, Any]:
    cached = task.stream.cached or []
    decode = decode_outcome(task)
    retention = prompt_outcomes(task.prompt, task.stream)
    return {
        "cached_tokens": sum(cached),
        "tiers": cached,
        "prompt_tokens": task.prompt.count,
        "account": _account(task),
        "retention": [_directive(*entry) for entry in retention],
        **({} if decode is None else {"decode": _outcome(*decode)}),
    }


def _account(task: SequenceTask) -> dict[str, Any] | None:
    """The account of the prompt for its caller, who learns nothing of other tenants' requests."""
    account, compared = account_of(task), task.prepared.comparison
    if account is None:
        return None
    size = task.prepared.model.card.block_size
    change = None
    if account.change is not None and compared is not None:
        change = {
            **msgspec.to_builtins(account.change),
            "block": account.change.token // size,
            "before": compared.before,
            "after": compared.after,
        }
    return {
        "reused": {"own": account.own, "ahead": account.ahead, "shared": account.shared},
        "lost": [loss_object(loss) for loss in account.losses],
        "new": account.new,
        "possible": account.possible,
        "previous": account.previous,
        "change": change,
    }


def _directive(entry: Retain, outcome: str) -> dict[str, Any]:
    return {"start": entry.start, "end": entry.end, **_outcome(entry, outcome)}


def _outcome(entry: Retain, outcome: str) -> dict[str, Any]:
    return {"priority": entry.priority, "duration_s": entry.ttl_s, "outcome": outcome}


def _routing(task: SequenceTask) -> dict[str, Any] | None:
    """Cost terms of the chosen worker and of the best one that was not chosen."""
    routed = task.dispatch.routed
    decision = routed.decision if routed else None
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
