"""Fields that are known and not supported, although an answer without them would be another one."""

from operator import attrgetter

from msgspec import Struct

from kvmesh.frontend.errors import InvalidRequest


class UnsupportedFields:
    """Names of fields, each with the one to use in its place, or None."""

    def __init__(self, **instead: str | None) -> None:
        self._instead = instead
        first = next(iter(instead))
        self._values = attrgetter(first, *instead)  # of two names at least: then it makes a tuple

    def refuse(self, body: Struct, prefix: str = "") -> None:
        """Raise InvalidRequest, with the path from `prefix` on, if a field asks for something."""
        if any(self._values(body)):
            name = next(name for name in self._instead if getattr(body, name))
            instead = self._instead[name]
            hint = f"; use `{instead}`" if instead else ""
            raise InvalidRequest(f"`{prefix}{name}` is not supported{hint}.", prefix + name)
