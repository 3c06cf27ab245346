"""Blocks that some request computes now, so that others wait for them instead."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

Computer = tuple[int, str]  # attachment and request


@dataclass(slots=True)
class Announcement:
    """What one request computes; `heard` is when it last came nearer."""

    computer: Computer
    heard: float
    digests: set[bytes] = field(default_factory=set)


class BlocksInProgress:
    """Who computes which block. One that is silent for `patience_s` is not believed any more.

    `on_end` is called with whoever computes nothing more.
    """

    def __init__(
        self, patience_s: float, on_end: Callable[[Computer], None] = lambda _: None
    ) -> None:
        self._patience_s = patience_s
        self._on_end = on_end
        self._of: dict[bytes, Announcement] = {}
        self._by: dict[Computer, Announcement] = {}

    def __len__(self) -> int:
        return len(self._of)

    @property
    def computers(self) -> Iterable[Computer]:
        """Who computes something."""
        return self._by.keys()

    def by(self, digest: bytes) -> Computer | None:
        """Who computes it."""
        found = self._of.get(digest)
        return found.computer if found else None

    def add(self, computer: Computer, digests: Iterable[bytes], now: float) -> None:
        """`computer` computes those of these that nobody else does."""
        mine = self._by.get(computer) or Announcement(computer, now)
        mine.heard = now
        new = [digest for digest in digests if digest not in self._of]
        self._of.update(dict.fromkeys(new, mine))
        mine.digests.update(new)
        if mine.digests:
            self._by[computer] = mine

    def settled(self, digests: Iterable[bytes], now: float) -> list[bytes]:
        """These have been computed, or never will be offered; returns those that were announced."""
        known = []
        for digest in digests:
            found = self._of.pop(digest, None)
            if found is not None:
                known.append(digest)
                found.heard = now
                found.digests.discard(digest)
                if not found.digests:
                    self._by.pop(found.computer, None)
        return known

    def end(self, computer: Computer) -> set[bytes]:
        """It computes nothing more; returns what it had announced."""
        self._on_end(computer)
        found = self._by.pop(computer, None)
        if found is None:
            return set()
        for digest in found.digests:
            del self._of[digest]
        return found.digests

    def end_attachment(self, attachment: int) -> set[bytes]:
        gone = [computer for computer in self._by if computer[0] == attachment]
        return {digest for computer in gone for digest in self.end(computer)}

    def expire(self, now: float) -> set[bytes]:
        late = [a.computer for a in self._by.values() if now - a.heard > self._patience_s]
        return {digest for computer in late for digest in self.end(computer)}
