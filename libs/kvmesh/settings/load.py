"""Settings from defaults, a TOML file, the environment and the command line; the last counts."""

import difflib
import inspect
import logging
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from kvmesh.settings.redaction import HIDDEN, redacted
from kvmesh.settings.schema import Section, Settings
from kvmesh.settings.secret_file import FileSecret, SecretUnreadable, read_secret

log = logging.getLogger(__name__)
PREFIX = "KVMESH_"
CONFIG = "KVMESH_CONFIG"
MAX_FAULTS = 20  # of a file, in one message
BOOLEANS = {"yes": "true", "on": "true", "no": "false", "off": "false"}
KEY = re.compile(r"^(\w+): (.*(?:\n +.*)*)", re.MULTILINE)  # of a section's docstring, and its text
TUNING = "\nTuning:\n"
OptionKey: TypeAlias = tuple[str, str]
# Settings of the former release, and what holds without them.
REMOVED: dict[OptionKey, str] = {
    ("worker", "eviction"): "recency orders eviction",
    ("kvbm", "eviction"): "recency orders eviction",
    **dict.fromkeys(
        (
            *(("up", "oracle"), ("planner", "oracle_budget_s")),
            *(("oracle", "window_s"), ("oracle", "window_bytes")),
        ),
        "planners evaluate fleets by their queue model alone",
    ),
}


class SettingsError(Exception):
    """Invalid key or value; `where` names it as the user wrote it."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


class Flag(NamedTuple):
    """A command-line flag as given: its name with the dashes, and its text."""

    name: str
    text: str


class Option(msgspec.Struct, frozen=True):
    """One setting: its section and key, resolved type, default and description.

    The default of a `tuning` one suits nearly every mesh.
    """

    section: str
    key: str
    hint: Any
    default: Any
    description: str
    tuning: bool = False

    @property
    def env(self) -> str:
        return f"{PREFIX}{self.section}_{self.key}".upper()

    @property
    def secret(self) -> bool:
        """True if its value must not be printed; a secret can also be read from a file."""
        return _marked(self.hint, "secret")

    @property
    def live(self) -> bool:
        """True if running processes take another value."""
        return _marked(self.hint, "live")

    @property
    def file_key(self) -> str:
        """The key for the path of a file that holds the secret."""
        return f"{self.key}_file"

    @property
    def file_env(self) -> str:
        return f"{self.env}_FILE"

    def shown(self, value: Any) -> Any:
        """Return the printable form of a value of this option."""
        if value is None or value == self.default:
            return value
        if self.secret:
            return HIDDEN
        return redacted(value) if _marked(self.hint, "url") and isinstance(value, str) else value

    @property
    def type(self) -> Any:
        """The type without annotations and without None."""
        return _base(self.hint)

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a closed set; empty for other types."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()


@cache
def options() -> tuple[Option, ...]:
    """All options of the schema, section by section."""
    return tuple(_options())


def _options() -> Iterator[Option]:
    for section in msgspec.structs.fields(Settings):
        cls: type[Section] = section.type
        hints: dict[str, Any] = get_type_hints(cls, include_extras=True)
        common, _, tuned = (inspect.getdoc(cls) or "").partition(TUNING)
        texts = dict(KEY.findall(common + tuned))
        tuning = {key for key, _ in KEY.findall(tuned)}
        for field in msgspec.structs.fields(cls):
            text = " ".join(texts.get(field.name, "").split())
            described = msgspec.Meta(description=text)
            hint = Annotated[hints[field.name], described]  # type: ignore[name-defined, valid-type]
            default = field.default
            if default is msgspec.NODEFAULT:
                default = field.default_factory()
            yield Option(section.name, field.name, hint, default, text, field.name in tuning)


def _marked(hint: Any, mark: str) -> bool:
    args = get_args(hint)
    metas = [arg for arg in args if isinstance(arg, msgspec.Meta)]
    return any((meta.extra or {}).get(mark) for meta in metas) or any(
        _marked(arg, mark) for arg in args
    )


def _base(hint: Any) -> Any:
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, UnionType):
        return next(_base(arg) for arg in get_args(hint) if arg is not type(None))
    return hint


def load(file: Path | None, env: Mapping[str, str], flags: Mapping[OptionKey, Flag]) -> Settings:
    """Resolve all options; without `file`, read the one that KVMESH_CONFIG in `env` names.

    Raises SettingsError naming the file and key, the variable, or the flag at fault.
    """
    file = file or (Path(env[CONFIG]) if env.get(CONFIG) else None)
    tree: dict[str, dict[str, Any]] = {section: {} for section in Settings.__struct_fields__}
    if file is not None:
        known = {(option.section, option.key): option for option in options()}
        for (section, key), value in _read(file, known):
            tree[section][key] = value
    for option in _given(env, flags):
        for where, text, is_file in _texts(option, env, flags):
            text = _secret(text, where) if is_file else text
            tree[option.section][option.key] = parse(option, text, where)
    return msgspec.convert(tree, Settings, dec_hook=_path)


def _given(env: Mapping[str, str], flags: Mapping[OptionKey, Flag]) -> list[Option]:
    """The options that the environment or a flag sets; logs variables of none."""
    named = variables()
    _warn_unknown(env, named)
    given = [named[name] for name in env if name in named]
    for option in options() if flags else ():
        given += [option for key in (option.key, option.file_key) if (option.section, key) in flags]
    return list({(option.section, option.key): option for option in given}.values())


@cache
def variables() -> dict[str, Option]:
    """The environment variables of all settings: name to option."""
    named = {option.env: option for option in options()}
    return named | {option.file_env: option for option in options() if option.secret}


def _texts(
    option: Option, env: Mapping[str, str], flags: Mapping[OptionKey, Flag]
) -> Iterator[tuple[str, str, bool]]:
    """Yield values from environment and flags: source, text, and if the text names a file."""
    if option.secret and option.file_env in env and env[option.file_env]:
        if env.get(option.env):
            raise SettingsError(option.file_env, f"{option.env} is given as well; choose one")
        yield option.file_env, env[option.file_env], True
    elif option.env in env:
        yield option.env, env[option.env], False
    for key in (option.key, option.file_key) if option.secret else (option.key,):
        flag = flags.get((option.section, key))
        if flag is not None:
            yield flag.name, flag.text, key != option.key


def _secret(path: object, where: str) -> str:
    """Return the secret in a file, stripped."""
    if not isinstance(path, str):
        raise SettingsError(where, f"expected a path, got `{type(path).__name__}`")
    try:
        return read_secret(Path(path))
    except SecretUnreadable as error:
        raise SettingsError(where, str(error)) from error


def to_env(settings: Settings) -> dict[str, str]:
    """Return the environment with which a process loads the same settings, without defaults.

    A secret from a file stays in that file.
    """
    env: dict[str, str] = {}
    for option in options():
        value = getattr(getattr(settings, option.section), option.key)
        if isinstance(value, FileSecret):
            env[option.file_env] = str(value.path)
            continue
        if value == option.default or value is None:
            continue
        env[option.env] = ",".join(str(v) for v in value) if isinstance(value, list) else str(value)
    return env


def _read(file: Path, known: Mapping[OptionKey, Option]) -> Iterator[tuple[OptionKey, object]]:
    try:
        tree = tomllib.loads(file.read_text())
    except OSError as error:
        raise SettingsError(str(file), error.strerror or str(error)) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(str(file), str(error)) from error
    faults: list[SettingsError] = []
    sections = {section for section, _ in known}
    for section, content in tree.items():
        if section not in sections:
            told = next((f": {told}" for (s, _), told in REMOVED.items() if s == section), None)
            reason = f"unknown section [{section}]{told or hint(section, sections)}"
            faults.append(SettingsError(str(file), reason))
            continue
        if not isinstance(content, dict):
            faults.append(SettingsError(str(file), f"{section}: expected a table, [{section}]"))
            continue
        for key in content:
            try:
                yield _entry(file, section, key, content, known)
            except SettingsError as fault:
                faults.append(fault)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        reasons = [str(fault).removeprefix(f"{file}: ") for fault in faults[:MAX_FAULTS]]
        more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        raise SettingsError(str(file), "; ".join([*reasons, *more]))


def _entry(
    file: Path,
    section: str,
    key: str,
    content: Mapping[str, object],
    known: Mapping[OptionKey, Option],
) -> tuple[OptionKey, object]:
    """The option that an entry of a file sets, and its value."""
    value, where = content[key], f"{file}: {section}.{key}"
    option = known.get((section, key))
    files = {o.file_key: o for o in known.values() if o.section == section and o.secret}
    if key in files:
        option = files[key]
        if option.key in content:
            raise SettingsError(where, f"{option.key} is given as well; choose one")
        value = _secret(value, where)
    if option is None:
        told = REMOVED.get((section, key))
        told = f": {told}" if told else hint(key, [k for s, k in known if s == section])
        raise SettingsError(str(file), f"unknown key {section}.{key}{told}")
    return (section, option.key), _convert(option, value, value, where, strict=True)


def parse(option: Option, text: str, where: str) -> object:
    """The value of an option that a text gives; raises SettingsError, which names `where`."""
    if not text and option.default is None:
        return None
    raw: object = text
    if get_origin(option.type) is list:
        raw = [part.strip() for part in text.split(",") if part.strip()]
    elif option.type is bool:
        raw = BOOLEANS.get(text.lower(), text)
    return _convert(option, raw, text, where, strict=False)


def _convert(option: Option, raw: object, given: object, where: str, strict: bool) -> object:
    try:
        return msgspec.convert(raw, option.hint, strict=strict, dec_hook=_path)
    except msgspec.ValidationError as error:
        reason = f"must be one of {', '.join(option.choices)}" if option.choices else str(error)
        got = "" if option.secret else f" (got {option.shown(given)!r})"
        raise SettingsError(where, f"{reason[:1].lower()}{reason[1:]}{got}") from error


def _path(cls: type, value: object) -> Path:
    if not isinstance(value, str | Path):
        raise TypeError(f"expected a path, got `{type(value).__name__}`")
    return Path(value)


def _warn_unknown(env: Mapping[str, str], known: Mapping[str, Option]) -> None:
    sections = tuple(f"{PREFIX}{name}_".upper() for name in Settings.__struct_fields__)
    removed = {f"{PREFIX}{'_'.join(key)}".upper(): f": {told}" for key, told in REMOVED.items()}
    for name in env:
        if name in removed or (name.startswith(sections) and name not in known):
            told = removed.get(name) or hint(name, known)
            log.warning("ignored unknown environment variable %s%s", name, told)


def hint(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one that is nearest, if any."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""
