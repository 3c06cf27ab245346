"""The sessions of requests and the first request with a block, from the route stream. Pure."""

from collections.abc import Collection, Iterable

import msgspec

from kvmesh.bus.messages import CacheAccount, Decision, MessageDecoder, Outcome, RouteEvent
from kvmesh.frontend.namespaces import own_name
from kvmesh.hashing import HASH_BYTES
from kvmesh.observer.prefetch_uses import base_id

_routes: MessageDecoder[RouteEvent] = MessageDecoder(RouteEvent)


class Origins:
    """The sessions of requests, and the first request with each block."""

    def __init__(self, requests: Collection[str], blocks: Collection[bytes]) -> None:
        self._ids = {base_id(request).encode() for request in requests}
        self._blocks = set(blocks)
        self._sessions: dict[str, str] = {}
        self._first: dict[bytes, str] = {}

    def __bool__(self) -> bool:
        return bool(self._ids or self._blocks)

    def add(self, data: bytes) -> None:
        """Read one message of the route stream."""
        missing = self._blocks - self._first.keys()
        if not any(key in data for key in (*self._ids, *missing)):
            return
        try:
            event = _routes.decode(data)
        except msgspec.MsgspecError:
            return  # of another version
        if isinstance(event, Decision):
            self.add_decision(event)

    def add_decision(self, decision: Decision) -> None:
        """Read one placement; earlier ones come before later ones."""
        request = base_id(decision.request)
        if decision.hints.session is not None:
            self._sessions[request] = own_name(decision.hints.session)
        for block in self._blocks - self._first.keys():
            if _contains(decision.sequence_hashes, block):
                self._first[block] = request

    def name(self, request: str) -> str:
        """The request with its session, if that is known."""
        request = base_id(request)
        session = self._sessions.get(request)
        return request if session is None else f"{request} (session {session})"

    def first(self, block: bytes) -> str | None:
        """The first request whose prompt had the block."""
        request = self._first.get(block)
        return None if request is None else self.name(request)


def origins_of(events: Iterable[RouteEvent]) -> Origins:
    """The origins to look up for outcomes: of their losses, and of the last block of others."""
    requests, blocks = [], []
    decisions = {event.request: event for event in events if isinstance(event, Decision)}
    for event in events:
        if isinstance(event, Outcome) and event.cache is not None:
            requests += [loss.request for loss in event.cache.losses if loss.request is not None]
            block = last_shared(event.cache, decisions.get(event.request))
            blocks += [block] if block is not None else []
    return Origins(requests, blocks)


def last_shared(account: CacheAccount, decision: Decision | None) -> bytes | None:
    """The packed hash of the last block that other requests had computed, if there is one."""
    if not account.shared or decision is None or not decision.block_size:
        return None
    end = account.reused // decision.block_size * HASH_BYTES
    return decision.sequence_hashes[end - HASH_BYTES : end] or None


def _contains(hashes: bytes, block: bytes) -> bool:
    at = hashes.find(block)
    while at % HASH_BYTES and at >= 0:
        at = hashes.find(block, at + 1)
    return at >= 0
