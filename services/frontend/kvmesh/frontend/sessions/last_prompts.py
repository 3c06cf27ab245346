"""The last prompt of each session, so that a session can be named instead of its prompt."""

import sys

import msgspec

from kvmesh.bus.client import Bus, Respond
from kvmesh.bus.errors import RequestTimeout
from kvmesh.bus.messages import SessionPrompt, SessionQuery, owner
from kvmesh.frontend.namespaces import SEPARATOR
from kvmesh.runtime.lru import LruCache

ENTRY_BYTES = 500
ASK_S = 0.5
_queries = msgspec.msgpack.Decoder(SessionQuery)


class LastPrompts:
    """At most `limit` bytes; what is too much, the owner with the most gives up, longest unused.

    Sessions are named within tenants. Each frontend knows what passed through itself, and asks the
    others for the rest.
    """

    def __init__(self, bus: Bus, limit: int) -> None:
        self._bus = bus
        self._limit = limit
        self._held: dict[str, LruCache[tuple[str, str], SessionPrompt]] = {}
        self._bytes = 0

    async def open(self) -> None:
        """Answer other frontends."""
        await self._bus.serve(self._bus.subjects.sessions, _queries, self._answer)

    def remember(self, model: str, session: str, prompt: SessionPrompt) -> None:
        held = self._held.setdefault(_owner(session), LruCache(sys.maxsize, _size))
        before = held.size
        held.put((model, session), prompt)
        self._bytes += held.size - before
        while self._bytes > self._limit:
            self._evict(max(self._held, key=lambda owner: self._held[owner].size))

    def _evict(self, owner: str) -> None:
        held = self._held[owner]
        key, prompt = held.evict()
        self._bytes -= _size(key, prompt)
        if not held:
            del self._held[owner]

    def _known(self, model: str, session: str) -> SessionPrompt | None:
        held = self._held.get(_owner(session))
        return None if held is None else held.peek((model, session))

    async def find(self, model: str, session: str) -> SessionPrompt | None:
        """None if no frontend knows the session."""
        known = self._known(model, session)
        if known is not None:
            return known
        query = SessionQuery(model, session)
        try:
            return await self._bus.request(self._bus.subjects.sessions, query, SessionPrompt, ASK_S)
        except RequestTimeout:
            return None

    async def _answer(self, query: SessionQuery, respond: Respond) -> None:
        known = self._known(query.model, query.session)
        if known is not None:
            await respond(known)


def _owner(session: str) -> str:
    """Of whose tenant a session is, by its name on the wire."""
    tenant, apart, _ = session.partition(SEPARATOR)
    return owner(tenant) if apart else ""


def _size(_key: tuple[str, str], prompt: SessionPrompt) -> int:
    return ENTRY_BYTES + len(prompt.tokens)
