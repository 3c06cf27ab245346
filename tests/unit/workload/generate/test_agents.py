"""The agent generator: reproducible, consistent, and true to its profile."""

import math
import random
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from kvmesh.workload.generate.agents import AgentGenerator
from kvmesh.workload.generate.distributions import Quantiles
from kvmesh.workload.generate.profile import AgentProfile, AgentProfileError, builtin, load_profile
from kvmesh.workload.model import Workload

SMALL = """
description = "small"
sessions = 6
per_minute = 60.0

[[agents]]
name = "lead"
share = 1.0
prompt_tokens = 1000
task = 50
steps = 4
output = 20
result = 100
spawns = [{ agent = "helper", step = 2, count = 2 }]
tools = [{ name = "bash", weight = 1.0, wait_s = 0.5 }]

[agents.human]
turns = 2
wait_s = 30.0
message = 10

[[agents]]
name = "helper"
prompt_tokens = 1000
task = 30
steps = 3
output = 10
result = 40
thinking = 0.5
keep_thinking = false
priority = 2
"""


def profile(tmp_path: Path, text: str) -> AgentProfile:
    file = tmp_path / "p.toml"
    file.write_text(text)
    return load_profile(str(file))


def generate(tmp_path: Path, text: str = SMALL, seed: int = 0) -> Workload:
    return AgentGenerator(profile(tmp_path, text), seed).workload()


@pytest.mark.parametrize("name", sorted(builtin()))
def test_shipped_profiles_give_sound_workloads(name: str) -> None:
    loaded = load_profile(name)
    workload = AgentGenerator(loaded, 0).workload(min(loaded.sessions, 40))
    assert workload.rounds
    contexts = {agent.name: agent.context for agent in loaded.agents}
    for index, round_ in enumerate(workload.rounds):
        assert all(before < index for before in round_.after)
        assert round_.at_s >= 0
        assert round_.input_tokens <= contexts[workload.sessions[round_.session].kind]
        ways = workload.tree.path(round_.output_branch, round_.input_tokens + round_.output_tokens)
        assert ways[-1].end == round_.input_tokens + round_.output_tokens


def test_one_seed_gives_one_workload() -> None:
    loaded = load_profile("agent-team")
    one, same = (AgentGenerator(loaded, 5).workload(3) for _ in range(2))
    assert one.rounds == same.rounds
    assert one.rounds != AgentGenerator(loaded, 6).workload(3).rounds


def test_session_ends_change_nothing_else(tmp_path: Path) -> None:
    silent = generate(tmp_path)
    told = generate(tmp_path, SMALL.replace("spawns = [", "ends = 1.0\nspawns = ["))
    leads = {i for i, session in enumerate(told.sessions) if session.kind == "lead"}
    assert {told.rounds[index].session for index in told.final_rounds()} == leads
    assert told.rounds == silent.rounds
    assert not silent.final_rounds()


def test_a_session_is_steps_tool_waits_and_a_human(tmp_path: Path) -> None:
    workload = generate(tmp_path)
    lead = next(m for m in workload.by_session() if workload.sessions[0].kind == "lead")
    rounds = [workload.rounds[index] for index in lead]
    assert [r.wait for r in rounds] == ["", *["bash"] * 3, "human", *["bash"] * 3]
    assert [r.at_s for r in rounds[1:]] == [0.5] * 3 + [30.0] + [0.5] * 3
    grown = [b.input_tokens - a.input_tokens for a, b in pairwise(rounds)]
    assert grown == [120] * 3 + [30] + [120] * 3


def test_a_template_may_drop_the_thinking_of_a_turn_once_the_human_writes(tmp_path: Path) -> None:
    text = SMALL.replace("spawns = [", 'thinking = 0.5\nkeep_thinking = "turn"\nspawns = [')
    workload, tree = generate(tmp_path, text), generate(tmp_path, text).tree
    lead = next(m for m in workload.by_session() if workload.sessions[0].kind == "lead")
    rounds = [workload.rounds[index] for index in lead]
    first, second = rounds[:4], rounds[4:]
    assert {r.branch for r in first}.isdisjoint({r.branch for r in second})
    assert [r.output_branch == r.branch for r in first] == [True, True, True, False]
    grown = [b.input_tokens - a.input_tokens for a, b in pairwise(rounds)]
    assert grown == [120] * 3 + [30 - 4 * 10] + [120] * 3
    shared = tree.shared(first[3].branch, second[0].branch, second[0].input_tokens)
    assert shared == first[0].input_tokens
    rendered = [r.rendered for r in first]
    assert rendered == [None, None, None, (second[0].branch, second[0].input_tokens - 10)]
    assert first[0].as_rendered(20) == (first[0].branch, first[1].input_tokens - 100)


def test_a_session_beyond_the_concurrency_waits_for_one_to_end(tmp_path: Path) -> None:
    text = SMALL.replace("per_minute = 60.0", "per_minute = 60.0\nconcurrency = 2")
    workload = generate(tmp_path, text)
    members = list(workload.by_session())
    roots = [i for i, session in enumerate(workload.sessions) if session.parent is None]
    firsts = [workload.rounds[members[i][0]] for i in roots]
    lasts = [(members[i][-1],) for i in roots]
    assert [first.after for first in firsts[:2]] == [(), ()]
    assert all(first.after in lasts and first.at_s == 0 for first in firsts[2:])
    assert len({first.after for first in firsts[2:]}) == len(firsts) - 2


def test_children_start_after_their_parents_step_and_are_waited_for(tmp_path: Path) -> None:
    workload = generate(tmp_path)
    members = list(workload.by_session())
    helpers = [i for i, s in enumerate(workload.sessions) if s.parent == 0]
    assert len(helpers) == 2
    second, third = members[0][1], members[0][2]
    for helper in helpers:
        assert workload.rounds[members[helper][0]].after == (second,)
        assert members[helper][-1] in workload.rounds[third].after
        assert workload.rounds[members[helper][0]].priority == 2


def test_agents_of_one_prompt_share_exactly_it(tmp_path: Path) -> None:
    workload = generate(tmp_path)
    lead, helper = workload.rounds[0], workload.rounds[list(workload.by_session())[1][0]]
    assert workload.tree.shared(lead.branch, helper.branch, 5000) == 1000


def test_the_next_prompt_has_outputs_but_no_dropped_thinking(tmp_path: Path) -> None:
    workload = generate(tmp_path)
    members = list(workload.by_session())
    one, two = (workload.rounds[i] for i in members[0][:2])
    assert workload.tree.shared(one.output_branch, two.branch, two.input_tokens) == two.input_tokens
    one, two = (workload.rounds[i] for i in members[1][:2])
    assert workload.tree.shared(one.output_branch, two.branch, two.input_tokens) == one.input_tokens
    assert two.input_tokens - one.input_tokens == 5 + 40


def test_compaction_starts_over_from_the_shared_prompt(tmp_path: Path) -> None:
    text = SMALL.replace("steps = 4", "steps = 12").replace(
        "[agents.human]", "[agents.compaction]\nat = 1500\nto = 1200\nsummary = 99\n[agents.human]"
    )
    workload = generate(tmp_path, text)
    rounds = [workload.rounds[i] for i in next(workload.by_session())]
    summaries = [i for i, r in enumerate(rounds) if r.output_tokens == 99]
    assert summaries
    before, after = rounds[summaries[0]], rounds[summaries[0] + 1]
    assert before.input_tokens > 1500
    assert after.input_tokens == 1200
    assert workload.tree.shared(before.branch, after.branch, 1200) == 1000


def test_aborted_outputs_end_early(tmp_path: Path) -> None:
    workload = generate(tmp_path, SMALL.replace("steps = 4", "steps = 4\nabort = 1.0"))
    leads = [r for r in workload.rounds if workload.sessions[r.session].kind == "lead"]
    assert all(1 <= (r.abort_after or 0) <= r.output_tokens for r in leads)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"helper", step', '"nobody", step', "spawns unknown 'nobody'"),
        ("sessions = 6", "sessions = 0", "`sessions`"),
        ("steps = 4", "stepps = 4", "unknown field `stepps`"),
        ("steps = 4", "steps = {p50 = 5, p90 = 2}", "percentiles must not decrease"),
        ("steps = 4", "steps = inf", "`agents.*steps`"),
        ("wait_s = 30.0", "wait_s = -30.0", "`agents.*wait_s`"),
        ("wait_s = 30.0", "wait_s = {p50 = 5, max = nan}", "`agents.*max`"),
        ("share = 1.0", "share = inf", "`agents.*share`"),
        ("share = 1.0", "share = 0.0", "no agent has a share"),
        ('name = "helper"', 'name = "helper"\nspawns = [{agent = "lead"}]', "spawns itself"),
        ("description", "= broken", "line"),
    ],
)
def test_an_invalid_profile_is_rejected_by_its_key(
    tmp_path: Path, old: str, new: str, reason: str
) -> None:
    with pytest.raises(AgentProfileError, match=reason):
        profile(tmp_path, SMALL.replace(old, new, 1))


def test_a_binary_profile_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(AgentProfileError, match=r"p\.toml: .*utf-8"):
        load_profile(str(file))


def test_prompts_longer_than_every_context_are_an_error(tmp_path: Path) -> None:
    cramped = SMALL.replace("share = 1.0", "share = 1.0\ncontext = 100")
    with pytest.raises(AgentProfileError, match="exceeds its agent's context"):
        generate(tmp_path, cramped)


def test_an_unknown_profile_names_the_shipped_ones() -> None:
    with pytest.raises(AgentProfileError, match="coding-agents, demo"):
        load_profile("nothing-like-it")


def test_samples_meet_the_published_percentiles() -> None:
    spread, rng = Quantiles(p50=0.3, p90=13.6, p99=216.0), random.Random(1)
    values = sorted(spread.sample(rng) for _ in range(40_000))
    assert math.isclose(median(values), 0.3, rel_tol=0.1)
    assert math.isclose(values[36_000], 13.6, rel_tol=0.1)
    assert math.isclose(values[39_600], 216.0, rel_tol=0.2)


def test_limits_and_constants() -> None:
    rng = random.Random(1)
    bounded = Quantiles(p50=10, p90=100, min=5, max=50)
    assert all(5 <= bounded.sample(rng) <= 50 for _ in range(1000))
    assert Quantiles(p50=7).sample(rng) == 7


CLASSES = """
description = "classes and approvals"
sessions = 20
per_minute = 60.0

[[agents]]
name = "coder"
share = 1.0
prompt_tokens = 1000
task = 50
steps = 12
output = 20
result = 100
osl = 25
marks = { prompt = "1h", last = "5m" }

[[agents.tools]]
name = "Bash"
weight = 1.0
classes = [
    { name = "ls", weight = 3.0, wait_s = 0.5 },
    { name = "push", weight = 1.0, wait_s = 2.0, approval = 1.0, result = 7 },
]

[agents.human]
turns = 2
approval_s = 60.0
"""


def test_calls_of_a_tool_differ_by_the_class_of_their_arguments(tmp_path: Path) -> None:
    rounds = generate(tmp_path, CLASSES).rounds
    calls = {r.wait_class: (r.at_s, r.approval_s) for r in rounds if r.wait == "Bash"}
    assert calls == {"ls": (0.5, 0.0), "push": (62.0, 60.0)}
    named = {tuple(r.waited_for()) for r in rounds}
    assert named == {(), ("human",), ("tool", "Bash", "ls"), ("tool", "Bash", "push")}


def test_results_of_a_class_replace_the_agents(tmp_path: Path) -> None:
    workload = generate(tmp_path, CLASSES)
    for members in workload.by_session():
        for before, after in pairwise(workload.rounds[index] for index in members):
            result = after.input_tokens - before.input_tokens - before.output_tokens
            assert result == {"ls": 100, "push": 7, "": 60}[after.wait_class]


def test_clients_mark_their_prompts_and_state_the_expected_output(tmp_path: Path) -> None:
    for round_ in generate(tmp_path, CLASSES).rounds:
        assert round_.marks == ((1000, 3600.0), (round_.input_tokens, 300.0))
        assert round_.osl == 25


def test_a_tool_without_a_wait_is_rejected(tmp_path: Path) -> None:
    text = CLASSES.replace(", wait_s = 0.5", "")
    with pytest.raises(AgentProfileError, match="tool 'ls' has no wait_s"):
        generate(tmp_path, text)
