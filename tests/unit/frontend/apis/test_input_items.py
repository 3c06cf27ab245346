"""The input of stored responses, as it is listed."""

import json
from typing import Any

import pytest
from msgspec import Raw

from kvmesh.frontend.apis.base import StoredTurn, decode_query
from kvmesh.frontend.apis.responses.input_items import ItemsQuery, input_of, item_list
from kvmesh.frontend.errors import InvalidRequest

TOKEN = "ab" * 12
SAID = {"type": "message", "id": f"msg_{TOKEN}00", "role": "assistant", "status": "completed"}
ANSWER = {**SAID, "content": [{"type": "output_text", "text": "Hi", "annotations": []}]}


def turn(*items: Any, token: str = TOKEN) -> StoredTurn:
    sent = [Raw(json.dumps(item).encode()) for item in items]
    return StoredTurn(f"resp_{token}", None, sent, [Raw(json.dumps(ANSWER).encode())], Raw(b"{}"))


def listed(*turns: StoredTurn) -> list[Any]:
    return [json.loads(bytes(item)) for item in input_of(turns)]


def test_every_item_has_an_id_a_type_and_a_status() -> None:
    image = {"type": "input_image", "image_url": "data:,"}
    found = listed(
        turn(
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "Two"},
            {"type": "message", "role": "user", "content": [image]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
            {"type": "reasoning", "summary": []},
        )
    )
    assert [item["id"] for item in found] == [
        f"{prefix}_{TOKEN}i0{place}"
        for place, prefix in enumerate(("msg", "msg", "msg", "fc", "fco", "rs"))
    ]
    assert [item.get("status") for item in found] == ["completed"] * 5 + [None]
    assert [item["type"] for item in found[:3]] == ["message"] * 3
    assert [item["content"] for item in found[:3]] == [
        [{"type": "input_text", "text": "One"}],
        [{"type": "output_text", "text": "Two", "annotations": []}],
        [image],
    ]
    assert found[4]["output"] == "x"


def test_an_item_keeps_its_own_id_and_a_reference_stays() -> None:
    own = {"type": "message", "id": "msg_mine", "role": "user", "content": "x"}
    reference = {"type": "item_reference", "id": "rs_x"}
    found = listed(turn(own, reference, {"id": "rs_y"}))
    assert [item["id"] for item in found] == ["msg_mine", "rs_x", "rs_y"]
    assert found[1] == reference


def test_earlier_answers_are_input_and_the_last_is_not() -> None:
    earlier = turn({"role": "user", "content": "x"}, token="cd" * 12)
    found = listed(earlier, turn({"role": "user", "content": "x"}))
    assert [item["id"] for item in found] == [
        f"msg_{'cd' * 12}i00",
        ANSWER["id"],
        f"msg_{TOKEN}i00",
    ]


ITEMS = [Raw(json.dumps({"id": str(n)}).encode()) for n in range(5)]


@pytest.mark.parametrize(
    ("query", "ids", "more"),
    [
        ({}, "43210", False),
        ({"order": "asc"}, "01234", False),
        ({"limit": "2"}, "43", True),
        ({"order": "asc", "limit": "2", "after": "1"}, "23", True),
        ({"after": "3", "limit": "3", "include": "file_search_call.results"}, "210", False),
        ({"after": "0"}, "", False),
    ],
)
def test_a_list_has_pages(query: dict[str, str], ids: str, more: bool) -> None:
    made = item_list(ITEMS, decode_query(query, ItemsQuery))
    assert [json.loads(bytes(item))["id"] for item in made["data"]] == list(ids)
    assert made["has_more"] == more
    assert made["first_id"] == (ids[0] if ids else None)
    assert made["last_id"] == (ids[-1] if ids else None)


@pytest.mark.parametrize(
    "query", [{"order": "up"}, {"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"after": "9"}]
)
def test_an_invalid_parameter_is_named(query: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as error:
        item_list(ITEMS, decode_query(query, ItemsQuery))
    assert error.value.param == next(iter(query))
