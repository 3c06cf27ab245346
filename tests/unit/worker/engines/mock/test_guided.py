"""Guided output: valid under any supported schema, expression or tag."""

import json
import re
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.bus.messages import Guided
from kvmesh.worker.engines.mock.text.guided import UnsupportedConstraint, generate
from kvmesh.worker.engines.mock.text.regex import RegexError, matching_string

SEEDS = range(30)
ADDRESS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "minLength": 3, "maxLength": 12},
        "number": {"type": "integer", "minimum": 1, "exclusiveMaximum": 4},
        "zip": {"type": "string", "pattern": r"^\d{5}(-[A-Z]{2})?$"},
        "kind": {"enum": ["home", "work"]},
        "since": {"type": "string", "format": "date"},
    },
    "required": ["street", "number", "zip"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["name", "children", "next"],
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: list[Any] = [
    True,
    {},
    ADDRESS,
    TREE,
    {"type": "array", "items": ADDRESS, "minItems": 2, "maxItems": 3},
    {"type": ["string", "null", "array"], "items": {"type": "boolean"}},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "uniqueItems": True},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "minItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False},
    {"allOf": [{"properties": {"a": {"minimum": 3}}}, {"properties": {"a": {"type": "integer"}}}]},
    {"anyOf": [{"required": ["x"]}, {"required": ["y"]}], "type": "object"},
    {"oneOf": [{"const": 3}, {"type": "string", "format": "uuid"}]},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.25},
    {"type": "number", "multipleOf": 0.5, "minimum": -3, "maximum": -2},
    {"type": "integer", "multipleOf": 7, "minimum": 10},
    {"type": "integer", "maximum": -5},
    {"type": "object", "minProperties": 3, "additionalProperties": {"type": "integer"}},
    {"properties": {"a~b": {"const": None}}, "required": ["a~b", "c"]},
    {"type": "object", "propertyNames": {"pattern": "^a[0-9]{3}$"}, "minProperties": 2},
    {"propertyNames": {"enum": ["x", "y"]}, "minProperties": 1, "additionalProperties": ADDRESS},
    {"patternProperties": {"^x[a-z]{4}$": {"type": "null"}}, "minProperties": 2, "type": "object"},
    {
        "type": "object",
        "patternProperties": {"^n[0-9]+$": {"type": "integer"}},
        "additionalProperties": False,
        "minProperties": 1,
    },
    {
        "type": "object",
        "properties": {n: {} for n in "abcd"},
        "maxProperties": 2,
        "required": ["d"],
    },
    {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "integer"}},
        "dependentRequired": {"a": ["b", "c"], "c": ["d"]},
    },
    {"type": "array", "contains": {"const": 7}, "items": {"type": "integer"}},
    {"contains": {"type": "null"}, "minContains": 2, "maxItems": 3},
    {"type": "string", "pattern": "^[a-z]{1,9}$", "minLength": 4, "maxLength": 6},
    {"type": "object", "properties": {"never": {"not": {}}, "a": {"type": "null"}}},
    {"anyOf": [{"not": {"type": "string"}}, {"type": "integer"}]},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:40])
@pytest.mark.parametrize("seed", SEEDS)
def test_generated_text_is_valid(schema: Any, seed: int) -> None:
    text = generate(Guided(kind="json_schema", value=json.dumps(schema)), Random(seed))
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (False, "no value"),
        ({"enum": []}, "empty enum"),
        ({"$ref": "https://example.org/x"}, "within the schema"),
        ({"$ref": "#/$defs/none"}, "refers to nothing"),
        ({"$ref": "#"}, "without end"),
        ({"required": ["a"], "properties": {"a": {"$ref": "#"}}}, "without end"),
        ({"type": "mystery"}, "no type"),
        ({"not": {"type": "string"}}, "`not`"),
        ({"if": {"type": "string"}, "then": {"minLength": 99}}, "`then`"),
        ({"dependentSchemas": {"a": {"required": ["b"]}}}, "`dependentSchemas`"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "no text"),
        ({"required": ["a"], "properties": {"a": {"not": {}}}}, "`not`"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no number"),
        ({"type": "array", "minItems": 10**9}, "more than"),
        ({"type": "string", "minLength": 10**9}, "characters"),
        ({"type": "array", "items": {"const": 1}, "minItems": 2, "uniqueItems": True}, "too few"),
        ({"required": ["a", "b"], "additionalProperties": {"$ref": "#"}}, "without|more"),
    ],
)
def test_unsatisfiable_constraints_are_explained(schema: Any, reason: str) -> None:
    with pytest.raises(UnsupportedConstraint, match=reason):
        generate(Guided(kind="json_schema", value=json.dumps(schema)), Random(0))


@pytest.mark.parametrize(
    "guided",
    [
        Guided(kind="json_schema", value="{"),
        Guided(kind="choice", value="[]"),
        Guided(kind="choice", value="yes"),
        Guided(kind="regex", value="("),
        Guided(kind="regex", value="((a{999}){999}){999}"),
        Guided(kind="grammar", value="root ::= 'x'"),
        Guided(kind="structural_tag", value="{}"),
        Guided(kind="structural_tag", value='{"format": {"type": "mystery"}}'),
    ],
)
def test_malformed_constraints_are_refused(guided: Guided) -> None:
    with pytest.raises(UnsupportedConstraint, match=f"cannot follow this {guided.kind}"):
        generate(guided, Random(0))


def test_a_json_object_and_a_choice() -> None:
    assert isinstance(json.loads(generate(Guided(kind="json_object", value=""), Random(1))), dict)
    choices = Guided(kind="choice", value='["red", "green"]')
    assert {generate(choices, Random(seed)) for seed in SEEDS} == {"red", "green"}


def test_the_same_state_writes_the_same() -> None:
    guided = Guided(kind="json_schema", value=json.dumps(TREE))
    assert generate(guided, Random(5)) == generate(guided, Random(5))


PATTERNS = [
    r"[a-z]{3,5}\d+",
    r"^(foo|bar)-\w+$",
    r"(\d{2})/\1",
    r"[^a-z\s]{4}",
    r"\S+@\S+\.(com|org)",
    r"a?b*c+?.{2}",
    r"(?:x|y(?:z)?)[-_.]",
    r"(?:ax?|a){60}",
    r"\bone\b t\Bwo\Z",
    r"(?m)^a$",
    r"(?i)Abc\d",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@given(seed=st.integers(0, 2**32))
def test_strings_match_their_expression(pattern: str, seed: int) -> None:
    assert re.fullmatch(pattern, matching_string(pattern, Random(seed)))


@pytest.mark.parametrize("pattern", [r"a(?=b)", r"a++b", r"(?>a|ab)c", r"(a)?(?(1)b|c)"])
def test_unsupported_constraints_are_refused(pattern: str) -> None:
    with pytest.raises(RegexError, match="not supported"):
        matching_string(pattern, Random(0))


@pytest.mark.parametrize("pattern", [r"(?:ax?|a){60}$b", r"a\bb", r"a^b", r"(?:x|(y))\1\Z\w"])
def test_conditions_that_do_not_hold_are_refused(pattern: str) -> None:
    with pytest.raises(RegexError, match=r"cannot satisfy|no value"):
        matching_string(pattern, Random(0))


NESTED = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 4} for i in range(14)}


MANY = [f"p{number}" for number in range(8000)]


@pytest.mark.parametrize(
    "guided",
    [
        Guided(kind="regex", value="(?:){4000000000}"),
        Guided(kind="regex", value="(?:(?:)*){60000}" * 2),
        Guided(kind="regex", value="(aa)" + "".join(rf"(\{i}\{i})" for i in range(1, 60))),
        Guided(kind="regex", value=f"[{''.join(map(chr, range(300, 9000)))}]" * 9),
        Guided(
            kind="json_schema",
            value=json.dumps({"$defs": {**NESTED, "d14": {}}, "$ref": "#/$defs/d0"}),
        ),
        Guided(
            kind="json_schema",
            value=json.dumps({"type": "array", "minItems": 9000, "items": {"const": "x" * 9999}}),
        ),
        Guided(
            kind="json_schema",
            value=json.dumps({"type": "array", "minItems": 9000, "items": {"pattern": "a{6000}"}}),
        ),
        Guided(
            kind="json_schema",
            value=json.dumps({"properties": dict.fromkeys(MANY, True), "required": MANY}),
        ),
        Guided(
            kind="json_schema",
            value=json.dumps(
                {"type": "array", "minItems": 900, "items": {"pattern": "[a-z]{1,9}"}}
            ),
        ),
    ],
    ids=lambda guided: guided.value[:30],
)
def test_oversized_constraints_are_refused(guided: Guided) -> None:
    with pytest.raises(UnsupportedConstraint, match="more than"):
        generate(guided, Random(0))


CALL = {"type": "json_schema", "json_schema": ADDRESS}
TAG = {"type": "tag", "begin": "<tool_call>", "content": CALL, "end": "</tool_call>"}


@pytest.mark.parametrize(
    "tag",
    [
        {"format": TAG},
        {"format": {"type": "triggered_tags", "tags": [TAG], "at_least_one": True}},
        {"format": {"type": "tags_with_separator", "tags": [TAG], "separator": "\n"}},
        {"format": {"type": "sequence", "elements": [{"type": "or", "elements": [TAG]}]}},
        {"structures": [{"begin": "<tool_call>", "schema": ADDRESS, "end": "</tool_call>"}]},
    ],
)
def test_structural_tags_wrap_valid_json(tag: Any) -> None:
    text = generate(Guided(kind="structural_tag", value=json.dumps(tag)), Random(3))
    found = re.fullmatch(r"<tool_call>(.*)</tool_call>", text)
    assert found is not None
    jsonschema.validate(json.loads(found[1]), ADDRESS)


def test_other_formats() -> None:
    parts = [{"type": "const_string", "value": "a="}, {"type": "regex", "pattern": r"\d"}]
    tag = {"format": {"type": "sequence", "elements": [*parts, {"type": "any_text"}]}}
    text = generate(Guided(kind="structural_tag", value=json.dumps(tag)), Random(3))
    assert re.fullmatch(r"a=\d[a-z ]+", text)
