"""Constraints in the words of vLLM, Dynamo, SGLang and llama.cpp."""

from typing import Any

import pytest
from unit.frontend.apis.prompts import request_of

from kvmesh.bus.messages import Guided
from kvmesh.frontend.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_TEXT = '{ "type": "object",\n "properties": {"a": {"type": "integer"}}}'
JSON = Guided(kind="json_schema", value='{"type":"object","properties":{"a":{"type":"integer"}}}')
OBJECT = Guided(kind="json_object", value="")
REGEX = Guided(kind="regex", value="a+")
CHOICE = Guided(kind="choice", value='["yes","no: \\"é\\""]')
GRAMMAR = Guided(kind="grammar", value='root ::= "a"')
CHOICES = ["yes", 'no: "é"']
OUTPUTS: list[tuple[dict[str, Any], Guided]] = [
    ({"json": SCHEMA}, JSON),
    ({"json": AS_TEXT}, JSON),
    ({"json_object": True}, OBJECT),
    ({"regex": "a+", "json": None, "choice": None, "json_object": False, "grammar": ""}, REGEX),
    ({"choice": CHOICES, "disable_any_whitespace": True}, CHOICE),
    ({"grammar": GRAMMAR.value}, GRAMMAR),
]
FIELDS: list[tuple[str, Any, Guided]] = [
    ("guided_json", SCHEMA, JSON),
    ("guided_json", AS_TEXT, JSON),
    ("guided_regex", "a+", REGEX),
    ("guided_choice", CHOICES, CHOICE),
    ("guided_grammar", GRAMMAR.value, GRAMMAR),
    ("json_schema", AS_TEXT, JSON),
    ("json_schema", SCHEMA, JSON),
    ("regex", "a+", REGEX),
    ("ebnf", GRAMMAR.value, GRAMMAR),
    ("grammar", GRAMMAR.value, GRAMMAR),
]


ASK: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "completions": {"prompt": "x"},
    "responses": {"input": "x"},
}


def constraint_of(api: str, **fields: Any) -> Guided | None:
    return request_of(api, {**ASK[api], **fields}).guided


@pytest.mark.parametrize("api", ASK)
@pytest.mark.parametrize(("outputs", "expected"), OUTPUTS)
def test_vllms_field_constrains_an_answer(
    api: str, outputs: dict[str, Any], expected: Guided
) -> None:
    assert constraint_of(api, structured_outputs=outputs) == expected


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize(("name", "value", "expected"), FIELDS)
def test_other_fields_constrain_an_answer(
    api: str, name: str, value: Any, expected: Guided
) -> None:
    assert constraint_of(api, **{name: value}) == expected
    assert constraint_of(api, **{name: None}) is None


@pytest.mark.parametrize("api", ASK)
def test_a_field_without_a_constraint_leaves_the_answer_free(api: str) -> None:
    for outputs in (None, {}, {"regex": None, "json_object": False}):
        assert constraint_of(api, structured_outputs=outputs) is None


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [
        ("chat", {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "choice"),
        ("chat", {"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ("completions", {"guided_json": SCHEMA, "ebnf": "a"}, "ebnf"),
        (
            "responses",
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
            "regex",
        ),
        ("chat", {"structured_outputs": {"choice": []}}, "choice"),
        ("chat", {"guided_choice": []}, "guided_choice"),
        ("chat", {"guided_choice": ["a", ""]}, "guided_choice"),
        ("chat", {"guided_json": "not JSON"}, "guided_json"),
        ("chat", {"guided_json": "[1]"}, "guided_json"),
        ("chat", {"structured_outputs": {"structural_tag": "{}"}}, "structural_tag"),
    ],
)
def test_bad_and_second_constraints_are_refused(
    api: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        constraint_of(api, **fields)
    assert str(error.value.param).endswith(param)
