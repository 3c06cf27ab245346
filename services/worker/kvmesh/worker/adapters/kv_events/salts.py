"""The mesh's salt of a prompt: in the engine's cache salt, and back out of its events."""

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

from kvmesh.bus.messages import Work
from kvmesh.hashing import block_hashes, salt
from kvmesh.runtime.lru import LruCache
from kvmesh.worker.adapters.kv_events.cache_events import BlocksStored

# before the salt's digits, so that a client's own cache salt is not taken for one of the mesh
MARK = "kvm"
_DIGITS = 16
_HEX = frozenset("0123456789abcdef")
SaltFinder: TypeAlias = Callable[[BlocksStored, Callable[[int], bool]], int | None]


def returned_salt(key: str) -> int | None:
    """The mesh's salt in an engine's cache salt, see `PromptSalts.cache_salt`; None if none."""
    mark, digits = key[-_DIGITS - len(MARK) : -_DIGITS], key[-_DIGITS:]
    before = key[: -_DIGITS - len(MARK)]
    marked = mark == MARK and (not before or before[-1] == "-")
    return int(digits, 16) if marked and set(digits) <= _HEX else None


class PromptSalts:
    """The salts of recent prompts, for engines whose events do not carry a salt.

    Prompts that came over the mesh are known by their first block, the newest `limit` of them.
    Other prompts came to the engine directly and have the model's salt without a tenant. If tenants
    share a first block, the one that waited longest without holding it is chosen.
    """

    def __init__(self, model: str, block_size: int, limit: int = 65536) -> None:
        self._model = model
        self._block_size = block_size
        self._limit = limit
        self._waiting: LruCache[int, list[int]] = LruCache(limit)
        self._tenants: OrderedDict[int, str | None] = OrderedDict()
        self._plain: LruCache[str, int] = LruCache(limit)  # salts without a tenant, by adapter
        self._salted = self._remembers = False

    def is_exclusive(self, work: Work) -> bool:
        """True if no other tenant has used this salt: all blocks under it are this tenant's."""
        plain = work.salt == self._salt_of(work.adapter)
        known = self._tenants.pop(work.salt, "" if plain else work.tenant)
        self._tenants[work.salt] = known if known == work.tenant else None
        if len(self._tenants) > self._limit:
            self._tenants.popitem(last=False)
        return known == work.tenant

    def cache_salt(self, work: Work) -> str | None:
        """The salt for the engine's own hashes; None for a prompt without a tenant.

        The tenant's tag isolates its blocks. The mesh's salt follows as MARK and 16 hexadecimal
        digits, which the engine's events return. vLLM's server accepts no "/", which occurs in the
        tag of a part of a tenant.
        """
        marked = f"{MARK}{work.salt:016x}"
        if work.tenant:
            self._salted = True
            return f"{work.tenant.replace('/', '.')}-{marked}"
        if work.salt == self._salt_of(work.adapter):
            return None
        self._salted = True
        return marked

    def remember(self, work: Work) -> None:
        """Record the salt of a prompt under its first block."""
        self._remembers = True
        local, _ = block_hashes(work.tokens[: 4 * self._block_size], self._block_size)
        if local:
            key = int.from_bytes(local, "little")
            salts = self._waiting.peek(key) or []
            if work.salt not in salts:
                salts.append(work.salt)
            self._waiting.put(key, salts)

    def root_salt(self, event: BlocksStored, held: Callable[[int], bool]) -> int | None:
        """The salt of a root block; `held(salt)`: the block is held under that salt already.

        None if it cannot be known yet: vLLM names the salts of blocks in device memory only.
        """
        if event.salt is not None:
            return event.salt
        if event.tier and self._salted and not self._remembers:
            return None
        if self._remembers:
            local, _ = block_hashes(event.tokens[: 4 * event.block_size], event.block_size)
            salts = (self._waiting.peek(int.from_bytes(local, "little")) if local else None) or []
            found = next((salt_ for salt_ in salts if not held(salt_)), None)
            if found is not None:
                salts.remove(found)
                return found
        return self._salt_of(event.adapter)

    def _salt_of(self, adapter: str | None) -> int:
        """The salt of the model and an adapter, without a tenant."""
        found = self._plain.peek(adapter or "")
        if found is None:
            found = salt(self._model, adapter or "")
            self._plain.put(adapter or "", found)
        return found
