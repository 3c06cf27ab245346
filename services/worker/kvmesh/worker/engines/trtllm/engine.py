"""Embedded TensorRT-LLM: its `LLM` as an engine of the mesh.

Written against the published LLM API (`llmapi`, its sources and documentation), of which no release
has been run. Its priorities are 0 to 1 for scheduling and 0 to 100 (default 35) for retention;
higher is more important in both.
"""

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm import __version__ as trtllm_version
from tensorrt_llm.llmapi import (
    DisaggregatedParams,
    GuidedDecodingParams,
    KvCacheConfig,
    KvCacheRetentionConfig,
)

from kvmesh.bus.log_once import LogOnce
from kvmesh.bus.messages import Capacity, Clear, Guided, Load, Sampling, Work
from kvmesh.hashing import TOKEN_BYTES
from kvmesh.retention.claims import DEFAULT_LEVEL, MAX_LEVEL, RetentionWish
from kvmesh.retention.token_ranges import segments
from kvmesh.worker.adapters.base import StreamingAdapter
from kvmesh.worker.adapters.engine_args import engine_arguments, refusal
from kvmesh.worker.adapters.kv_events.ledger import CacheLedger
from kvmesh.worker.adapters.kv_events.paced_dumps import PacedDumps
from kvmesh.worker.adapters.kv_events.salts import PromptSalts
from kvmesh.worker.adapters.request_streams import (
    EngineUnavailable,
    RequestStreams,
    StepClock,
    StreamOutput,
    remaining,
)
from kvmesh.worker.adapters.vllm_fields import choice_pattern
from kvmesh.worker.adapters.weights.linked_folder import LinkedArgument
from kvmesh.worker.clearing import ENGINE, HOST, ClearOutcome, named_tiers
from kvmesh.worker.engine import (
    EngineContext,
    EngineError,
    EngineInfo,
    Rejected,
    Sink,
)
from kvmesh.worker.enginecore.counters import LedgerCounts
from kvmesh.worker.engines.retention_settings import retention_options
from kvmesh.worker.engines.trtllm.events import EventReader
from kvmesh.worker.model_folder import model_context

log = logging.getLogger(__name__)
POLL_S = 0.05
EVENT_BUFFER = 65536
NOT_CLEARED = "TensorRT-LLM's API cannot clear its cache"
# fields of the context phase's DisaggregatedParams that the generation phase gets
HANDOFF = (
    "first_gen_tokens",
    "ctx_request_id",
    "opaque_state",
    "draft_tokens",
    "disagg_request_id",
    "ctx_dp_rank",
    "ctx_info_endpoint",
)


class TrtllmEngine(StreamingAdapter):
    """TensorRT-LLM with the arguments of `[trtllm]` for the model in the folder: one rank.

    Under attention data parallelism the rank holds all blocks.
    """

    def __init__(self, context: EngineContext) -> None:
        super().__init__()
        worker, trtllm = context.settings.worker, context.settings.trtllm
        arguments = engine_arguments(trtllm.args, trtllm.args_file)
        self._kv_cache = {
            "enable_block_reuse": True,
            "event_buffer_max_size": EVENT_BUFFER,
            "tokens_per_block": worker.block_size,
            **arguments.pop("kv_cache_config", {}),
        }
        if worker.context:
            arguments.setdefault("max_seq_len", worker.context)
        if worker.serves != "aggregated":
            arguments.setdefault("cache_transceiver_config", {"backend": "DEFAULT"})
        if worker.serves == "prefill":
            # overlap serves decoding, of which a context phase has none
            arguments.setdefault("disable_overlap_scheduler", True)
        self._arguments = {"model": str(context.folder), **arguments}
        self._context = arguments.get("max_seq_len") or model_context(context.folder)
        self._model = LinkedArgument(context.weights, context.folder, "model")
        self._block_size = int(self._kv_cache["tokens_per_block"])
        self._defaults = retention_options(worker).defaults
        served = worker.served_name or context.folder.name
        self._salts = PromptSalts(served, self._block_size)
        self._reader = EventReader(self._block_size)
        self._ledger = CacheLedger(self._block_size, self._salts.root_salt)
        self._malformed, self._last_error = 0, ""
        self._logged = LogOnce()
        self._clock = StepClock()
        self._stats: dict[str, Any] = {}
        self._llm: Any = None
        self._dumps: PacedDumps | None = None

    async def start(self, sink: Sink) -> EngineInfo:
        try:
            self._llm = await asyncio.to_thread(self._load)
        except Exception as error:  # TensorRT-LLM and its plugins raise any type
            self._model.close()
            raise EngineError(f"TensorRT-LLM failed to start: {refusal(error)}") from error
        self._dumps = PacedDumps(lambda: sink.events(0, self._ledger.dump()))
        self._streams = RequestStreams(sink, 1, self._block_size)
        self._tasks.start(self._follow_events(sink), "trtllm events")
        self._tasks.start(self._follow_stats(), "trtllm stats")
        return self._describe()

    def submit(self, work: Work) -> None:
        if self._streams is None:
            raise Rejected("the engine has not started")
        if work.rank:
            raise Rejected(f"there is no rank {work.rank}")
        if work.adapter is not None:
            raise Rejected("this engine serves no adapters")
        fields = self._request(work)
        self._salts.remember(work)
        matched = self._ledger.cached_tokens(work) if self._salts.is_exclusive(work) else 0
        cached = min(matched, len(work.tokens) // 4 - 1)
        self._streams.start(work, self._generate(fields, cached))

    def load(self, instance: str) -> list[Load]:
        if self._streams is None:
            return []
        kv = self._stats.get("kvCacheStats") or {}
        active, waiting = kv.get("usedNumBlocks"), self._stats.get("numQueuedRequests")
        return [
            self._streams.load(
                instance, 0, kv.get("maxNumBlocks", 0), len(self._ledger), waiting, active
            )
        ]

    def dump(self, rank: int) -> None:
        if rank == 0 and self._dumps is not None:
            self._dumps.make()

    async def clear(self, command: Clear) -> ClearOutcome:
        own = (ENGINE, HOST) if self._kv_cache.get("host_cache_size") else (ENGINE,)
        named = [tier for tier in own if tier in named_tiers(command)]
        return ClearOutcome(0, dict.fromkeys(named, NOT_CLEARED))

    async def close(self) -> None:
        await self._stop_streams()
        if self._dumps is not None:
            self._dumps.close()
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)
        self._model.close()

    def _load(self) -> Any:
        self._model.resolve(self._arguments)
        return LLM(**self._arguments, kv_cache_config=KvCacheConfig(**self._kv_cache))

    def _describe(self) -> EngineInfo:
        return EngineInfo(
            name="trtllm",
            version=trtllm_version,
            context=self._context,
            block_size=self._block_size,
            retention="honoured",
            supports_handoff="cache_transceiver_config" in self._arguments,
            structural_tags=self._arguments.get("guided_decoding_backend") == "xgrammar",
            capacity=Capacity(
                blocks=(self._stats.get("kvCacheStats") or {}).get("maxNumBlocks", 0),
                max_sequences=self._arguments.get("max_batch_size") or 256,
                max_batched_tokens=self._arguments.get("max_num_tokens") or 8192,
            ),
        )

    def _request(self, work: Work) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "inputs": array("I", work.tokens).tolist(),
            "sampling_params": _sampling(remaining(work)),
            "streaming": not work.prefill,
            "priority": scheduling_priority(work.priority),
            "cache_salt": self._salts.cache_salt(work),
        }
        retention = _retention(work, self._defaults)
        if retention is not None:
            fields["kv_cache_retention_config"] = retention
        if work.prefill:
            fields["disaggregated_params"] = DisaggregatedParams(request_type="context_only")
        elif work.handoff:
            fields["disaggregated_params"] = _disaggregated(work.handoff)
        return fields

    async def _generate(self, fields: dict[str, Any], cached: int) -> AsyncIterator[StreamOutput]:
        try:
            result = self._llm.generate_async(**fields)
        except ValueError as error:
            raise Rejected(str(error)) from error
        seen, finish = 0, None
        try:
            async for output in result:
                completion = output.outputs[0]
                finish = completion.finish_reason
                yield _output(completion, seen, cached)
                seen = len(completion.token_ids)
        except RuntimeError as error:
            raise EngineUnavailable(f"TensorRT-LLM aborted the request: {error}") from error
        finally:
            if finish is None:
                result.abort()

    async def _follow_events(self, sink: Sink) -> None:
        while True:
            async for event in _until_empty(self._llm.get_kv_cache_events_async(POLL_S)):
                self._apply_event(event, sink)
            await asyncio.sleep(POLL_S)

    def event_counts(self) -> list[LedgerCounts]:
        counts = self._ledger.counts(0, self._malformed, self._last_error)
        reader = self._reader
        return [replace(counts, lost=reader.missed, limits=sorted(reader.limits))]

    def _apply_event(self, event: dict[str, Any], sink: Sink) -> None:
        before = self._reader.missed
        try:
            _, events = self._reader.read(event)
        except ValueError as error:
            self._malformed += 1
            self._last_error = str(error)
            if self._logged.first(self._last_error):
                log.warning("%s", error)
            return
        if self._reader.missed > before:
            log.warning("%d KV events lost", self._reader.missed - before)
            if self._dumps is not None:
                self._dumps.request()
        published = self._ledger.apply(events)
        if published:
            sink.events(0, published)

    async def _follow_stats(self) -> None:
        while True:
            async for stats in _until_empty(self._llm.get_stats_async(POLL_S)):
                self._stats = stats
                if self._streams is not None:
                    self._streams.counters[0].steps = self._clock.update(stats.get("iter"))
            await asyncio.sleep(POLL_S)


async def _until_empty(results: Any) -> AsyncIterator[dict[str, Any]]:
    """The queued results; an empty queue ends the iteration with any of three exceptions."""
    try:
        async for result in results:
            yield result
    except (IndexError, asyncio.QueueEmpty, TimeoutError):
        return


def scheduling_priority(priority: int) -> float:
    """Map any integer to a float between 0 and 1, order preserved; 0 maps to the default 0.5."""
    return 0.5 + priority / (2 * (1 + abs(priority)))


def _retention(work: Work, defaults: Mapping[str, RetentionWish]) -> Any:
    """Retention of the requested ranges; the rest follows the request's priority.

    None if all is default. Ranges may not overlap and do not cover generated tokens.
    """
    prompt = len(work.tokens) // TOKEN_BYTES - work.generated
    wishes = segments(work.retention, work.decode, prompt, 1, defaults)
    rest = RetentionWish(_level(DEFAULT_LEVEL + work.priority))
    if not wishes and rest.is_default:
        return None
    spans = []
    at, output = 0, rest
    for first, end, wish in wishes:
        spans += _span(at, min(first, prompt), rest) + _span(
            first, min(end or prompt, prompt), wish
        )
        at, output = end or prompt, wish if end is None else rest
    spans += _span(at, prompt, rest)
    return KvCacheRetentionConfig(spans, _level(output.level), _duration(output))


def _span(start: int, end: int, wish: RetentionWish) -> list[Any]:
    if start >= end or wish.is_default:
        return []
    make = KvCacheRetentionConfig.TokenRangeRetentionConfig
    return [make(start, end, _level(wish.level), _duration(wish))]


def _level(level: int) -> int:
    return max(0, min(MAX_LEVEL, level))


def _duration(wish: RetentionWish) -> timedelta | None:
    return None if wish.ttl_s is None else timedelta(seconds=wish.ttl_s)


def _sampling(sampling: Sampling) -> SamplingParams:
    fields: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens or None,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or None,
        "min_p": sampling.min_p or None,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": sampling.stop_token_ids or None,
        "ignore_eos": sampling.ignore_eos,
        "seed": sampling.seed,
        "logprobs": sampling.logprobs,
        "detokenize": False,
    }
    if sampling.logit_bias:
        raise Rejected("this engine does not support logit_bias")
    if sampling.guided is not None:
        fields["guided_decoding"] = _guided(sampling.guided)
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        raise Rejected(str(error)) from error


def _guided(guided: Guided) -> Any:
    names = {"json_schema": "json", "grammar": "grammar", "regex": "regex"}
    if guided.kind == "json_object":
        return GuidedDecodingParams(json_object=True)
    if guided.kind == "structural_tag":
        return GuidedDecodingParams(structural_tag=guided.value)
    if guided.kind == "choice":
        return GuidedDecodingParams(regex=choice_pattern(guided.value))
    return GuidedDecodingParams(**{names[guided.kind]: guided.value})


def _disaggregated(handoff: dict[str, Any]) -> Any:
    known = {key: handoff[key] for key in HANDOFF if handoff.get(key) is not None}
    return DisaggregatedParams(request_type="generation_only", **known)


def _handed_off(params: Any) -> dict[str, Any]:
    """The set fields of the context phase's parameters; versions differ in those that they have."""
    fields = {key: getattr(params, key, None) for key in HANDOFF}
    return {key: value for key, value in fields.items() if value is not None}


def _output(completion: Any, seen: int, cached: int) -> StreamOutput:
    tokens = list(completion.token_ids[seen:])
    rows = completion.logprobs[seen:] if completion.logprobs else None
    logprobs = [{t: entry.logprob for t, entry in row.items()} for row in rows] if rows else None
    reason = completion.finish_reason
    if reason in ("cancelled", "timeout"):
        raise EngineUnavailable(f"TensorRT-LLM aborted the request ({reason})")
    params = completion.disaggregated_params
    handoff = None if params is None else _handed_off(params)
    finish = None if reason is None else "length" if reason == "length" else "stop"
    if handoff is not None and reason == "not_finished":
        finish = "length"
    return StreamOutput(tokens, finish, cached, logprobs, handoff)
