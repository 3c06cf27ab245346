"""Errors of compile caches."""


class CompileCacheError(Exception):
    """A compile cache cannot be kept, packed, fetched or unpacked; the message names the cause."""
