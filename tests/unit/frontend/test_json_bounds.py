"""Bounds of the number of JSON values in a body and in arguments of tool calls."""

from typing import Any

import msgspec
import pytest
from support.stamp import STAMP

from kvmesh.frontend import json_bounds as values
from kvmesh.frontend.apis.chat.api import Chat
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.json_bounds import (
    COMPOUND_WEIGHT,
    LIGHT_BYTES,
    LIGHT_VALUES,
    MAX_VALUES,
    SMALL,
    check_arguments,
    check_values,
    is_light,
)


def chat(**fields: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return Chat().parse(msgspec.json.encode(body), {}, STAMP).request


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b"[]," * MAX_VALUES + b"1]}",
        b'{"a":[' + b"1," * (MAX_VALUES + 1) + b"1]}",
        b'{"a":[' + b'"\\"",' * (MAX_VALUES + 1) + b"1]}",
    ],
)
def test_a_body_of_too_many_values_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as error:
        check_values(body)
    assert error.value.kind == "too_large"


@pytest.mark.parametrize("text", ['"', "\\", "\\\\", ',{":"', "a\\", '\\"'])
def test_only_separators_outside_of_strings_count(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = msgspec.json.encode([text * 50, 1, {"a": text * 30}])
    counted = 2 + 4 * COMPOUND_WEIGHT - COMPOUND_WEIGHT  # commas, and three that are dear
    for size in (2, 3, 7, 64):
        monkeypatch.setattr(values, "SLICE_BYTES", size)
        monkeypatch.setattr(values, "MAX_VALUES", counted)
        check_values(body)
        monkeypatch.setattr(values, "MAX_VALUES", counted - 1)
        with pytest.raises(ApiError):
            check_values(body)


def test_code_inside_strings_of_arguments_does_not_count() -> None:
    text = msgspec.json.encode({"code": "f(a, {b: [c]}), " * (MAX_VALUES // 4)}).decode()
    call = {"id": "a", "function": {"name": "f", "arguments": text}}
    check_arguments(chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages)


def test_json_inside_strings_does_not_count() -> None:
    text = msgspec.json.encode({"content": '{"a": [1, 2], "\\\\": ","}' * (MAX_VALUES // 4)})
    check_values(text)


def test_a_body_is_light_if_it_is_small_or_most_of_it_is_few_texts() -> None:
    assert is_light(b"[" * (SMALL - 1))
    assert is_light(msgspec.json.encode(["x" * SMALL] * 3))
    assert not is_light(b"[" * SMALL)
    assert not is_light(msgspec.json.encode(["x" * LIGHT_BYTES]))
    few = b"," * LIGHT_VALUES + b" " * SMALL
    assert is_light(few)
    assert not is_light(few + b",")
