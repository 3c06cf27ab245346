"""A stand-in for the `tensorrt_llm` package: its recorded interface, no model.

The record (`support.engine_api`), written by hand, has the accepted arguments.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from support.api_server import ApiServer, Request
from support.engine_api import recorded, recorded_class

RECORD = recorded("tensorrt_llm")
__version__ = RECORD.version
DEFAULT_LEVEL = 35
KvCacheConfig = recorded_class(
    RECORD, "KvCacheConfig", enable_block_reuse=True, event_buffer_max_size=0, tokens_per_block=32
)
DisaggregatedParams = recorded_class(RECORD, "DisaggregatedParams")
GuidedDecodingParams = recorded_class(RECORD, "GuidedDecodingParams", json_object=False)
_Sampling = recorded_class(RECORD, "SamplingParams", max_tokens=32, ignore_eos=False)
_Retention = recorded_class(
    RECORD, "KvCacheRetentionConfig", decode_retention_priority=DEFAULT_LEVEL
)


class KvCacheRetentionConfig(_Retention):  # type: ignore[misc, valid-type]
    TokenRangeRetentionConfig = recorded_class(RECORD, "TokenRangeRetentionConfig")


class SamplingParams(_Sampling):  # type: ignore[misc, valid-type]
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self.temperature is not None and self.temperature < 0:
            raise ValueError("require temperature >= 0")


def modules(own: ModuleType) -> dict[str, ModuleType]:
    """The stand-in's modules by the names of TensorRT-LLM's."""
    api = ModuleType("tensorrt_llm.llmapi")
    for kind in (DisaggregatedParams, GuidedDecodingParams, KvCacheConfig, KvCacheRetentionConfig):
        setattr(api, kind.__name__, kind)
    return {"tensorrt_llm": own, "tensorrt_llm.llmapi": api}


@dataclass
class CompletionOutput:
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[dict[int, Any]] | None = None
    disaggregated_params: Any = None


class RequestOutput:
    """Iterates over itself with growing output, as TensorRT-LLM's does.

    Without streaming it yields once. A context phase ends after one token, "not_finished".
    """

    def __init__(
        self, server: ApiServer, request: Request, streaming: bool, disaggregated: Any
    ) -> None:
        self._streaming = streaming
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
            kind = getattr(self._disaggregated, "request_type", None)
            if finish and kind == "context_only":
                output.finish_reason = "not_finished"
                output.disaggregated_params = DisaggregatedParams(
                    request_type=kind,
                    first_gen_tokens=[token],
                    ctx_request_id=7,
                    opaque_state=b"\x00\xff",
                    ctx_info_endpoint="tcp://127.0.0.1:9",
                )
            if finish or self._streaming:
                yield self

    def abort(self) -> None:
        self._server.release(self._request)


class LLM:
    made: ClassVar[list["LLM"]] = []

    def __init__(self, model: str, kv_cache_config: Any, **kwargs: Any) -> None:
        given = {"model": model, "kv_cache_config": kv_cache_config, **kwargs}
        if unknown := given.keys() - RECORD.optional("LlmArgs").keys():
            raise ValueError(f"LLM got invalid argument: {unknown.pop()}")
        self.kwargs = kwargs
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

    def generate_async(self, **call: Any) -> RequestOutput:
        RECORD.check("BaseLLM.generate_async", call)
        self.calls.append(call)
        assert 0 <= call["priority"] <= 1
        params, phase = call["sampling_params"], call.get("disaggregated_params")
        is_context = phase is not None and phase.request_type == "context_only"
        assert call["streaming"] or is_context
        server = self._begin()
        body = {"priority": call["priority"], "logprobs": params.logprobs}
        limit, stops = params.max_tokens, params.stop_token_ids or []
        limit = 1 if is_context else limit
        request = server.enter(body, call["inputs"], limit, stops)
        request.extra = call["cache_salt"]
        return RequestOutput(server, request, call["streaming"], phase)

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
