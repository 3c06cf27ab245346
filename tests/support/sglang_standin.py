"""A stand-in for the `sglang` package: the published signatures and payloads, no model.

Signatures: sglang/srt/entrypoints/engine.py; chunks: the native-API page of docs.sglang.io;
events: sglang/srt/disaggregation/kv_events.py, which are arrays with signed hashes.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from support.api_server import ApiServer, Request

__version__ = "0.5.15"
SERVER_ARGS = {"model_path", "page_size", "context_length", "enable_priority_scheduling"}
SERVER_ARGS |= {"skip_tokenizer_init", "kv_events_config", "radix_eviction_policy", "dp_size"}
SAMPLING = {"max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p"}
SAMPLING |= {"presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos"}
SAMPLING |= {"stop_token_ids", "skip_special_tokens", "sampling_seed", "logit_bias"}
SAMPLING |= {"json_schema", "regex", "ebnf", "structural_tag"}


def signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


class Publisher:
    """Converts the server's maps to SGLang's arrays."""

    def __init__(self, server: ApiServer) -> None:
        self._inner = server.publisher

    async def send(self, *events: dict[str, Any]) -> None:
        await self._inner.send(*(self._array(event) for event in events))

    def _array(self, event: dict[str, Any]) -> list[Any]:
        hashes = [signed(value) for value in event["block_hashes"]]
        if event["type"] == "BlockRemoved":
            return ["BlockRemoved", hashes, "GPU"]
        parent = event["parent_block_hash"]
        parent = None if parent is None else signed(parent)
        fields = [hashes, parent, event["token_ids"], event["block_size"], None, "GPU"]
        salt = event.get("salt")
        return ["BlockStored", *fields, *([{"cache_salt": salt}] if salt else [])]


class Engine:
    """Checks `server_args` by name, as SGLang's dataclass does."""

    made: ClassVar[list["Engine"]] = []

    def __init__(self, **kwargs: Any) -> None:
        if unknown := kwargs.keys() - SERVER_ARGS:
            raise TypeError(f"ServerArgs got an unexpected keyword argument {unknown.pop()!r}")
        if not (Path(kwargs["model_path"]) / "config.json").is_file():
            raise OSError(f"{kwargs['model_path']} does not have a config.json")
        self.kwargs = kwargs
        events = json.loads(kwargs["kv_events_config"])
        assert events["publisher"] == "zmq"
        folder = Path(events["endpoint"].removeprefix("ipc://")).parent
        self.server = ApiServer(folder, "sglang", block_size=kwargs["page_size"])
        self._serving = asyncio.create_task(self.server.publisher.start())
        self.server.events = Publisher(self.server)
        self.server.begin()
        self.calls: list[dict[str, Any]] = []
        self.live: dict[str, Request] = {}
        self.tokenizer_manager = SimpleNamespace(abort_request=self._abort, flush_cache=self._flush)
        tokens = self.server.blocks * self.server.block_size
        info = {"max_total_num_tokens": tokens, "max_running_requests": 4}
        self._scheduler_init_result = SimpleNamespace(scheduler_infos=[info])
        Engine.made.append(self)

    async def async_generate(
        self,
        prompt: str | None = None,
        sampling_params: dict[str, Any] | None = None,
        input_ids: list[int] | None = None,
        return_logprob: bool = False,
        top_logprobs_num: int | None = None,
        lora_path: str | None = None,
        stream: bool = False,
        bootstrap_host: str | None = None,
        bootstrap_port: int | None = None,
        bootstrap_room: int | None = None,
        routed_dp_rank: int | None = None,
        rid: str | None = None,
        session_params: dict[str, Any] | None = None,
        priority: int | None = None,
        session_id: str | None = None,
        *,
        cache_salt: str | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        call = {key: value for key, value in locals().items() if key != "self"}
        self.calls.append(call)
        assert stream
        assert rid
        params = sampling_params or {}
        if unknown := params.keys() - SAMPLING:
            raise ValueError(f"unknown sampling parameter {unknown.pop()}")
        if params["temperature"] < 0:
            raise ValueError("temperature must be non-negative")
        body: dict[str, Any] = {"priority": priority or 0, "return_logprob": return_logprob}
        body["top_logprobs_num"] = top_logprobs_num
        limit, stops = params["max_new_tokens"], params["stop_token_ids"]
        request = self.server.enter(body, input_ids or [], limit, stops)
        request.extra = cache_salt
        self.live[rid] = request
        return self._chunks(rid, request)

    async def _chunks(self, rid: str, request: Request) -> AsyncIterator[dict[str, Any]]:
        generated: list[int] = []
        finish: str | None = None
        while finish is None:
            token, finish = await request.news.get()
            generated.append(token)
            yield self.server.generate_chunk(request, token, finish, generated)
        self.live.pop(rid, None)

    def _abort(self, rid: str = "", abort_all: bool = False) -> None:
        request = self.live.pop(rid, None)
        if request is not None:
            self.server.release(request)

    async def _flush(self) -> None:
        await self.server.reset()

    def shutdown(self) -> None:
        self._closing = asyncio.create_task(self.server.close())
