"""Names of generated answers."""

import pytest
from unit.frontend.dialects.recorded import assistant, result, system, user

from kvmesh.frontend.answers.answer import answer_name, answer_runs, answers_before, worth_storing
from kvmesh.frontend.conversation import Image, Text, Thinking, ToolCall
from kvmesh.frontend.dialects.output import call_id

OURS, THEIRS = ToolCall(call_id(), "read", "{}"), ToolCall("toolu_01", "read", "{}")
FIRST = [system("Be brief."), user("hi")]


def test_an_answer_with_calls_has_the_name_of_the_first() -> None:
    other = ToolCall(call_id(), "read", "{}")
    assert answer_name(FIRST, [Text("x"), OURS, other], 0) == OURS.id
    assert answer_name([], [OURS], 7) == OURS.id


@pytest.mark.parametrize("identifier", ["", "call_1", "toolu_01", f"{OURS.id}0", OURS.id.upper()])
def test_a_call_that_no_frontend_made_has_no_name(identifier: str) -> None:
    assert answer_name(FIRST, [Text("x"), ToolCall(identifier, "read", "{}"), OURS], 0) == ""


def test_other_answers_are_named_by_text_and_place() -> None:
    name = answer_name(FIRST, [Thinking("I see."), Text("Hello.")], 0)
    assert name
    assert name == answer_name(FIRST, [Text("Hel"), Text("lo.\n")], 0)
    assert name not in {
        answer_name(FIRST, [Text("Hello!")], 0),
        answer_name(FIRST, [Text("Hello.")], 1),
        answer_name([*FIRST, user("more")], [Text("Hello.")], 0),
        answer_name([system("Be long."), user("hi")], [Text("Hello.")], 0),
    }
    assert answer_name([system("a"), user("bc")], [Text("d")], 0) != answer_name(
        [system("ab"), user("c")], [Text("d")], 0
    )


def test_answers_without_text_have_no_name() -> None:
    assert answer_name(FIRST, [], 0) == ""
    assert answer_name(FIRST, [Thinking("I see."), Text(" \n")], 0) == ""
    assert answer_name([], [Text("Hello.")], 0) == ""
    assert answer_name([user("\ud800")], [Text("\udfff")], 0)


def test_neighbouring_assistant_messages_are_one_answer() -> None:
    messages = [
        *FIRST,
        assistant("Let me see."),
        assistant(OURS),
        result("found", OURS.id),
        assistant(THEIRS),
        result("none", THEIRS.id),
        assistant("Done."),
        user("Go on."),
        assistant("The begi"),
    ]
    runs = [(run.first, run.end, run.name) for run in answer_runs(messages)]
    done = answer_name(messages[:7], [Text("Done.")], 2)
    assert runs == [(2, 4, OURS.id), (7, 8, done)]
    assert answers_before(messages) == 4
    assert answers_before(messages[:7]) == 2
    assert not [*answer_runs([])]


def test_answers_are_stored_that_clients_may_change() -> None:
    assert worth_storing([Text("x"), OURS])
    assert worth_storing([Thinking("x"), Text("x")])
    assert not worth_storing([Text("x"), Image("http://x/y.png")])
