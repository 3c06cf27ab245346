"""Embedded vLLM: `AsyncLLM` as an engine of the mesh.

vLLM starts its scheduler in another process and publishes KV events over ZeroMQ, with replay, on
sockets in a private folder.
"""

import asyncio
import logging
import os
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm import __version__ as vllm_version
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError, VLLMError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from kvmesh.bus.messages import (
    GENERATE,
    Capacity,
    Clear,
    Guided,
    Load,
    Pooling,
    Prefetch,
    StartPhase,
    Work,
)
from kvmesh.worker.adapters.connector_stores import plain_config
from kvmesh.worker.adapters.engine_args import refusal
from kvmesh.worker.adapters.engine_stores import EngineStore, clear_vllm, vllm_stores
from kvmesh.worker.adapters.kv_events.feed import EventFeed
from kvmesh.worker.adapters.kv_events.ledger import CacheLedger
from kvmesh.worker.adapters.kv_events.salts import PromptSalts
from kvmesh.worker.adapters.kv_events.subscriber import event_endpoints
from kvmesh.worker.adapters.prefetching.adapter import PrefetchingAdapter
from kvmesh.worker.adapters.request_origin import KEY, origin_params
from kvmesh.worker.adapters.request_streams import (
    EngineUnavailable,
    RequestStreams,
    StreamOutput,
    remaining,
)
from kvmesh.worker.adapters.vllm_fields import sampling_fields, structured_outputs
from kvmesh.worker.capabilities import TierCounts
from kvmesh.worker.clearing import ClearOutcome
from kvmesh.worker.engine import (
    EngineConfigError,
    EngineError,
    EngineInfo,
    Rejected,
    Sink,
    Unsupported,
)
from kvmesh.worker.engines.vllm.adapters import VllmAdapters
from kvmesh.worker.engines.vllm.connectors.known import hands_off
from kvmesh.worker.engines.vllm.connectors.outcome import changed_arguments, check_connectors
from kvmesh.worker.engines.vllm.constraints import Constraints
from kvmesh.worker.engines.vllm.fork_servers.servers import ForkServers
from kvmesh.worker.engines.vllm.images.prompts import ImagePrompts, image_prompts
from kvmesh.worker.engines.vllm.kvbm.refused_subjects import OnRefused, refusals_heard
from kvmesh.worker.engines.vllm.parking.configuration import park_ranks
from kvmesh.worker.engines.vllm.parking.gate import ParkingGate
from kvmesh.worker.engines.vllm.pooling.models import least_blocks, task_of
from kvmesh.worker.engines.vllm.pooling.requests import pooled
from kvmesh.worker.engines.vllm.process_guard import ProcessGuard, spawned
from kvmesh.worker.engines.vllm.scheduler_stats import (
    RankStats,
    StatsCollector,
    managed_ranks,
    tier_counts,
)
from kvmesh.worker.engines.vllm.sleep_mode import SleepMode, died
from kvmesh.worker.engines.vllm.start_phases.listener import imports_follow, start_phases_told
from kvmesh.worker.engines.vllm.stopped_processes import any_stopped
from kvmesh.worker.engines.vllm.tracing import ENDPOINT, trace_headers
from kvmesh.worker.engines.vllm.transfer_config import (
    handing_off,
    is_multi,
    serves_any_role,
    transfer_config_of,
)
from kvmesh.worker.images import ImageStore, with_placeholders
from kvmesh.worker.scratch import ScratchFolder
from kvmesh.worker.start.timeline import StartTimeline

log = logging.getLogger(__name__)
HEALTH_S = 0.5
STOPPED_S = 3.0
ABANDON_S = 3.0  # nothing is lost with ranks that have no device
READY_TIMEOUT = "VLLM_ENGINE_READY_TIMEOUT_S"
DAY_S = 86400  # vLLM's own 600 s end the load of a large model
# structured-output backends that support `format` trees
TAGGING = ("auto", "xgrammar")
_FINISH = {"stop": "stop", "length": "length", "repetition": "stop"}


class VllmEngine(PrefetchingAdapter):
    """One `AsyncLLM` with one or more data-parallel ranks.

    `retains`: `KvmeshRetentionConnector` receives the origin of each request.
    """

    retains = False

    def __init__(
        self,
        arguments: dict[str, Any],
        adapters: VllmAdapters,
        served: str,
        compile_timeout_s: float,
        tiered: bool,
        warnings: dict[str, str],
        timeline: StartTimeline,
        sleep_mode: SleepMode,
        servers: ForkServers | None = None,
        on_refused: OnRefused = lambda _, __: None,
    ) -> None:
        super().__init__()
        self._on_refused = on_refused
        self._hearing = AsyncExitStack()
        self._sleep_mode = sleep_mode
        self._timeline = timeline
        self._servers = servers
        self._tiered = tiered
        self._warnings = warnings
        self._compile_timeout_s = compile_timeout_s
        self._arguments = arguments
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault(READY_TIMEOUT, str(DAY_S))
        self._traces = arguments.get(ENDPOINT) is not None
        self._adapters = adapters
        self._served = served
        self._folder = ScratchFolder()
        self._llm: Any = None
        self._gate: ParkingGate | None = None
        self._loading: asyncio.Task[AsyncLLM] | None = None
        self._collector = StatsCollector()
        self._guard: ProcessGuard | None = None
        self._constraints: Constraints | None = None
        self._processes: list[int] = []
        self._salts = PromptSalts(served, 1)
        self._handing: list[dict[str, Any]] = []  # the connectors that hand KV off
        self._loads = is_multi(arguments.get("kv_transfer_config"))
        self._stats: list[RankStats] = []
        self._ledgers: list[CacheLedger] = []
        self._blocks = 0
        self._block_size = 1
        self._task = GENERATE
        self.images = ImageStore()
        self._image_prompts: ImagePrompts | None = None

    async def park(self) -> None:
        self._gate = gate = ParkingGate(self._folder.path)
        await gate.open()
        self._loading = loading = self._begin_load()
        parked = asyncio.create_task(gate.parked())
        await asyncio.wait({parked, loading}, return_when=asyncio.FIRST_COMPLETED)
        parked.cancel()
        if loading.done():
            raise await self.lost()

    async def lost(self) -> EngineError:
        if self._llm is not None:
            return await died(self._llm, HEALTH_S)
        try:
            await self._loaded()
        except EngineError as error:
            return error
        return EngineError("vLLM did not wait to be promoted")

    def _begin_load(self) -> asyncio.Task[AsyncLLM]:
        if self._guard is None:
            self._guard = ProcessGuard(self._roots)
        return asyncio.create_task(self._load_told(), name="vllm start")

    def _roots(self) -> list[int]:
        servers = self._servers.processes if self._servers is not None else []
        return spawned() + servers

    async def _load_told(self) -> AsyncLLM:
        hearing = refusals_heard(self._folder.path, self._on_refused)
        await self._hearing.enter_async_context(hearing)
        async with start_phases_told(self._folder.path, self._timeline):
            if self._servers is None:
                return await asyncio.to_thread(self._load)
            with self._servers.used():
                llm = await asyncio.to_thread(self._load)
            await asyncio.to_thread(self._servers.remember)
            return llm

    async def _loaded(self) -> AsyncLLM:
        """The engine once it runs; raises EngineError."""
        if self._loading is None:
            self._loading = self._begin_load()
        try:
            return await asyncio.shield(self._loading)
        except EngineConfigError:
            raise
        except Exception as error:  # vLLM and its plugins raise any type
            raise EngineError(f"vLLM failed to start: {_cause(error)}") from error

    async def start(self, sink: Sink) -> EngineInfo:
        if self._llm is None:
            await self._start_llm()
        else:
            with self._timeline.phase(StartPhase.WEIGHTS):
                await self._sleep_mode.wake(self._llm)
        return self._serve(sink)

    def cannot_sleep(self) -> str:
        return self._sleep_mode.problem

    async def sleep(self) -> None:
        await self._pause_streams()
        self._streams = self._prefetches = None
        await self._sleep_mode.sleep(self._llm)

    async def _start_llm(self) -> None:
        if self._gate is not None:
            await self._gate.release()
        try:
            self._llm = await self._loaded()
        except EngineError:
            self._folder.close()
            raise
        self._processes = spawned()
        if self._guard is not None:
            self._guard.settled()
        await self._adapters.open(self._llm)
        config = self._llm.vllm_config
        self._task = await task_of(self._llm)
        if self._task == GENERATE:
            self._image_prompts = await image_prompts(self._llm)
            self._constraints = Constraints(config, self._folder.path, self._compile_timeout_s)
            # importing vLLM takes seconds, which only requests with constraints wait for
            self._tasks.start(_open(self._constraints), "trial process")
        cache, ranks = config.cache_config, managed_ranks(self._llm)
        self._block_size = cache.block_size
        self._blocks = max(cache.num_gpu_blocks, least_blocks(config))
        self._salts = PromptSalts(self._served, cache.block_size)
        self._stats = [self._collector.rank(rank) for rank in ranks]
        self._ledgers = [CacheLedger(cache.block_size, self._salts.root_salt) for _ in ranks]

    def _serve(self, sink: Sink) -> EngineInfo:
        """Pass requests to vLLM and its events to `sink`; the cache is empty."""
        config = self._llm.vllm_config
        cache = config.cache_config
        self._streams = RequestStreams(sink, len(self._stats), cache.block_size)
        if self._task == GENERATE:
            self._open_prefetches(
                self._streams,
                self._ledgers,
                lambda work: self._generate(work, self._sampling(work)),
                cache.block_size,
                config.model_config.max_model_len,
                config.scheduler_config.max_num_batched_tokens,
                self._tiered,
            )
        self._follow(sink)
        self._tasks.start(self._watch(), "vllm health")
        return self._describe(config)

    def submit(self, work: Work) -> None:
        if self._streams is None:
            raise Rejected("the engine has not started")
        if not 0 <= work.rank < len(self._ledgers):
            raise Rejected(f"there is no rank {work.rank}")
        if work.adapter is not None and work.adapter not in self._adapters:
            raise Rejected(f"there is no adapter {work.adapter}")
        if work.pooling is not None:
            self._streams.start(work, self._pool(work, work.pooling))
            return
        try:
            params = self._sampling(work)
        except (VLLMClientError, ValueError) as error:
            raise Rejected(str(error)) from error
        files = self.images.files(work.images)
        self._streams.start(work, self._paced(work.rank, self._generate(work, params, files)))
        self._end_prefetches_of(work)

    def prefetch(self, command: Prefetch) -> str:
        if command.adapter is not None and command.adapter not in self._adapters:
            return f"there is no adapter {command.adapter}"
        if self._task != GENERATE:
            return "the model generates no text"
        return super().prefetch(command)

    async def measure_image(self, width: int, height: int) -> int:
        if self._image_prompts is None:
            raise Unsupported("the model reads no images")
        return await self._image_prompts.measure(width, height)

    def max_adapter_rank(self) -> int:
        return self._adapters.max_rank

    async def load_adapter(self, identity: str, folder: Path) -> None:
        await self._adapters.load(identity, folder)

    async def unload_adapter(self, identity: str) -> None:
        await self._adapters.unload(identity)

    async def switch_role(self, serves: str) -> None:
        """Nothing to prepare: a request's `kv_transfer_params` say what becomes of its KV."""
        if not serves_any_role(self._handing):
            raise Unsupported(
                "the kv_role of vLLM's KV connector is not kv_both"
                if self._handing
                else "none of vLLM's KV connectors hands KV off to another engine"
            )

    def compiled(self, guided: Guided) -> bool:
        return self._constraints is not None and guided in self._constraints

    async def compile(self, guided: Guided) -> None:
        if self._constraints is None:
            raise Rejected("the engine has not started")
        await self._constraints.compile(guided)

    def load(self, instance: str) -> list[Load]:
        if self._streams is None:
            return []
        return [self._rank_load(self._streams, instance, rank) for rank in range(len(self._stats))]

    def tier_counts(self) -> TierCounts | None:
        if not self._stats or not (self._tiered or self._loads):
            return None
        return tier_counts(self._stats, self._block_size)

    async def clear(self, command: Clear) -> ClearOutcome:
        return await clear_vllm(self._stores, command, self._reset)

    async def close(self) -> None:
        await self._stop_streams()
        if self._llm is None and self._loading is not None:
            await self._abandon(self._loading)
        if self._constraints is not None:
            self._constraints.close()
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
            self._llm = None
        if self._guard is not None:
            await self._guard.close()
            self._guard = None
        if self._servers is not None:
            await asyncio.to_thread(self._servers.close)
        await self._hearing.aclose()
        self._folder.close()

    async def _abandon(self, loading: asyncio.Task[AsyncLLM]) -> None:
        """End a start that waits at the gate: its ranks fail, and so does vLLM."""
        if self._gate is not None:
            await self._gate.close()
        done, _ = await asyncio.wait({loading}, timeout=ABANDON_S)
        if not done:
            for child in active_children():
                child.kill()
        with suppress(Exception):
            (await loading).shutdown()

    def _load(self) -> AsyncLLM:
        arguments = {
            "kv_events_config": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                **event_endpoints(self._folder.path),
            },
            **self._arguments,
        }
        with self._timeline.phase(StartPhase.CONFIGURATION):
            try:
                engine_args = AsyncEngineArgs(**arguments)
                config = engine_args.create_engine_config(UsageContext.ENGINE_CONTEXT)
            except (TypeError, ValueError) as error:
                raise EngineConfigError(f"vLLM rejects its arguments: {refusal(error)}") from error
            check_connectors(self._arguments.get("kv_transfer_config"), config)
            self._handing = handing_off(transfer_config_of(config), hands_off)
            self._warnings |= changed_arguments(self._arguments, config)
            if self._gate is not None:
                park_ranks(config, engine_args.worker_cls, self._gate)
        imports_follow(self._timeline)
        return AsyncLLM.from_vllm_config(
            config,
            stat_loggers=[self._collector.logger],
            enable_log_requests=engine_args.enable_log_requests,
            disable_log_stats=engine_args.disable_log_stats,
        )

    def _follow(self, sink: Sink) -> None:
        for feed in self._feeds:  # of the time before
            feed.ledger.clear()
            feed.sink = sink
        if self._feeds:
            return
        sources = self._llm.get_kv_event_sources()
        for rank, managed in enumerate(managed_ranks(self._llm)):
            source = sources.get(managed)
            if source is None or not source.enable_kv_cache_events:
                continue
            feed = EventFeed(
                rank,
                self._ledgers[rank],
                sink,
                _connect_endpoint(source.endpoint),
                _connect_endpoint(source.replay_endpoint) if source.replay_endpoint else None,
                source.topic,
            )
            self._feeds.append(feed)
            feed.start()

    def _describe(self, config: Any) -> EngineInfo:
        scheduler, outputs = config.scheduler_config, config.structured_outputs_config
        return EngineInfo(
            reports_outcomes=self.retains,
            task=self._task,
            image_placeholder=self._image_prompts.placeholder if self._image_prompts else "",
            name="vllm",
            version=vllm_version,
            context=config.model_config.max_model_len,
            block_size=config.cache_config.block_size,
            adapters=self._adapters.identities,
            supports_handoff=bool(self._handing),
            tiered=self._tiered,
            structural_tags=outputs.backend in TAGGING,
            exempts_thinking=bool(outputs.reasoning_parser) and not outputs.enable_in_reasoning,
            kv_layout=_kv_layout(config),
            warnings=self._warnings,
            devices=config.parallel_config.world_size,
            capacity=Capacity(
                blocks=self._blocks,
                max_sequences=scheduler.max_num_seqs,
                max_batched_tokens=scheduler.max_num_batched_tokens,
                dp_ranks=len(self._ledgers),
            ),
        )

    def _sampling(self, work: Work) -> SamplingParams:
        sampling = remaining(work)
        guided = sampling.guided
        return SamplingParams(
            **sampling_fields(sampling),
            logit_bias=sampling.logit_bias or None,
            detokenize=False,
            extra_args=self._extra_args(work),
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=None
            if guided is None
            else StructuredOutputsParams(**structured_outputs(guided)),
        )

    def _extra_args(self, work: Work) -> dict[str, Any] | None:
        """`extra_args` with the parameters of the KV handoff and of kvmesh's connectors, if any."""
        handoff = {"do_remote_decode": True} if work.prefill else work.handoff or {}
        wanted = self._tiered or self._loads or self.retains
        params = {**handoff, **(origin_params(work) if wanted else {})}
        return {"kv_transfer_params": params} if params else None

    async def _generate(
        self, work: Work, params: SamplingParams, files: Sequence[bytes] = ()
    ) -> AsyncGenerator[StreamOutput, None]:
        prompt = await self._prompt_with_images(work, files)
        outputs = self._llm.generate(
            prompt,
            params,
            work.request,
            lora_request=self._adapters.begin(work.adapter),
            trace_headers=trace_headers(work) if self._traces else None,
            priority=-work.priority,
            data_parallel_rank=work.rank if len(self._ledgers) > 1 else None,
        )
        stats = self._stats[work.rank]
        stats.begin()
        try:
            async for output in outputs:
                below = stats.below(work.request, self._block_size)
                yield _output(output, below, stats.outcomes(work.request))
        except (VLLMError, EngineDeadError, ValueError) as error:
            raise _translated(error) from error
        finally:
            stats.forget(work.request)
            await outputs.aclose()
            self._adapters.end(work.adapter)

    async def _pool(self, work: Work, pooling: Pooling) -> AsyncGenerator[StreamOutput, None]:
        """The vectors of all inputs, which vLLM computes together."""
        stats = self._stats[work.rank]
        stats.begin()
        lora = self._adapters.begin(work.adapter)
        headers = trace_headers(work) if self._traces else None
        try:
            prompt = partial(self._prompt, work)
            yield await pooled(self._llm, work, pooling, prompt, lora, headers)
        except (VLLMError, EngineDeadError, ValueError) as error:
            raise _translated(error) from error
        finally:
            stats.forget(work.request)
            self._adapters.end(work.adapter)

    async def _prompt_with_images(self, work: Work, files: Sequence[bytes]) -> dict[str, Any]:
        prompts = self._image_prompts
        if prompts is None or not work.images:
            return self._prompt(work, array("I", work.tokens).tolist())
        try:
            images = await prompts.data(work.images, files)
        except ValueError as error:
            raise Rejected(str(error)) from error
        tokens = with_placeholders(work.tokens, work.images, prompts.token)
        return self._prompt(work, tokens) | images

    def _prompt(self, work: Work, tokens: list[int]) -> dict[str, Any]:
        """A prompt of vLLM within the namespace of a work."""
        salt = self._salts.cache_salt(work)
        return {"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt is not None else {})

    def _rank_load(self, streams: RequestStreams, instance: str, rank: int) -> Load:
        stats = self._stats[rank]
        streams.counters[rank].steps = stats.counters.steps
        return streams.load(
            instance,
            rank,
            self._blocks,
            len(self._ledgers[rank]),
            stats.waiting,
            round(stats.usage * self._blocks),
            stats.preemptions,
            stats.counters.step_s,
            stats.counters.busy_s,
            stats.counters.prefill_steps,
            stats.load_ratio,
        )

    async def _reset(self, external: bool) -> bool:
        """Reset the whole prefix cache, and with `external` the stores; False if blocks are in use.

        vLLM publishes the event with its next step, which may be much later: clear the feeds here.
        """
        done: bool = await self._llm.reset_prefix_cache(reset_connector=external)
        if done:
            for feed in self._feeds:
                feed.clear()
        return done

    @property
    def _stores(self) -> list[EngineStore]:
        """vLLM's own stores, which its arguments may name in other ways than a connector's."""
        return vllm_stores(plain_config(self._llm.vllm_config.kv_transfer_config))

    async def _watch(self) -> None:
        """Fail all requests once vLLM has died, or all probes of STOPPED_S found it stopped."""
        stopped_probes = 0
        while not self._llm.errored and stopped_probes * HEALTH_S < STOPPED_S:
            await asyncio.sleep(HEALTH_S)
            stopped_probes = stopped_probes + 1 if any_stopped(self._processes) else 0
        reason = "has died; see its log" if self._llm.errored else "has been stopped (SIGSTOP)"
        if self._streams is not None:
            self._streams.fail(EngineError(f"vLLM {reason}"))


def _output(output: Any, below: list[int], retention: list[str] | None) -> StreamOutput:
    completion = output.outputs[0]
    reason = completion.finish_reason
    if reason in ("abort", "error"):
        raise EngineUnavailable(f"vLLM aborted the request ({reason})")
    params = dict(output.kv_transfer_params or {})
    of_output = params.pop(KEY, {})
    return StreamOutput(
        list(completion.token_ids),
        None if reason is None else _FINISH.get(reason, "stop"),
        output.num_cached_tokens,
        None
        if completion.logprobs is None
        else [
            {token: entry.logprob for token, entry in row.items()} for row in completion.logprobs
        ],
        params or None,
        below,
        retention,
        of_output.get("decode"),
        admitted_at=getattr(output.metrics, "scheduled_ts", None) or None,
    )


def _translated(error: BaseException) -> Exception:
    """The error of vLLM as one of the worker's."""
    if isinstance(error, EngineDeadError):
        return EngineError(f"vLLM has died: {_cause(error)}")
    if isinstance(error, VLLMClientError | ValueError):
        return Rejected(str(error))
    return EngineUnavailable(_cause(error))  # paused, busy, a failed load of KV, …


def _kv_layout(config: Any) -> str:
    dtype = str(config.cache_config.cache_dtype)
    return str(config.model_config.dtype).removeprefix("torch.") if dtype == "auto" else dtype


def _connect_endpoint(endpoint: str) -> str:
    return endpoint.replace("*", "127.0.0.1")


def _cause(error: BaseException) -> str:
    """The last line of the message: vLLM puts the reason there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


async def _open(constraints: Constraints) -> None:
    try:
        await constraints.open()
    except EngineError as error:
        log.warning("the trial process did not start: %s", error)
