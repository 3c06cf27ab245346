"""A synthetic workload has the structure of its source, or differs as the options say."""

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from support.shared_prompts import seed_trace

from kvmesh.workload.analysis.analysis import analyze
from kvmesh.workload.analysis.comparison import WorkloadFigure, compare
from kvmesh.workload.formats.registry import load, save
from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.profile import load_profile
from kvmesh.workload.generate.synthesizer import SynthesisError, SynthesisOptions, Synthesizer
from kvmesh.workload.model import HUMAN, Workload
from kvmesh.workload.reading.window import TOKEN_S
from kvmesh.workload.tree import Tree

CORPORA = ("teams", "developers", "sessions", "runner")


def synthetic(workload: Workload, requests: int = 0, **options: Any) -> Workload:
    given = SynthesisOptions(num_requests=requests or len(workload), **options)
    return Synthesizer(workload, given).workload()


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Workload]:
    """Agents of four structures, as read from three formats.

    Teams with subagents and a common prompt, from Dynamo's agentic Mooncake; developers with
    approvals, compactions and pauses, native; and sessions without common prompts, from TraceLab:
    some that arrive by chance, others of a runner that starts one after the other.
    """
    folder = tmp_path_factory.mktemp("corpora")
    teams = AgentGenerator(load_profile("agent-team"), 2).workload(8)
    save(teams, folder / "teams.jsonl", 64, "dynamo")
    developers = AgentGenerator(load_profile("approving-agents"), 2).workload(24)
    save(developers, folder / "developers.json")
    (folder / "sessions.csv").write_text(tracelab_sessions())
    (folder / "runner.csv").write_text(tracelab_sessions(20, one_by_one=True))
    files = ("teams.jsonl", "developers.json", "sessions.csv", "runner.csv")
    return dict(zip(CORPORA, (load(str(folder / file))[0] for file in files), strict=True))


def tracelab_sessions(count: int = 120, one_by_one: bool = False) -> str:
    """Sessions of 1 to 20 rounds whose waits and tokens have heavy tails."""
    rng = Random(5)
    lines = ["session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms"]
    arrival = 0.0
    for session in range(count):
        if not one_by_one:
            arrival += rng.expovariate(1 / 4000)
        context, lasts = 0, 0.0
        for number in range(rng.randint(1, 20)):
            kept = context if rng.random() > 0.03 else context // 2
            new, output = 1 + int(rng.lognormvariate(6, 1)), 1 + int(rng.lognormvariate(4.5, 0.8))
            wait = int(rng.lognormvariate(6.5, 1.5))
            lines.append(f"{session},{arrival:.0f},{number},{kept},{new},{output},{wait}")
            context = kept + new + output
            lasts += wait + output * TOKEN_S * 1e3
        if one_by_one:
            arrival += lasts
    return "\n".join(lines) + "\n"


def like(figures: list[WorkloadFigure]) -> dict[str, float]:
    """Differences by name, of what a synthetic trace is to keep."""
    return {
        each.name: round(each.difference, 3)
        for each in figures
        if not (each.first < 0.05 and each.share)
    }


@pytest.mark.parametrize("name", CORPORA)
def test_a_synthetic_corpus_is_like_its_source(name: str, corpora: dict[str, Workload]) -> None:
    source = corpora[name]
    made = synthetic(source)
    differences = like(compare(source, made))
    assert {"ideal share", "requests per session, p90", "s between arrivals, mean"} < set(
        differences
    )
    assert {key: value for key, value in differences.items() if abs(value) > 0.05} == {}
    assert [r.input_tokens for r in made.rounds] != [r.input_tokens for r in source.rounds]
    assert made.block_size == source.block_size


@pytest.mark.parametrize("factor", [0.3, 0.5, 2.4, 5])
@pytest.mark.parametrize("name", CORPORA)
def test_the_ideal_share_stays_with_any_number_of_requests(
    name: str, factor: float, corpora: dict[str, Workload]
) -> None:
    source = corpora[name]
    made = synthetic(source, round(len(source) * factor), seed=3)
    size = source.block_size
    before, after = analyze(source, size), analyze(made, size)
    assert after.requests == round(len(source) * factor)
    assert after.ideal_hit_share == pytest.approx(before.ideal_hit_share, rel=0.05)


def test_the_ideal_share_of_single_prompts_stays_too() -> None:
    source = seed_trace()
    share = analyze(source, 16).ideal_hit_share
    for requests in (100, 400, 2000):
        found = analyze(synthetic(source, requests), 16).ideal_hit_share
        assert found == pytest.approx(share, rel=0.05)


def test_families_keep_who_waits_for_whom(corpora: dict[str, Workload]) -> None:
    source = corpora["developers"]
    made = synthetic(source)

    def shapes(workload: Workload) -> Counter[tuple[str, bool, str, int, int]]:
        return Counter(
            (
                workload.sessions[each.session].kind,
                workload.sessions[each.session].parent is None,
                each.wait,
                len(each.after),
                len(each.marks),
            )
            for each in workload.rounds
        )

    assert shapes(made) == shapes(source)
    for index, each in enumerate(made.rounds):
        assert all(before < index for before in each.after)
        assert each.approval_s <= each.at_s
        assert all(tokens <= each.input_tokens for tokens, _ in each.marks)
        assert each.abort_after is None or each.abort_after <= each.output_tokens
    waits = [sorted(r.at_s for r in w.rounds if r.wait == HUMAN) for w in (source, made)]
    assert waits[0] == waits[1]


def test_a_synthetic_workload_is_readable(corpora: dict[str, Workload], tmp_path: Path) -> None:
    file = tmp_path / "made.json"
    for source in corpora.values():
        made = synthetic(source)
        save(made, file)
        assert load(str(file))[0].rounds == made.rounds


def test_one_seed_gives_one_trace() -> None:
    source = seed_trace()
    assert synthetic(source, seed=4).rounds == synthetic(source, seed=4).rounds
    assert synthetic(source, seed=4).rounds != synthetic(source, seed=-4).rounds


def test_each_option_changes_what_it_names() -> None:
    source = seed_trace()
    base = analyze(synthetic(source), 16)
    deeper = analyze(synthetic(source, prefix_len_multiplier=3), 16)
    copies = analyze(synthetic(source, prefix_root_multiplier=8), 16)
    shorter = analyze(synthetic(source, prompt_len_multiplier=0.25), 16)
    longer = analyze(synthetic(source, osl_multiplier=4), 16)
    assert deeper.ideal_hit_share > base.ideal_hit_share + 0.05
    assert copies.ideal_hit_share < base.ideal_hit_share - 0.01
    assert copies.input_tokens == base.input_tokens
    assert shorter.input_tokens < base.input_tokens
    assert longer.output_tokens == pytest.approx(4 * base.output_tokens, rel=0.01)
    assert analyze(synthetic(source, speedup_ratio=10), 16).span_s == pytest.approx(
        base.span_s / 10
    )


def test_a_session_ends_before_a_prompt_that_is_too_long(corpora: dict[str, Workload]) -> None:
    source = corpora["developers"]
    most = sorted(round_.input_tokens for round_ in source.rounds)[len(source) // 2]
    made = synthetic(source, max_isl=most)
    assert len(made) == len(source)
    assert max(round_.input_tokens for round_ in made.rounds) <= most


def test_impossible_options_are_rejected() -> None:
    with pytest.raises(SynthesisError, match="at most 1 token"):
        synthetic(seed_trace(), max_isl=1)
    empty = Workload(tree=Tree(), sessions=[], rounds=[])
    with pytest.raises(SynthesisError, match="no requests"):
        synthetic(empty, 1)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"num_requests": 10**9}, SynthesisOptions)


def test_a_mooncake_file_of_sessions_has_a_native_form(tmp_path: Path) -> None:
    row = {"session_id": "a", "input_length": 1000, "output_length": 30, "hash_ids": [1, 2]}
    rows = [row, {**row, "input_length": 1500, "hash_ids": [1, 3, 4]}]
    file, native = tmp_path / "rows.jsonl", tmp_path / "native.json"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    workload = load(str(file))[0]
    save(workload, native)
    assert load(str(native))[0].rounds == workload.rounds
