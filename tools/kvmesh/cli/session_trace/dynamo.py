"""Records of a session in the forms of Dynamo's request and agent traces, one JSON object each.

Both have an event `request_end` per request. Facts that are not on the route stream are left out:
the ids, names, times and results of tool calls (events `tool_start`, `tool_end` and `tool_error`,
the field `tool_calls`), the engine's own finish and stop reason, the class of the session and the
run of a trajectory without a parent, the depth of the queue, and the estimated time of a handoff.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

import msgspec

from kvmesh.cli.session_trace.turns import SessionTurn
from kvmesh.hashing import HASH_BYTES, block_hashes

Form: TypeAlias = Literal["request", "agent"]
SCHEMAS: dict[Form, str] = {
    "request": "dynamo.request.trace.v1",
    "agent": "dynamo.agent.trace.v1",
}


def trace_records(turns: Iterable[SessionTurn], form: Form) -> Iterator[bytes]:
    """One line per turn."""
    for turn in turns:
        record = {
            "schema": SCHEMAS[form],
            "event_type": "request_end",
            "event_time_unix_ms": _ms(turn.end),
            "event_source": "kvmesh",
            "agent_context": _context(turn) if form == "request" else _agent_context(turn),
            "request": _request(turn),
        }
        yield msgspec.json.encode(record)


def _context(turn: SessionTurn) -> dict[str, Any]:
    parent = {"parent_session_id": turn.parent} if turn.parent else {}
    return {"session_id": turn.session, **parent}


def _agent_context(turn: SessionTurn) -> dict[str, Any]:
    """A session of the mesh is one trajectory; a run of several begins with the parent."""
    parent = {"parent_trajectory_id": turn.parent} if turn.parent else {}
    return {
        "session_type_id": "kvmesh",
        "session_id": turn.parent or turn.session,
        "trajectory_id": turn.session,
        **parent,
        **({"trajectory_final": True} if turn.decision.hints.session_final else {}),
    }


def _request(turn: SessionTurn) -> dict[str, Any]:
    decision, outcome = turn.decision, turn.round.outcome
    prefill = decision.prefill or decision.chosen
    first = turn.first_token
    timing: dict[str, Any] = {}
    if first is not None:
        timing["prefill_time_ms"] = _span_ms(turn.placed, first)
        timing["ttft_ms"] = _span_ms(turn.start, first)
        if outcome.output_tokens > 1:
            gap = (turn.end - first) / (outcome.output_tokens - 1)
            timing["avg_itl_ms"] = round(gap * 1000, 3)
    return {
        "request_id": turn.request,
        **({"x_request_id": outcome.client} if outcome.client else {}),
        "model": decision.model,
        "input_tokens": decision.tokens,
        "output_tokens": outcome.output_tokens,
        "cached_tokens": outcome.cached_tokens,
        "kv_hit_rate": round(outcome.cached_tokens / max(decision.tokens, 1), 6),
        "request_received_ms": _ms(turn.start),
        "prefill_wait_time_ms": _span_ms(turn.start, turn.placed),
        **timing,
        "total_time_ms": _span_ms(turn.start, turn.end),
        "worker": {
            "prefill_worker_id": prefill.instance,
            "prefill_dp_rank": prefill.rank,
            "decode_worker_id": decision.chosen.instance,
            "decode_dp_rank": decision.chosen.rank,
        },
        "finish_reason_metadata": {"finish_reason": outcome.finish},
        "replay": {
            "trace_block_size": decision.block_size,
            "input_length": decision.tokens,
            "input_sequence_hashes": _hashes(turn),
        },
    }


def _hashes(turn: SessionTurn) -> list[int]:
    """One hash per started block; that of a partial last block is the request's alone."""
    decision = turn.decision
    hashes: list[int] = memoryview(decision.sequence_hashes).cast("Q").tolist()
    size = decision.block_size
    if size and len(hashes) * size < decision.tokens:
        name = decision.request.encode()
        padded = name + bytes(-len(name) % HASH_BYTES)
        previous = hashes[-1] if hashes else 0
        _, own = block_hashes(padded, len(padded) // 4, previous)
        hashes.append(int.from_bytes(own[:HASH_BYTES], "little"))
    return hashes


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _span_ms(start: float, end: float) -> float:
    return round((end - start) * 1000, 3)
