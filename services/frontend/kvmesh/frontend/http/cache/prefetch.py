"""POST and DELETE /v1/prefetch: load a prompt's blocks into the worker that would serve it."""

import re
import secrets
import time
from typing import Any

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
from kvmesh.frontend.apis.cache.body import PrefetchBody
from kvmesh.frontend.dispatch.control_client import ControlClient
from kvmesh.frontend.dispatch.route_client import RouteClient
from kvmesh.frontend.dispatch.route_request import route_request
from kvmesh.frontend.dispatch.sequence_events import SequenceEventPublisher
from kvmesh.frontend.errors import ApiError, InvalidRequest, Unavailable
from kvmesh.frontend.http.cache.prompt_resolver import PromptResolver, ResolvedPrompt
from kvmesh.frontend.http.endpoint import EndpointCall
from kvmesh.frontend.namespaces import certain_conversation, scoped

ROUTE_S = 2.0
MAX_AHEAD_S = 3600.0
_ID = re.compile(r"pf_[0-9a-f]{24}")


class PrefetchEndpoint:
    """Routes a prompt like a request and sends a prefetch command to the chosen worker.

    Stateless: the id of a prefetch includes its instance, and commands carry the tenant.
    """

    def __init__(
        self,
        route_client: RouteClient,
        prompts: PromptResolver,
        control: ControlClient,
        events: SequenceEventPublisher,
    ) -> None:
        self._route_client = route_client
        self._prompts = prompts
        self._control = control
        self._events = events

    async def start(self, call: EndpointCall[PrefetchBody]) -> dict[str, Any]:
        parsed, account = call.parsed, call.caller.account
        if parsed.at is not None and parsed.at > time.time() + MAX_AHEAD_S:
            raise InvalidRequest("`at` must be at most an hour ahead.", "at")
        target = await self._prompts.resolve(call)
        target.require_full_block()
        own = f"pf_{secrets.token_hex(12)}"
        routed = await self._route(target, own, parsed)
        worker = routed.prefill or RankKey(routed.instance, routed.rank)
        command = _command(scoped(target.tenant, own), target, parsed, worker.rank)
        reply = await self._control.request(worker.instance, command)
        if not reply.ok:
            raise Unavailable(f"The worker refused the prefetch: {reply.reason}")
        if account is not None:
            account.charge_tokens(min(parsed.compute, target.prompt.count))
        return {
            "id": f"{own}.{token(worker.instance)}",
            "object": "prefetch",
            "model": target.request.model,
            "instance": worker.instance,
            "dp_rank": worker.rank,
            "tokens": target.prompt.count,
            "blocks": target.blocks,
            "overlap": routed.overlap,
            "at": parsed.at,
            "deadline": parsed.deadline,
            "compute": parsed.compute,
        }

    async def cancel(self, call: EndpointCall[None]) -> dict[str, Any]:
        own, _, instance = call.path_id.partition(".")
        if not _ID.fullmatch(own) or not instance:
            raise ApiError("not_found", f"Prefetch `{call.path_id}` not found.")
        command = Cancel(scoped(call.caller.tenant, own))
        reply = await self._control.request(untoken(instance), command)
        return {"id": call.path_id, "object": "prefetch", "cancelled": reply.ok}

    async def _route(self, target: ResolvedPrompt, request_id: str, parsed: PrefetchBody) -> Routed:
        """Placement of the prompt now; a prefetch does not wait in the router's queue for long."""
        model = target.model.card.name
        attempts = [request_id]
        terms = PrefetchTerms(compute=parsed.compute, at=parsed.at, deadline_s=parsed.deadline)

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


def _command(wire_id: str, target: ResolvedPrompt, parsed: PrefetchBody, rank: int) -> Prefetch:
    return Prefetch(
        id=wire_id,
        tokens=target.prompt.tokens,
        salt=target.prompt.salt,
        tenant=target.tenant,
        adapter=target.adapter,
        session=target.request.hints.session,
        conversation=certain_conversation(target.request.hints),
        retention=target.prompt.retention,
        at=None if parsed.at is None or parsed.at <= time.time() else parsed.at,
        deadline_s=parsed.deadline,
        compute=parsed.compute,
        rank=rank,
    )
