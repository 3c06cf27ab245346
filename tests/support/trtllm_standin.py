"""A stand-in for the `tensorrt_llm` package: the published signatures and payloads, no model.

Signatures: tensorrt_llm/llmapi/llm.py; events: KVCacheEventSerializer in tensorrt_llm/_utils.py.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from support.api_server import ApiServer, Request

__version__ = "1.2.0"


@dataclass
class KvCacheConfig:
    enable_block_reuse: bool = True
    event_buffer_max_size: int = 0
    tokens_per_block: int = 32
    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = None
    host_cache_size: int | None = None


class KvCacheRetentionConfig:
    @dataclass
    class TokenRangeRetentionConfig:
        token_start: int
        token_end: int | None
        priority: int
        duration_ms: Any = None

    def __init__(
        self,
        token_range_retention_configs: list["KvCacheRetentionConfig.TokenRangeRetentionConfig"],
        decode_retention_priority: int = 35,
        decode_duration_ms: Any = None,
    ) -> None:
        self.token_range_retention_configs = token_range_retention_configs
        self.decode_retention_priority = decode_retention_priority
        self.decode_duration_ms = decode_duration_ms


@dataclass(kw_only=True)
class DisaggregatedParams:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None


@dataclass(kw_only=True)
class GuidedDecodingParams:
    json: str | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


@dataclass(kw_only=True)
class SamplingParams:
    max_tokens: int = 32
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    detokenize: bool = True
    guided_decoding: GuidedDecodingParams | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None and self.temperature < 0:
            raise ValueError("require temperature >= 0")


@dataclass
class CompletionOutput:
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[dict[int, Any]] | None = None
    disaggregated_params: DisaggregatedParams | None = None


class RequestOutput:
    """Iterates over itself with growing output, as TensorRT-LLM's does."""

    def __init__(self, server: ApiServer, request: Request, disaggregated: Any) -> None:
        self.outputs = [CompletionOutput([])]
        self._server = server
        self._request = request
        self._disaggregated = disaggregated

    def __aiter__(self) -> AsyncIterator["RequestOutput"]:
        return self._steps()

    async def _steps(self) -> AsyncIterator["RequestOutput"]:
        [output] = self.outputs
        while output.finish_reason is None:
            token, finish = await self._request.news.get()
            output.token_ids.append(token)
            if (count := self._request.body["logprobs"]) is not None:
                row = {(token + i) % 4000: SimpleNamespace(logprob=-0.1 - i) for i in range(count)}
                output.logprobs = [*(output.logprobs or []), row]
            output.finish_reason = finish
            if finish and self._disaggregated is not None:
                output.disaggregated_params = DisaggregatedParams(
                    first_gen_tokens=[token], ctx_request_id=7, opaque_state=b"\x00\xff"
                )
            yield self

    def abort(self) -> None:
        self._server.release(self._request)


class LLM:
    made: ClassVar[list["LLM"]] = []

    def __init__(self, model: str, kv_cache_config: KvCacheConfig, **kwargs: Any) -> None:
        if unknown := kwargs.keys() - {"max_seq_len", "max_batch_size", "max_num_tokens"}:
            raise ValueError(f"LlmArgs: extra fields not permitted: {unknown.pop()}")
        if not (Path(model) / "config.json").is_file():
            raise ValueError(f"{model} has no config.json")
        assert kv_cache_config.event_buffer_max_size > 0
        self.server: ApiServer | None = None
        self.size = kv_cache_config.tokens_per_block
        self.queue: deque[dict[str, Any]] = deque()
        self.calls: list[dict[str, Any]] = []
        self.next_id = 0
        self.emit({"type": "created", "num_blocks_per_cache_level": [64, 0]})
        LLM.made.append(self)

    def emit(self, data: dict[str, Any], window: int = 512) -> None:
        self.queue.append({"event_id": self.next_id, "data": data, "window_size": window})
        self.next_id += 1

    def _begin(self) -> ApiServer:
        if self.server is None:
            folder = Path("/nonexistent")
            self.server = ApiServer(folder, "sglang", block_size=self.size, zmq=False)
            self.server.events = self
            self.server.begin()
        return self.server

    async def send(self, *events: dict[str, Any]) -> None:
        for event in events:
            hashes = event["block_hashes"]
            if event["type"] == "BlockRemoved":
                self.emit({"type": "removed", "block_hashes": hashes})
                continue
            blocks = [self._block(event, index) for index in range(len(hashes))]
            parent = event["parent_block_hash"]
            self.emit({"type": "stored", "parent_hash": parent, "blocks": blocks})

    def _block(self, event: dict[str, Any], index: int) -> dict[str, Any]:
        tokens = event["token_ids"][index * self.size : (index + 1) * self.size]
        unique = {"type": "unique_token", "token_extra_id": 0}
        return {
            "type": "stored_block",
            "block_hash": event["block_hashes"][index],
            "tokens": [unique | {"token_id": token} for token in tokens],
            "cache_level": 0,
            "priority": 35,
        }

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
        disaggregated_params: DisaggregatedParams | None = None,
        trace_headers: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        self.calls.append({key: value for key, value in locals().items() if key != "self"})
        assert streaming
        assert 0 <= priority <= 1
        params = sampling_params or SamplingParams()
        server = self._begin()
        body = {"priority": priority, "logprobs": params.logprobs}
        request = server.enter(body, inputs, params.max_tokens, params.stop_token_ids or [])
        request.extra = cache_salt
        return RequestOutput(server, request, disaggregated_params)

    async def get_kv_cache_events_async(
        self, timeout: float | None = 2
    ) -> AsyncIterator[dict[str, Any]]:
        while self.queue:
            yield self.queue.popleft()
        raise asyncio.QueueEmpty

    async def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        server = self._begin()
        used = sum(users > 0 for users in server.held.values())
        yield {
            "iter": server.steps,
            "numActiveRequests": len(server.running),
            "numQueuedRequests": len(server.waiting),
            "kvCacheStats": {"maxNumBlocks": server.blocks, "usedNumBlocks": used},
        }
        raise asyncio.QueueEmpty

    def shutdown(self) -> None:
        if self.server is not None:
            self.server.stop()
