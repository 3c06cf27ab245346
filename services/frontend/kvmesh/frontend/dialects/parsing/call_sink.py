"""What the readers of tool calls have in common: where calls go, and how they begin and end."""

import re
from typing import Protocol

from kvmesh.frontend.dialects.parsing.coerce import Schema
from kvmesh.frontend.dialects.parsing.source import MalformedOutput, OutputSource, Steps

MAX_NAME = 256
NAME = re.compile(r"[\w.:/\-]+")


class CallSink(Protocol):
    """Where calls go. A call begins with the first of its `arguments`, which are JSON text."""

    def name(self, name: str) -> None: ...

    def arguments(self, text: str) -> None: ...

    def end(self) -> None: ...

    def schema(self) -> Schema:
        """Of the arguments of the call whose name is known."""
        ...

    def known(self, name: str) -> bool:
        """Whether there is such a tool, or no way to tell."""
        ...


class CallReader(Protocol):
    """Reads calls of one form."""

    def call(self) -> Steps[bool]:
        """Reads one call; False if none begins here. Raises Malformed."""
        ...


def skip(source: OutputSource, options: tuple[str, ...]) -> Steps[None]:
    """Skips any of `options`, in any order, and white space around them."""
    while options and (yield from source.skip_space()):
        if not (yield from source.literal(*options)):
            break


def opened(source: OutputSource, options: tuple[str, ...]) -> Steps[bool]:
    """Reads a call's own marker, if one is here; a form without any begins anywhere."""
    found = yield from source.literal(*options)
    return found is not None or "" in options


def read_name(source: OutputSource, pattern: re.Pattern[str] = NAME) -> Steps[str]:
    found = yield from source.match(pattern, MAX_NAME)
    if not found:
        raise MalformedOutput
    return found
