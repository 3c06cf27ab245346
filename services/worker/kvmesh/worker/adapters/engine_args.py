"""Arguments of an embedded engine: a TOML file, then KEY=VALUE pairs."""

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvmesh.worker.engine import EngineConfigError


def engine_arguments(pairs: Iterable[str], file: Path | None) -> dict[str, Any]:
    """The arguments by name; a dot in a key addresses a nested table; values are JSON or text.

    Raises EngineConfigError naming the file or the pair at fault.
    """
    arguments = _read(file) if file is not None else {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        *tables, last = key.strip().replace("-", "_").split(".")
        if not equals or not last or not all(tables):
            raise EngineConfigError(f"engine argument {pair!r} is not of the form KEY=VALUE")
        table = arguments
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise EngineConfigError(f"engine argument {pair!r}: {name} is not a table")
        table[last] = _value(text)
    return arguments


def refusal(error: Exception) -> str:
    """An engine's error about its arguments: of pydantic's, the messages without its own lines."""
    details = getattr(error, "errors", None)
    if not callable(details):
        return str(error)
    return "; ".join(
        ": ".join([*map(str, each["loc"]), each["msg"].removeprefix("Value error, ")])
        for each in details()
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise EngineConfigError(f"cannot read engine arguments from {file}: {error}") from error


def _value(text: str) -> Any:
    constants = {"True": True, "False": False, "None": None}
    if text in constants:
        return constants[text]
    try:
        return json.loads(text)
    except ValueError:
        return text
