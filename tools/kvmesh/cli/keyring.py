"""Creates, rotates and formats API keys; no I/O.

A secret has 256 random bits, so its plain SHA-256 cannot be reversed by brute force.
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
_GENERATED = ("name", "sha256", "old_sha256", "old_until")
_TIME_FIELDS = ("expires",)


class KeyringError(Exception):
    """Invalid field of a key, or invalid arguments."""


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def options() -> Iterator[tuple[str, str]]:
    """Name and metavar of each field that the user may set."""
    hints = get_type_hints(Key)
    for field in fields(Key):
        if field.name not in _GENERATED:
            yield field.name, _metavar(field.name, hints[field.name])


def make_key(name: str, secret: str, given: Mapping[str, str], now: float) -> Key:
    """A key from fields given as text; raises KeyringError naming the invalid one."""
    hints = get_type_hints(Key, include_extras=True)
    values: dict[str, Any] = {}
    for field, text in given.items():
        try:
            values[field] = _value(field, text, hints[field], now)
        except (msgspec.ValidationError, ValueError) as error:
            raise KeyringError(f"--{field.replace('_', '-')} {text}: {error}") from error
    return Key(name=name, sha256=digest(secret), **values)


def rotate(key: Key, secret: str, until: float) -> Key:
    """The key with a new secret; the old secret stays valid until the Unix time `until`."""
    return replace(key, sha256=digest(secret), old_sha256=key.sha256, old_until=until)


def fields_shown(key: Key, now: float) -> dict[str, str]:
    """The fields of a key to display; the hash is shortened."""
    shown = {"name": key.name, "sha256": f"{key.sha256[:SHOWN]}…"}
    for field, _ in options():
        value = getattr(key, field)
        if value is None or value == []:
            continue
        shown[field] = _local_time(value) if field in _TIME_FIELDS else _text(value)
    if key.old_sha256 is not None and key.old_until > now:
        shown["old secret until"] = _local_time(key.old_until)
    return shown


def _value(field: str, text: str, kind: Any, now: float) -> Any:
    if field in _TIME_FIELDS:
        return now + seconds(text)
    if list in _origins(kind):
        return msgspec.convert([part.strip() for part in text.split(",") if part.strip()], kind)
    return msgspec.convert(text, kind, strict=False)


def seconds(text: str) -> float:
    """Seconds in a duration such as `90s`, `15m`, `12h` or `30d`; raises ValueError."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    number, unit = text[:-1], text[-1:]
    if unit not in units or not number.isdecimal():
        raise ValueError("not a duration such as 90s, 15m, 12h or 30d")
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
    if field in _TIME_FIELDS:
        return "TIME"
    origins = _origins(kind)
    if list in origins:
        return "A,B"
    if int in origins or float in origins:
        return "N"
    return "yes|no" if bool in origins else "TEXT"


def _local_time(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
