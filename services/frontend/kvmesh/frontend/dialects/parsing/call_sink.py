"""Interfaces and helpers shared by the readers of tool calls."""

import re
from typing import Protocol

from kvmesh.frontend.dialects.parsing.coerce import Schema
from kvmesh.frontend.dialects.parsing.source import MalformedOutput, OutputSource, Steps

MAX_NAME = 256
NAME = re.compile(r"[\w.:/\-]+")


class CallSink(Protocol):
    """Receives calls piece by piece: a name, then its arguments, then the end."""

    def name(self, name: str) -> None: ...

    def arguments(self, text: str) -> None:
        """Append JSON text to the arguments; the first one starts the call."""
        ...

    def end(self) -> None: ...

    def hold(self) -> None:
        """Have a call that has started, and fails from here on, leave this text unread."""
        ...

    def let_go(self) -> None:
        """End `hold`."""
        ...

    def schema(self) -> Schema:
        """The schema of the named tool's arguments, {} if the tool is unknown."""
        ...

    def known(self, name: str) -> bool:
        """True if the request has this tool, or no tools at all."""
        ...


class CallReader(Protocol):
    """Reads calls of one form."""

    def call(self) -> Steps[bool]:
        """Read one call; False if none begins here. Raises MalformedOutput."""
        ...


def skip(source: OutputSource, options: tuple[str, ...]) -> Steps[None]:
    """Skip any of `options`, in any order, and white space around them."""
    while options and (yield from source.skip_space()):
        if not (yield from source.literal(*options)):
            break


def opened(source: OutputSource, options: tuple[str, ...]) -> Steps[bool]:
    """Read one of `options`, perhaps repeated; True if it is there or if one of them is empty."""
    found = yield from source.literal(*options)
    if found:
        while (yield from source.follow(found)):
            pass
    return found is not None or "" in options


def read_name(source: OutputSource, pattern: re.Pattern[str] = NAME) -> Steps[str]:
    found = yield from source.match(pattern, MAX_NAME)
    if not found:
        raise MalformedOutput
    return found
