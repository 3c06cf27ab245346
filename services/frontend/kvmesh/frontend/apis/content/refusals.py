"""Fields that are known and not supported, although an answer without them would be another one."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from kvmesh.frontend.errors import InvalidRequest

NEUTRAL: tuple[Any, ...] = ("", [], {})


def refuse(body: Struct, unsupported: Mapping[str, str]) -> None:
    """Raise InvalidRequest for a field that asks for something.

    `unsupported`: names of fields, each with those to use in its place, if there are any.
    """
    for name, instead in unsupported.items():
        value = getattr(body, name)
        if value is not None and value is not False and value not in NEUTRAL:
            hint = f"; use `{instead}`" if instead else ""
            raise InvalidRequest(f"`{name}` is not supported{hint}.", name)
