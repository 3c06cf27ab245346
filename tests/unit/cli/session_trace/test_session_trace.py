"""The turns of a session, and the forms in which `kvmesh explain trace` writes them."""

import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from kvmesh.bus.messages import Candidate, Decision, Hints, Outcome
from kvmesh.cli.session_trace.dynamo import Form, trace_records
from kvmesh.cli.session_trace.table import turn_table
from kvmesh.cli.session_trace.timeline import perfetto_timeline
from kvmesh.cli.session_trace.turns import (
    TOOLS,
    USER,
    SessionTurn,
    session_rounds,
    session_turns,
)
from kvmesh.frontend.namespaces import SEPARATOR
from kvmesh.workload.analysis.analysis import analyze
from kvmesh.workload.capture import CapturedRound, Recorder, assemble
from kvmesh.workload.formats.registry import load
from kvmesh.workload.writing.mooncake import write

T0 = 1_700_000_000.0


def candidate(worker: str) -> Candidate:
    return Candidate(
        instance=f"{worker}-1", worker=worker, rank=0, overlap=[0], prefill=1.0, decode=1.0,
        requests=0, cost=1.0,
    )  # fmt: skip


def round_of(
    name: str,
    at: float,
    session: str | None = "s",
    parent: str | None = None,
    finish: str = "tool_calls",
    ttft_s: float | None = 0.5,
) -> CapturedRound:
    """A request that arrives at the frontend at `at`, waits 0.2 s and ends after 2 s."""
    decision = Decision(
        request=name, model="m", time=T0 + at + 0.3, router="r", policy="kv",
        chosen=candidate("decoder"), prefill=candidate("prefiller"), candidates=[], tokens=40,
        sequence_hashes=struct.pack("<2Q", 1, 2), max_tokens=5, block_size=16, wait_s=0.2,
        hints=Hints(session=session, parent_session=parent),
    )  # fmt: skip
    outcome = Outcome(
        request=name, instance="decoder-1", time=T0 + at + 2.0, cached_tokens=16, output_tokens=7,
        ttft_s=ttft_s, total_s=2.0, finish=finish,
    )  # fmt: skip
    recorder = Recorder()
    recorder.add(decision)
    recorder.add(outcome)
    (captured,) = recorder.rounds
    return captured


def turns(*rounds: CapturedRound) -> list[SessionTurn]:
    return list(session_turns(rounds))


def test_a_session_has_its_subagents_and_no_others() -> None:
    rounds = [
        round_of("a", 0.0),
        round_of("other", 1.0, "o"),
        round_of("none", 1.0, None),
        round_of("grandchild", 2.0, "s/x/y", "s/x"),
        round_of("child", 3.0, "s/x", "s"),
    ]
    found = [each.decision.request for each in session_rounds(rounds, "s")]
    assert found == ["a", "grandchild", "child"]
    assert session_rounds(rounds, "unknown") == []


def test_a_tenant_s_session_is_found_by_its_callers_name() -> None:
    rounds = [round_of("a", 0.0, f"tag{SEPARATOR}s"), round_of("b", 1.0, f"tag{SEPARATOR}t")]
    (found,) = session_rounds(rounds, "s")
    (turn,) = turns(found)
    assert turn.session == "s"


def test_a_turn_has_its_phases_in_order() -> None:
    first, second = turns(round_of("a", 0.0), round_of("b", 5.0, finish="stop"))
    moments = (first.start, first.routed, first.placed, first.first_token, first.end)
    assert [round(m - T0, 3) for m in moments if m is not None] == [0.0, 0.1, 0.3, 0.5, 2.0]
    assert (first.after, first.waits_for) == (None, "")
    assert second.after == first.end
    assert (second.number, second.waits_for) == (2, TOOLS)
    assert (second.prefill_worker, second.worker) == ("prefiller", "decoder")


def test_clocks_that_differ_keep_the_order() -> None:
    late = round_of("a", 0.0)
    decision = replace(late.decision, time=T0 + 99.0)
    (turn,) = turns(replace(late, decision=decision))
    assert turn.first_token is not None
    assert turn.start <= turn.routed <= turn.placed <= turn.first_token <= turn.end


def test_turns_at_once_wait_for_nothing() -> None:
    both = turns(round_of("a", 0.0, finish="stop"), round_of("b", 1.0), round_of("c", 4.0))
    assert [turn.waits_for for turn in both] == ["", "", TOOLS]
    assert turns(round_of("a", 0.0, finish="stop"), round_of("b", 3.0))[1].waits_for == USER


def slices(written: bytes, name: str) -> list[dict[str, Any]]:
    return [e for e in json.loads(written)["traceEvents"] if e["name"] == name]


def test_the_timeline_has_sessions_and_workers() -> None:
    written = perfetto_timeline(
        turns(round_of("a", 0.0), round_of("b", 1.0), round_of("c", 4.0, "x", "s"))
    )
    names = [e["args"]["name"] for e in slices(written, "process_name")]
    assert names == ["session s", "worker prefiller", "worker decoder", "session x"]
    first, third = slices(written, "turn 1")
    (second,) = slices(written, "turn 2")
    assert (first["ts"], first["dur"]) == (0.0, 2e6)
    assert first["tid"] != second["tid"]  # at the same time
    assert third["pid"] != first["pid"]
    assert first["args"]["cached_tokens"] == 16
    assert [e["dur"] for e in slices(written, "queue")] == [2e5, 2e5, 2e5]
    assert len(slices(written, "decode s 1")) == 1


def test_a_pause_is_a_slice_before_its_turn() -> None:
    written = perfetto_timeline(turns(round_of("a", 0.0), round_of("b", 5.0)))
    (pause,) = slices(written, "waits for tools")
    (turn,) = slices(written, "turn 2")
    assert (pause["ts"], pause["dur"], pause["tid"]) == (2e6, 3e6, turn["tid"])


def test_a_request_without_a_token_has_no_decode() -> None:
    written = perfetto_timeline(turns(round_of("a", 0.0, finish="error", ttft_s=None)))
    assert slices(written, "decode") == []
    assert slices(written, "prefill")[0]["dur"] == 1.7e6


def test_the_records_have_dynamo_s_fields() -> None:
    child = round_of("b", 1.0, "x", "s")
    final = replace(child.decision.hints, session_final=True)
    outcome = replace(child.outcome, client="call-7")
    child = replace(child, decision=replace(child.decision, hints=final), outcome=outcome)
    both = turns(round_of("a", 0.0), child)
    first, second = (json.loads(line) for line in trace_records(both, "request"))
    assert first["schema"] == "dynamo.request.trace.v1"
    assert first["event_type"] == "request_end"
    assert first["agent_context"] == {"session_id": "s"}
    assert second["agent_context"] == {"session_id": "x", "parent_session_id": "s"}
    told = first["request"]
    assert (told["request_id"], told["input_tokens"], told["output_tokens"]) == ("a", 40, 7)
    assert (told["kv_hit_rate"], told["ttft_ms"], told["total_time_ms"]) == (0.4, 500.0, 2000.0)
    assert told["worker"]["prefill_worker_id"] == "prefiller-1"
    assert told["avg_itl_ms"] == 250.0  # 6 tokens after the first, in 1.5 s
    assert "x_request_id" not in told
    assert second["request"]["x_request_id"] == "call-7"
    replay = told["replay"]
    assert (replay["trace_block_size"], replay["input_length"]) == (16, 40)
    assert replay["input_sequence_hashes"][:2] == [1, 2]
    assert len(replay["input_sequence_hashes"]) == 3  # one per started block
    assert replay["input_sequence_hashes"] != second["request"]["replay"]["input_sequence_hashes"]
    _, agent = (json.loads(line) for line in trace_records(both, "agent"))
    assert agent["schema"] == "dynamo.agent.trace.v1"
    assert agent["agent_context"] == {
        "session_type_id": "kvmesh",
        "session_id": "s",
        "trajectory_id": "x",
        "parent_trajectory_id": "s",
        "trajectory_final": True,
    }


def test_the_rounds_are_a_workload(tmp_path: Path) -> None:
    write(assemble([round_of("a", 0.0), round_of("b", 5.0)]), tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["input_length"] for row in rows] == [40, 40]
    assert rows[1]["wait_for"] == [rows[0]["request_id"]]


def test_the_table_shows_what_each_turn_waited_for() -> None:
    out = io.StringIO()
    Console(file=out, width=200).print(turn_table(turns(round_of("a", 0.0), round_of("b", 5.0))))
    header, first, second = out.getvalue().splitlines()
    assert "waited for" in header
    assert "prefiller → decoder" in first
    assert "tools 3.00 s" in second
    assert "40%" in second


@pytest.mark.parametrize("form", ["request", "agent"])
def test_what_is_written_for_dynamo_is_read_as_captured(tmp_path: Path, form: Form) -> None:
    rounds = [
        round_of("a", 0.0),
        round_of("child", 1.0, "s/x", "s"),
        round_of("b", 5.0, finish="cancelled"),
        round_of("overlapping", 6.0),
    ]
    file = tmp_path / "trace.jsonl"
    file.write_bytes(b"".join(line + b"\n" for line in trace_records(turns(*rounds), form)))
    captured, (again, _) = assemble(rounds), load(str(file))
    assert [session.name for session in again.sessions] == ["s", "s/x"]
    assert [s.parent for s in again.sessions] == [s.parent for s in captured.sessions]
    for one, other in zip(captured.rounds, again.rounds, strict=True):
        assert (one.session, one.after, one.wait) == (other.session, other.after, other.wait)
        # A capture counts from the arrival at the router, a trace from that at the frontend.
        assert one.at_s == pytest.approx(other.at_s, abs=0.102)
        assert (one.input_tokens, one.output_tokens) == (other.input_tokens, other.output_tokens)
        assert one.abort_after == other.abort_after
    assert analyze(again).ideal_hit_share == analyze(captured).ideal_hit_share
