"""Sidecar engine: connects a running inference server to the mesh.

Requests go to the server over HTTP; its KV events arrive over ZeroMQ. Closing the connection aborts
a request. Until the server has reported the cached tokens of a prompt, and if it never does, the
count is that of the blocks known from events when the request was sent.
"""

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path

import aiohttp
import msgspec

from kvmesh.bus.messages import (
    GENERATE,
    Capacity,
    Clear,
    Load,
    Pin,
    Prefetch,
    Release,
    Unpin,
    Work,
)
from kvmesh.settings import redacted
from kvmesh.settings.schema import RemoteSettings, WorkerSettings
from kvmesh.worker.adapters import sglang_fields as sglang
from kvmesh.worker.adapters.kv_events.feed import EventFeed
from kvmesh.worker.adapters.kv_events.ledger import CacheLedger
from kvmesh.worker.adapters.kv_events.salts import PromptSalts
from kvmesh.worker.adapters.kv_events.subscriber import rank_endpoint
from kvmesh.worker.adapters.prefetching.adapter import PrefetchingAdapter
from kvmesh.worker.adapters.request_origin import origin_params
from kvmesh.worker.adapters.request_streams import RequestStreams, StepClock, StreamOutput
from kvmesh.worker.capabilities import TierCounts
from kvmesh.worker.clearing import ENGINE, ClearOutcome, named_tiers
from kvmesh.worker.engine import (
    NO_RETENTION,
    EngineConfigError,
    EngineContext,
    EngineError,
    EngineInfo,
    Rejected,
    Sink,
    Unsupported,
)
from kvmesh.worker.enginecore.counters import EngineCounters, RetentionState
from kvmesh.worker.engines.remote import completions, images
from kvmesh.worker.engines.remote.answers import ServerRequest, answer
from kvmesh.worker.engines.remote.clearing import clear_sglang_server, clear_vllm_server
from kvmesh.worker.engines.remote.direct_traffic import (
    DirectTraffic,
    OtherRequests,
    OwnRequests,
)
from kvmesh.worker.engines.remote.gauges import Gauges, lower_tiers
from kvmesh.worker.engines.remote.images import ServerImages
from kvmesh.worker.engines.remote.pooling import pooled, pooling_task
from kvmesh.worker.engines.remote.retention import ServerRetention
from kvmesh.worker.engines.remote.server import InferenceServer, ServerInfo
from kvmesh.worker.images import ImageStore, placeholder_of
from kvmesh.worker.lora.folder import AdapterError
from kvmesh.worker.model_folder import model_context

log = logging.getLogger(__name__)
MISSED_PROBES = 3
CONNECT_S = 5.0  # longest wait for a connection
ARGUMENTS_S = 120.0  # for which the first reply with a server's arguments may take
LINE_BYTES = 1 << 20
OTHER_RANKS = "other_ranks"  # a kind of warning
NO_CONNECTOR = "the server's metrics have no series of KvmeshConnector"
NO_CACHED_TOKENS = "the server does not report cached tokens (--enable-prompt-tokens-details)"


def create(context: EngineContext) -> "RemoteEngine":
    """Create the sidecar from `[remote]`; the model folder provides tokenizer and template."""
    worker, remote = context.settings.worker, context.settings.remote
    if not remote.url:
        raise EngineConfigError("--remote-url is missing: the URL of the inference server")
    served = worker.served_name or context.folder.name
    return RemoteEngine(worker, remote, served, context.folder)


class RemoteEngine(PrefetchingAdapter):
    """One server as an engine of the mesh."""

    def __init__(
        self, worker: WorkerSettings, remote: RemoteSettings, served: str, folder: Path
    ) -> None:
        super().__init__()
        self._worker = worker
        self._remote = remote
        self._served = served
        self._context = model_context(folder)
        self._placeholder = placeholder_of(folder)
        self._block_size = worker.block_size
        self._url = remote.url.rstrip("/")
        self._redacted_url = redacted(self._url)
        self._http: aiohttp.ClientSession | None = None
        self._server: InferenceServer | None = None
        self._salts = PromptSalts(served, worker.block_size)
        self._info = ServerInfo(model="", owner="")
        self._ledgers: list[CacheLedger] = []
        self._gauges = Gauges()
        self._of_ranks = [Gauges()] * remote.dp_ranks
        self._clock = StepClock()
        self._retention: ServerRetention | None = None
        self._task = GENERATE
        self.images = ImageStore()
        self._server_images: ServerImages | None = None
        self._reports_cached = False
        self._tier_counts: TierCounts | None = None
        self._served_tokens: list[int] | None = None
        self._traffic = DirectTraffic()
        self._own = OwnRequests()
        self._counters = EngineCounters()
        self._warnings: dict[str, str] = {}

    async def start(self, sink: Sink) -> EngineInfo:
        headers = {"Authorization": f"Bearer {key}"} if (key := self._remote.api_key) else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._http = aiohttp.ClientSession(
            headers=headers,
            timeout=timeout,
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=LINE_BYTES,
            json_serialize=_json,
        )
        self._server = InferenceServer(self._http, self._url)
        try:
            self._info = await self._server.describe(self._remote.model)
            self._check_ranks()
            await self._try_server(self._http, self._server)
            if not self._is_sglang:
                retention = ServerRetention(self._http, self._url)
                self._retention = retention if await retention.find() else None
                if retention.problem:
                    self._warnings[NO_RETENTION] = retention.problem
                await self._try_images(self._http)
            if self._remote.kvbm:
                self._tier_counts = (await self._server.gauges(self._info.model))[0].tiers
                if self._tier_counts is None:
                    log.warning("%s: no lower tiers, %s", self._redacted_url, NO_CONNECTOR)
            return self._open_streams(sink, self._server)
        except EngineError:
            await self._http.close()
            raise

    async def _try_server(self, http: aiohttp.ClientSession, server: InferenceServer) -> None:
        """Find out what the server's model is for; raises EngineError if it is for nothing."""
        model = self._info.model
        if self._is_sglang:
            if self._info.generates:
                return
            failure = EngineError(f"{self._redacted_url} neither generates text nor embeds it")
        else:
            try:
                self._reports_cached = await server.try_completion(model)
                return
            except EngineError as error:
                failure = error
        self._task = await pooling_task(http, self._url, model)
        if not self._task:
            raise failure

    async def _try_images(self, http: aiohttp.ClientSession) -> None:
        """Find out whether the server takes the images that the model's folder names."""
        if self._placeholder is None or self._task != GENERATE:
            return
        found = ServerImages(http, self._url, self._info.model, self._placeholder[0])
        if problem := await found.problem():
            log.warning("the model reads images, but this worker passes none on: %s", problem)
        else:
            self._server_images = found

    def _open_streams(self, sink: Sink, server: InferenceServer) -> EngineInfo:
        block_size = self._block_size = self._info.block_size or self._worker.block_size
        self._salts = PromptSalts(self._served, block_size)
        self._streams = RequestStreams(sink, self._remote.dp_ranks, block_size)
        counted = not self._is_sglang
        for rank in range(self._remote.dp_ranks):
            ledger = CacheLedger(block_size, self._salts.root_salt, counted)
            self._ledgers.append(ledger)
            if self._remote.kv_events:
                self._feeds.append(self._feed(rank, ledger, sink))
        for feed in self._feeds:
            feed.start()
        if self._reports_cached:
            self._open_prefetches(
                self._streams,
                self._ledgers,
                self._send,
                block_size,
                self._info.context or self._context,
                self._remote.max_batched_tokens,
                tiered=self._tier_counts is not None,
            )
        elif not self._is_sglang and self._task == GENERATE:
            log.info("%s: no prefetches, %s", self._redacted_url, NO_CACHED_TOKENS)
        self._tasks.start(self._watch(server), "server watch")
        if self._retention is None and not self._is_sglang:
            self._tasks.start(_ask_early(server), "server arguments")
        return self._describe(block_size)

    def _check_ranks(self) -> None:
        """Compare the configured ranks with the server's; raises EngineConfigError."""
        has, wanted = len(self._info.ranks), self._remote.dp_ranks
        if 0 < has < wanted:
            raise EngineConfigError(
                f"{self._redacted_url} has {has} of the {wanted} data-parallel ranks that"
                " remote.dp_ranks states"
            )
        if has > wanted:
            self._warnings[OTHER_RANKS] = (
                f"the server has {has} data-parallel ranks, remote.dp_ranks is {wanted}: the index"
                " does not know the blocks of the others"
            )

    @property
    def _ranks(self) -> Sequence[int]:
        """The ranks that this worker serves, among those of all servers of a deployment."""
        return (self._info.ranks or range(self._remote.dp_ranks))[: self._remote.dp_ranks]

    def _feed(self, rank: int, ledger: CacheLedger, sink: Sink) -> EventFeed:
        remote, published = self._remote, self._ranks[rank]
        replay = rank_endpoint(remote.kv_replay, published) if remote.kv_replay else None
        return EventFeed(rank, ledger, sink, rank_endpoint(remote.kv_events, published), replay)

    def submit(self, work: Work) -> None:
        if self._streams is None or self._http is None:
            raise Rejected("the engine has not started")
        if not 0 <= work.rank < self._remote.dp_ranks:
            raise Rejected(f"there is no rank {work.rank}")
        if work.pooling is not None:
            salt = self._salts.cache_salt(work)
            common = {"model": work.adapter or self._info.model, **self._priority(work)}
            common |= {} if salt is None else {"cache_salt": salt}
            outputs = pooled(self._http, self._url, common, work, work.pooling)
            self._streams.start(work, self._counted(outputs))
            return
        outputs = self._send(work)
        if self._is_sglang:
            self._salts.remember(work)
        exclusive = self._salts.is_exclusive(work)
        cached = self._ledgers[work.rank].cached_tokens(work) if exclusive else 0
        size = self._block_size
        cached = min(cached, (len(work.tokens) // 4 - 1) // size * size)
        self._streams.start(work, self._serve(work, self._paced(work.rank, outputs), cached))
        self._end_prefetches_of(work)

    async def measure_image(self, width: int, height: int) -> int:
        if self._server_images is None:
            raise Unsupported("the server of the openai engine takes no images")
        return await self._server_images.measure(width, height)

    def prefetch(self, command: Prefetch) -> str:
        if self._task != GENERATE:
            return "the model generates no text"
        if self._is_sglang:
            raise Unsupported("the openai engine does not prefetch with SGLang")
        if self._streams is not None and not self._reports_cached:
            raise Unsupported(NO_CACHED_TOKENS)
        return super().prefetch(command)

    async def release(self, sessions: list[str]) -> int:
        return await self._retaining_server().execute(Release(sessions=sessions))

    async def pin(self, pin: Pin) -> int:
        return await self._retaining_server().execute(pin)

    async def unpin(self, pin: str) -> int:
        return await self._retaining_server().execute(Unpin(pin))

    async def clear(self, command: Clear) -> ClearOutcome:
        if self._retention is not None:
            return await self._retention.clear(command)
        if self._server is None:
            raise EngineError("the engine has not started")
        clear = clear_sglang_server if self._is_sglang else clear_vllm_server
        outcome = await clear(self._server, command)
        if command.salt is None and ENGINE in named_tiers(command) and ENGINE not in outcome.kept:
            for feed in self._feeds:  # a server may publish the event with its next step only
                feed.clear()
        return outcome

    def retention(self) -> list[RetentionState]:
        return self._retention.states if self._retention is not None else []

    @property
    def _tells_tiers(self) -> bool:
        return self._reports_cached and self._retention is not None and self._retention.tells_tiers

    def _retaining_server(self) -> ServerRetention:
        if self._retention is None:
            raise Unsupported("the server of the openai engine has no plugin of kvmesh")
        return self._retention

    def max_adapter_rank(self) -> int:
        return 0

    async def load_adapter(self, identity: str, folder: Path) -> None:
        await self._adaptable_server().load_adapter(identity, str(folder))

    async def unload_adapter(self, identity: str) -> None:
        await self._adaptable_server().unload_adapter(identity)

    def _adaptable_server(self) -> InferenceServer:
        if self._server is None:
            raise AdapterError("the engine has not started")
        if self._is_sglang:
            raise Unsupported("the openai engine loads no adapters into SGLang")
        return self._server

    def load(self, instance: str) -> list[Load]:
        if self._streams is None:
            return []
        of_ranks = [self._gauges] if self._remote.dp_ranks == 1 else self._of_ranks
        blocks = self._blocks
        return [
            self._streams.load(
                instance,
                rank,
                blocks,
                len(ledger),
                gauges.waiting,
                None if gauges.usage is None else round(gauges.usage * blocks),
                step_s=self._counters.step_s,
                busy_s=self._counters.busy_s,
            )
            for rank, (ledger, gauges) in enumerate(zip(self._ledgers, of_ranks, strict=True))
        ]

    def tier_counts(self) -> TierCounts | None:
        return lower_tiers(self._tier_counts, self._served_tokens, self._block_size)

    async def close(self) -> None:
        await self._stop_streams()
        if self._http is not None:
            await self._http.close()

    @property
    def _is_sglang(self) -> bool:
        api = self._remote.api
        return api == "generate" or (api == "auto" and self._info.owner == "sglang")

    @property
    def _blocks(self) -> int:
        """Blocks of the server as reported, else as configured."""
        return self._info.blocks or self._remote.blocks

    def _describe(self, block_size: int) -> EngineInfo:
        worker, info = self._worker, self._info
        log.info("%s serves %s (%s %s)", self._redacted_url, info.model, info.owner, info.version)
        return EngineInfo(
            name="openai",
            reports_outcomes=self._retention is not None,
            warnings=self._warnings,
            task=self._task,
            image_placeholder=self._placeholder[1]
            if self._placeholder and self._server_images
            else "",
            version=f"{info.owner} {info.version}".strip(),
            context=worker.context or info.context or self._context,
            block_size=block_size,
            adapters=worker.adapters or info.adapters,
            structural_tags=True,
            tiered=self._tier_counts is not None,
            capacity=Capacity(
                blocks=self._blocks,
                max_sequences=info.max_sequences or self._remote.max_sequences,
                max_batched_tokens=self._remote.max_batched_tokens,
                dp_ranks=self._remote.dp_ranks,
            ),
        )

    def _request(self, work: Work) -> ServerRequest:
        """The HTTP request for work; raises Rejected."""
        tag = self._salts.cache_salt(work)
        priority = self._priority(work)
        headers = {"X-data-parallel-rank": str(work.rank)} if self._remote.dp_ranks > 1 else {}
        if self._is_sglang:
            tokens = array("I", work.tokens).tolist()
            return ServerRequest(
                url=f"{self._url}/generate",
                body=sglang.request_fields(work, tokens, tag) | priority,
                headers=headers,
                read=sglang.AnswerReader().read,
            )
        usage, path = self._reports_cached, "/v1/completions"
        if work.images and self._server_images is not None:
            path, files = images.PATH, self.images.files(work.images)
            body = self._server_images.request_fields(work, files, tag, usage)
        else:
            tokens = array("I", work.tokens).tolist()
            body = completions.request_fields(work, tokens, self._info.model, tag, usage)
        if self._retention is not None or self._tier_counts is not None:
            body["kv_transfer_params"] = origin_params(work)
        return ServerRequest(
            url=self._url + path,
            body=body | priority,
            headers=headers,
            read=completions.read_chunk,
            awaits_usage=usage,
        )

    def _priority(self, work: Work) -> dict[str, int]:
        """The field of a body that states a work's priority, if the server has one."""
        polarity = {"none": 0, "higher": 1, "lower": -1}[self._remote.priority]
        return {"priority": polarity * work.priority} if polarity else {}

    def _send(self, work: Work) -> AsyncGenerator[StreamOutput, None]:
        """The outputs of a request, sent with the first; raises Rejected at once."""
        if self._http is None:
            raise Rejected("the engine has not started")
        return self._counted(answer(self._http, self._request(work)))

    async def _counted(
        self, stream: AsyncGenerator[StreamOutput, None]
    ) -> AsyncGenerator[StreamOutput, None]:
        """The outputs of a request that counts as this worker's until they end."""
        clock = asyncio.get_running_loop().time
        self._own.begin(clock())
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._own.end(clock())

    async def _serve(
        self, work: Work, stream: AsyncGenerator[StreamOutput, None], cached: int
    ) -> AsyncGenerator[StreamOutput, None]:
        """The outputs for a caller: with outcomes, and `cached` until the server reports it."""
        is_first = True
        async with aclosing(stream) as outputs:
            async for output in outputs:
                if is_first and output.cached is None:
                    output.cached, output.estimate = cached, True
                if self._retention is not None and _reports_now(output, work, is_first):
                    outcomes = await self._retention.outcomes(work.request)
                    output.retention, output.decode = outcomes
                if self._tells_tiers and output.finish is not None and output.cached:
                    output.below = await self._retaining_server().loaded(work.request)
                is_first = False
                yield output

    async def _watch(self, server: InferenceServer) -> None:
        failures = 0
        while failures < MISSED_PROBES:
            await asyncio.sleep(self._remote.probe_s)
            healthy = await server.healthy()
            failures = 0 if healthy else failures + 1
            if healthy:
                await self._poll(server)
                if self._retention is not None:
                    await self._retention.update()
        if self._streams is not None:
            self._streams.fail(EngineError(f"{self._redacted_url}/health does not reply"))

    async def _poll(self, server: InferenceServer) -> None:
        self._own.restart_most()
        gauges, self._of_ranks = await server.gauges(self._info.model, self._ranks)
        self._gauges = gauges
        now = asyncio.get_running_loop().time()
        self._served_tokens = gauges.served or self._served_tokens
        if self._tier_counts is not None:
            self._tier_counts = gauges.tiers or self._tier_counts
        steps, others = self._clock.update(gauges.steps), OtherRequests()
        if self._remote.dp_ranks == 1:
            others = self._traffic.update(gauges, self._own.most, now)
            for pacer in self._pacers:
                pacer.record_others(others.running, others.waiting)
        new = steps - self._counters.steps
        if new and gauges.steps is not None and self._remote.dp_ranks == 1:
            busy_s = self._own.take_busy_s(now)
            if others == OtherRequests():  # else the time is not that of this worker's tokens
                self._counters.count_steps(new, busy_s)
        self._counters.steps = steps
        for counters in self._streams.counters if self._streams is not None else ():
            counters.steps = steps


def _reports_now(output: StreamOutput, work: Work, is_first: bool) -> bool:
    """True if outcomes of explicit directives are to be known with this output."""
    if output.finish is not None and work.decode is not None and work.decode.explicit:
        return True
    return is_first and any(retain.explicit for retain in work.retention)


def _json(body: object) -> str:
    """JSON in a tenth of the standard library's time: prompts are lists of 100,000 numbers."""
    return msgspec.json.encode(body).decode()


async def _ask_early(server: InferenceServer) -> None:
    """A vLLM in its development mode looks at its machine for the first reply, which takes long.

    Later ones, when the cache is to be cleared, come at once.
    """
    with suppress(EngineError):
        await server.arguments(ARGUMENTS_S)
