"""A scaled workload has more sessions at the same pace, which share what families shared."""

import pytest

from kvmesh.workload.generate.scaling import ScalingError, scale_sessions
from kvmesh.workload.model import Round, Session, Workload
from kvmesh.workload.tree import Tree

SYSTEM, FIRST, SECOND = 1000, 1500, 1900


def workload(families: int = 4) -> Workload:
    """Agents with a common system prompt; each has two rounds, and a child session."""
    tree = Tree()
    system = tree.fork()
    sessions: list[Session] = []
    rounds: list[Round] = []
    for number in range(families):
        own = tree.fork(system, SYSTEM)
        parent, at = len(sessions), len(rounds)
        sessions.append(Session(name=f"s{number}"))
        sessions.append(Session(name=f"c{number}", parent=parent))
        for session, tokens, after, at_s in (
            (parent, FIRST, (), 100.0 * number),
            (parent, SECOND, (at,), 7.0),
            (parent + 1, FIRST, (at,), 1.0),
        ):
            rounds.append(
                Round(
                    session=session, branch=own, output_branch=own, input_tokens=tokens,
                    output_tokens=100, at_s=at_s, after=after,
                )
            )  # fmt: skip
    return Workload(tree=tree, sessions=sessions, rounds=rounds)


def test_the_window_itself_comes_first() -> None:
    of, same = workload(), scale_sessions(workload(), 1.0, 0)
    assert [r.at_s for r in same.rounds] == [r.at_s for r in of.rounds]
    assert [r.after for r in same.rounds] == [r.after for r in of.rounds]
    assert len(same.sessions) == len(of.sessions)


def test_copies_share_the_system_prompt_only() -> None:
    scaled = scale_sessions(workload(), 3.0, 1)
    assert len(scaled.rounds) == 36
    assert len({session.name for session in scaled.sessions}) == len(scaled.sessions) == 24
    for index in range(0, 36, 3):
        first, second, child = scaled.rounds[index : index + 3]
        assert (second.after, child.after) == ((index,), (index,))
        assert (second.at_s, child.at_s) == (7.0, 1.0)
        assert scaled.sessions[child.session].parent == first.session
        assert scaled.tree.shared(first.branch, second.branch, SECOND) >= FIRST
        for other in range(0, index, 3):
            branch = scaled.rounds[other].branch
            assert scaled.tree.shared(first.branch, branch, SECOND) == SYSTEM


def test_seeds_draw_other_sessions_in_order_of_time() -> None:
    starts = [
        [r.at_s for r in scale_sessions(workload(8), 1.0, seed).rounds if not r.after]
        for seed in (1, 2)
    ]
    assert starts[0] != starts[1]
    for each in starts:
        assert each == sorted(each)
        assert all(0 <= at <= 700 for at in each)


def test_a_tail_of_a_branch_that_others_share_is_copied() -> None:
    tree = Tree()
    long = tree.fork()
    short = tree.fork(long, 400)
    rounds = [
        Round(session=n, branch=b, output_branch=b, input_tokens=1000, output_tokens=1)
        for n, b in enumerate((long, short))
    ]
    of = Workload(tree=tree, sessions=[Session(name="a"), Session(name="b")], rounds=rounds)
    scaled = scale_sessions(of, 4.0, 0)
    branches = [round_.branch for round_ in scaled.rounds]
    assert len(set(branches)) == 8
    for n, one in enumerate(branches):
        for other in branches[:n]:
            assert scaled.tree.shared(one, other, 1000) == 400


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(ScalingError, match="no session is left of 4"):
        scale_sessions(workload(), 0.01, 0)
    with pytest.raises(ScalingError, match="more than"):
        scale_sessions(workload(), 1e9, 0)
