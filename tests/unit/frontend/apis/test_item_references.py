"""References to stored items in the input of the Responses API."""

import json
from typing import Any

import pytest
from msgspec import Raw
from support.stamp import STAMP

from kvmesh.frontend.apis.base import StoredTurn
from kvmesh.frontend.apis.responses.api import InputTokens, Responses
from kvmesh.frontend.apis.responses.references import referenced_responses
from kvmesh.frontend.conversation import Text, Thinking, ToolCall, ToolResult
from kvmesh.frontend.errors import InvalidRequest

TOKEN = "ab" * 12
RESPONSE = f"resp_{TOKEN}"
THOUGHT = {
    "type": "reasoning",
    "id": f"rs_{TOKEN}00",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "I think."}],
}
SAID = {
    "type": "message",
    "id": f"msg_{TOKEN}01",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "I look."}],
}
CALL = {
    "type": "function_call",
    "id": f"fc_{TOKEN}02",
    "call_id": "c",
    "name": "look",
    "arguments": "{}",
}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "blue"}
USER = {"role": "user", "content": "Look"}
OUTPUTS = {RESPONSE: [Raw(json.dumps(item).encode()) for item in (THOUGHT, SAID, CALL)]}


def reference(item: Any) -> dict[str, Any]:
    return {"type": "item_reference", "id": item if isinstance(item, str) else item["id"]}


def call(*items: Any, **fields: Any) -> Any:
    return Responses().parse(
        json.dumps({"model": "m", "input": items, **fields}).encode(), {}, STAMP
    )


def kinds(made: Any) -> list[type]:
    return [type(block) for message in made.request.messages for block in message.blocks]


def test_references_are_resolved_where_they_stand() -> None:
    made = call(USER, reference(THOUGHT), reference(SAID), CALL, RESULT, instructions="Be brief")
    assert made.thread.referenced([]) == {RESPONSE: []}
    made.thread.extend([], OUTPUTS)
    assert kinds(made) == [Text, Text, Thinking, Text, ToolCall, ToolResult]
    whole = call(USER, THOUGHT, SAID, CALL, RESULT, instructions="Be brief")
    assert made.request.messages == whole.request.messages


def test_a_reference_needs_no_type() -> None:
    made = call(USER, {"id": CALL["id"]}, RESULT)
    made.thread.extend([], OUTPUTS)
    assert kinds(made) == [Text, ToolCall, ToolResult]


def test_items_with_ids_are_no_references() -> None:
    made = call({**USER, "id": f"msg_{TOKEN}09"}, THOUGHT, SAID, CALL, RESULT)
    assert made.thread.referenced([]) == {}
    assert len(made.request.messages) == 5


def test_references_of_an_earlier_turn_are_resolved_in_its_place() -> None:
    earlier = call(USER, reference(CALL), RESULT)
    turn = earlier.thread.turn(b'{"output": []}')
    made = call({"role": "user", "content": "And now?"}, previous_response_id="resp_x")
    assert made.thread.referenced([turn]) == {RESPONSE: []}
    made.thread.extend([turn], OUTPUTS)
    assert kinds(made) == [Text, ToolCall, ToolResult, Text]


@pytest.mark.parametrize(
    "name", [f"rs_{TOKEN}07", f"msg_{'cd' * 12}00", "rs_of_another_server", "x"]
)
def test_a_missing_item_is_named(name: str) -> None:
    made = call(USER, reference(name))
    with pytest.raises(InvalidRequest) as error:
        made.thread.extend([], OUTPUTS)
    assert error.value.param == "input"
    assert f"'{name}'" in error.value.message


def test_a_missing_item_of_an_earlier_turn_is_named() -> None:
    turn = StoredTurn("resp_x", None, [Raw(json.dumps(reference(SAID)).encode())], [], Raw(b"{}"))
    made = call(USER, previous_response_id="resp_x")
    with pytest.raises(InvalidRequest) as error:
        made.thread.extend([turn], {})
    assert error.value.param == "previous_response_id"


@pytest.mark.parametrize("fields", [{"call_id": "c", "output": "x"}, {"content": "x"}])
def test_an_item_without_a_type_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as error:
        call(USER, fields)
    assert error.value.param == "input[1].type"


def test_a_reference_has_an_id() -> None:
    with pytest.raises(InvalidRequest) as error:
        call(USER, {"type": "item_reference"})
    assert error.value.param == "input[1].id"


def test_each_response_is_read_once() -> None:
    items = [
        Raw(json.dumps(reference(item)).encode()) for item in (THOUGHT, SAID, CALL, "y", "../x")
    ]
    assert referenced_responses(items) == {RESPONSE: [], "y": [], "../x": []}


def test_items_of_an_input_are_meant_by_their_places() -> None:
    ids = [f"msg_{TOKEN}i00", f"fco_{TOKEN}i1a", f"msg_{TOKEN}00", f"msg_{TOKEN}i0"]
    found = referenced_responses(Raw(json.dumps(reference(name)).encode()) for name in ids)
    assert found == {RESPONSE: [0, 26], f"msg_{TOKEN}i0": []}


def test_token_counts_resolve_references() -> None:
    sent = json.dumps({"model": "m", "input": [USER, reference(SAID)]}).encode()
    made = InputTokens().parse(sent, {}, STAMP)
    assert made.thread is not None
    assert made.thread.referenced([]) == {RESPONSE: []}


def test_references_written_with_escapes_are_resolved() -> None:
    sent = json.dumps({"model": "m", "input": [USER, reference(SAID)]})
    sent = sent.replace('"item_reference"', '"item\\u005freference"').replace(
        '"type"', '"typ\\u0065"'
    )
    made = Responses().parse(sent.encode(), {}, STAMP)
    assert made.thread is not None
    made.thread.extend([], OUTPUTS)
    assert kinds(made) == [Text, Text]


def test_the_items_of_all_references_are_bounded() -> None:
    long = {**SAID, "content": [{"type": "output_text", "text": "x" * (1 << 20)}]}
    made = call(*[reference(SAID)] * 40)
    with pytest.raises(InvalidRequest) as error:
        made.thread.extend([], {RESPONSE: [Raw(json.dumps(long).encode())]})
    assert error.value.param == "input"
