"""What can go wrong between a request and a model's own way of writing."""


class DialectError(Exception):
    """Base of this package's errors."""


class TemplateError(DialectError):
    """The chat template is unusable or refused the conversation; the text is the template's own."""


class UnknownParser(DialectError):
    """No parser has this name; `known` lists those there are."""

    def __init__(self, kind: str, name: str, known: list[str]) -> None:
        super().__init__(f"unknown {kind} parser {name!r}; known: {', '.join(known)}")
        self.kind = kind
        self.name = name
        self.known = known
