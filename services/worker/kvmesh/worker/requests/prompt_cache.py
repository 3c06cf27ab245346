"""Long prompts of earlier requests, so that their frontends need not send them again."""

from collections import OrderedDict

from msgspec.structs import replace

from kvmesh.bus.messages import Work

TOKEN = 4
MIN_PROMPT_BYTES = 4096 * TOKEN
MAX_CACHE_BYTES = 64 << 20


class PromptCache:
    """Packed prompts by request, least recently kept out first; `limit` in bytes bounds them."""

    def __init__(self, limit: int = MAX_CACHE_BYTES) -> None:
        self._limit = limit
        self._prompts: OrderedDict[str, bytes] = OrderedDict()
        self.bytes = 0

    def complete(self, work: Work) -> Work | None:
        """`work` with its whole prompt; None if what it builds on is not here."""
        if not work.base:
            return work
        known = self._prompts.get(work.base, b"")
        size = work.shared * TOKEN
        if not 0 < size <= len(known):
            return None
        return replace(work, tokens=known[:size] + work.tokens, base="", shared=0)

    def store(self, work: Work, base: str = "") -> bool:
        """Keep the prompt of `work` in place of the one it was built on; whether it is kept."""
        self.bytes -= len(self._prompts.pop(base, b""))
        if not MIN_PROMPT_BYTES <= len(work.tokens) <= self._limit:
            return False
        self.bytes += len(work.tokens) - len(self._prompts.pop(work.request, b""))
        self._prompts[work.request] = work.tokens
        while self.bytes > self._limit:
            _, oldest = self._prompts.popitem(last=False)
            self.bytes -= len(oldest)
        return True
