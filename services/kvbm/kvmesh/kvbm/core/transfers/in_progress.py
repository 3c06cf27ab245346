"""Blocks that requests are computing; other requests wait for them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

RequestKey = tuple[int, str]  # attachment and request id


@dataclass(slots=True)
class Announcement:
    """The blocks that one request computes, and the time of its last progress."""

    request: RequestKey
    last_progress: float
    digests: set[bytes] = field(default_factory=set)


class BlocksInProgress:
    """The request that computes each block, until it makes no progress for `patience_s`.

    Calls `on_end` with each request whose announcement ends.
    """

    def __init__(
        self, patience_s: float, on_end: Callable[[RequestKey], None] = lambda _: None
    ) -> None:
        self._patience_s = patience_s
        self._on_end = on_end
        self._by_digest: dict[bytes, Announcement] = {}
        self._by_request: dict[RequestKey, Announcement] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    @property
    def requests(self) -> Iterable[RequestKey]:
        """The requests with blocks in progress."""
        return self._by_request.keys()

    def request_of(self, digest: bytes) -> RequestKey | None:
        """The request that computes a block."""
        found = self._by_digest.get(digest)
        return found.request if found else None

    def add(self, request: RequestKey, digests: Iterable[bytes], now: float) -> None:
        """Announce the blocks among `digests` that no other request computes."""
        own = self._by_request.get(request) or Announcement(request, now)
        own.last_progress = now
        new = [digest for digest in digests if digest not in self._by_digest]
        self._by_digest.update(dict.fromkeys(new, own))
        own.digests.update(new)
        if own.digests:
            self._by_request[request] = own

    def remove(self, digests: Iterable[bytes], now: float) -> list[bytes]:
        """Remove blocks that were computed or will not be offered; return those announced."""
        removed = []
        for digest in digests:
            found = self._by_digest.pop(digest, None)
            if found is not None:
                removed.append(digest)
                found.last_progress = now
                found.digests.discard(digest)
                if not found.digests:
                    self._by_request.pop(found.request, None)
        return removed

    def end(self, request: RequestKey) -> set[bytes]:
        """End a request's announcement; return its remaining digests."""
        self._on_end(request)
        found = self._by_request.pop(request, None)
        if found is None:
            return set()
        for digest in found.digests:
            del self._by_digest[digest]
        return found.digests

    def end_attachment(self, attachment: int) -> set[bytes]:
        ended = [request for request in self._by_request if request[0] == attachment]
        return {digest for request in ended for digest in self.end(request)}

    def expire(self, now: float) -> set[bytes]:
        """End announcements without progress for `patience_s`; return their digests."""
        late = [
            a.request for a in self._by_request.values() if now - a.last_progress > self._patience_s
        ]
        return {digest for request in late for digest in self.end(request)}
