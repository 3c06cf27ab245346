"""Files for other tools: increments, dependencies, units, block sizes, and what is lost."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import structs

from kvmesh.workload.analysis.sharing import ideal_hits
from kvmesh.workload.formats.detection import FormatError
from kvmesh.workload.formats.registry import load, save
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.profile import load_profile
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.reading.options import ReadOptions
from kvmesh.workload.tree import Tree
from kvmesh.workload.writing.targets import Target

TARGETS = get_args(Target)


@pytest.fixture(scope="module")
def agents() -> Workload:
    return AgentGenerator(load_profile("demo"), 1).workload(12)


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def chain(*prompts: tuple[int, int], children: bool = False) -> Workload:
    """A session whose prompts (tokens, output) lie on one branch, 1 s apart."""
    tree = Tree()
    branch = tree.fork()
    sessions = [Session(name="s", kind="agent")]
    rounds = [
        Round(
            session=0, branch=branch, output_branch=branch, input_tokens=tokens,
            output_tokens=output, at_s=1.0 if n else 0.0, after=(n - 1,) if n else (), wait="Bash",
        )
        for n, (tokens, output) in enumerate(prompts)
    ]  # fmt: skip
    return Workload(tree=tree, sessions=sessions, rounds=rounds)


def test_a_later_turn_is_what_it_adds(tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    saved = save(chain((1024, 100), (1636, 50)), file, None, "aiperf")
    first, second = rows(file)
    assert (first["input_length"], first["hash_ids"], first["timestamp"]) == (1024, [0, 1], 0.0)
    assert (second["input_length"], second["hash_ids"], second["delay"]) == (512, [2], 1000.0)
    assert "timestamp" not in second
    assert second["session_id"] == first["session_id"] == "s"
    assert saved.losses == ["session kinds", "names of tools and human waits"]
    assert saved.usage.endswith("mooncake_trace --fixed-schedule")


def test_a_rewritten_prompt_begins_a_conversation(tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    losses = save(chain((1024, 100), (600, 50), (700, 5)), file, None, "aiperf").losses
    one, compacted, next_one = rows(file)
    assert "session_id" not in one
    assert compacted["timestamp"] == 3000.0  # a second after 100 tokens of 20 ms each
    assert (compacted["session_id"], next_one["input_length"]) == ("s#1", 50)
    assert losses[0].startswith("1 turns that do not continue the prompt before")


def test_an_answer_that_prompts_leave_out_is_named(tmp_path: Path) -> None:
    workload = chain((1024, 100), (1636, 50))
    other = workload.tree.fork(0, 1024)
    rounds = [structs.replace(workload.rounds[0], output_branch=other), workload.rounds[1]]
    workload = structs.replace(workload, rounds=rounds)
    losses = save(workload, tmp_path / "w.jsonl", None, "aiperf").losses
    assert "1 turns whose recorded prompt leaves out the answer before" in losses[0]


def test_dynamo_s_header_states_blocks_and_rows_their_dependencies(
    tmp_path: Path, agents: Workload
) -> None:
    file = tmp_path / "w.jsonl"
    saved = save(agents, file, 64, "dynamo")
    header, *found = rows(file)
    assert (header["schema"], header["version"]) == ("dynamo.agentic_mooncake", 2)
    assert (header["block_size"], header["hash_id_scope"]) == (64, "local")
    relations = {d["relation"] for row in found for d in row.get("dependencies", ())}
    assert relations == {"sequence", "spawn", "join"}
    assert saved.usage == "trace format agentic_mooncake"
    again, _ = load(str(file))
    for one, other in zip(agents.rounds, again.rounds, strict=True):
        assert (one.after, one.priority) == (other.after, other.priority)
        assert one.at_s == pytest.approx(other.at_s, abs=1e-3)
    assert sum(ideal_hits(again, 64)) == pytest.approx(sum(ideal_hits(agents, 64)), rel=0.01)


def test_a_parent_that_begins_after_its_child_is_named(tmp_path: Path) -> None:
    workload = chain((1024, 100), (1636, 50))
    child = structs.replace(workload.rounds[0], session=1)
    later = [structs.replace(workload.rounds[0], at_s=5.0)]
    later.append(structs.replace(workload.rounds[1], after=(1,)))
    sessions = [*workload.sessions, Session(name="child", parent=0)]
    workload = structs.replace(workload, sessions=sessions, rounds=[child, *later])
    lost = "parents of 1 child session that no request of the parent starts"
    assert lost in save(workload, tmp_path / "w.jsonl", None, "dynamo").losses


@pytest.mark.parametrize(
    ("target", "unit", "option"),
    [
        ("dynamo", 1000.0, "trace block size 64"),
        ("guidellm", 1.0, "hash_id_block_size=64"),
        ("vllm", 1.0, "--timed-trace-chunk-hash-size 64"),
        ("aiperf", 1000.0, "--isl-block-size 64"),
    ],
)
def test_each_tool_has_its_unit_and_the_option_of_other_blocks(
    tmp_path: Path, target: Target, unit: float, option: str
) -> None:
    source, file = tmp_path / "t.jsonl", tmp_path / "w.jsonl"
    line = '{"timestamp": %d, "input_length": 130, "output_length": 3, "hash_ids": [1, %d, %d]}\n'
    source.write_text(line % (0, 2, 3) + line % (1500, 2, 4))
    workload, _ = load(str(source), options=ReadOptions(trace_block_size=64))
    saved = save(workload, file, None, target)
    assert saved.losses == []
    assert saved.usage.endswith(option)
    one, other = rows(file)
    assert other["timestamp"] == 1.5 * unit
    assert one["hash_ids"][:2] == other["hash_ids"][:2]
    assert one["hash_ids"][2] != other["hash_ids"][2]


@pytest.mark.parametrize("target", [*TARGETS, None])
def test_what_is_written_is_read_again(
    tmp_path: Path, agents: Workload, target: Target | None
) -> None:
    file = tmp_path / "w.jsonl"
    save(agents, file, 64, target)
    unit: Any = "s" if target in ("guidellm", "vllm") else None
    again, repairs = load(str(file), options=ReadOptions(time_unit=unit))
    assert repairs.counts() == {}
    lengths = sorted((r.input_tokens, r.output_tokens) for r in agents.rounds)
    assert sorted((r.input_tokens, r.output_tokens) for r in again.rounds) == lengths
    share = sum(ideal_hits(agents, 64))
    assert sum(ideal_hits(again, 64)) == pytest.approx(share, rel=0.02)


def test_other_tools_read_json_lines(tmp_path: Path, agents: Workload) -> None:
    with pytest.raises(FormatError, match="vllm reads JSON lines"):
        save(agents, tmp_path / "w.csv", None, "vllm")
