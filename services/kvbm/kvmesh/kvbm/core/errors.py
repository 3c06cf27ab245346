"""Errors of the block manager."""


class KvbmError(Exception):
    """Base of this package's errors."""


class InUse(KvbmError):
    """Another kvbm holds a resource that this one needs, perhaps only until it exits."""


class TooSmall(KvbmError):
    """A tier of `capacity` bytes cannot hold a block of `needed` bytes."""

    def __init__(self, needed: int, capacity: int) -> None:
        super().__init__(f"a tier of {capacity} bytes cannot hold a block of {needed} bytes")
        self.needed = needed
        self.capacity = capacity
