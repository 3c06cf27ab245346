"""Tools of requests, kept by their JSON: every turn of an agent defines the same ones."""

from collections.abc import Callable, Container, Iterable
from threading import Lock
from typing import Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from kvmesh.frontend.apis.base import decode, decode_part
from kvmesh.frontend.conversation import Tool
from kvmesh.frontend.errors import InvalidRequest
from kvmesh.runtime.lru import LruCache

B = TypeVar("B", bound=Struct)
MEMO_BYTES = 48 << 20
SIZE = 24  # times the JSON of a tool: at most what it takes in memory


class ToolDefinitions(Generic[B]):
    """Tools defined as `kind`, bounded by MEMO_BYTES; `tools_of` converts one, with its path for
    errors. Thread-safe.

    Definitions of other types than `types` may have any fields.
    """

    def __init__(
        self, kind: type[B], types: Container[str | None], tools_of: Callable[[B, str], list[Tool]]
    ) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._types = types
        self._tools_of = tools_of
        self._known: LruCache[bytes, list[Tool]] = LruCache(MEMO_BYTES, _size)
        self._lock = Lock()

    def tools(self, definitions: Iterable[Raw], skipped: list[str]) -> list[Tool]:
        """The tools of a request, the same objects for the same JSON. Raises InvalidRequest.

        `skipped` gets the paths of those that only their vendor's servers run.
        """
        found: list[Tool] = []
        for index, raw in enumerate(definitions):
            text = bytes(raw)
            with self._lock:
                known = self._known.get(text)
            if known is None:
                known = self._converted(text, f"tools[{index}]")
                with self._lock:
                    self._known.put(text, known)
            if not known:
                skipped.append(f"tools[{index}]")
            found += known
        return found

    def _converted(self, text: bytes, where: str) -> list[Tool]:
        try:
            return [
                _checked(t, where)
                for t in self._tools_of(decode(self._decoder, text, where), where)
            ]
        except InvalidRequest:
            value = decode_part(text, where)
            kind = value.get("type") if isinstance(value, dict) else None
            if isinstance(kind, str) and kind not in self._types:
                return []
            raise


def _checked(tool: Tool, where: str) -> Tool:
    """The tool; raises InvalidRequest if its arguments would be no object."""
    kind = tool.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        reason = f"`{where}`: the schema of `{tool.name}` must have the type `object`."
        raise InvalidRequest(reason, where, "invalid_function_parameters")
    return tool


def _size(text: bytes, _: list[Tool]) -> int:
    return SIZE * len(text)
