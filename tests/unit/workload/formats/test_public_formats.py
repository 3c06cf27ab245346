"""Samples of the field's traces: each is recognised by its content and read as documented."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvmesh.workload.analysis.analysis import analyze
from kvmesh.workload.errors import Repairs, TraceError, WorkloadError
from kvmesh.workload.formats.detection import FormatError
from kvmesh.workload.formats.registry import load
from kvmesh.workload.model import Workload
from kvmesh.workload.reading.options import ReadOptions

SAMPLES = Path(__file__).parents[3] / "data" / "traces"

# Of each sample: its format, requests, sessions, prompt tokens, block size, and the tokens that an
# infinite cache would hold.
EXPECTED: dict[str, tuple[str, int, int, int, int, int]] = {
    "mooncake.jsonl": ("Mooncake", 3, 3, 3100, 512, 1024),
    "mooncake_full_blocks.jsonl": ("Mooncake", 2, 2, 330, 64, 128),
    "mooncake_lengths.jsonl": ("Mooncake", 2, 2, 420, 1, 0),
    "aiperf_sessions.jsonl": ("Mooncake", 2, 1, 2624, 512, 1024),
    "agentic_mooncake_v2.jsonl": ("Dynamo's agentic Mooncake v2", 4, 3, 512, 64, 256),
    "dynamo_request_trace.jsonl": ("Dynamo's request trace", 3, 2, 126, 16, 48),
    "dynamo_request_trace_enveloped.jsonl": ("Dynamo's request trace", 3, 2, 126, 16, 48),
    "weka": ("Weka's agent sessions", 6, 3, 1270, 64, 576),
    "tracelab_rounds.jsonl": ("TraceLab's corpus", 4, 2, 12700, 1, 8650),
    "tracelab_rounds.jsonl.gz": ("TraceLab's corpus", 4, 2, 12700, 1, 8650),
    "tracelab_canonical.csv": ("TraceLab's sessions", 2, 1, 490, 1, 250),
    "tracelab_runner.csv": ("TraceLab's sessions", 2, 1, 490, 1, 250),
    "bailian.jsonl": ("Qwen-Bailian", 3, 2, 150, 16, 48),
    "azure_2023.csv": ("Azure's LLM inference trace", 2, 2, 770, 1, 0),
    "azure_2024.csv": ("Azure's LLM inference trace", 2, 2, 4561, 1, 0),
    "burstgpt.csv": ("BurstGPT", 2, 2, 1559, 1, 0),
    "lmcache_agent.jsonl": ("texts or messages", 2, 1, 360, 16, 160),
    "lmcache_collection.jsonl": ("texts or messages", 2, 1, 253, 16, 112),
    "sharegpt.json": ("texts or messages", 3, 2, 305, 16, 144),
    "swe_agent.traj": ("texts or messages", 2, 1, 242, 16, 112),
    "swe_messages.jsonl": ("texts or messages", 2, 1, 261, 16, 128),
    "aiperf_messages.jsonl": ("texts or messages", 1, 1, 39, 16, 0),
    "aiperf_text_input.jsonl": ("texts or messages", 2, 1, 245, 16, 112),
    "aiperf_multi_turn.jsonl": ("texts or messages", 2, 1, 353, 16, 224),
    "vllm_custom.jsonl": ("texts or messages", 2, 2, 160, 16, 64),
    "guidellm_prompts.csv": ("texts or messages", 2, 2, 8, 1, 0),
    "guidellm_counts.jsonl": ("GuideLLM's token counts", 2, 2, 384, 1, 0),
    "inference_perf_text.jsonl": ("texts or messages", 2, 2, 100, 16, 0),
    "inference_perf_prefixes.jsonl": ("inference-perf's shared prefixes", 2, 2, 1100, 1, 500),
}


def read(name: str, **options: Any) -> tuple[Workload, Repairs]:
    return load(str(SAMPLES / name), options=ReadOptions(**options))


def figures(workload: Workload) -> tuple[int, int, int, int, int]:
    found = analyze(workload)
    shared = round(found.ideal_hit_share * found.input_tokens)
    sizes = found.requests, found.sessions, found.input_tokens
    return *sizes, found.block_size, shared


@pytest.mark.parametrize("name", EXPECTED)
def test_a_sample_is_read(name: str) -> None:
    workload, repairs = read(name)
    title, *expected = EXPECTED[name]
    assert f": {title}, " in repairs.summary
    assert figures(workload) == tuple(expected)
    assert min(r.at_s for r in workload.rounds if not r.after) == 0
    assert repairs.problems == []


def test_every_sample_is_listed() -> None:
    assert {path.name for path in SAMPLES.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", [name for name in EXPECTED if not name.endswith((".gz", "weka"))])
def test_the_name_and_the_packing_do_not_matter(name: str, tmp_path: Path) -> None:
    packed = tmp_path / "trace"
    packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + (SAMPLES / name).read_bytes()))
    assert load(str(packed))[0].rounds == read(name)[0].rounds


def test_a_subagent_starts_after_its_parent_which_waits_for_it() -> None:
    workload, _ = read("weka")
    names = [session.name for session in workload.sessions]
    one = {
        (names[r.session], position): r
        for members in workload.by_session()
        for position, index in enumerate(members)
        if (r := workload.rounds[index])
    }
    rounds = workload.rounds
    first, child = one["one", 0], one["one/agent_001", 0]
    assert [rounds[index] for index in child.after] == [first]
    assert child.at_s == pytest.approx(0.5)
    joined = one["one", 1]
    assert {rounds[index].session for index in joined.after} == {first.session, child.session}
    assert joined.at_s == pytest.approx(2.0)
    assert (joined.wait, one["one", 2].wait, one["one", 2].at_s) == ("tool", "human", 30.0)
    assert workload.sessions[child.session].kind == "Explore"


def test_ids_of_weka_files_are_local() -> None:
    workload, _ = read("weka")
    names = [session.name for session in workload.sessions]
    branches = {names[r.session]: r.branch for r in workload.rounds}
    assert workload.tree.shared(branches["one"], branches["two"], 128) == 0


def test_agentic_dependencies_become_waits() -> None:
    rounds = read("agentic_mooncake_v2.jsonl")[0].rounds
    sessions = read("agentic_mooncake_v2.jsonl")[0].sessions
    by_name = {sessions[r.session].name + str(r.input_tokens): r for r in rounds}
    child, joined = by_name["p/child64"], by_name["p/main192"]
    assert (child.after, child.at_s) == ((), 0.2)
    assert len(joined.after) == 2
    assert joined.at_s == 0.1
    assert sessions[child.session].parent is not None


def test_tools_name_the_waits_of_live_traces() -> None:
    workload, _ = read("dynamo_request_trace.jsonl")
    second = next(r for r in workload.rounds if r.input_tokens == 70)
    assert (second.wait, second.at_s) == ("web_search", 1.0)
    assert workload.sessions[1].parent == 0


def test_the_corpus_of_tracelab_has_named_waits_and_shared_first_prompts() -> None:
    workload, repairs = read("tracelab_rounds.jsonl")
    waits = [(r.wait, r.at_s) for r in workload.rounds if r.after]
    assert waits == [("Bash", 1.0), ("human", 120.0)]
    assert "4,000 cached prompt tokens" in repairs.notes[0]


def test_turns_are_whole_or_increments() -> None:
    whole, repairs = read("aiperf_sessions.jsonl", turns="whole")
    assert [r.input_tokens for r in whole.rounds] == [1024, 512]
    assert repairs.notes == []
    delta, repairs = read("aiperf_sessions.jsonl", turns="delta")
    assert [r.input_tokens for r in delta.rounds] == [1024, 1600]
    assert repairs.notes == []
    guessed, repairs = read("aiperf_sessions.jsonl")
    assert guessed.rounds == delta.rounds
    assert "--turns delta" in repairs.notes[0]
    assert "--turns whole" in repairs.notes[0]


def test_times_have_a_unit_and_a_window() -> None:
    in_seconds, _ = read("mooncake.jsonl", time_unit="s")
    assert [r.at_s for r in in_seconds.rounds] == [0, 1000, 3500]
    late, _ = read("mooncake.jsonl", begin_s=0.5, end_s=2.0)
    assert [(r.at_s, r.input_tokens) for r in late.rounds] == [(0.0, 1100)]
    with pytest.raises(WorkloadError, match=r"no request between 9 and inf s.*ends at 3\.5 s"):
        read("mooncake.jsonl", begin_s=9)


def test_a_window_cuts_sessions_and_keeps_their_prompts() -> None:
    workload, _ = read("weka", begin_s=10)
    assert [r.input_tokens for r in workload.rounds] == [330, 400]
    assert [(r.at_s, r.after) for r in workload.rounds] == [(0.0, ()), (30.0, (0,))]
    assert [session.name for session in workload.sessions] == ["one"]


def test_long_waits_are_shortened() -> None:
    workload, repairs = read("weka", max_wait_s=5)
    assert max(r.at_s for r in workload.rounds if r.after) == 5
    assert "shortened 1 wait to 5 s" in repairs.notes


def rows(folder: Path, *lines: dict[str, Any] | str) -> str:
    file = folder / "trace.jsonl"
    file.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return str(file)


def row(time: float, tokens: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {
        "timestamp": time,
        "input_length": tokens,
        "output_length": 5,
        "hash_ids": ids,
        **more,
    }


def test_blocks_of_another_size_name_the_way_out(tmp_path: Path) -> None:
    source = rows(tmp_path, *(row(i, 48, [3 * i, 3 * i + 1, 3 * i + 2]) for i in range(9)))
    with pytest.raises(TraceError, match=r"8 more lines.*--trace-block-size 16 fits"):
        load(source)
    with pytest.raises(TraceError, match="in 9 of 9 rows would be another trace"):
        load(source, repair=True)
    workload, _ = load(source, options=ReadOptions(trace_block_size=16))
    assert workload.block_size == 16


def test_odd_spellings_of_a_row_are_read(tmp_path: Path) -> None:
    odd = row(0, 512, [1], session_id=7, priority=None, delay=None, request_id=3)
    source = rows(tmp_path, {**odd, "input_length": 512.0, "output_length": "5"})
    workload, repairs = load(source)
    assert (workload.rounds[0].input_tokens, workload.sessions[0].name) == (512, "7")
    assert repairs.notes == []


def test_several_files_are_one_workload(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        shutil.copy(SAMPLES / "mooncake.jsonl", tmp_path / name)
    (tmp_path / "README.md").write_text("no trace")
    both, _ = load([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    folder, _ = load(str(tmp_path))
    assert both.rounds == folder.rounds
    assert [r.at_s for r in both.rounds] == [0, 0, 1, 1, 3.5, 3.5]
    shutil.copy(SAMPLES / "azure_2023.csv", tmp_path / "c.csv")
    with pytest.raises(
        FormatError, match=r"c\.csv is Azure's .* but .*a\.jsonl is Mooncake: .* name those alone"
    ):
        load(str(tmp_path))


def test_a_defect_names_its_file(tmp_path: Path) -> None:
    shutil.copy(SAMPLES / "mooncake.jsonl", tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text(json.dumps(row(0, 9, [1])) + "\nnonsense\n")
    with pytest.raises(TraceError, match=r"b\.jsonl:2: JSON is malformed"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"PAR1....", "Parquet"),
        (b"\x28\xb5\x2f\xfd", "zstandard"),
        (b'{"resourceSpans": []}', "OpenTelemetry"),
        (b'{"captureData": {}}', "SageMaker"),
        (b'{"num_turns": 2, "tool_call_latency": [1.4]}', "Applied Compute"),
        (b'{"schema": "dynamo.agentic_mooncake", "version": 3, "block_size": 1}', "version 3"),
        (b'{"schema": "dynamo.future.v9"}', "dynamo.future.v9"),
        (b'{"colour": "red"}', "no known format"),
    ],
)
def test_a_format_that_is_not_read_is_named(tmp_path: Path, content: bytes, name: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(content + b"\n")
    with pytest.raises(WorkloadError, match=name):
        load(str(file))


def test_a_damaged_archive_is_one_error(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(gzip.compress((SAMPLES / "mooncake.jsonl").read_bytes())[:-20])
    with pytest.raises(TraceError, match="damaged gzip file"):
        load(str(file))
    with pytest.raises(FormatError, match="no such file"):
        load(str(tmp_path / "missing.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(WorkloadError, match="no trace in this folder"):
        load(str(tmp_path / "empty"))


def test_subagents_of_subagents_are_their_children(tmp_path: Path) -> None:
    def entry(t: float, **fields: Any) -> dict[str, Any]:
        request = {"type": "n", "in": 128, "out": 5, "hash_ids": [1, 2], "api_time": 1.0}
        return {"t": t, **(fields or request)}

    inner = entry(4, type="subagent", agent_id="B", requests=[entry(4)])
    outer = entry(2, type="subagent", agent_id="A", requests=[entry(2), inner, entry(8)])
    file = tmp_path / "day.json"
    file.write_text(json.dumps({"block_size": 64, "requests": [entry(0), outer, entry(12)]}))
    workload, repairs = load(str(file))
    sessions = [(each.name, each.parent) for each in workload.sessions]
    assert sessions == [("day", None), ("day/A", 0), ("day/A/B", 1)]
    assert [round_.after for round_ in workload.rounds] == [(), (0,), (1,), (1, 2), (0, 3)]
    assert repairs.notes == []


def test_names_of_agentic_files_are_their_own(tmp_path: Path) -> None:
    text = (SAMPLES / "agentic_mooncake_v2.jsonl").read_text()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(text)
    one = load(str(tmp_path / "a.jsonl"))[0]
    both = load(str(tmp_path))[0]
    assert len(both.sessions) == 2 * len(one.sessions)
    assert sum(map(len, (r.after for r in both.rounds))) == 2 * sum(
        map(len, (r.after for r in one.rounds))
    )
