"""API keys as the command line makes, changes and shows them. Pure.

A secret is 256 random bits: nobody can try them all, so that a plain SHA-256 of it tells nothing.
"""

import hashlib
import secrets
import time
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import fields, replace

from kvmesh.frontend.auth.accounts import Key

PREFIX = "km-"
SHOWN = 8
_NOT_ASKED = ("name", "sha256", "old_sha256", "old_until")
_MOMENTS = ("expires",)


class KeyringError(Exception):
    """A key cannot be made of what was given."""


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def options() -> Iterator[tuple[str, str]]:
    """Name and metavar of each field that a caller may set."""
    hints = get_type_hints(Key)
    for field in fields(Key):
        if field.name not in _NOT_ASKED:
            yield field.name, _metavar(field.name, hints[field.name])


def made(name: str, secret: str, given: Mapping[str, str], now: float) -> Key:
    """A key with the fields given as text; raises KeyringError naming the one at fault."""
    hints = get_type_hints(Key, include_extras=True)
    values: dict[str, Any] = {}
    for field, text in given.items():
        try:
            values[field] = _value(field, text, hints[field], now)
        except (msgspec.ValidationError, ValueError) as error:
            raise KeyringError(f"--{field.replace('_', '-')} {text}: {error}") from error
    return Key(name=name, sha256=digest(secret), **values)


def rotated(key: Key, secret: str, until: float) -> Key:
    """The same key with a new secret; the one before it stays good `until` then."""
    return replace(key, sha256=digest(secret), old_sha256=key.sha256, old_until=until)


def row(key: Key, now: float) -> dict[str, str]:
    """The fields to show of a key; of its hash only as much as tells it from others."""
    told = {"name": key.name, "sha256": f"{key.sha256[:SHOWN]}…"}
    for field, _ in options():
        value = getattr(key, field)
        if value is None or value == []:
            continue
        told[field] = _moment(value) if field in _MOMENTS else _text(value)
    if key.old_sha256 is not None and key.old_until > now:
        told["old secret until"] = _moment(key.old_until)
    return told


def _value(field: str, text: str, kind: Any, now: float) -> Any:
    if field in _MOMENTS:
        return now + seconds(text)
    if list in _origins(kind):
        return msgspec.convert([part.strip() for part in text.split(",") if part.strip()], kind)
    return msgspec.convert(text, kind, strict=False)


def seconds(text: str) -> float:
    """`90s`, `15m`, `12h` or `30d`."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    number, unit = text[:-1], text[-1:]
    if unit not in units or not number.isdecimal():
        raise ValueError("not a time like 90s, 15m, 12h or 30d")
    return float(int(number) * units[unit])


def _origins(kind: Any) -> set[Any]:
    """The plain types of an annotation."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _origins(get_args(kind)[0])
    if origin is Literal:
        return {str}
    if origin is Union or type(kind).__name__ == "UnionType":
        return {found for part in get_args(kind) for found in _origins(part)}
    return {origin or kind} - {NoneType}


def _metavar(field: str, kind: Any) -> str:
    if field in _MOMENTS:
        return "TIME"
    origins = _origins(kind)
    if list in origins:
        return "A,B"
    if int in origins or float in origins:
        return "N"
    return "yes|no" if bool in origins else "TEXT"


def _moment(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
