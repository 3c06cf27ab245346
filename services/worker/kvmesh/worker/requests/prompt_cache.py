"""Long prompts of earlier requests, so that frontends send only the rest of the next prompt."""

from collections import OrderedDict

from msgspec.structs import replace

from kvmesh.bus.messages import Work

TOKEN = 4
MIN_PROMPT_BYTES = 4096 * TOKEN
MAX_CACHE_BYTES = 64 << 20


class PromptCache:
    """Packed prompts by request, in LRU order, at most `limit` bytes."""

    def __init__(self, limit: int = MAX_CACHE_BYTES) -> None:
        self._limit = limit
        self._prompts: OrderedDict[str, bytes] = OrderedDict()
        self.bytes = 0

    def complete(self, work: Work) -> Work | None:
        """Return `work` with its whole prompt; None if its base prompt is unknown."""
        if not work.base:
            return work
        known = self._prompts.get(work.base, b"")
        size = work.shared * TOKEN
        if not 0 < size <= len(known):
            return None
        return replace(work, tokens=known[:size] + work.tokens, base="", shared=0)

    def store(self, work: Work, base: str = "") -> bool:
        """Store the prompt of `work` in place of its base prompt; False if it is not stored."""
        self.bytes -= len(self._prompts.pop(base, b""))
        if not MIN_PROMPT_BYTES <= len(work.tokens) <= self._limit:
            return False
        self.bytes += len(work.tokens) - len(self._prompts.pop(work.request, b""))
        self._prompts[work.request] = work.tokens
        while self.bytes > self._limit:
            _, oldest = self._prompts.popitem(last=False)
            self.bytes -= len(oldest)
        return True
