"""All formats: round trips, rejections with line numbers, reported losses."""

import os
from pathlib import Path

import pytest
from msgspec import structs

from kvmesh.workload.analysis.analysis import analyze
from kvmesh.workload.errors import TraceError, WorkloadError
from kvmesh.workload.formats import native
from kvmesh.workload.formats.detection import FormatError
from kvmesh.workload.formats.registry import load, save
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.profile import load_profile
from kvmesh.workload.model import Workload

HEADER = "session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n"
SESSIONS = HEADER + "a,100,0,0,200,50,300\na,100,1,250,40,10,0\nb,50,0,0,90,5,0\n"


@pytest.fixture(scope="module")
def agents() -> Workload:
    return AgentGenerator(load_profile("demo"), 1).workload(12)


def csv(folder: Path, text: str) -> Path:
    file = folder / "sessions.csv"
    file.write_text(text)
    return file


def parents(workload: Workload) -> dict[str, str | None]:
    names = [session.name for session in workload.sessions]
    return {s.name: None if s.parent is None else names[s.parent] for s in workload.sessions}


def test_the_native_format_is_lossless(tmp_path: Path, agents: Workload) -> None:
    file = tmp_path / "w.json"
    assert save(agents, file).losses == []
    again, _ = load(str(file))
    assert again.rounds == agents.rounds
    assert again.sessions == agents.sessions
    pairs = [agents.tree.parent(b) for b in range(len(agents.tree))]
    assert [again.tree.parent(b) for b in range(len(again.tree))] == pairs


def test_mooncake_keeps_order_waits_lengths_and_whole_blocks(
    tmp_path: Path, agents: Workload
) -> None:
    file = tmp_path / "w.jsonl"
    save(agents, file, block_size=16)
    again, repairs = load(str(file))
    assert repairs.counts() == {}
    for one, other in zip(agents.rounds, again.rounds, strict=True):
        assert one.after == other.after
        assert one.at_s == pytest.approx(other.at_s, abs=1e-3)
        assert (one.input_tokens, one.output_tokens) == (other.input_tokens, other.output_tokens)
        assert (one.priority, one.abort_after) == (other.priority, other.abort_after)
    assert parents(again) == parents(agents)
    ideal, found = analyze(agents, 16), analyze(again, 16)
    assert found.ideal_hit_share == pytest.approx(ideal.ideal_hit_share, abs=0.002)


def test_tracelab_sessions_are_closed_loops(tmp_path: Path) -> None:
    workload, _ = load(str(csv(tmp_path, SESSIONS)))
    first, other, second = workload.rounds
    assert (first.input_tokens, other.input_tokens, second.input_tokens) == (90, 200, 290)
    assert (first.at_s, other.at_s, second.at_s) == (0.0, 0.05, 0.3)
    assert second.after == (1,)
    assert workload.tree.shared(other.output_branch, second.branch, 290) == 290


def test_tracelab_writes_what_it_read(tmp_path: Path) -> None:
    workload, _ = load(str(csv(tmp_path, SESSIONS)))
    out = tmp_path / "out.csv"
    assert save(workload, out).losses == []
    expected = SESSIONS.replace("a,100", "a,50").replace("b,50", "b,0")
    assert sorted(out.read_text().splitlines()) == sorted(expected.splitlines())


def test_a_shorter_prefix_leaves_the_old_prompt(tmp_path: Path) -> None:
    text = SESSIONS.replace("a,100,1,250,40", "a,100,1,120,40")
    workload, _ = load(str(csv(tmp_path, text)))
    assert workload.tree.shared(workload.rounds[1].branch, workload.rounds[2].branch, 160) == 120


def test_tracelab_reports_losses(tmp_path: Path, agents: Workload) -> None:
    losses = " ".join(save(agents, tmp_path / "out.csv").losses)
    assert "prefixes shared between sessions" in losses
    assert "priorities" in losses
    assert "session kinds" in losses


def test_mooncake_reports_losses(tmp_path: Path) -> None:
    thinkers = AgentGenerator(load_profile("coding-agents"), 1).workload(2)
    thinkers.sessions[0] = structs.replace(thinkers.sessions[0], ends=True)
    assert save(thinkers, tmp_path / "out.jsonl", 512).losses == [
        "thinking tokens",
        "session kinds",
        "session ends",
        "names of tools and human waits",
    ]


def test_a_supervised_agents_file_is_lossless_only_in_the_native_format(tmp_path: Path) -> None:
    supervised = AgentGenerator(load_profile("approving-agents"), 1).workload(6)
    assert save(supervised, tmp_path / "w.json").losses == []
    again, _ = load(str(tmp_path / "w.json"))
    assert again.rounds == supervised.rounds
    assert any(round_.approval_s for round_ in again.rounds)
    losses = save(supervised, tmp_path / "w.jsonl", 512).losses
    expected = ["cache marks", "expected output lengths", "classes of tool calls and approvals"]
    assert losses[-3:] == expected


def test_a_mark_after_the_end_of_the_prompt_is_a_defect(tmp_path: Path, agents: Workload) -> None:
    longer = agents.rounds[0].input_tokens + 1
    rounds = [structs.replace(agents.rounds[0], marks=((longer, 300.0),)), *agents.rounds[1:]]
    native.write(structs.replace(agents, rounds=rounds), tmp_path / "w.json")
    with pytest.raises(TraceError, match="a cache mark after the end of the prompt"):
        load(str(tmp_path / "w.json"))


def test_files_without_the_newer_fields_are_readable(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    file.write_text(
        '{"format": "kvmesh.workload.v1", "block_size": 1, "branches": [[-1, 0]], "sessions":'
        ' [{"name": "a"}], "rounds": [{"session": 0, "branch": 0, "output_branch": 0,'
        ' "input_tokens": 5, "output_tokens": 2, "wait": "human"}]}'
    )
    workload, _ = load(str(file))
    assert workload.rounds[0].waited_for() == ["human"]
    assert workload.rounds[0].marks == ()


def test_mooncake_keeps_open_loop_sessions(tmp_path: Path) -> None:
    trace, again = tmp_path / "t.jsonl", tmp_path / "again.jsonl"
    line = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1], %s}\n'
    trace.write_text(line % '"session_id": "s"' * 2)
    workload, _ = load(str(trace))
    assert save(workload, again).losses == []
    copy, _ = load(str(again))
    assert (copy.rounds, copy.sessions) == (workload.rounds, workload.sessions)


def test_tracelab_rejects_open_loop_sessions(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    line = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1], %s}\n'
    trace.write_text(line % '"session_id": "s"' * 2)
    workload, _ = load(str(trace))
    out = tmp_path / "out.csv"
    out.write_text("precious")
    with pytest.raises(WorkloadError, match="'s' is not closed-loop"):
        save(workload, out)
    assert out.read_text() == "precious"


@pytest.mark.parametrize(
    ("line", "reason", "repair"),
    [
        ("c,1,0,0,-5,1,0", "`input_len`", "dropped the line"),
        ("c,1,0,0,many,1,0", "`input_len`", "dropped the line"),
        ("c,1,0,0", "`input_len`", "dropped the line"),
        ("c,1,0,0,5,1,0,7", "more fields than columns", "dropped the line"),
        ("c,inf,0,0,5,1,0", "`arrival_time`", "dropped the line"),
        ("c,1,0,0,1000000000,1,0", "`input_len`", "dropped the line"),
        ("c" * 200_000 + ",1,0,0,5,1,0", "field larger than field limit", "dropped the line"),
        ("c,1,3,0,5,1,0", "round 3 of session c, expected 0", "renumbered the rounds"),
        ("c,1,0,0,0,1,0", "empty prompt", "made it one token"),
        (
            "a,100,2,999,5,1,0",
            "prefix_len 999 exceeds the session's context of 300",
            "counted the excess",
        ),
    ],
)
def test_an_invalid_row_is_rejected_by_line_or_repaired(
    tmp_path: Path, line: str, reason: str, repair: str
) -> None:
    file = csv(tmp_path, SESSIONS + line + "\n")
    with pytest.raises(TraceError, match=rf"sessions.csv:5: .*{reason}"):
        load(str(file))
    workload, repairs = load(str(file), repair=True)
    assert any(made.startswith(repair) for made in repairs.counts())
    assert len(workload) == (3 if repair == "dropped the line" else 4)


def test_a_table_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = csv(tmp_path, SESSIONS)
    plain = load(str(file))[0].rounds
    file.write_text(SESSIONS.replace("\n", "\r\n"), encoding="utf-8-sig")
    assert load(str(file))[0].rounds == plain


def test_a_table_with_other_columns_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no known format has its columns \(a, b\)"):
        load(str(csv(tmp_path, "a,b\n1,2\n")))
    with pytest.raises(TraceError, match=r":1: missing column tool_wait_after_ms"):
        load(str(csv(tmp_path, HEADER.replace(",tool_wait_after_ms", ""))))
    with pytest.raises(TraceError, match="no sessions"):
        load(str(csv(tmp_path, HEADER)))
    with pytest.raises(TraceError, match=":1: field larger"):
        load(str(csv(tmp_path, "a" * 200_000)))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"branch":1,', '"branch":99,', "unknown branch 99"),
        ('"after":[]', '"after":[7]', "waits for a round"),
        (
            '"output_branch":1,',
            '"output_branch":0,',
            "the output branch does not continue the prompt",
        ),
        ('"output_tokens":', '"output_tokens":-', "`int` >= 0 - at `rounds"),
        ('"parent":null', '"parent":3', r"sessions\[0\]: the parent must precede the session"),
        ('"block_size":1', '"block_size":0', "`int` >= 1 - at `block_size`"),
        ("v1", "v9", "Invalid enum value 'kvmesh.workload.v9'"),
        ('"branches":[[-1,0]', '"branches":[[5,0]', "no token 0 on branch 5"),
        ("{", "[", "malformed|Expected"),
    ],
)
def test_a_damaged_document_is_refused(
    tmp_path: Path, agents: Workload, old: str, new: str, reason: str
) -> None:
    file = tmp_path / "w.json"
    native.write(agents, file)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(TraceError, match=reason):
        load(str(file))


def test_a_document_without_requests_is_refused(tmp_path: Path, agents: Workload) -> None:
    file = tmp_path / "w.json"
    native.write(agents.first(0), file)
    with pytest.raises(TraceError, match="no requests"):
        load(str(file))


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.parquet"
    with pytest.raises(FormatError, match=r"no such file or shipped profile.*demo"):
        load(str(file))
    workload, _ = load(str(csv(tmp_path, SESSIONS)))
    with pytest.raises(FormatError, match=r"known: \.jsonl"):
        save(workload, file)


def test_the_public_session_trace() -> None:
    path = os.environ.get("KVMESH_SESSION_TRACE")
    if not path:
        pytest.skip("set KVMESH_SESSION_TRACE to the public TraceLab example of 48 sessions")
    workload, repairs = load(path)
    assert (len(workload), len(workload.sessions), repairs.counts()) == (303, 48, {})
