"""Files written for other tools, read by their own readers; and files of theirs, read here.

Each reader runs in its tool's environment, `make readers` installs them.
"""

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvmesh.workload.analysis.sharing import ideal_hits
from kvmesh.workload.formats.registry import load, save
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.profile import load_profile
from kvmesh.workload.model import Workload

pytestmark = pytest.mark.readers
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "libs" / "kvmesh" / "demo" / "kvmesh-demo"
READERS = Path(os.environ.get("READERS", ROOT / ".readers")).absolute()
VENVS = {name: READERS / name for name in ("aiperf", "dynamo", "guidellm")}
VENVS["vllm"] = Path(os.environ.get("VLLM_VENV", ROOT / ".venv-vllm")).absolute()
Sent = list[dict[str, Any]]


def sent(tool: str, file: Path, *arguments: str | int | Path) -> Sent:
    """The requests that a tool makes of a file."""
    python = VENVS[tool] / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{tool} is not installed")
    driver = Path(__file__).parent / "drivers" / f"{tool}_reader.py"
    command = [str(python), str(driver), str(file), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def agents() -> Workload:
    """Sessions with children, tools and humans."""
    return AgentGenerator(load_profile("demo"), 1).workload(12)


@pytest.fixture
def arrivals(tmp_path: Path) -> Workload:
    """Requests without sessions that share their first blocks, with a partial last block."""
    file = tmp_path / "arrivals.jsonl"
    rows = [
        {"timestamp": 40 * n, "input_length": 150 + n, "output_length": 3, "block_size": 64,
         "hash_ids": [n % 2, 10 + n % 4, 100 + n]}
        for n in range(12)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load(str(file))[0]


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_aiperf_sends_the_conversations(tmp_path: Path, agents: Workload) -> None:
    file = tmp_path / "w.jsonl"
    save(agents, file, 64, "aiperf")
    held: dict[str, int] = defaultdict(int)
    prompts, waits = [], []
    for turn in sent("aiperf", file, MODEL, 64):
        prompt = held[turn["session"]] + turn["tokens"]
        held[turn["session"]] = prompt + turn["output"]
        prompts.append((prompt, turn["output"]))
        assert (turn["delay"] is None) == (turn["timestamp"] is not None)
        if turn["delay"] is not None:
            waits.append(turn["delay"])
    expected = sorted((r.input_tokens, r.output_tokens) for r in agents.rounds)
    assert sorted(prompts) == expected
    own = [round(r.at_s * 1e3, 3) for r in agents.rounds if r.after]
    assert len(waits) > len(own) / 2
    assert set(waits) <= set(own)


def test_aiperf_s_conversations_share_what_sessions_share(tmp_path: Path, agents: Workload) -> None:
    file = tmp_path / "w.jsonl"
    save(agents, file, 64, "aiperf")
    first: dict[str, str] = {}
    for turn in sent("aiperf", file, MODEL, 64):
        first.setdefault(turn["session"], turn["text"])
    opening = {
        agents.sessions[session].name: agents.rounds[members[0]].branch
        for session, members in enumerate(agents.by_session())
    }
    compared = 0
    for one, other in pairwise([name for name in first if name in opening]):
        shared = agents.tree.shared(opening[one], opening[other], 1 << 20) // 64 * 64
        letters = common([*map(ord, first[one])], [*map(ord, first[other])])
        assert (letters > 2 * shared) if shared else (letters < 64)
        compared += shared > 0
    assert compared


def test_dynamo_keeps_waits_and_shares(tmp_path: Path, agents: Workload) -> None:
    file = tmp_path / "w.jsonl"
    save(agents, file, 64, "dynamo")
    replayed = {each["request"]: each for each in sent("dynamo", file, "agentic_mooncake", 64)}
    assert len(replayed) == len(agents)
    for index, round_ in enumerate(agents.rounds):
        one = replayed[f"r{index}"]
        assert (one["tokens"], one["output"]) == (round_.input_tokens, round_.output_tokens)
        assert one["session"] == agents.sessions[round_.session].name
        ends = [replayed[f"r{before}"]["end"] for before in round_.after]
        assert one["timestamp"] == pytest.approx(max(ends, default=0.0) + 1e3 * round_.at_s)
    reused = sum(one["reused"] for one in replayed.values())
    assert reused == pytest.approx(sum(ideal_hits(agents, 64)), rel=0.1)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [("dynamo", ("mooncake", 64)), ("guidellm", (MODEL, 64)), ("vllm", (MODEL, 64))],
)
def test_requests_arrive_at_their_times(
    tmp_path: Path, arrivals: Workload, tool: Any, arguments: tuple[str | int, ...]
) -> None:
    file = tmp_path / "w.jsonl"
    assert save(arrivals, file, None, tool).losses == []
    found = sent(tool, file, *arguments)
    assert [
        (one["tokens"], one["output"], round(one["timestamp"]))
        for one in sorted(found, key=lambda one: float(one["timestamp"]))
    ] == [(r.input_tokens, r.output_tokens, round(r.at_s * 1e3)) for r in arrivals.rounds]


def test_vllm_s_prompts_share_the_same_tokens(tmp_path: Path, arrivals: Workload) -> None:
    file = tmp_path / "w.jsonl"
    save(arrivals, file, None, "vllm")
    prompts = [one["ids"] for one in sent("vllm", file, MODEL, 64)]
    rounds = arrivals.rounds
    for one, prompt in enumerate(prompts):
        for other in range(one):
            shared = arrivals.tree.shared(rounds[one].branch, rounds[other].branch, 1 << 20)
            assert common(prompt, prompts[other]) == shared


@pytest.mark.parametrize("tool", ["guidellm", "vllm"])
def test_turns_are_sent_at_planned_times(tmp_path: Path, agents: Workload, tool: Any) -> None:
    file = tmp_path / "w.jsonl"
    (*_, waits) = sorted(save(agents, file, 64, tool).losses, key=lambda loss: "planned" in loss)
    assert "planned with 20 ms per output token" in waits
    found = sent(tool, file, MODEL, 64)
    lengths = sorted((r.input_tokens, r.output_tokens) for r in agents.rounds)
    assert sorted((one["tokens"], one["output"]) for one in found) == lengths


def dynamo_s_own() -> Iterator[tuple[str, Path]]:
    for file in sorted(VENVS["dynamo"].rglob("fixtures/traces/*.jsonl")):
        if file.stem in ("mooncake", "mooncake-delta", "agentic-mooncake", "dynamo-standard"):
            kind = {"agentic-mooncake": "agentic_mooncake", "dynamo-standard": "dynamo"}
            yield kind.get(file.stem, file.stem), file


@pytest.fixture(params=["mooncake", "mooncake-delta", "agentic_mooncake", "dynamo"])
def own_file(request: pytest.FixtureRequest) -> tuple[str, Path]:
    found = dict(dynamo_s_own())
    if request.param not in found:
        pytest.skip("this release of Dynamo has no such file")
    return request.param, found[request.param]


def test_dynamo_s_own_files_are_the_same_requests_here(own_file: tuple[str, Path]) -> None:
    kind, file = own_file
    size = {"dynamo": 4, "mooncake": 32, "mooncake-delta": 16}.get(kind, 512)
    theirs = sent("dynamo", file, kind, size)
    workload, _ = load(str(file))
    ours = sorted((r.input_tokens, r.output_tokens) for r in workload.rounds)
    assert ours == sorted((one["tokens"], one["output"]) for one in theirs)
