"""Classes of what a session waits for after an answer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.bus.messages import Hints, Sampling
from kvmesh.frontend.conversation import (
    AnswerEvent,
    GenerateRequest,
    Message,
    Text,
    TextDelta,
    ThinkingDelta,
    Tool,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from kvmesh.frontend.generation.awaited import MAX_ARGUMENTS, MAX_CALLS, AnswerCalls, waits_for

NAMES = ("Bash", "Read", "Agent", "AskUserQuestion", "exec_command", "lookup", "search")
ASKED = [Message("user", [Text("Go on.")])]
SECRET = "hunter2"


def request(**fields: Any) -> GenerateRequest:
    tools = [Tool(name, "", {}) for name in NAMES]
    tools.append(Tool("spawn", "", {}, namespace="agents"))
    given = {"messages": ASKED, "tools": tools, **fields}
    return GenerateRequest(id="r", model="m", sampling=Sampling(max_tokens=9), **given)


def call(name: str, _namespace: str | None = None, **arguments: Any) -> list[AnswerEvent]:
    text = json.dumps(arguments)
    pieces = [text[:7], text[7:]]
    start = ToolCallStart("id", name, _namespace)
    return [start, *map(ToolCallDelta, pieces), ToolCallEnd()]


def together(answers: list[list[AnswerEvent]]) -> list[AnswerEvent]:
    return [event for answer in answers for event in answer]


def calls(*events: AnswerEvent) -> AnswerCalls:
    found = AnswerCalls()
    for event in (ThinkingDelta("hm"), TextDelta("I look."), *events):
        found.add(event)
    return found


def awaited(*events: AnswerEvent, **fields: Any) -> list[str]:
    return waits_for(request(**fields), "tool_calls", calls(*events))


def test_a_call_of_a_shell_has_the_class_of_its_command() -> None:
    assert awaited(*call("Bash", command="sleep 60")) == ["tool", "Bash", "sleep", "64s"]
    assert awaited(*call("Bash", command="ls /etc")) == ["tool", "Bash", "ls"]
    assert awaited(*call("exec_command", cmd="npm test")) == ["tool", "exec_command", "npm test"]
    listed = ["bash", "-lc", "git push origin main"]
    assert awaited(*call("exec_command", command=listed)) == ["tool", "exec_command", "git push"]


def test_a_call_without_a_command_has_the_name_of_its_tool() -> None:
    assert awaited(*call("Read", path="/etc/passwd")) == ["tool", "Read"]
    assert awaited(*call("Agent", prompt="Count", run_in_background=False)) == ["tool", "Agent"]
    assert awaited(*call("spawn", "agents", message="Count")) == ["tool", "agents__spawn"]


def test_a_tool_in_the_background_returns_at_once() -> None:
    shell = call("Bash", command="npm start", run_in_background=True)
    assert awaited(*shell) == ["tool", "Bash", "background"]
    assert awaited(*shell, *call("Bash", command="ls")) == ["tool", "Bash", "background"]
    assert awaited(*shell, *call("Bash", command="git log")) == ["tool", "Bash", "git log"]


def test_the_slowest_of_several_calls_decides_whatever_their_order() -> None:
    several = [
        call("Read", path="a"),
        call("lookup", q="b"),
        call("Bash", command="npm test"),
        call("Bash", command="ls"),
    ]
    test = ["tool", "Bash", "npm test"]
    assert awaited(*together(several)) == awaited(*together(several[::-1])) == test
    assert awaited(*together(several), *call("Agent", prompt="x")) == ["tool", "Agent"]
    equal = [call("search"), call("lookup")]
    assert awaited(*together(equal)) == awaited(*together(equal[::-1])) == ["tool", "lookup"]


def test_a_tool_that_asks_the_person_waits_for_them() -> None:
    asking = call("AskUserQuestion", questions=[SECRET])
    assert awaited(*asking, *call("Agent", prompt="x")) == ["human", "AskUserQuestion"]


def test_an_answer_without_calls_waits_for_the_person() -> None:
    assert waits_for(request(), "stop", calls()) == ["human"]
    assert waits_for(request(tools=[]), "stop", calls()) == ["human", "no_tools"]


def test_the_end_of_a_session_and_of_a_subagent_wait_for_nothing() -> None:
    final, child = Hints(session="s", session_final=True), Hints(session="s", parent_session="p")
    assert awaited(*call("Read"), hints=final) == ["end"]
    assert waits_for(request(hints=child), "stop", calls()) == ["end"]
    assert awaited(*call("Read"), hints=child) == ["tool", "Read"]


@pytest.mark.parametrize("finish", ["length", "cancelled", "error", "lost"])
def test_a_cut_answer_waits_for_something_unknown(finish: str) -> None:
    assert waits_for(request(), finish, calls(*call("Bash", command="ls"))) == []


def test_an_answer_to_a_raw_prompt_may_call_tools_that_only_the_caller_parses() -> None:
    assert waits_for(request(messages=[], prompts=["Hi"]), "stop", calls()) == []


def test_a_tool_that_the_request_does_not_offer_has_no_name() -> None:
    assert awaited(*call(SECRET)) == ["tool", "other"]
    odd = f"{SECRET} {SECRET}"
    assert awaited(*call(odd), tools=[Tool(odd, "", {})]) == ["tool", "other"]


def test_arguments_and_calls_beyond_the_bounds_are_dropped() -> None:
    huge = call("Bash", command="ls", description="x" * MAX_ARGUMENTS)
    assert awaited(*huge) == ["tool", "Bash"]
    many = together([call("Bash", command="ls")] * MAX_CALLS)
    assert awaited(*many, *call("Bash", command="sleep 9")) == ["tool", "Bash", "ls"]


ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(SECRET) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["command", "cmd", "run_in_background", "x"]), inner)
    ),
    max_leaves=9,
)


@given(ARGUMENTS, st.booleans())
def test_no_argument_leaks(arguments: Any, cut: bool) -> None:
    text = json.dumps(arguments)
    text = text[: len(text) // 2] if cut else text
    for custom in (False, True):
        events: list[AnswerEvent] = [
            ToolCallStart("id", "Bash", None, custom),
            ToolCallDelta(text),
            ToolCallEnd(),
        ]
        found = awaited(*events)
        assert found[:2] == ["tool", "Bash"]
        assert SECRET not in "".join(found)


@pytest.mark.parametrize("text", ["[" * 50_000, '"\ud800"', '{"command": "\\ud800 ls"}', "{}{}"])
def test_malformed_arguments_have_no_class(text: str) -> None:
    found = awaited(ToolCallStart("id", "Bash"), ToolCallDelta(text))
    assert found[:2] == ["tool", "Bash"]
