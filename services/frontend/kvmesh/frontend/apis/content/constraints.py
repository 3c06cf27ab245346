"""The constraint of an answer, as OpenAI, vLLM, SGLang, llama.cpp and Dynamo spell it."""

import re
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Struct

from kvmesh.bus.messages import Guided
from kvmesh.frontend.apis.base import as_json, missing
from kvmesh.frontend.apis.content.refusals import UnsupportedFields
from kvmesh.frontend.errors import InvalidRequest

MAX_ALTERNATIVES = 1 << 12
_SPELLED = (  # fields of `ConstraintBody`, and the fields of `StructuredOutputsBody` that they mean
    ("guided_json", "json"),
    ("json_schema", "json"),
    ("guided_regex", "regex"),
    ("regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "grammar"),
    ("grammar", "grammar"),
    ("ebnf", "grammar"),
)
JSON_OPTIONS = UnsupportedFields(
    whitespace_pattern=None, disable_any_whitespace=None, disable_additional_properties=None
)
_spelled = attrgetter(*(name for name, _ in _SPELLED))
_NONE = (None,) * len(_SPELLED)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class JsonSchema(Struct):
    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    type: str
    json_schema: JsonSchema | None = None
    schema: Any = None  # of other servers, beside `json_object`


class StructuredOutputsBody(Struct):
    """vLLM's, but for `structural_tag` and, for an answer in JSON, JSON_OPTIONS."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Any = None
    whitespace_pattern: Any = None
    disable_any_whitespace: Any = None
    disable_additional_properties: Any = None


class ConstraintBody(Struct, kw_only=True):
    """Fields of completions and chat completions that constrain the answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None


def constraint(body: ConstraintBody) -> Guided | None:
    """The only constraint of a request; None if its answer is free. Raises InvalidRequest."""
    given: list[tuple[str, Guided]] = []
    if (form := formatted(body.response_format)) is not None:
        given.append(("response_format", form))
    given += structured(body.structured_outputs)
    if (values := _spelled(body)) != _NONE:
        given += _read((*each, value) for each, value in zip(_SPELLED, values, strict=True))
    return only(given)


def only(given: list[tuple[str, Guided]]) -> Guided | None:
    """The one constraint among these, each with its field. Raises InvalidRequest for several."""
    if len(given) > 1:
        (first, _), (second, _), *_ = given
        reason = f"`{first}` and `{second}`: an answer follows one constraint."
        raise InvalidRequest(reason, second)
    return given[0][1] if given else None


def formatted(form: ResponseFormat | None) -> Guided | None:
    if form is None:
        return None
    if form.schema or (form.json_schema and form.type in ("text", "json_object")):
        reason = "A schema requires the type `json_schema` and stands in `json_schema.schema`."
        raise InvalidRequest(f"`response_format`: {reason}", "response_format")
    if form.type == "text":
        return None
    if form.type == "json_object":
        return Guided(kind="json_object", value="")
    if form.type == "json_schema":
        wanted = form.json_schema or JsonSchema()
        named(wanted.name, "response_format.json_schema.name")
        if wanted.schema is None:
            raise missing("response_format.json_schema.schema")
        return Guided(kind="json_schema", value=as_json(wanted.schema))
    raise InvalidRequest(f"Unknown type `{form.type}`.", "response_format.type")


def named(name: str, where: str) -> None:
    """Check the name of an answer's schema, which OpenAI's APIs require; raises InvalidRequest."""
    if not name:
        raise missing(where)
    if not _NAME.fullmatch(name):
        reason = "must have 1 to 64 letters, digits, underscores and hyphens"
        raise InvalidRequest(f"`{where}` {reason}.", where)


def structured(outputs: StructuredOutputsBody | None) -> list[tuple[str, Guided]]:
    """The constraints of vLLM's field, with their names. Raises InvalidRequest."""
    if outputs is None:
        return []
    if outputs.structural_tag:
        name = "structured_outputs.structural_tag"
        raise InvalidRequest(f"`{name}` is not supported; use `tools`.", name)
    if outputs.json or outputs.json_object:
        JSON_OPTIONS.refuse(outputs, "structured_outputs.")
    kinds = ("json", "json_object", "regex", "choice", "grammar")
    return _read((f"structured_outputs.{kind}", kind, getattr(outputs, kind)) for kind in kinds)


def _read(fields: Iterable[tuple[str, str, Any]]) -> list[tuple[str, Guided]]:
    """The constraints of (field, kind, value), without the fields that clients leave empty."""
    return [
        (name, _guided(name, kind, value))
        for name, kind, value in fields
        if value is not None and value not in ("", False)
    ]


def _guided(name: str, kind: str, value: Any) -> Guided:
    match kind:
        case "json":
            return Guided(kind="json_schema", value=_schema(name, value))
        case "json_object":
            return Guided(kind="json_object", value="")
        case "choice":
            if not 0 < len(value) <= MAX_ALTERNATIVES or "" in value:
                reason = f"must have 1 to {MAX_ALTERNATIVES} texts that are not empty"
                raise InvalidRequest(f"`{name}` {reason}.", name)
            return Guided(kind="choice", value=as_json(value))
        case "regex":
            return Guided(kind="regex", value=value)
        case _:
            return Guided(kind="grammar", value=value)


def _schema(name: str, schema: dict[str, Any] | str) -> str:
    """A schema, or the JSON text of one, as compact JSON text."""
    if not isinstance(schema, str):
        return as_json(schema)
    try:
        return as_json(msgspec.json.decode(schema, type=dict[str, Any]))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"`{name}` is not a JSON schema: {error}", name) from error
