"""The JSON Schema of the settings file, for editors and checks."""

from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from kvmesh.settings import Option, options

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TITLE = "The settings of kvmesh, as TOML"


def settings_schema() -> dict[str, Any]:
    """The schema of a file that `kvmesh --config` accepts.

    An unknown key is invalid, as it is for kvmesh. A secret may be given by the path of its file.
    """
    sections = groupby(options(), key=lambda option: option.section)
    return {
        "$schema": DIALECT,
        "title": TITLE,
        "type": "object",
        "properties": {name: _section(list(members)) for name, members in sections},
        "additionalProperties": False,
    }


def _section(members: list[Option]) -> dict[str, Any]:
    secrets = [option for option in members if option.secret]
    files = {
        option.file_key: {"type": "string", "description": f"file with the secret `{option.key}`"}
        for option in secrets
    }
    either = [{"not": {"required": [option.key, option.file_key]}} for option in secrets]
    return {
        "type": "object",
        "properties": {**{option.key: _value(option) for option in members}, **files},
        "additionalProperties": False,
        **({"allOf": either} if either else {}),
    }


def _value(option: Option) -> dict[str, Any]:
    schema = msgspec.json.schema(option.hint, schema_hook=_path)
    # TOML has no null: a key without a value is left out
    kinds = [each for each in schema.pop("anyOf", []) if each != {"type": "null"}]
    if len(kinds) == 1:
        schema |= kinds[0]
    elif kinds:
        schema["anyOf"] = kinds
    if option.default is not None and not option.secret:
        schema["default"] = msgspec.to_builtins(option.default, enc_hook=str)
    return schema


def _path(cls: type) -> dict[str, Any]:
    if cls is Path:
        return {"type": "string"}
    raise NotImplementedError
