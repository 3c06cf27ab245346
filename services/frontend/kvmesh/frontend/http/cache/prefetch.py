"""POST /v1/prefetch: have a prompt's blocks where its request will go, before it comes."""

import re
import secrets
import time
from typing import Any

from kvmesh.bus.errors import MessageTooLarge
from kvmesh.bus.messages import (
    Cancel,
    Prefetch,
    RankKey,
    Refused,
    Routed,
    RouteRequest,
    SeqFree,
)
from kvmesh.bus.subjects import token, untoken
from kvmesh.frontend.apis.cache_body import PrefetchBody, prefetch_decoder
from kvmesh.frontend.dispatch.control_client import ControlClient
from kvmesh.frontend.dispatch.route_client import RouteClient
from kvmesh.frontend.dispatch.route_request import route_request
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.frontend.errors import ApiError, InvalidRequest, Unavailable
from kvmesh.frontend.http.cache.prompt_resolver import PromptResolver, ResolvedPrompt
from kvmesh.frontend.http.endpoint import EndpointCall
from kvmesh.frontend.namespaces import scoped

ROUTE_S = 2.0
AHEAD_S = 3600.0
_ID = re.compile(r"pf_[0-9a-f]{24}")


class PrefetchEndpoint:
    """Routes a prompt as a request is routed, and tells the worker. It remembers nothing:

    an id names the worker as well, and within it only the tenant's own prefetches are found.
    """

    def __init__(
        self,
        asking: RouteClient,
        targets: PromptResolver,
        holders: ControlClient,
        tracker: SequenceEventPublisher,
    ) -> None:
        self._asking = asking
        self._targets = targets
        self._holders = holders
        self._tracker = tracker

    async def start(self, visit: EndpointCall) -> dict[str, Any]:
        parsed = visit.decoded(prefetch_decoder)
        if parsed.at is not None and parsed.at > time.time() + AHEAD_S:
            raise InvalidRequest("`at`: at most an hour ahead.", "at")
        target = await self._targets.find(parsed, visit.body, visit.headers, visit.account)
        target.check()
        own = f"pf_{secrets.token_hex(12)}"
        routed = await self._route(target, own)
        there = routed.prefill or RankKey(routed.instance, routed.rank)
        command = _command(scoped(target.tenant, own), target, parsed, there.rank)
        reply = await self._holders.request(there.instance, command)
        if not reply.ok:
            raise Unavailable(f"The worker does not prefetch: {reply.reason}")
        if visit.account is not None:
            visit.account.spend(min(parsed.compute, target.prompt.count))
        return {
            "id": f"{own}.{token(there.instance)}",
            "object": "prefetch",
            "model": target.request.model,
            "instance": there.instance,
            "dp_rank": there.rank,
            "tokens": target.prompt.count,
            "blocks": target.blocks,
            "overlap": routed.overlap,
            "at": parsed.at,
            "deadline": parsed.deadline,
            "compute": parsed.compute,
        }

    async def cancel(self, visit: EndpointCall) -> dict[str, Any]:
        own, _, instance = visit.id.partition(".")
        if not _ID.fullmatch(own) or not instance:
            raise ApiError("not_found", f"There is no prefetch with the id `{visit.id}`.")
        reply = await self._holders.request(untoken(instance), Cancel(scoped(visit.tenant, own)))
        return {"id": visit.id, "object": "prefetch", "cancelled": reply.ok}

    async def _route(self, target: ResolvedPrompt, request_id: str) -> Routed:
        """Where the request would go now; a prefetch is not worth waiting in a queue."""
        model = target.model.card.name
        attempts = [request_id]

        def compose(anew: bool, arrived: float | None) -> RouteRequest:
            if anew:
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
            )

        try:
            answer = await self._asking.request(model, compose, ROUTE_S)
        except MessageTooLarge as error:
            raise ApiError("too_large", "The prompt is larger than the mesh carries.") from error
        finally:
            # nothing runs under this id: its load must not stay with the worker
            self._tracker.event(model, SeqFree(attempts[-1]))
        if isinstance(answer, Refused):
            if answer.code == "invalid":
                raise InvalidRequest(answer.reason)
            raise Unavailable(answer.reason, answer.retry_after_s)
        return answer


def _command(wire_id: str, target: ResolvedPrompt, parsed: PrefetchBody, rank: int) -> Prefetch:
    return Prefetch(
        id=wire_id,
        tokens=target.prompt.tokens,
        salt=target.prompt.salt,
        tenant=target.tenant,
        adapter=target.adapter,
        session=target.request.hints.session,
        retention=target.prompt.retention,
        at=None if parsed.at is None or parsed.at <= time.time() else parsed.at,
        deadline_s=parsed.deadline,
        compute=parsed.compute,
        rank=rank,
    )
