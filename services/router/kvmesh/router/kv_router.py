"""KvRouter: placements and generation called from Python in the caller's own process.

    async with KvRouter.connect("kvmesh-demo") as router:
        worker, rank, overlap = await router.best_worker(token_ids, request_id="request-1")
        …
        await router.free("request-1")

It follows the mesh as a replica does: each router counts the placements of all others. It serves
no requests of other processes.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from time import monotonic
from typing import NamedTuple, TypedDict

from msgspec.structs import replace

from kvmesh.bus.client import Bus, BusOptions
from kvmesh.bus.errors import NotFound
from kvmesh.bus.messages import (
    Hints,
    Placement,
    Refused,
    Retain,
    Routed,
    RouteRequest,
    Sampling,
    SeqEvent,
    SeqFree,
    SeqPrefilled,
    Work,
)
from kvmesh.hashing import block_hashes, salt
from kvmesh.router.config import check_settings
from kvmesh.router.errors import InvalidRouteRequest, NoWorkers, RouteError
from kvmesh.router.model_router import ModelRouter, RouteCall
from kvmesh.router.service import RouterService
from kvmesh.router.worker_client import GenerationError, generate, pack
from kvmesh.runtime.service import Service
from kvmesh.settings.schema import RouterSettings, Settings

MIGRATIONS = 3  # as frontends: a fourth lost worker is more likely the request's doing
log = logging.getLogger(__name__)


class BestWorker(NamedTuple):
    """A placement: the worker's instance, its data-parallel rank, blocks of the prompt held there.

    The fields have the names of Dynamo's triple.
    """

    worker_id: str
    dp_rank: int
    overlap_blocks: int


class PotentialLoad(TypedDict):
    """Load of a rank if a prompt were placed there; the keys are Dynamo's."""

    worker_id: str
    dp_rank: int
    potential_prefill_tokens: float
    potential_decode_blocks: float
    active_requests: int


class GeneratedTokens(TypedDict):
    """New tokens of an answer; the last item has its `finish_reason`, "stop" or "length"."""

    token_ids: list[int]
    finish_reason: str | None


class KvRouter:
    """Placements for one model. Token ids are those of the model's tokenizer.

    `worker_id` is an instance or the name of a worker. `router_config_override` may set the weights
    of `nvext.router_config_override` for one call. Prompts of different `adapter` and `tenant`
    share no cache. Frontends salt their tenants with a secret, so their caches are separate; a
    program that lets callers name a tenant must salt them as well.
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
    ) -> "AsyncIterator[KvRouter]":
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
        *,
        request_id: str | None = None,
        update_indexer: bool = True,
        router_config_override: Mapping[str, float] | None = None,
        max_tokens: int = 0,
        hints: Hints | None = None,
        placement: Placement | None = None,
        adapter: str | None = None,
        tenant: str = "",
        timeout: float = 60.0,
    ) -> BestWorker:
        """Place a prompt, queued while no rank has free capacity.

        With a `request_id` the prompt counts as running there until `free`, and as cached there
        before the engine's events arrive. Without one, or with `update_indexer` False, nothing is
        counted. Raises RouteError if the router refuses the prompt.
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
            overrides=dict(router_config_override or {}),
        )
        if update_indexer and request_id is not None:
            return await self._place(request)
        result = await self._router.overlaps(request.sequence_hashes, request.salt)
        chosen = self._router.core.decide(request, result.overlaps, monotonic()).chosen
        return BestWorker(chosen.instance, chosen.rank, sum(chosen.overlap))

    async def get_potential_loads(
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
                worker_id=candidates.rank(at).instance,
                dp_rank=candidates.rank(at).rank,
                potential_prefill_tokens=float(tokens[at]),
                potential_decode_blocks=float(candidates.decode[at]),
                active_requests=int(candidates.requests[at]),
            )
            for at in range(len(candidates))
        ]

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        worker_id: str | None = None,
        dp_rank: int | None = None,
        sampling: Sampling | None = None,
        router_config_override: Mapping[str, float] | None = None,
        hints: Hints | None = None,
        placement: Placement | None = None,
        retention: Sequence[Retain] = (),
        decode_retention: Retain | None = None,
        adapter: str | None = None,
        tenant: str = "",
        timeout: float = 60.0,
    ) -> AsyncIterator[GeneratedTokens]:
        """Place the prompt, run it there and yield its tokens as they arrive.

        `worker_id` and `dp_rank` choose the first worker. If that one refuses the work or is lost,
        another one continues after the tokens so far; what `placement` demands holds for each.
        Without `sampling` the answer may fill the model's context. Stops the engine if the caller
        stops iterating. Raises RouteError if the prompt is refused, GenerationError if the engine
        refuses it or MIGRATIONS workers were lost.
        """
        if model not in (None, self._router.model):
            raise InvalidRouteRequest(f"this router places prompts of {self._router.model} only")
        hints = hints or Hints()
        sampling = sampling or Sampling(max_tokens=max(self._context() - len(token_ids), 1))
        generated: list[int] = []
        lost: list[str] = []
        while True:
            # no name follows from that of another attempt, whose worker knows it
            request_id = f"{self._service.name}-{secrets.token_hex(8)}"
            prompt = [*token_ids, *generated]
            if lost:
                worker_id = dp_rank = None
            worker = await self.best_worker(
                prompt,
                request_id=request_id,
                router_config_override=router_config_override,
                max_tokens=sampling.max_tokens - len(generated),
                hints=hints,
                placement=self._narrowed(placement or Placement(), worker_id, dp_rank, lost),
                adapter=adapter,
                tenant=tenant,
                timeout=timeout,
            )
            work = Work(
                request=request_id,
                frontend=self._service.instance,
                tokens=pack(prompt),
                sampling=sampling,
                salt=self._salt(adapter, tenant),
                adapter=adapter,
                rank=worker.dp_rank,
                priority=hints.priority,
                generated=len(generated),
                session=hints.session,
                parent_session=hints.parent_session,
                conversation=hints.conversation,
                ephemeral=hints.ephemeral,
                tenant=tenant,
                retention=list(retention),
                decode=decode_retention,
            )
            try:
                answer = generate(self._service.bus, worker.worker_id, work, timeout)
                async with aclosing(answer) as chunks:
                    async for chunk in chunks:
                        if chunk.tokens and len(generated) == work.generated:
                            await self.mark_prefill_complete(request_id)
                        generated += chunk.tokens
                        yield GeneratedTokens(token_ids=chunk.tokens, finish_reason=chunk.finish)
                return
            except GenerationError as error:
                lost.append(worker.worker_id)
                if error.invalid or len(lost) > MIGRATIONS:
                    raise
                log.warning("%s moves after %d tokens: %s", request_id, len(generated), error)
            finally:
                await self.free(request_id)
            if len(generated) >= sampling.max_tokens:
                yield GeneratedTokens(token_ids=[], finish_reason="length")
                return

    async def mark_prefill_complete(self, request_id: str) -> None:
        """Record a placed prompt's first token: it no longer counts as prefill."""
        await self._publish(SeqPrefilled(request_id))

    async def free(self, request_id: str) -> None:
        """Free a placed or waiting prompt; unknown ids are ignored."""
        await self._publish(SeqFree(request_id))

    async def _publish(self, event: SeqEvent) -> None:
        self._router.apply(event)
        self._router.schedule_placement()
        self._router.publish([event])

    async def _place(self, request: RouteRequest) -> BestWorker:
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
        return BestWorker(result.instance, result.rank, sum(result.overlap))

    def _narrowed(
        self, placement: Placement, worker_id: str | None, dp_rank: int | None, lost: list[str]
    ) -> Placement:
        """`placement` with the worker and rank that the caller chose, without the lost ones."""
        if worker_id is not None:
            cards = self._router.core.table.cards.values()
            named = [card.instance for card in cards if card.name == worker_id]
            placement = replace(placement, instance=named[0] if named else worker_id)
        if dp_rank is not None:
            placement = replace(placement, rank=dp_rank)
        return replace(placement, exclude=[*placement.exclude, *lost])

    def _context(self) -> int:
        """The model's longest context in tokens."""
        cards = self._router.core.table.cards.values()
        return min((card.model.context for card in cards if card.model is not None), default=1)

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
