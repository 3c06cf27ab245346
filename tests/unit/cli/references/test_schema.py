"""The JSON Schema of the settings file."""

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvmesh.cli.main import run
from kvmesh.cli.references.options import toml
from kvmesh.cli.references.schema import settings_schema
from kvmesh.settings import Settings, SettingsError, load, options

CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("nothing", {}, True),
    ("a port", {"frontend": {"port": 8001}}, True),
    ("a port as text", {"frontend": {"port": "8001"}}, False),
    ("a port beyond the last", {"frontend": {"port": 70_000}}, False),
    ("an unknown key", {"frontend": {"prot": 1}}, False),
    ("an unknown section", {"fronted": {}}, False),
    ("a section that is no table", {"frontend": 1}, False),
    ("a choice", {"log": {"format": "json"}}, True),
    ("no such choice", {"log": {"format": "xml"}}, False),
    ("a secret", {"nats": {"password": "p"}}, True),
    ("a path", {"up": {"state_dir": "/var/lib/kvmesh"}}, True),
    ("a whole number as a float", {"up": {"stop_timeout_s": 5}}, True),
    ("no seconds", {"up": {"stop_timeout_s": 0}}, False),
]


def is_valid(content: object) -> bool:
    validator: Any = jsonschema.Draft202012Validator(settings_schema())
    return bool(validator.is_valid(content))


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(settings_schema())


def test_the_settings_in_effect_are_valid() -> None:
    assert is_valid(tomllib.loads(toml(Settings())))


@pytest.mark.parametrize(("name", "content", "valid"), CASES, ids=[case[0] for case in CASES])
def test_the_schema_agrees_with_kvmesh(
    name: str, content: dict[str, Any], valid: bool, tmp_path: Path
) -> None:
    assert is_valid(content) == valid
    file = tmp_path / "mesh.toml"
    lines = []
    for section, values in content.items():
        if isinstance(values, dict):
            lines += [f"[{section}]", *(f"{k} = {json.dumps(v)}" for k, v in values.items())]
        else:
            lines.append(f"{section} = {json.dumps(values)}")
    file.write_text("\n".join(lines))
    try:
        load(file, {}, {})
    except SettingsError:
        assert not valid
    else:
        assert valid


def test_a_secret_comes_from_one_place() -> None:
    assert is_valid({"nats": {"password_file": "/run/secrets/nats"}})
    assert not is_valid({"nats": {"password": "p", "password_file": "/run/secrets/nats"}})


def test_every_setting_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    for option in options():
        assert schema["properties"][option.section]["properties"][option.key]["description"]
