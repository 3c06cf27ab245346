"""The settings as a TOML file and as the lists of docs/configuration.md."""

import json
from collections.abc import Iterator
from itertools import groupby

from kvmesh.cli.flags import metavar, one_line, text
from kvmesh.settings import Option, Settings, options


def toml(settings: Settings) -> str:
    """All options with their values in effect; secrets and unset options are commented out."""
    return "\n".join(_toml_lines(settings)) + "\n"


def _toml_lines(settings: Settings) -> Iterator[str]:
    for section, members in _sections():
        values = getattr(settings, section)
        yield f"[{section}]"
        for option in members:
            value = option.shown(getattr(values, option.key))
            line = f"{option.key} = {_toml_value(value)}"
            yield f"{'# ' if value is None or option.secret else ''}{line}  # {option.description}"
        yield ""


def _toml_value(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(part) for part in value)}]"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return json.dumps(text(value), ensure_ascii=False)


def markdown(tuning: bool) -> str:
    """One list per section: key, default and meaning; of tuning options, or of others."""
    return "\n".join(_markdown_lines(tuning))


def _markdown_lines(tuning: bool) -> Iterator[str]:
    for section, members in _sections():
        items = [_item(option) for option in members if option.tuning is tuning]
        if items:
            yield f"## [{section}]\n"
            yield from items
            yield ""


def _item(option: Option) -> str:
    default = one_line(option.default)
    value = "secret" if option.secret else metavar(option)
    shown = f"`{default}`" if default else value
    if default and "|" in value:
        shown = f"{shown} of {value}"
    live = ", live" if option.live else ""
    return f"- `{option.section}.{option.key}` ({shown}{live}): {option.description}"


def _sections() -> Iterator[tuple[str, Iterator[Option]]]:
    return groupby(options(), key=lambda option: option.section)
