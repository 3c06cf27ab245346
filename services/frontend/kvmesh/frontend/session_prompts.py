"""The last prompt of each session, so that a session can be named instead of its prompt."""

from collections import OrderedDict

import msgspec

from kvmesh.bus.client import Bus, Respond
from kvmesh.bus.errors import RequestTimeout
from kvmesh.bus.messages import SessionPrompt, SessionQuery

ENTRY_BYTES = 500
ASK_S = 0.5
_queries = msgspec.msgpack.Decoder(SessionQuery)


class SessionPrompts:
    """At most `limit` bytes, the longest unused first out. Sessions are named within tenants.

    Each frontend knows what passed through itself, and asks the others for the rest.
    """

    def __init__(self, bus: Bus, limit: int) -> None:
        self._bus = bus
        self._limit = limit
        self._held: OrderedDict[tuple[str, str], SessionPrompt] = OrderedDict()
        self._bytes = 0

    async def open(self) -> None:
        """Answer other frontends."""
        await self._bus.serve(self._bus.subjects.sessions, _queries, self._answer)

    def remember(self, model: str, session: str, prompt: SessionPrompt) -> None:
        key = (model, session)
        self._bytes += _size(prompt) - _size(self._held.pop(key, None))
        self._held[key] = prompt
        while self._bytes > self._limit:
            self._bytes -= _size(self._held.popitem(last=False)[1])

    async def find(self, model: str, session: str) -> SessionPrompt | None:
        """None if no frontend knows the session."""
        known = self._held.get((model, session))
        if known is not None:
            return known
        query = SessionQuery(model, session)
        try:
            return await self._bus.request(self._bus.subjects.sessions, query, SessionPrompt, ASK_S)
        except RequestTimeout:
            return None

    async def _answer(self, query: SessionQuery, respond: Respond) -> None:
        known = self._held.get((query.model, query.session))
        if known is not None:
            await respond(known)


def _size(prompt: SessionPrompt | None) -> int:
    return 0 if prompt is None else ENTRY_BYTES + len(prompt.tokens)
