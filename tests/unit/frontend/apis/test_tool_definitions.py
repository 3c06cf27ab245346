"""Tools are parsed once, however many turns define them."""

from typing import Any

import pytest
from msgspec import Raw, json
from support.stamp import STAMP
from unit.frontend.apis.answers import APIS, body

from kvmesh.frontend.apis import tool_definitions
from kvmesh.frontend.apis.base import Api
from kvmesh.frontend.apis.chat.body import ChatToolBody
from kvmesh.frontend.apis.tool_definitions import ToolDefinitions
from kvmesh.frontend.conversation import Tool
from kvmesh.frontend.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}


def defined(api: Api, name: Any) -> dict[str, Any]:
    if api.name == "messages":
        return {"name": name, "input_schema": SCHEMA}
    if api.name == "responses":
        return {"type": "function", "name": name, "parameters": SCHEMA}
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


@pytest.fixture(params=[api for api in APIS if api.name != "completions"], ids=lambda a: a.name)
def api(request: pytest.FixtureRequest) -> Api:
    return request.param  # type: ignore[no-any-return]


def test_equal_definitions_give_the_same_tools(api: Api) -> None:
    def tools(*names: str) -> list[Tool]:
        sent = body(api, tools=[defined(api, name) for name in names])
        return api.parse(sent, {}, STAMP).request.tools

    first = tools("read", "write")
    assert [(tool.name, tool.parameters) for tool in first] == [("read", SCHEMA), ("write", SCHEMA)]
    again = tools("write", "read", "grep")
    assert again[0] is first[1]
    assert again[1] is first[0]
    assert again[2].name == "grep"


def test_a_wrong_definition_is_named_with_its_place(api: Api) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest) as raised:
            api.parse(body(api, tools=[defined(api, "read"), defined(api, 1)]), {}, STAMP)
        field = "tools[1].function.name" if "function" in defined(api, "") else "tools[1].name"
        assert raised.value.param == field
        assert field in raised.value.message


@pytest.mark.parametrize("kind", ["string", "array", ["string", "null"], None])
def test_arguments_are_objects(api: Api, kind: Any) -> None:
    wrong = defined(api, "read")
    inner = wrong.get("function", wrong)
    schema = "input_schema" if "input_schema" in inner else "parameters"
    inner[schema] = {"type": kind}
    with pytest.raises(InvalidRequest, match="`read` must have the type `object`") as raised:
        api.parse(body(api, tools=[defined(api, "write"), wrong]), {}, STAMP)
    assert raised.value.param == "tools[1]"
    fine: list[Any] = [{}, {"type": "object"}, {"type": ["object", "null"]}, {"anyOf": [{}]}]
    for right in fine:
        inner[schema] = right
        assert api.parse(body(api, tools=[wrong]), {}, STAMP).request.tools[0].parameters == right


def test_messages_refuse_two_tools_of_one_name() -> None:
    api = next(api for api in APIS if api.name == "messages")
    tools = [defined(api, "read"), {**defined(api, "read"), "description": "another"}]
    with pytest.raises(InvalidRequest, match="must be unique"):
        api.parse(body(api, tools=tools), {}, STAMP)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_definitions, "MEMO_BYTES", 1000)
    made: list[ChatToolBody] = []

    def convert(tool: ChatToolBody, _: str) -> list[Tool]:
        made.append(tool)
        return []

    known = ToolDefinitions(ChatToolBody, (), convert)
    for turn in range(2):
        for number in range(30):
            known.tools([Raw(json.encode({"type": f"t{number}"}))], [])
        assert len(made) == 30 * (turn + 1)
