"""A schema keeps its meaning where it is embedded, in the one form that every engine reads."""

import json
import re
from collections.abc import Iterator
from random import Random
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, RootModel, create_model

from kvmesh.frontend.dialects.embedded_schemas import embedded, embedded_arguments
from kvmesh.frontend.dialects.parsing.coerce import root_kinds
from kvmesh.worker.engines.mock.text.schema import SchemaWriter

Json = dict[str, Any]
PLACE = "#/$defs/0"


class Point(BaseModel):
    x: int
    y: float = 0.0


class Leaf(BaseModel):
    kind: Literal["leaf"]
    at: Point


class Branch(BaseModel):
    kind: Literal["branch"]
    children: "list[Annotated[Leaf | Branch, Field(discriminator='kind')]]" = []


class Tree(BaseModel):
    root: Branch
    names: dict[str, Point]
    parent: "Tree | None" = None


class Forest(RootModel[list[Tree]]):
    pass


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
# (schema, instances that fit, instances that do not)
WRITTEN: dict[str, tuple[Json, list[Any], list[Any]]] = {
    "zod 4": (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"node": {"$ref": "#/$defs/__schema0"}},
            "required": ["node"],
            "additionalProperties": False,
            "$defs": {
                "__schema0": {
                    "type": "object",
                    "properties": {
                        "next": {"anyOf": [{"$ref": "#/$defs/__schema0"}, {"type": "null"}]}
                    },
                    "required": ["next"],
                    "additionalProperties": False,
                }
            },
        },
        [{"node": {"next": {"next": None}}}],
        [{"node": {"next": 1}}, {"node": {"next": {}}}],
    ),
    "zod-to-json-schema": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/Plan",
            "definitions": {
                "Plan": {
                    "type": "object",
                    "properties": {
                        "from": POINT,
                        "to": {"$ref": "#/definitions/Plan/properties/from"},
                        "why": {"allOf": [{"$ref": "#/definitions/Why"}], "description": "d"},
                    },
                    "required": ["from", "to", "why"],
                },
                "Why": {"type": "string", "enum": ["a", "b"]},
            },
        },
        [{"from": {"x": 1}, "to": {"x": 2}, "why": "a"}],
        [
            {"from": {"x": 1}, "to": {"x": "2"}, "why": "a"},
            {"from": {"x": 1}, "to": {"x": 2}, "why": "c"},
        ],
    ),
    "escapes": (
        {
            "$defs": {"a/b~c %": POINT, "100%": {"type": "integer"}, "ä": {"type": "null"}},
            "properties": {
                "p": {"$ref": "#/$defs/a~1b~0c%20%25"},
                "q": {"$ref": "#/$defs/100%25"},
                "r": {"$ref": "#/$defs/%C3%A4"},
            },
        },
        [{"p": {"x": 1}, "q": 1, "r": None}],
        [{"p": {}}, {"q": "1"}, {"r": 1}],
    ),
    "lists": (
        {"anyOf": [POINT, {"type": "array", "items": {"$ref": "#/anyOf/0"}}]},
        [{"x": 1}, [{"x": 1}]],
        [{}, [1], [[]]],
    ),
    "itself": (
        {"type": "object", "properties": {"inner": {"$ref": "#"}}, "additionalProperties": False},
        [{"inner": {"inner": {}}}],
        [{"inner": {"outer": {}}}],
    ),
    "anchors": (
        {
            "$defs": {"P": {"$anchor": "point", **POINT}},
            "properties": {"p": {"$ref": "#point"}},
        },
        [{"p": {"x": 1}}],
        [{"p": {"x": ""}}],
    ),
    "ids": (
        {
            "$id": "https://example.org/tool",
            "$defs": {
                "P": {
                    "$id": "point",
                    "$defs": {"N": {"type": "integer"}},
                    "items": {"$ref": "#/$defs/N"},
                },
                "N": {"type": "string"},
            },
            "properties": {
                "p": {"$ref": "point"},
                "n": {"$ref": "https://example.org/tool#/$defs/N"},
                "m": {"$ref": "point#/$defs/N"},
            },
        },
        [{"p": [1], "n": "a", "m": 1}],
        [{"p": ["a"]}, {"n": 1}, {"m": "a"}],
    ),
    "data and names": (
        {
            "$defs": {"default": {"type": "integer"}},
            "properties": {
                "$ref": {"$ref": "#/$defs/default"},
                "enum": {"enum": [{"$ref": "#/$defs/default"}]},
                "properties": {"properties": {"$ref": {"type": "null"}}, "default": {"$ref": "#"}},
            },
            "additionalProperties": False,
        },
        [{"$ref": 1, "enum": {"$ref": "#/$defs/default"}, "properties": {"$ref": None}}],
        [{"$ref": "1"}, {"enum": 1}, {"properties": {"$ref": 1}}, {"default": 1}],
    ),
    "lists by place": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"P": POINT},
            "properties": {
                "pair": {
                    "type": "array",
                    "items": [{"$ref": "#/definitions/P"}, {"type": "string"}],
                    "additionalItems": False,
                    "minItems": 2,
                },
                "open": {"items": [{"type": "null"}], "additionalItems": {"type": "integer"}},
                "any": {"items": [{"$ref": "#/properties/pair/items/1"}]},
            },
        },
        [{"pair": [{"x": 1}, "a"]}, {"open": [None, 1, 2]}, {"any": ["a", 1]}],
        [
            *({"pair": pair} for pair in ([{"x": 1}], [{"x": 1}, 2], [{"x": 1}, "a", 3])),
            *({"open": [None, ""]}, {"open": [1]}, {"any": [1]}),
        ],
    ),
    "beside others": (
        {
            "$defs": {"P": POINT, "any": True, "none": False},
            "properties": {
                "p": {"$ref": "#/$defs/P", "minProperties": 1},
                "a": {"$ref": "#/$defs/any", "type": "string"},
                "n": {"$ref": "#/$defs/none"},
            },
        },
        [{"p": {"x": 1}, "a": "b"}],
        [{"p": {}}, {"a": 1}, {"n": 1}],
    ),
    "recursive": (
        {
            "$recursiveAnchor": True,
            "type": "object",
            "properties": {"sub": {"$recursiveRef": "#"}},
            "additionalProperties": False,
        },
        [{"sub": {"sub": {}}}],
        [{"sub": {"x": {}}}],
    ),
    "dynamic": (
        {
            "$dynamicAnchor": "node",
            "type": "object",
            "properties": {"sub": {"$dynamicRef": "#node"}},
            "additionalProperties": False,
        },
        [{"sub": {"sub": {}}}],
        [{"sub": {"x": {}}}],
    ),
}


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref" and isinstance(value, str):
                yield value
            elif key != "enum":
                yield from references(value)
    elif isinstance(node, list):
        for item in node:
            yield from references(item)


def listed(schema: Json) -> Json:
    """A document with the schema and a stranger at other places."""
    other = {"$defs": {"Point": {"type": "null"}, "P": {"type": "null"}}, "$ref": "#/$defs/Point"}
    definitions = {"0": embedded(schema, PLACE), "1": embedded(other, "#/$defs/1")}
    return {"items": {"anyOf": [{"$ref": PLACE}]}, "$defs": definitions}


def check_forms(schema: Json, good: list[Any], bad: list[Any]) -> None:
    """The schema alone, and among others, accepts the same values."""
    whole, many = embedded(schema), listed(schema)
    for document in (whole, many):
        for reference in references(document):
            assert re.fullmatch(r"#(/\$defs/[\w.-]+)*", reference, re.ASCII), reference
    for value in good:
        jsonschema.validate(value, whole)
        jsonschema.validate([value], many, jsonschema.Draft202012Validator)
    for value in bad:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, whole)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate([value], many, jsonschema.Draft202012Validator)


@pytest.mark.parametrize("name", WRITTEN)
def test_written_schemas_keep_their_meaning(name: str) -> None:
    schema, good, bad = WRITTEN[name]
    before = json.dumps(schema)
    check_forms(schema, good, bad)
    assert json.dumps(schema) == before


def test_schemas_of_pydantic_keep_their_meaning() -> None:
    leaf = {"kind": "leaf", "at": {"x": 1}}
    tree = {"root": {"kind": "branch", "children": [leaf]}, "names": {"a": {"x": 2}}}
    bad = {"root": {"kind": "branch", "children": [{"kind": "leaf"}]}, "names": {}}
    check_forms(Tree.model_json_schema(), [tree, {**tree, "parent": tree}], [bad, {}])
    check_forms(Forest.model_json_schema(), [[tree]], [[bad], tree])


def test_what_leads_out_stays_as_it_is() -> None:
    for reference in ("https://example.org/x", "#/$defs/none", "#nowhere", "other.json#/a"):
        assert embedded({"properties": {"a": {"$ref": reference}}}, PLACE) == {
            "properties": {"a": {"$ref": reference}}
        }
    assert embedded(True) is True


def test_malformed_schemas_are_left_to_the_engine() -> None:
    """It says what it cannot follow."""
    for schema in (
        {"$id": "http://[", "items": {"$ref": "http://[#/a"}},
        {"$ref": "#", "$dynamicRef": "#", "allOf": 5},
        {"anyOf": 5, "enum": 5, "properties": [], "items": [5], "additionalItems": []},
    ):
        assert isinstance(embedded_arguments(schema, PLACE), dict)
        assert root_kinds(schema) == frozenset()


def test_a_plain_schema_is_not_changed() -> None:
    assert embedded(POINT) == POINT
    draft = {"$schema": "http://json-schema.org/draft-07/schema#", **POINT}
    assert embedded(draft) == draft
    assert embedded(draft, PLACE) == POINT


def test_keywords_beside_a_reference_hold_in_engines_that_ignore_them_there() -> None:
    word: dict[str, Any] = {"type": "string", "pattern": "[a-z]+", "description": "a word"}
    row: dict[str, Any] = {"type": "object", "properties": {"word": {"$ref": "#/$defs/word"}}}
    schema = {
        "type": "object",
        "properties": {
            "short": {"$ref": "#/$defs/word", "maxLength": 2, "description": "a short one"},
            "other": {"$ref": "#/$defs/word", "pattern": "x"},
            "row": {"$ref": "#/$defs/row", "minProperties": 1},
        },
        "$defs": {"word": word, "row": row},
    }
    parts = embedded(schema)["properties"]
    assert parts["short"] == {**word, "maxLength": 2, "description": "a short one"}
    assert parts["other"] == {"$ref": "#/$defs/word", "pattern": "x"}
    assert parts["row"] == {"$ref": "#/$defs/row", "minProperties": 1}


def test_null_leaves_a_keyword_out() -> None:
    given = {"type": "object", "required": None, "properties": None, "$defs": None, "title": None}
    assert embedded(given) == {"type": "object"}
    value = {"properties": {"a": {"const": None, "enum": None, "default": None, "$ref": None}}}
    assert embedded(value) == {"properties": {"a": {"const": None, "default": None}}}


def test_arguments_are_an_object() -> None:
    untyped: list[Json] = [{}, {"required": ["a"]}, {"anyOf": [{"required": ["a"]}]}]
    for schema in untyped:
        assert embedded_arguments(schema) == {"type": "object", **schema}
    typed: list[Json] = [POINT, {"$ref": "#"}, {"type": None}]
    for schema in typed:
        assert embedded_arguments(schema) == (embedded(schema) or {"type": "object"})


# --- generated models ---

_plain = st.sampled_from(
    [int, str, bool, float, None, list[int], Literal["a", "b"], Point, Leaf, Branch]
)


@st.composite
def models(draw: st.DrawFn) -> type[BaseModel]:
    """Models that refer to each other; two of one name among them."""
    known: list[Any] = []
    for number in range(draw(st.integers(1, 4))):
        fields: dict[str, Any] = {}
        for index in range(draw(st.integers(1, 3))):
            kind = draw(st.one_of(_plain, st.sampled_from(known)) if known else _plain)
            shape = draw(st.sampled_from(["one", "list", "map", "option", "either"]))
            field = {
                "one": kind,
                "list": list[kind],  # type: ignore[valid-type]
                "map": dict[str, kind],  # type: ignore[valid-type]
                "option": kind | None if kind is not None else None,
                "either": kind | Point if kind is not None else Point,
            }[shape]
            fields[f"f{index}"] = (field, ...)
        name = draw(st.sampled_from(["Model", f"Model{number}", "A_b", "Ä"]))
        known.append(create_model(name, __module__=f"m{number}", **fields))
    return known[-1]  # type: ignore[no-any-return]


def altered(value: Any, rng: Random) -> Any:
    """The value with one part replaced by another."""
    if rng.random() < 0.3 or not isinstance(value, dict | list) or not value:
        return rng.choice([{}, [], "no", 7, None, {"x": 1}])
    copy = dict(value) if isinstance(value, dict) else list(value)
    key: Any = rng.choice(list(copy)) if isinstance(copy, dict) else rng.randrange(len(copy))
    copy[key] = altered(copy[key], rng)
    return copy


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(0, 999))
def test_generated_models_accept_the_same_values(model: type[BaseModel], seed: int) -> None:
    schema, rng = model.model_json_schema(), Random(seed)
    many = listed(schema)
    jsonschema.Draft202012Validator.check_schema(many)
    before = jsonschema.Draft202012Validator(schema).is_valid
    after = jsonschema.Draft202012Validator(embedded(schema)).is_valid
    among = jsonschema.Draft202012Validator(many).is_valid
    value = SchemaWriter(many["$defs"]["0"] | {"$defs": {"0": many["$defs"]["0"]}}, rng).write()
    assert before(value)
    for tried in (value, *(altered(value, rng) for _ in range(5))):
        assert before(tried) == after(tried) == among([tried])
