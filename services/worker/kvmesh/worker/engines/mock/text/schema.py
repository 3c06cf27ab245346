"""Generates values for a JSON schema: the part of draft 2020-12 that tools and responses use."""

import json
import math
from random import Random
from typing import Any, TypeAlias

from kvmesh.worker.engines.mock.text.regex import StepBudget, matching_string

Schema: TypeAlias = dict[str, Any]
SIMPLE_DEPTH = 4
MAX_DEPTH = 32
MAX_VALUES = 2000  # each value blocks the event loop of the engine for 20 µs
MAX_CHARACTERS = 1 << 16
MAX_STEPS = 1 << 18
TRIES = 20  # of a random text that must also have a certain length
UNFOLLOWED = ("not", "then", "else", "dependentSchemas", "$dynamicRef")
_VOCABULARY = """
block cache engine prefix router token worker branch commit file path test value result error index
layer module output query stream table thread window answer plan report
"""
_WORDS = _VOCABULARY.split()
_OBJECT_KEYS = ("properties", "required", "patternProperties", "propertyNames", "minProperties")
_FORMATS = {
    "date-time": "2026-01-31T12:00:00Z",
    "date": "2026-01-31",
    "time": "12:00:00Z",
    "duration": "PT5M",
    "email": "agent@example.org",
    "hostname": "example.org",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.org/a",
    "uuid": "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b",
}


class SchemaError(Exception):
    """No value can be made for the schema; the message gives the reason."""


class SchemaTooLarge(SchemaError):
    """The smallest value is too large; another branch is not tried."""


def words(rng: Random, count: int) -> str:
    """`count` random plain words."""
    return " ".join(rng.choice(_WORDS) for _ in range(count))


class SchemaWriter:
    """Writes values for one schema document; `rng` decides where the schema leaves a choice."""

    def __init__(self, schema: object, rng: Random) -> None:
        self._root = schema
        self._rng = rng
        self._values = 0
        self._steps = StepBudget(MAX_STEPS)
        self._sizes: dict[int, int] = {}

    def write(self) -> Any:
        """A value that is valid under the schema; raises SchemaError."""
        return self._value(self._root, 0)

    def _value(self, schema: object, depth: int) -> Any:
        self._values += 1
        if self._values > MAX_VALUES:
            raise SchemaTooLarge(f"the schema asks for more than {MAX_VALUES} values")
        schema = self._resolve(schema, depth)
        for key in UNFOLLOWED:
            if key in schema:
                raise SchemaError(f"`{key}` is not supported")
        if "const" in schema:
            return self._literal(schema["const"])
        if "enum" in schema:
            if not schema["enum"]:
                raise SchemaError("an empty enum has no value")
            return self._literal(self._rng.choice(schema["enum"]))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                rest = {k: v for k, v in schema.items() if k != key}
                return self._any_of(schema[key], rest, depth)
        return self._typed(self._type(schema, depth), schema, depth)

    def _literal(self, value: Any) -> Any:
        """A value that the schema spells out; its size counts against the step budget."""
        if id(value) not in self._sizes:
            self._sizes[id(value)] = len(json.dumps(value))
        self._steps.spend(self._sizes[id(value)])
        return value

    def _resolve(self, schema: object, depth: int) -> Schema:
        self._steps.spend(1)
        if depth > MAX_DEPTH:
            raise SchemaError("the schema recurses without end")
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise SchemaError(f"{schema!r} has no value")
        if "$ref" in schema:
            rest = {k: v for k, v in schema.items() if k != "$ref"}
            return merge(self._resolve(self._dereference(schema["$ref"]), depth + 1), rest)
        if "allOf" in schema:
            merged = {k: v for k, v in schema.items() if k != "allOf"}
            for part in schema["allOf"]:
                merged = merge(merged, self._resolve(part, depth + 1))
            return merged
        return schema

    def _dereference(self, reference: object) -> object:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise SchemaError(f"only references within the schema are followed, not {reference!r}")
        found = self._root
        for part in reference[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or key not in found:
                raise SchemaError(f"{reference} refers to nothing")
            found = found[key]
        return found

    def _any_of(self, options: list[object], rest: Schema, depth: int) -> Any:
        order = list(options)
        self._rng.shuffle(order)
        if depth >= SIMPLE_DEPTH:
            order.sort(key=lambda option: ("$ref" in str(option), len(str(option))))
        failure = SchemaError("an empty anyOf has no value")
        for option in order:
            try:
                return self._value(merge(rest, self._resolve(option, depth + 1)), depth + 1)
            except SchemaTooLarge:
                raise
            except SchemaError as error:
                failure = error
        raise failure

    def _type(self, schema: Schema, depth: int) -> str:
        given = schema.get("type")
        if isinstance(given, list) and given:
            simple = [t for t in given if t not in ("object", "array")]
            chosen = self._rng.choice(simple if depth >= SIMPLE_DEPTH and simple else given)
            return str(chosen)
        return given if isinstance(given, str) else _implied_type(schema)

    def _typed(self, kind: str, schema: Schema, depth: int) -> Any:
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return self._number(schema, kind == "integer")
            case "boolean":
                return self._rng.random() < 0.5
            case "null":
                return None
        raise SchemaError(f"there is no type {kind!r}")

    def _object(self, schema: Schema, depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), _required(schema)
        needed = set(required)
        optional = schema.get("maxProperties", math.inf) - len(needed)
        made: dict[str, Any] = {}
        for name, kind in properties.items():
            if name in needed:
                made[name] = self._value(kind, depth + 1)
            elif self._optional(depth) and optional > 0:
                optional -= self._add_optional(made, name, kind, depth)
        other = schema.get("additionalProperties", True)
        for name in required:
            if name not in made:
                made[name] = self._value(other, depth + 1)
        extra = 0
        while len(made) < schema.get("minProperties", 0):
            name, kind = self._further(schema, extra, depth)
            made[name] = self._value(kind, depth + 1)
            extra += 1
        return made

    def _add_optional(self, made: dict[str, Any], name: str, kind: object, depth: int) -> bool:
        """Add a property unless its schema has no value."""
        try:
            made[name] = self._value(kind, depth + 1)
        except SchemaTooLarge:
            raise
        except SchemaError:
            return False
        return True

    def _further(self, schema: Schema, number: int, depth: int) -> tuple[str, object]:
        """A name, perhaps in use, for a property that the schema does not name, and its schema."""
        for pattern, kind in schema.get("patternProperties", {}).items():
            return matching_string(pattern, self._rng, self._steps), kind
        kind = schema.get("additionalProperties", True)
        if "propertyNames" in schema:
            names = {"allOf": [schema["propertyNames"], {"type": "string"}]}
            return str(self._value(names, depth + 1)), kind
        return f"key{number}", kind

    def _optional(self, depth: int) -> bool:
        return depth < SIMPLE_DEPTH and self._rng.random() < 0.7

    def _array(self, schema: Schema, depth: int) -> list[Any]:
        contained = schema.get("minContains", 1) if "contains" in schema else 0
        low = max(schema.get("minItems", 0), contained)
        high = max(low, min(schema.get("maxItems", low + 3), low + 3))
        first = schema.get("prefixItems", [])
        if schema.get("items") is False:
            high = max(low, min(high, len(first)))
        count = low if depth >= SIMPLE_DEPTH else max(self._rng.randint(low, high), min(1, high))
        made: list[Any] = []
        for attempt in range(20 * count):
            if len(made) == count:
                break
            kind = first[len(made)] if len(made) < len(first) else schema.get("items", True)
            if len(made) < contained:
                kind = {"allOf": [kind, schema["contains"]]}
            item = self._value(kind, depth + 1)
            if not schema.get("uniqueItems") or self._is_new(item, made):
                made.append(item)
            elif attempt == 20 * count - 1 and len(made) < low:
                raise SchemaError("too few distinct items")
        return made

    def _is_new(self, item: Any, made: list[Any]) -> bool:
        self._steps.spend(len(made))
        return item not in made

    def _string(self, schema: Schema) -> str:
        low, high = schema.get("minLength", 0), schema.get("maxLength", math.inf)
        if "pattern" in schema:
            for _ in range(TRIES):
                text = matching_string(schema["pattern"], self._rng, self._steps)
                if low <= len(text) <= high:
                    return text
            raise SchemaError(f"no text of {low} to {high} characters found for the pattern")
        if schema.get("format") in _FORMATS:
            return _FORMATS[schema["format"]]
        if low > MAX_CHARACTERS:
            raise SchemaTooLarge(f"a string of {low} characters")
        self._steps.spend(low)
        text = words(self._rng, self._rng.randint(1, 4))
        while len(text) < low:
            text += " " + words(self._rng, 1)
        return text if len(text) <= high else text[: int(high)]

    def _number(self, schema: Schema, whole: bool) -> float:
        step = schema.get("multipleOf", 1 if whole else 0.5)
        low, high = _bounds(schema)
        first = math.ceil(low / step) if low > -math.inf else None
        last = math.floor(high / step) if high < math.inf else None
        if first is None:
            first = last - 100 if last is not None else 0
        if "exclusiveMinimum" in schema and first * step <= schema["exclusiveMinimum"]:
            first += 1
        last = first + 100 if last is None else last
        if "exclusiveMaximum" in schema and last * step >= schema["exclusiveMaximum"]:
            last -= 1
        if first > last:
            return self._between(schema, low, high, whole)
        value: float = self._rng.randint(first, min(last, first + 100)) * step
        return int(value) if whole else value

    def _between(self, schema: Schema, low: float, high: float, whole: bool) -> float:
        if whole or "multipleOf" in schema or low > high:
            raise SchemaError(f"there is no number between {low} and {high}")
        return (low + high) / 2


def merge(first: Schema, second: Schema) -> Schema:
    """A schema that demands both; of two bounds the tighter one."""
    merged = dict(first)
    for key, value in second.items():
        old = merged.get(key)
        if key == "properties" and isinstance(old, dict):
            shared = {n: merge(old[n], value[n]) for n in old if n in value}
            merged[key] = {**old, **value, **shared}
        elif key == "required" and isinstance(old, list):
            merged[key] = [*old, *(n for n in value if n not in old)]
        elif key.startswith(("min", "exclusiveMin")) and old is not None:
            merged[key] = max(old, value)
        elif key.startswith(("max", "exclusiveMax")) and old is not None:
            merged[key] = min(old, value)
        elif key in ("anyOf", "oneOf") and old is not None:
            merged["allOf"] = [*merged.get("allOf", []), {key: value}]
        else:
            merged[key] = value
    return merged


def _required(schema: Schema) -> list[str]:
    """The names in `required`, and those that come with them."""
    found, dependent = list(schema.get("required", [])), schema.get("dependentRequired", {})
    if not dependent:
        return found
    # optional ones that demand others are required, too, so that the order plays no part
    found += [name for name in schema.get("properties", {}) if name in dependent]
    seen = set(found)
    for name in found:
        others = [other for other in dependent.get(name, []) if other not in seen]
        found += others
        seen.update(others)
    return list(dict.fromkeys(found))


def _implied_type(schema: Schema) -> str:
    if any(key in schema for key in _OBJECT_KEYS):
        return "object"
    if any(key in schema for key in ("items", "prefixItems", "contains")):
        return "array"
    if any(key in schema for key in ("minimum", "maximum", "multipleOf")):
        return "number"
    return "string"


def _bounds(schema: Schema) -> tuple[float, float]:
    low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
    high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
    return low, high
