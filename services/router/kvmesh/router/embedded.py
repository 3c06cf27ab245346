"""Embedded router: placements called from Python in the caller's own process.

    async with EmbeddedRouter.connect("kvmesh-demo") as router:
        worker, rank, overlap = await router.best_worker(token_ids, "request-1")
        …
        await router.free("request-1")

It follows the mesh as a replica does: each router counts the placements of all others. It serves
no requests of other processes.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import NamedTuple

import msgspec

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.errors import NotFound
from kvmesh.bus.messages import (
    Hints,
    Placement,
    Refused,
    Routed,
    RouteRequest,
    Sampling,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
)
from kvmesh.hashing import block_hashes, salt
from kvmesh.router.config import check_settings
from kvmesh.router.errors import NoWorkers, RouteError
from kvmesh.router.model_router import ModelRouter, RouteCall
from kvmesh.router.service import RouterService
from kvmesh.router.worker_client import generate, new_work, pack
from kvmesh.runtime.service import Service
from kvmesh.settings.schema import RouterSettings, Settings


class EmbeddedWorker(NamedTuple):
    """A placement: worker instance, data-parallel rank, blocks of the prompt held there."""

    instance: str
    dp_rank: int
    overlap: int


class PotentialLoad(NamedTuple):
    """Load of a rank if a prompt were placed there."""

    instance: str
    dp_rank: int
    prefill_tokens: float
    decode_blocks: float
    active_requests: int


class EmbeddedRouter:
    """Placements for one model. Token ids are those of the model's tokenizer.

    `overrides` may set overlap_credit, prefill_weight, request_weight, credit_decay and
    temperature for one call. Prompts of different `adapter` and `tenant` share no cache. Frontends
    salt their tenants with a secret, so their caches are separate; a program that lets callers name
    a tenant must salt them as well.
    """

    def __init__(self, service: Service, router: ModelRouter) -> None:
        self._service = service
        self._router = router

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        model: str,
        options: BusOptions | None = None,
        settings: RouterSettings | None = None,
        timeout: float = 10.0,
    ) -> "AsyncIterator[EmbeddedRouter]":
        """Join the mesh and wait for a worker of `model`.

        Raises BusUnavailable, ConfigError, or NoWorkers after `timeout` seconds.
        """
        settings = settings or RouterSettings()
        check_settings(settings)
        name = f"router-embedded-{secrets.token_hex(4)}"
        bus = await Bus.connect(options or BusOptions(), name, timeout)
        service = Service(bus, Settings(router=settings), name)
        mesh = RouterService(service, serves=False)
        try:
            await _join(mesh, service, timeout)
            yield cls(service, await _first_worker(mesh, model, timeout))
        finally:
            await mesh.close()
            await service.close()

    async def best_worker(
        self,
        token_ids: Sequence[int],
        request_id: str | None = None,
        *,
        update: bool = True,
        overrides: Mapping[str, float] | None = None,
        max_tokens: int = 0,
        hints: Hints | None = None,
        placement: Placement | None = None,
        adapter: str | None = None,
        tenant: str = "",
        timeout: float = 60.0,
    ) -> EmbeddedWorker:
        """Place a prompt, queued while no rank has free capacity.

        With `update` and a `request_id`, the prompt counts as running there until `free`.
        Raises RouteError if the router refuses the prompt.
        """
        request = RouteRequest(
            request=request_id or f"unnamed-{secrets.token_hex(8)}",
            model=self._router.model,
            sequence_hashes=self._hashes(token_ids, adapter, tenant),
            salt=self._salt(adapter, tenant),
            tokens=len(token_ids),
            max_tokens=max_tokens,
            deadline_s=timeout,
            adapter=adapter,
            hints=hints or Hints(),
            placement=placement or Placement(),
            overrides=dict(overrides or {}),
        )
        if update and request_id is not None:
            routed = await self._place(request)
            return EmbeddedWorker(routed.instance, routed.rank, sum(routed.overlap))
        result = await self._router.overlaps(request.sequence_hashes, request.salt)
        chosen = self._router.core.decide(request, result.overlaps, monotonic()).chosen
        return EmbeddedWorker(chosen.instance, chosen.rank, sum(chosen.overlap))

    async def potential_loads(
        self, token_ids: Sequence[int], *, adapter: str | None = None, tenant: str = ""
    ) -> list[PotentialLoad]:
        """The load of each eligible rank with this prompt."""
        request = RouteRequest(
            request="",
            model=self._router.model,
            sequence_hashes=self._hashes(token_ids, adapter, tenant),
            salt=self._salt(adapter, tenant),
            tokens=len(token_ids),
            max_tokens=0,
            deadline_s=1.0,
            adapter=adapter,
        )
        result = await self._router.overlaps(request.sequence_hashes, request.salt)
        candidates = self._router.core.choice.candidates(request, result.overlaps, monotonic())
        new = candidates.prompt - candidates.overlap.sum(1)
        tokens = (candidates.prefill + new) * self._router.core.table.block_size
        return [
            PotentialLoad(
                candidates.rank(at).instance,
                candidates.rank(at).rank,
                float(tokens[at]),
                float(candidates.decode[at]),
                int(candidates.requests[at]),
            )
            for at in range(len(candidates))
        ]

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        overrides: Mapping[str, float] | None = None,
        hints: Hints | None = None,
        placement: Placement | None = None,
        adapter: str | None = None,
        tenant: str = "",
        timeout: float = 60.0,
    ) -> AsyncIterator[list[int]]:
        """Place the prompt, run it there and yield its tokens as they arrive.

        Stops the engine if the caller stops iterating. Raises RouteError if the prompt is refused,
        GenerationError if the worker fails.
        """
        request_id = f"{self._service.name}-{secrets.token_hex(8)}"
        worker = await self.best_worker(
            token_ids,
            request_id,
            overrides=overrides,
            max_tokens=sampling.max_tokens,
            hints=hints,
            placement=placement,
            adapter=adapter,
            tenant=tenant,
            timeout=timeout,
        )
        work = msgspec.structs.replace(
            new_work(request_id, self._service.instance, token_ids, sampling),
            salt=self._salt(adapter, tenant),
            adapter=adapter,
            rank=worker.dp_rank,
        )
        first = True
        try:
            async for tokens in generate(self._service.bus, worker.instance, work, timeout):
                if first:
                    await self.mark_prefilled(request_id)
                    first = False
                yield tokens
        finally:
            await self.free(request_id)

    async def mark_prefilled(self, request_id: str) -> None:
        """Record a placed prompt's first token: it no longer counts as prefill."""
        await self._publish(SeqPrefilled(request_id))

    async def free(self, request_id: str) -> None:
        """Free a placed or waiting prompt; unknown ids are ignored."""
        await self._publish(SeqFree(request_id))

    async def _publish(self, event: SeqEvent) -> None:
        self._router.apply(event)
        self._router.schedule_placement()
        self._router.publish([event])

    async def _place(self, request: RouteRequest) -> Routed:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()

        def reply(result: object) -> None:
            if not future.done():
                future.set_result(result)

        try:
            self._router.route(RouteCall(request, monotonic(), reply=reply))
            result = await future
        except asyncio.CancelledError:
            await self.free(request.request)
            raise
        if isinstance(result, Refused):
            raise RouteError(result)
        if not isinstance(result, Routed):
            raise TypeError(f"a router replied {result!r}")
        return result

    def _hashes(self, token_ids: Sequence[int], adapter: str | None, tenant: str) -> bytes:
        size = self._router.core.table.block_size
        return block_hashes(pack(token_ids), size, self._salt(adapter, tenant))[1]

    def _salt(self, adapter: str | None, tenant: str) -> int:
        return salt(self._router.model, adapter or "", tenant)


async def _join(mesh: RouterService, service: Service, timeout: float) -> None:
    """Wait for the mesh's streams, which its services create with their limits."""
    deadline = monotonic() + timeout
    while True:
        try:
            await service.bus.js.stream_info(service.bus.subjects.seq_stream)
            await service.bus.js.stream_info(f"KV_{service.bus.subjects.router_bucket}")
            break
        except NotFound:
            if monotonic() > deadline:
                raise NoWorkers(f"no mesh named {service.bus.options.namespace}") from None
            await asyncio.sleep(0.1)
    await mesh.open()


async def _first_worker(mesh: RouterService, model: str, timeout: float) -> ModelRouter:
    try:
        return await mesh.model(model, timeout)
    except TimeoutError:
        raise NoWorkers(f"no worker serves {model}") from None
