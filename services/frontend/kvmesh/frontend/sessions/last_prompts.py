"""The last prompt of each session, which callers may name by the session instead of sending it."""

import sys

import msgspec

from kvmesh.bus.client import Bus, Reply
from kvmesh.bus.errors import RequestTimeout
from kvmesh.bus.messages import SessionPrompt, SessionQuery, owner
from kvmesh.frontend.namespaces import SEPARATOR
from kvmesh.runtime.lru import LruCache

ENTRY_BYTES = 500
QUERY_TIMEOUT_S = 0.5
_queries = msgspec.msgpack.Decoder(SessionQuery)
_prompts = msgspec.msgpack.Decoder(SessionPrompt)


class LastPrompts:
    """The prompts, at most `limit` bytes: the owner with the most loses its least recently stored.

    Sessions are named within tenants. Each frontend stores the prompts that it has served and
    queries the other frontends for the rest.
    """

    def __init__(self, bus: Bus, limit: int) -> None:
        self._bus = bus
        self._limit = limit
        self._prompts: dict[str, LruCache[tuple[str, str], SessionPrompt]] = {}
        self._bytes = 0

    async def open(self) -> None:
        """Reply to other frontends' queries."""
        await self._bus.serve(self._bus.subjects.sessions, _queries, self._reply)

    def store(self, model: str, session: str, prompt: SessionPrompt) -> None:
        prompts = self._prompts.setdefault(_owner(session), LruCache(sys.maxsize, _size))
        before = prompts.size
        prompts.put((model, session), prompt)
        self._bytes += prompts.size - before
        while self._bytes > self._limit:
            self._evict(max(self._prompts, key=lambda owner: self._prompts[owner].size))

    def _evict(self, owned_by: str) -> None:
        prompts = self._prompts[owned_by]
        key, oldest = prompts.evict()
        self._bytes -= _size(key, oldest)
        if not prompts:
            del self._prompts[owned_by]

    def _stored(self, model: str, session: str) -> SessionPrompt | None:
        prompts = self._prompts.get(_owner(session))
        return None if prompts is None else prompts.peek((model, session))

    async def find(self, model: str, session: str) -> SessionPrompt | None:
        """The prompt, here or on another frontend; None if no frontend has it."""
        stored = self._stored(model, session)
        if stored is not None:
            return stored
        query, subject = SessionQuery(model, session), self._bus.subjects.sessions
        try:
            return await self._bus.request(subject, query, _prompts, QUERY_TIMEOUT_S)
        except RequestTimeout:
            return None

    def _reply(self, query: SessionQuery, reply: Reply) -> None:
        stored = self._stored(query.model, query.session)
        if stored is not None:
            reply(stored)


def _owner(session: str) -> str:
    """The owner of a session's tenant, from the session's name on the wire."""
    tenant, separator, _ = session.partition(SEPARATOR)
    return owner(tenant) if separator else ""


def _size(_key: tuple[str, str], prompt: SessionPrompt) -> int:
    return ENTRY_BYTES + len(prompt.tokens)
