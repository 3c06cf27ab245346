"""Comparison of returned answers with generated ones, by their meaning."""

import json
import time
from typing import Any

import pytest
from unit.frontend.dialects.recorded import assistant, request, system, user

from kvmesh.frontend.answers.equivalence import AnswerComparison
from kvmesh.frontend.conversation import Block, Text, Thinking, Tool, ToolCall

CWD = "/home/u/my repo"
READ: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "offset": {"type": "integer"},
        "ratio": {"type": "number"},
        "limit": {"type": "integer", "default": 2000},
        "all": {"type": "boolean", "default": False},
        "note": {"type": ["string", "null"], "default": None},
        "tags": {"type": "array", "items": {"type": "integer"}},
        "where": {"type": "object", "properties": {"deep": {"type": "boolean", "default": True}}},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "size": {"$ref": "#/$defs/size"},
        "mixed": {"allOf": [{"type": "number"}, {"default": 1.5}]},
        "options": {"type": "object", "default": {"deep": True, "list": [1]}},
    },
    "additionalProperties": {"type": "boolean"},
    "$defs": {"size": {"type": "integer", "default": 7}},
}
SAME = [
    ("the same text", "{", "{"),
    ("no arguments", "", "{}"),
    ("other order", {"path": "a", "offset": 1}, {"offset": 1, "path": "a"}),
    ("compact", '{"path":"a","tags":[1,2]}', '{"path": "a", "tags": [1, 2]}'),
    ("escapes", '{"path": "\\u00e9\\/"}', '{"path": "é/"}'),
    ("a default added", {"path": "a"}, {"all": False, "path": "a", "limit": 2000}),
    ("a default dropped", {"path": "a", "limit": 2000}, {"path": "a"}),
    ("a null default", {"note": None}, {}),
    ("a default as text", {"limit": "2000"}, {}),
    ("a nested default", {"where": {}}, {"where": {"deep": True}}),
    ("a default by reference", {}, {"size": 7}),
    ("a default in allOf", {}, {"mixed": 1.5}),
    ("a default object", {}, {"options": {"list": [1], "deep": True}}),
    ("text to integer", {"offset": "1"}, {"offset": 1}),
    ("text to number", {"ratio": "2.5"}, {"ratio": 2.5}),
    ("text to boolean", {"all": "True"}, {"all": True}),
    ("text to null", {"maybe": "null"}, {"maybe": None}),
    ("text by reference", {"size": "8"}, {"size": 8}),
    ("text of any other property", {"more": "true"}, {"more": True}),
    ("integer to text", {"path": 5}, {"path": "5"}),
    ("float to text", {"path": 5.0}, {"path": "5"}),
    ("boolean to text", {"path": True}, {"path": "true"}),
    ("back from text", {"path": "5"}, {"path": 5}),
    ("a whole float", {"ratio": 5.0}, {"ratio": 5}),
    ("an exponent", '{"offset": 1e3}', '{"offset": 1000}'),
    ("an array as text", {"tags": "[1, 2]"}, {"tags": [1, 2]}),
    ("items as text", {"tags": ["1"]}, {"tags": [1]}),
    ("an object as text", {"where": '{"deep": "false"}'}, {"where": {"deep": False}}),
    ("a large integer", {"offset": 2**60 + 1}, {"offset": 2**60 + 1}),
]
EDITED = [
    ("one character", {"path": "a"}, {"path": "b"}),
    ("a blank", {"path": "a "}, {"path": "a"}),
    ("a key dropped", {"path": "a", "offset": 0}, {"path": "a"}),
    ("a key added", {"path": "a"}, {"path": "a", "offset": 0}),
    ("other than the default", {"path": "a", "limit": 1999}, {"path": "a"}),
    ("null is not absent", {"maybe": None}, {}),
    ("another number", {"offset": 1}, {"offset": 2}),
    ("precision lost in JavaScript", {"offset": 2**53 + 1}, {"offset": 2**53}),
    ("another order of an array", {"tags": [1, 2]}, {"tags": [2, 1]}),
    ("a shorter array", {"tags": [1, 2]}, {"tags": [1]}),
    ("true is not 1", {"all": True}, {"all": 1}),
    ("1 is not true", {"offset": 1}, {"offset": True}),
    ("1 in a text is not true", {"all": "1"}, {"all": True}),
    ("both types are valid", {"either": "1"}, {"either": 1}),
    ("null may be a word", {"note": "null"}, {"note": None}),
    ("no schema", {"tags": [{"x": "1"}]}, {"tags": [{"x": 1}]}),
    ("text that is no number", {"offset": "one"}, {"offset": 1}),
    ("not JSON any more", {"path": "a"}, '{"path": "a"'),
    ("not an object", {"path": "a"}, "[1]"),
    ("an object in a text field", {"path": {"a": 1}}, {"path": '{"a": 1}'}),
    ("a nested edit", {"where": {"deep": False}}, {"where": {}}),
]


def called(arguments: Any, name: str = "read", **fields: Any) -> ToolCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall("call_1", name, text, **fields)


def same(
    generated: Any,
    returned: Any,
    schema: dict[str, Any] | None = None,
    tool: str = "read",
    agent: str = "",
) -> bool:
    asked = request(
        system(f"<env>\nWorking directory: {CWD}\nOther: /tmp/x\n</env>"),
        tools=[Tool(tool, "", READ if schema is None else schema)],
        agent=agent,
    )
    return AnswerComparison(asked).same_call(called(generated, tool), called(returned, tool))


@pytest.mark.parametrize(("generated", "returned"), [case[1:] for case in SAME])
def test_a_rewritten_call_is_the_same(generated: Any, returned: Any) -> None:
    assert same(generated, returned)


@pytest.mark.parametrize(("generated", "returned"), [case[1:] for case in EDITED])
def test_another_meaning_is_an_edit(generated: Any, returned: Any) -> None:
    assert not same(generated, returned)


FREE: dict[str, Any] = {"type": "object"}
CLAUDE_CODE = [  # tool, generated, returned, same by its habits
    ("Bash", {"command": f"cd '{CWD}' && ls"}, {"command": "ls"}, True),
    ("Bash", {"command": f'cd "{CWD}/" && ls'}, {"command": "ls"}, True),
    ("Bash", {"command": "cd /tmp && ls"}, {"command": "ls"}, False),
    ("Bash", {"command": "cd /tmp/x && ls"}, {"command": "ls"}, False),
    ("Bash", {"command": f"cd '{CWD}'; ls"}, {"command": "ls"}, False),
    ("Bash", {"command": f"cd '{CWD}' && ls"}, {"command": "ls -a"}, False),
    ("Bash", {"command": "ls"}, {"command": f"cd '{CWD}' && ls"}, False),
    ("Bash", {"description": f"cd '{CWD}' && ls"}, {"description": "ls"}, False),
    ("read", {"command": f"cd '{CWD}' && ls"}, {"command": "ls"}, False),
    ("Write", {"content": "x \n\ty\t\n"}, {"content": "x\n\ty\n"}, True),
    ("Write", {"content": "x \r\ny  "}, {"content": "x\r\ny"}, True),
    ("Write", {"content": "x\n"}, {"content": "x \n"}, False),
    ("Write", {"content": "x \ny "}, {"content": "x\ny "}, False),
    ("Write", {"content": " x"}, {"content": "x"}, False),
    ("Write", {"content": "x\n\n"}, {"content": "x\n"}, False),
    ("Write", {"file_path": "x "}, {"file_path": "x"}, False),
    (
        "Edit",
        {"old_string": "a ", "new_string": "b "},
        {"old_string": "a", "new_string": "b"},
        True,
    ),
    (
        "MultiEdit",
        {"edits": [{"old_string": "a ", "new_string": "b"}]},
        {"edits": [{"old_string": "a", "new_string": "b"}]},
        True,
    ),
    ("NotebookEdit", {"new_source": "a "}, {"new_source": "a"}, True),
    ("read", {"content": "x \n"}, {"content": "x\n"}, False),
]


@pytest.mark.parametrize(("tool", "generated", "returned", "known"), CLAUDE_CODE)
def test_claude_code_rewrites_texts_of_its_tools(
    tool: str, generated: Any, returned: Any, known: bool
) -> None:
    assert same(generated, returned, FREE, tool, "claude-code") is known
    assert same(generated, returned, FREE, tool, "claude-code-subagent") is known
    assert not same(generated, returned, FREE, tool, "codex")


def test_tools_are_told_apart_by_namespace_and_name() -> None:
    comparison = AnswerComparison(request())
    assert comparison.same_call(called("{}", namespace="a"), called("{ }", namespace="a"))
    assert not comparison.same_call(called("{}", namespace="a"), called("{}"))
    assert not comparison.same_call(called("{}"), called("{}", "write"))


def test_text_of_a_custom_tool_is_compared_as_text() -> None:
    comparison = AnswerComparison(request())
    patch = called("*** Begin\n", custom=True)
    assert comparison.same_call(patch, called("*** Begin", custom=True))
    assert not comparison.same_call(patch, called("*** End", custom=True))
    assert not comparison.same_call(called('{"a":1}', custom=True), called('{"a": 1}', custom=True))


THOUGHT, SAID = Thinking("I think.\n"), Text("Here  \nit is.")
CALL, OTHER = ToolCall("call_1", "read", "{}"), ToolCall("call_2", "read", "{}")
ANSWERS: list[tuple[list[Block], list[Block], bool]] = [  # generated, returned, same
    ([THOUGHT, SAID, CALL], [THOUGHT, SAID, CALL], True),
    ([THOUGHT, SAID, CALL], [SAID, CALL], True),
    ([THOUGHT, SAID, CALL], [CALL], True),
    ([THOUGHT, SAID, CALL], [CALL, SAID], True),
    ([THOUGHT, SAID, CALL], [Thinking(" I think."), Text("Here\nit is.\n"), CALL], True),
    ([THOUGHT, SAID, CALL], [Thinking("I thought."), SAID, CALL], False),
    ([THOUGHT, SAID, CALL], [Text("Here."), CALL], False),
    ([SAID, CALL], [THOUGHT, SAID, CALL], False),
    ([CALL, OTHER], [CALL], False),
    ([CALL], [CALL, OTHER], False),
    ([CALL, OTHER], [OTHER, CALL], False),
    ([THOUGHT, SAID], [SAID], True),
    ([THOUGHT, SAID], [THOUGHT], False),
    ([THOUGHT, SAID], [Text("Here it is.")], False),
]


@pytest.mark.parametrize(("generated", "returned", "known"), ANSWERS)
def test_an_answer_may_lack_thinking_and_text_beside_calls(
    generated: list[Block], returned: list[Block], known: bool
) -> None:
    assert AnswerComparison(request()).same(generated, returned) is known


def test_texts_around_a_call_are_the_same_joined() -> None:
    call = ToolCall("c", "read", "{}")
    generated: list[Block] = [Text("First."), call, Text("Second.")]
    returned: list[Block] = [Text("First.\n\nSecond."), call]
    assert AnswerComparison(request()).same(generated, returned)
    assert not AnswerComparison(request()).same(generated, [Text("First."), call])


def test_a_directory_in_a_sentence_is_named() -> None:
    asked = request(user("Your working directory: `/srv/app`. Begin."), assistant("ok"))
    comparison = AnswerComparison(asked)
    assert comparison.names_directory("/srv/app/")
    assert not comparison.names_directory("/srv")
    assert not comparison.names_directory("/")


def nested(depth: int, key: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {key: [schema]} if key.endswith("Of") else {"properties": {"a": schema}}
    return schema


CYCLE = {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}}
HOSTILE: list[Any] = [
    CYCLE,
    {"$ref": "#"},
    {"$ref": "#/" + "a/" * 500_000},
    {"additionalProperties": {"$ref": "#/" + "a/" * 500_000}},
    nested(1000, "anyOf"),
    nested(1000, "properties"),
    {"anyOf": [{"properties": {"a": {"type": "string"}}}] * 50_000},
    {"anyOf": [{"additionalProperties": {"anyOf": [{}] * 200}} for _ in range(200)]},
    {"type": [{}, [], 1, None], "properties": {"a": {"type": {"x": 1}}}},
    {"properties": [], "anyOf": "x", "$ref": 5, "items": 3, "default": {}},
    {"properties": {"a": 7, "b": None}, "allOf": [None, 1, "x", [[]]]},
    [],
    None,
    "string",
    {"properties": {"a": {"default": json.loads("[" * 500 + "]" * 500)}}},
]
ARGUMENTS: list[tuple[Any, Any]] = [
    ({"a": "1"}, {"a": 1}),
    ({"a": [1, {"b": None}]}, {"a": [1, {"b": []}]}),
    ({}, {"a": {"b": 1}}),
    ({str(n): "1" for n in range(20_000)}, {str(n): 1 for n in range(20_000)}),
    ({"a": ["1"] * 50_000}, {"a": [1] * 50_000}),
    ("[" * 100_000, "[" * 99_999),
    ("1" * 10_000, "1" * 10_001),
    ({"a": float("inf")}, {"a": "Infinity"}),
    ('{"a": NaN}', '{ "a": NaN}'),
    (f'{{"a": {"[" * 500}{"]" * 500}}}', f'{{"a":  {"[" * 500}{"]" * 500}}}'),
    ({"a": "x" * 1_000_000}, {"a": "x" * 999_999}),
]


@pytest.mark.parametrize("schema", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_schemas_and_arguments_take_bounded_time(schema: Any) -> None:
    began = time.process_time()
    for generated, returned in ARGUMENTS:
        same(generated, returned, schema, "Write", "claude-code")
        same(returned, generated, schema, "Write", "claude-code")
    assert time.process_time() - began < 5


@pytest.mark.parametrize("blanks", [" ", "\n", "\r", " \n", "\t\r\n"])
def test_long_runs_of_blanks_take_bounded_time(blanks: str) -> None:
    began = time.process_time()
    text = blanks * 200_000 + "x"
    same({"content": text}, {"content": text + "y"}, FREE, "Write", "claude-code")
    AnswerComparison(request()).same([Text(text)], [Text(text + "y")])
    directory = request(system("Working directory:" + blanks * 200_000))
    AnswerComparison(directory).names_directory("/x")
    assert time.process_time() - began < 2
