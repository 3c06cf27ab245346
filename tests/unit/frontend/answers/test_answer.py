"""Names of generated answers."""

import pytest
from unit.frontend.dialects.recorded import assistant, result, system, user

from kvmesh.frontend.answers.answer import (
    AnswerNames,
    answer_name,
    answer_runs,
    answers_in,
    is_call,
    name_after,
)
from kvmesh.frontend.conversation import Block, Message, Text, Thinking, ToolCall
from kvmesh.frontend.dialects.output import call_id

OURS = ToolCall("call_00112233445566778899aabb", "read", "{}")
THEIRS = ToolCall("toolu_01", "read", "{}")
FIRST = [system("Be brief."), user("hi")]
NAMES = AnswerNames()


def name_of(before: list[Message], blocks: list[Block], number: int) -> str:
    name = answer_name(before, len(before), blocks, number)
    place = NAMES.place("", before, len(before), number)
    assert [NAMES.of(place, before, len(before), blocks, number) for _ in range(2)] == [name] * 2
    return name


def test_an_answer_with_calls_has_the_name_of_the_first() -> None:
    other = ToolCall(call_id(), "read", "{}")
    assert name_of(FIRST, [Text("x"), OURS, other], 0) == OURS.id
    assert name_of([], [OURS], 7) == OURS.id


@pytest.mark.parametrize("identifier", ["", "call_1", "toolu_01", f"{OURS.id}0", OURS.id.upper()])
def test_a_call_that_no_frontend_made_has_no_name(identifier: str) -> None:
    assert name_of(FIRST, [Text("x"), ToolCall(identifier, "read", "{}"), OURS], 0) == ""


def test_other_answers_are_named_by_text_and_place() -> None:
    name = name_of(FIRST, [Thinking("I see."), Text("Hello.")], 0)
    assert name
    assert name == name_of(FIRST, [Text("Hel"), Text("lo.\n")], 0)
    assert name not in {
        name_of(FIRST, [Text("Hello!")], 0),
        name_of(FIRST, [Text("Hello.")], 1),
        name_of([*FIRST, user("more")], [Text("Hello.")], 0),
        name_of([system("Be long."), user("hi")], [Text("Hello.")], 0),
    }
    assert name_of([system("a"), user("bc")], [Text("d")], 0) != name_of(
        [system("ab"), user("c")], [Text("d")], 0
    )


def test_texts_that_thinking_separates_have_the_name_of_their_joined_text() -> None:
    generated: list[Block] = [Text("First."), Thinking("Hm."), Text("Second.")]
    for returned in ([Text("First.\n\nSecond.")], [Text("First."), Text("Second.")]):
        assert name_of(FIRST, generated, 0) == name_of(FIRST, list[Block](returned), 0)


def test_answers_without_text_have_no_name() -> None:
    assert name_of(FIRST, [], 0) == ""
    assert name_of(FIRST, [Thinking("I see."), Text(" \n")], 0) == ""
    assert name_of([], [Text("Hello.")], 0) == ""
    assert name_of([user("\ud800")], [Text("\udfff")], 0)


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
    runs = [(run.first, run.end, run.name) for run in answer_runs(messages, NAMES, "")]
    done = name_of(messages[:7], [Text("Done.")], 2)
    assert runs == [(2, 4, OURS.id), (7, 8, done)]
    assert name_after(messages[:7], [Text("Done.")]) == done
    assert not [*answer_runs([], NAMES, "")]


def test_the_place_of_an_answer_is_that_of_the_prompt_before_it() -> None:
    messages = [*FIRST, assistant("Hm."), user("Go on."), assistant("Done."), user("Thanks.")]
    places = [run.place for run in answer_runs(messages, NAMES, "t")]
    assert places == [
        NAMES.place("t", messages[:end], end, answers_in(messages[:end])) for end in (2, 4)
    ]
    edited = [*messages[:2], assistant("Well."), *messages[3:]]
    assert [run.place for run in answer_runs(edited, NAMES, "t")] == places
    others = [
        answer_runs(messages, NAMES, "u"),
        answer_runs([user("hi"), *messages[2:]], NAMES, "t"),
        answer_runs([*FIRST, messages[2], user("Stop."), *messages[4:]], NAMES, "t")[1:],
        answer_runs([*FIRST, messages[4], user("Go on."), *messages[2:]], NAMES, "t")[1:],
    ]
    assert not {*places} & {run.place for runs in others for run in runs[-1:]}


def test_names_tell_answers_with_calls() -> None:
    assert is_call(name_after(FIRST, [Text("x"), OURS]))
    assert not is_call(name_after(FIRST, [Text("x")]))
