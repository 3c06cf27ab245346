"""Messages about traces; the contexts of spans are `traceparent` fields of other messages."""

from msgspec import Struct


class KeepTraces(Struct, frozen=True, array_like=True):
    """A frontend's report that unsampled traces are kept: processes export their spans of them."""

    traces: list[str]
