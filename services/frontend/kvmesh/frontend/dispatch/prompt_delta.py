"""Prompts that workers still have, so that the next turn sends only what it adds. Pure."""

from collections import OrderedDict

from msgspec.structs import replace

from kvmesh.bus.messages import Work

TOKEN = 4
LOOSE = 64 * TOKEN  # the end of a prompt invites an answer, and may not be repeated as it was
LIMIT = 32 << 20

Key = tuple[str, int, str]


class SentPromptCache:
    """The latest prompt of each session on each worker that keeps it; `limit` in bytes."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._held: OrderedDict[Key, tuple[str, bytes]] = OrderedDict()
        self.bytes = 0

    def shorten(self, instance: str, work: Work) -> Work:
        """`work` without the tokens that `instance` has, or as it is."""
        request, tokens = self._held.get(_key(instance, work), ("", b""))
        for known in (tokens, tokens[:-LOOSE]):
            if known and work.tokens.startswith(known):
                rest = work.tokens[len(known) :]
                return replace(work, tokens=rest, base=request, shared=len(known) // TOKEN)
        return work

    def keep(self, instance: str, work: Work) -> None:
        """`instance` keeps the prompt of `work`."""
        if work.session is None or len(work.tokens) > self._limit:
            return
        self.forget(instance, work)
        self._held[_key(instance, work)] = (work.request, work.tokens)
        self.bytes += len(work.tokens)
        while self.bytes > self._limit:
            _, (_, tokens) = self._held.popitem(last=False)
            self.bytes -= len(tokens)

    def forget(self, instance: str, work: Work) -> None:
        """Whatever `instance` had of this session, it has it no longer."""
        _, tokens = self._held.pop(_key(instance, work), ("", b""))
        self.bytes -= len(tokens)


def _key(instance: str, work: Work) -> Key:
    return instance, work.salt, work.session or ""
