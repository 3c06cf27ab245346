"""Errors of chat templates and parser selection."""


class DialectError(Exception):
    """Base of this package's errors."""


class TemplateError(DialectError):
    """The chat template is unusable or raised; the message is the template's own if it raised."""


class UnknownParser(DialectError):
    """No parser has this name; `known` lists the valid ones."""

    def __init__(self, kind: str, name: str, known: list[str]) -> None:
        super().__init__(f"unknown {kind} parser {name!r}; known: {', '.join(known)}")
        self.kind = kind
        self.name = name
        self.known = known
