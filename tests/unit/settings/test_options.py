"""Every option of every section: each source accepts it, and each refuses a bad value by name."""

import inspect
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest
from msgspec import Meta

from kvmesh.cli.flags import FlagParser, add_flags, settings_flags
from kvmesh.cli.references.options import toml
from kvmesh.cli.registry import COMMANDS
from kvmesh.settings import Flag, Option, Settings, SettingsError, load, options, to_env
from kvmesh.settings.load import KEY

DOCS = Path(__file__).parents[3] / "docs"
OPTIONS = list(options())
LIMITS = ("gt", "ge", "lt", "le")
SECTIONS = sorted({option.section for option in OPTIONS})
REFERENCE = [
    line
    for page in ("configuration.md", "tuning.md")
    for line in (DOCS / page).read_text().splitlines()
]
every_section = pytest.mark.parametrize("section", SECTIONS)
every_option = pytest.mark.parametrize("option", OPTIONS, ids=lambda o: f"{o.section}.{o.key}")


def metas(hint: Any) -> Iterator[Meta]:
    """All constraints of a type, those of its parts included."""
    for part in get_args(hint):
        if isinstance(part, Meta):
            yield part
        else:
            yield from metas(part)


def constraint(option: Option, name: str) -> Any:
    found = [value for m in metas(option.hint) if (value := getattr(m, name)) is not None]
    return found[0] if found else None


def candidates(option: Option) -> Iterator[Any]:
    """Values of the option's type, of which at least one is legal and not the default."""
    if option.choices:
        yield from option.choices
    elif option.type is bool:
        yield from (True, False)
    elif option.type is int:
        yield from (3, 5, 1 << 21, 1 << 31, 2)
    elif option.type is float:
        yield from (0.375, 0.875, 2.5, 40.25)
    elif option.type is Path:
        yield Path("/some/folder/with space")
    elif get_origin(option.type) is list:
        yield from ([0.5, 0.25, 0.125, 0.0], ["gold=2", "free=1"], ["a", "b"], ["https://a", "*"])
    else:
        yield from ("strange-é word", "other", "1/2", "a=1", "2")


def legal(option: Option, value: Any) -> bool:
    try:
        msgspec.convert(value, option.hint, dec_hook=lambda _, path: path)
    except msgspec.ValidationError:
        return False
    return True


def other(option: Option) -> Any:
    """A legal value that is not the default."""
    return next(v for v in candidates(option) if v != option.default and legal(option, v))


def text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def toml_value(value: Any) -> str:
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def in_file(section: str, values: dict[str, Any], folder: Path) -> Path:
    lines = [f"{key} = {toml_value(value)}" for key, value in values.items()]
    file = folder / "mesh.toml"
    file.write_text("\n".join([f"[{section}]", *lines, ""]))
    return file


def flag(option: Option, own: str, value: Any) -> str:
    prefix = "" if own == option.section else f"{option.section}-"
    name = prefix + option.key.replace("_", "-")
    if option.type is bool:
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={text(value)}"


def flags(section: str, own: str, arguments: list[str]) -> dict[tuple[str, str], Flag]:
    """Flags of a command whose own section is `own`, as it records them."""
    parser = FlagParser(prog="test")
    add_flags(parser, own, () if own == section else (section,))
    return settings_flags(parser.parse_args(arguments))


@every_section
def test_options_are_the_same_in_a_file_variables_and_flags(tmp_path: Path, section: str) -> None:
    members = [option for option in OPTIONS if option.section == section]
    values = {option.key: other(option) for option in members}
    from_file = load(in_file(section, values, tmp_path), {}, {})
    assert msgspec.structs.asdict(getattr(from_file, section)) == values
    env = {option.env: text(values[option.key]) for option in members}
    assert load(None, env, {}) == from_file
    assert load(None, to_env(from_file), {}) == from_file
    # Secrets are no flags; the flag `args_file` has a test of its own.
    as_file = [option for option in members if option.secret or option.key == "args_file"]
    as_env = {option.env: text(values[option.key]) for option in as_file}
    for own in ("", section):
        arguments = [flag(o, own, values[o.key]) for o in members if o not in as_file]
        assert load(None, as_env, flags(section, own, arguments)) == from_file


@pytest.mark.parametrize("section", ["vllm", "sglang", "trtllm"])
def test_a_file_of_engine_arguments_is_a_flag(tmp_path: Path, section: str) -> None:
    file = tmp_path / "engine.toml"
    file.write_text("max_model_len = 4096\n")
    settings = load(None, {}, flags(section, section, [f"--args-file={file}"]))
    assert getattr(settings, section).args == []
    assert getattr(settings, section).args_file == file


@every_section
def test_the_settings_in_effect_are_read_back(tmp_path: Path, section: str) -> None:
    members = [option for option in OPTIONS if option.section == section]
    values = {option.key: other(option) for option in members}
    shown = toml(load(in_file(section, values, tmp_path), {}, {}))
    file = tmp_path / "shown.toml"
    file.write_text(shown)
    secret = {option.env: values[option.key] for option in members if option.secret}
    assert msgspec.structs.asdict(getattr(load(file, secret, {}), section)) == values
    assert tomllib.loads(shown)[section].keys() == {o.key for o in members if not o.secret}


@every_option
def test_a_value_of_another_type_names_the_option(tmp_path: Path, option: Option) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(f"[{option.section}]\n{option.key} = {{a = 1}}\n")
    with pytest.raises(SettingsError, match=re.escape(f"{option.section}.{option.key}: ")):
        load(file, {}, {})


@pytest.mark.parametrize(
    "option", [o for o in OPTIONS if o.type in (int, float, bool)], ids=lambda o: o.env
)
def test_a_word_instead_of_a_number_or_switch_names_the_variable(option: Option) -> None:
    with pytest.raises(SettingsError, match=f"^{option.env}: .*'many'") as raised:
        load(None, {option.env: "many"}, {})
    assert raised.value.where == option.env


BOUNDED = [(o, name) for o in OPTIONS for name in LIMITS if constraint(o, name) is not None]


@pytest.mark.parametrize(
    ("option", "limit"), BOUNDED, ids=[f"{o.section}.{o.key}-{limit}" for o, limit in BOUNDED]
)
def test_a_value_beyond_a_bound_names_the_option_and_the_bound(option: Option, limit: str) -> None:
    bound = constraint(option, limit)
    beyond = {"gt": bound, "ge": bound - 1, "lt": bound, "le": bound + 1}[limit]
    sign = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}[limit]
    said = re.compile(
        rf"{re.escape(sign)} {re.escape(str(bound))}(\.0)?\b.*{re.escape(str(beyond))}"
    )
    with pytest.raises(SettingsError, match=said) as raised:
        load(None, {option.env: str(beyond)}, {})
    assert raised.value.where == option.env


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.choices], ids=lambda o: o.env)
def test_a_value_outside_a_closed_set_is_answered_with_the_set(option: Option) -> None:
    said = f"^{option.env}: must be one of {', '.join(option.choices)} .*'strange'"
    with pytest.raises(SettingsError, match=said):
        load(None, {option.env: "strange"}, {})


@pytest.mark.parametrize(
    "option", [o for o in OPTIONS if constraint(o, "min_length")], ids=lambda o: o.env
)
def test_a_list_of_another_length_names_the_length(option: Option) -> None:
    length = constraint(option, "min_length")
    with pytest.raises(SettingsError, match=f"^{option.env}: .*length >?=? ?{length}.*'1'"):
        load(None, {option.env: "1"}, {})


@pytest.mark.parametrize("value", ["nan", "-inf"])
def test_a_bounded_number_is_a_number(value: str) -> None:
    bounded = [o for o, _ in BOUNDED if o.type is float]
    assert [o.env for o in bounded if legal(o, float(value))] == []


def test_few_options_are_not_for_tuning() -> None:
    assert sum(not option.tuning for option in OPTIONS) <= 250


def test_a_section_describes_its_keys_and_no_others() -> None:
    for section in SECTIONS:
        cls = type(getattr(Settings(), section))
        described = [key for key, _ in KEY.findall(inspect.getdoc(cls) or "")]
        assert sorted(described) == sorted(cls.__struct_fields__)


@every_option
def test_the_reference_lists_an_option_once(option: Option) -> None:
    rows = [line for line in REFERENCE if line.startswith(f"- `{option.section}.{option.key}` ")]
    assert len(rows) == 1
    assert option.description in rows[0]


def test_every_section_is_a_flag_of_some_command() -> None:
    offered = {section for command in COMMANDS for section in (command.own, *command.sections)}
    assert {option.section for option in OPTIONS} <= offered
