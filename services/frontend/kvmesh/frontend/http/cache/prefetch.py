"""POST and DELETE /v1/prefetch: load a prompt's blocks into the worker that would serve it."""

import logging
import re
import secrets
import time
from typing import Any, NamedTuple

from kvmesh.bus.errors import MessageTooLarge
from kvmesh.bus.messages import (
    Cancel,
    Prefetch,
    PrefetchTerms,
    RankKey,
    Refused,
    Routed,
    RouteRequest,
    SeqFree,
)
from kvmesh.bus.subjects import token, untoken
from kvmesh.frontend.apis.base import Usage
from kvmesh.frontend.apis.cache.body import PrefetchBody
from kvmesh.frontend.auth.accounts import Account
from kvmesh.frontend.dispatch.control_client import ControlClient
from kvmesh.frontend.dispatch.route_client import RouteClient
from kvmesh.frontend.dispatch.route_request import route_request
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.frontend.errors import ApiError, InvalidRequest, Unavailable
from kvmesh.frontend.http.cache.prompt_resolver import PromptResolver, ResolvedPrompt
from kvmesh.frontend.http.endpoint import EndpointCall
from kvmesh.frontend.namespaces import certain_conversation, scoped

log = logging.getLogger(__name__)
ROUTE_S = 2.0
MAX_AHEAD_S = 3600.0
_ID = re.compile(r"pf_[0-9a-f]{24}")


class PrefetchRefused(Unavailable):
    """The worker that would serve the prompt does not prefetch it; `placed` as far as it was."""

    def __init__(self, reason: str, placed: "PlacedPrefetch") -> None:
        super().__init__(f"The worker refused the prefetch: {reason}")
        self.placed = placed


class PlacedPrefetch(NamedTuple):
    """A prefetch: its id, and the rank that loads the prompt, of which tiers hold `overlap`."""

    id: str
    rank: RankKey
    overlap: list[int]


class PrefetchEndpoint:
    """Starts and cancels prefetches for clients.

    Stateless: the id of a prefetch includes its instance, and commands carry the tenant.
    """

    def __init__(self, prefetcher: "Prefetcher", prompts: PromptResolver) -> None:
        self._prefetcher = prefetcher
        self._prompts = prompts

    async def start(self, call: EndpointCall[PrefetchBody]) -> dict[str, Any]:
        parsed = call.parsed
        if parsed.at is not None and parsed.at > time.time() + MAX_AHEAD_S:
            raise InvalidRequest("`at` must be at most an hour ahead.", "at")
        target = await self._prompts.resolve(call)
        target.require_full_block()
        terms = PrefetchTerms(compute=parsed.compute, at=parsed.at, deadline_s=parsed.deadline)
        placed = await self._prefetcher.start(target, terms, call.caller.account)
        worker = placed.rank
        return {
            "id": f"{placed.id}.{token(worker.instance)}",
            "object": "prefetch",
            "model": target.request.model,
            "instance": worker.instance,
            "dp_rank": worker.rank,
            "tokens": target.prompt.count,
            "blocks": target.blocks,
            "overlap": placed.overlap,
            "at": parsed.at,
            "deadline": parsed.deadline,
            "compute": parsed.compute,
        }

    async def cancel(self, call: EndpointCall[None]) -> dict[str, Any]:
        own, _, instance = call.path_id.partition(".")
        if not _ID.fullmatch(own) or not instance:
            raise ApiError("not_found", f"Prefetch `{call.path_id}` not found.")
        cancelled = await self._prefetcher.cancel(scoped(call.caller.tenant, own), instance)
        return {"id": call.path_id, "object": "prefetch", "cancelled": cancelled}


class Prefetcher:
    """Routes prompts like requests and sends prefetch commands to the chosen workers."""

    def __init__(
        self, route_client: RouteClient, control: ControlClient, events: SequenceEventPublisher
    ) -> None:
        self._route_client = route_client
        self._control = control
        self._events = events

    async def start(
        self, target: ResolvedPrompt, terms: PrefetchTerms, account: Account | None
    ) -> PlacedPrefetch:
        """Load a prompt of at least a block, on the account; raises ApiError."""
        own = f"pf_{secrets.token_hex(12)}"
        routed = await self._route(target, own, terms)
        worker = routed.prefill or RankKey(routed.instance, routed.rank)
        placed = PlacedPrefetch(own, worker, routed.overlap)
        command = _command(scoped(target.tenant, own), target, terms, worker.rank)
        reply = await self._control.request(worker.instance, command)
        if not reply.ok:
            raise PrefetchRefused(reply.reason, placed)
        if account is not None:
            account.charge_tokens(min(terms.compute, target.prompt.count))
        return placed

    async def preload(self, target: ResolvedPrompt, account: Account | None) -> Usage:
        """Have a prompt computed ahead of the next one; raises ApiError if nothing can serve it.

        Workers that do not prefetch compute it with that one.
        """
        size, count = target.model.card.block_size, target.prompt.count
        if not target.blocks:
            return Usage(count, 0, 0, 0)
        try:
            placed = await self.start(target, PrefetchTerms(compute=count), account)
        except PrefetchRefused as error:
            log.info("no preload of %s: %s", target.request.id, error)
            placed = error.placed
        cached = min(sum(placed.overlap), target.blocks) * size
        return Usage(count, cached, target.blocks * size - cached, 0)

    async def cancel(self, wire_id: str, instance: str) -> bool:
        """Cancel a prefetch of the instance, which is named as in an id; True if there was one."""
        return (await self._control.request(untoken(instance), Cancel(wire_id))).ok

    async def _route(self, target: ResolvedPrompt, request_id: str, terms: PrefetchTerms) -> Routed:
        """Placement of the prompt now; a prefetch does not wait in the router's queue for long."""
        model = target.model.card.name
        attempts = [request_id]

        def compose(new_attempt: bool, arrived: float | None) -> RouteRequest:
            if new_attempt:
                attempts.append(f"{request_id}.{len(attempts)}")
            return route_request(
                target.request,
                target.prompt,
                attempt=attempts[-1],
                model=model,
                adapter=target.adapter,
                max_tokens=1,
                deadline_s=ROUTE_S,
                arrived=arrived,
                prefetch=terms,
            )

        try:
            reply = await self._route_client.request(model, compose, ROUTE_S)
        except MessageTooLarge as error:
            reason = f"The prompt has {error.size} bytes and exceeds {error.limit}."
            raise ApiError("too_large", reason) from error
        finally:
            # no sequence runs under this id: remove its predicted load from the router
            self._events.event(model, SeqFree(attempts[-1]))
        if isinstance(reply, Refused):
            if reply.code == "invalid":
                raise InvalidRequest(reply.reason)
            raise Unavailable(reply.reason, reply.retry_after_s)
        return reply


def _command(wire_id: str, target: ResolvedPrompt, terms: PrefetchTerms, rank: int) -> Prefetch:
    return Prefetch(
        id=wire_id,
        tokens=target.prompt.tokens,
        salt=target.prompt.salt,
        tenant=target.tenant,
        adapter=target.adapter,
        session=target.request.hints.session,
        conversation=certain_conversation(target.request.hints),
        retention=list(target.prompt.retention),
        at=None if terms.at is None or terms.at <= time.time() else terms.at,
        deadline_s=terms.deadline_s,
        compute=terms.compute,
        rank=rank,
    )
