"""A small inference server: real HTTP, real ZeroMQ events, the published APIs of vLLM and SGLang.

Its model is a function of the last tokens, so that any worker can continue an output. Its cache
evicts blocks in LRU order and pins those of running requests. Its scheduler orders by priority.
Options add SGLang's eviction by priority, and after that of blocks of closed sessions.
"""

import asyncio
import json
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from support.zmq_publisher import EngineCache, ZmqPublisher

VOCABULARY = 4000
PLUGIN = "/v1/kvmesh/retention"


def next_token(tokens: list[int]) -> int:
    return (sum(3 * token + i for i, token in enumerate(tokens[-6:])) * 7 + 11) % VOCABULARY


def continuation(tokens: list[int], count: int) -> list[int]:
    """The tokens that the model generates for a prompt."""
    extended = list(tokens)
    for _ in range(count):
        extended.append(next_token(extended))
    return extended[len(tokens) :]


@dataclass
class Request:
    """One request; `news` receives (token or None, finish or None) after each step."""

    body: dict[str, Any]
    tokens: list[int]
    limit: int
    stops: list[int]
    rank: int
    extra: str | None
    priority: int
    news: asyncio.Queue[tuple[int, str | None]] = field(default_factory=asyncio.Queue)
    prompt: int = 0
    cached: int = 0
    held: list[int] = field(default_factory=list)


class EventSink(Protocol):
    """Receives cache events as vLLM's maps."""

    async def send(self, *events: dict[str, Any]) -> None: ...


@dataclass
class ApiServer:
    """Serves on `url`; `style` is "vllm" or "sglang".

    `prompt_details`: like vLLM with `--enable-prompt-tokens-details`. `kvbm_series` are metrics of
    kvmesh's connector.
    `adapters` are those loaded at run time, name to folder; None: the server has no such endpoint.
    `connector` is vLLM's KV connector, which keeps every block in `below` unless it only
    transfers, and SGLang does so in its `storage`. vLLM clears in its `development` mode only.
    `ranks` are those that its metrics name; the first one runs.
    """

    folder: Path
    style: str = "vllm"
    blocks: int = 64
    block_size: int = 16
    context: int = 512
    max_sequences: int = 4
    token_ids: bool = True
    step_s: float = 0.001
    zmq: bool = True
    private: bool = False
    evict_by_priority: bool = False
    track_sessions: bool = False
    adapters: dict[str, str] | None = None
    prompt_details: bool = False
    kvbm_series: str = ""
    plugin_problem: str | None = None
    connector: str = ""
    development: bool = True
    told: int = 0  # times that it told its configuration
    storage: str = ""
    ranks: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if self.zmq:
            # "tcp" and a number let an engine add a rank, see kvmesh's event_endpoints
            prefix, rank = ("tcp-", f":{1 + self.ranks[0]}") if self.private else ("", "")
            self.publisher = ZmqPublisher(self.folder, prefix=prefix, rank=rank)
            self.events: EventSink = self.publisher
        self.levels: dict[int, int] = {}
        self.sessions: dict[int, set[str]] = {}
        self.cache = EngineCache(self.block_size)
        self.held: OrderedDict[int, int] = OrderedDict()  # hash → users
        self.below: set[int] = set()
        self.refused = 0  # requests to clear
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.cut_usage = False
        self.polls = 0  # of the metrics
        self.steps = 0
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/version", self._version),
                web.post("/v1/completions", self._completions),
                web.post("/generate", self._generate),
                *(self._development_routes() if self.style == "vllm" else self._hicache_routes()),
                *([] if self.adapters is None else self._adapter_routes()),
                *([] if self.plugin_problem is None else [web.get(PLUGIN, self._plugin)]),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        await self.publisher.start()
        self.begin()

    async def _plugin(self, _: web.Request) -> web.Response:
        return web.json_response({"error": {"message": self.plugin_problem}}, status=501)

    def begin(self) -> None:
        """Run the engine without the HTTP server, for a stand-in with its own frontend."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Stop the engine, from any thread."""
        if self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._runner is not None:
            await self._runner.cleanup()
        await self.publisher.close()

    # the engine

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            await self._admit()
            for request in list(self.running):
                await self._advance(request)
            self.steps += bool(self.running)

    async def _admit(self) -> None:
        sign = 1 if self.style == "vllm" else -1
        self.waiting.sort(key=lambda request: sign * request.priority)
        while self.waiting and len(self.running) < self.max_sequences:
            request = self.waiting[0]
            need = -(-(request.prompt + request.limit) // self.block_size)
            busy = sum(users > 0 for users in self.held.values())
            promised = sum(
                -(-(other.prompt + other.limit) // self.block_size) for other in self.running
            )
            if max(busy, promised) + need > self.blocks:
                return
            self.running.append(self.waiting.pop(0))
            await self._prefill(request)

    async def _prefill(self, request: Request) -> None:
        names = self.cache.hashes(request.tokens, request.extra)
        held = self.held.keys() | self.below
        known = next((i for i, name in enumerate(names) if name not in held), len(names))
        request.cached = min(known * self.block_size, request.prompt - 1)
        for name in names[:known]:
            self._use(request, name)
        await self._store(request, known)

    async def _store(self, request: Request, start: int) -> None:
        names = self.cache.hashes(request.tokens, request.extra)
        events = []
        for name in names[start:]:
            if name not in self.held and len(self.held) >= self.blocks:
                events.append(self._evict())
            self._use(request, name)
        if names[start:]:
            stored = self.cache.stored(request.tokens, start, request.extra)
            if self.style == "sglang":
                stored.pop("extra_keys")
                stored["cache_salt"] = request.extra
            events.append(stored)
        if events:
            await self.events.send(*events)

    def _use(self, request: Request, name: int) -> None:
        if self.storage or self.connector not in ("", "NixlConnector"):
            self.below.add(name)
        self.held[name] = self.held.get(name, 0) + 1
        self.held.move_to_end(name)
        request.held.append(name)
        if self.evict_by_priority:
            self.levels[name] = max(self.levels.get(name, request.priority), request.priority)
        if self.track_sessions and request.body.get("session"):
            self.sessions.setdefault(name, set()).add(request.body["session"])

    def close_session(self, session: str) -> None:
        for sessions in self.sessions.values():
            sessions.discard(session)

    def _evict(self) -> dict[str, Any]:
        unused = [name for name, users in self.held.items() if not users]
        name = min(unused, key=lambda n: (bool(self.sessions.get(n)), self.levels.get(n, 0)))
        del self.held[name]
        self.levels.pop(name, None)
        self.sessions.pop(name, None)
        return {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"}

    async def _advance(self, request: Request) -> None:
        # the engine computes a token's KV with the next token
        if len(request.tokens) > request.prompt and len(request.tokens) % self.block_size == 0:
            await self._store(request, len(request.held))
        token = next_token(request.tokens)
        request.tokens.append(token)
        generated = len(request.tokens) - request.prompt
        finish = "stop" if token in request.stops else None
        finish = finish or ("length" if generated >= request.limit else None)
        request.news.put_nowait((token, finish))
        if finish is not None:
            self.release(request)

    def release(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
            for name in reversed(request.held):
                if name in self.held:
                    self.held[name] -= 1
                    self.held.move_to_end(name)

    # the HTTP API

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        tokens = body["prompt"]
        if self.status != 200 or len(tokens) >= self.context:
            code = self.status if self.status != 200 else 400
            error = {"message": f"no: {code}", "code": code}
            return web.json_response({"error": error}, status=code)
        request = self._submit(http, body, tokens, body["max_tokens"], body["stop_token_ids"])
        request.extra = body.get("cache_salt")
        if not body["stream"]:
            token, finish = await request.news.get()
            chunk = self._completion_chunk(request, token, finish, [])
            return web.json_response(chunk | self._usage(request))
        return await self._stream(http, request, self._completion_chunk)

    def _completion_chunk(
        self, request: Request, token: int, finish: str | None, generated: list[int]
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": finish}
        if request.body.get("return_token_ids") and self.token_ids:
            choice["token_ids"] = [token]
        if (count := request.body.get("logprobs")) is not None:
            top = {f"token_id:{(token + i) % VOCABULARY}": -0.1 - i for i in range(count)}
            choice["logprobs"] = {
                "tokens": [f"token_id:{token}"],
                "token_logprobs": [-0.1],
                "top_logprobs": [top],
            }
        return {"object": "text_completion", "choices": [choice]}

    def _usage(self, request: Request) -> dict[str, Any]:
        details = {"prompt_tokens_details": {"cached_tokens": request.cached}}
        return {
            "usage": {"prompt_tokens": request.prompt, **(details if self.prompt_details else {})}
        }

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        sampling = body["sampling_params"]
        limit, stops = sampling["max_new_tokens"], sampling["stop_token_ids"]
        request = self._submit(http, body, body["input_ids"], limit, stops)
        assert body.get("extra_key") == body.get("cache_salt")
        request.extra = body.get("cache_salt")
        return await self._stream(http, request, self.generate_chunk)

    def generate_chunk(
        self, request: Request, token: int, finish: str | None, generated: list[int]
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "finish_reason": None if finish is None else {"type": finish},
            "prompt_tokens": request.prompt,
            "completion_tokens": len(generated),
            "cached_tokens": request.cached,
        }
        if request.body.get("return_logprob"):
            count = request.body["top_logprobs_num"]
            meta["output_token_logprobs"] = [[-0.1, t, None] for t in generated]
            meta["output_top_logprobs"] = [
                [[-0.1 - i, (t + i) % VOCABULARY, None] for i in range(count)] for t in generated
            ]
        return {"text": "x", "output_ids": list(generated), "meta_info": meta}

    def _submit(
        self, http: web.Request, body: dict[str, Any], tokens: list[int], limit: int, stops: Any
    ) -> Request:
        if body["stream"]:
            self.bodies.append(body)
        self.headers.append(dict(http.headers))
        return self.enter(body, tokens, limit, stops)

    def enter(self, body: dict[str, Any], tokens: list[int], limit: int, stops: Any) -> Request:
        """Queue a request."""
        request = Request(body, list(tokens), limit, stops, 0, None, body.get("priority", 0))
        request.prompt = len(tokens)
        self.waiting.append(request)
        return request

    async def _stream(self, http: web.Request, request: Request, chunk: Any) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(http)
        generated: list[int] = []
        try:
            finish: str | None = None
            while finish is None:
                token, finish = await request.news.get()
                generated.append(token)
                data = json.dumps(chunk(request, token, finish, generated))
                await answer.write(f"data: {data}\n\n".encode())
            if request.body.get("stream_options", {}).get("include_usage"):
                if self.cut_usage and http.transport is not None:
                    http.transport.abort()
                    return answer
                usage = json.dumps({"choices": [], **self._usage(request)})
                await answer.write(f"data: {usage}\n\n".encode())
            await answer.write(b"data: [DONE]\n\n")
        finally:
            self.release(request)
        return answer

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": "served", "owned_by": self.style, "max_model_len": self.context}
        adapter = {"id": "lora-a", "owned_by": self.style, "parent": "served"}
        return web.json_response({"object": "list", "data": [card, adapter]})

    def _adapter_routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/load_lora_adapter", self._load_adapter),
            web.post("/v1/unload_lora_adapter", self._unload_adapter),
        ]

    async def _load_adapter(self, http: web.Request) -> web.Response:
        body = await http.json()
        if self.adapters is None or "ghost" in body["lora_path"]:
            error = {"message": "no such adapter", "code": 404}
            return web.json_response({"error": error}, status=404)
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.Response(text="Success: LoRA adapter added.")

    async def _unload_adapter(self, http: web.Request) -> web.Response:
        name = (await http.json())["lora_name"]
        if self.adapters is None or self.adapters.pop(name, None) is None:
            error = {"message": "no such adapter", "code": 404}
            return web.json_response({"error": error}, status=404)
        return web.Response(text="Success: LoRA adapter removed.")

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.status)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "9.9"})

    async def _server_info(self, _: web.Request) -> web.Response:
        tokens = self.blocks * self.block_size
        sizes = {"page_size": self.block_size, "max_total_num_tokens": tokens}
        arguments = {
            "max_running_requests": self.max_sequences,
            "enable_hierarchical_cache": bool(self.storage),
            "hicache_storage_backend": self.storage or None,
        }
        return web.json_response(sizes | arguments)

    async def _metrics(self, _: web.Request) -> web.Response:
        self.polls += 1
        if self.style == "sglang":
            lines = [f"sglang:num_running_reqs {len(self.running)}"]
            lines.append(f"sglang:num_queue_reqs {len(self.waiting)}")
            return web.Response(text="\n".join(lines) + "\n")
        sizes = f'block_size="{self.block_size}",num_gpu_blocks="{self.blocks}"'
        busy = sum(users > 0 for users in self.held.values()) / self.blocks
        text = f"""# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{{sizes}}} 1.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="{self.ranks[0]}"}} {len(self.running)}
{"".join(f'vllm:num_requests_running{{engine="{rank}"}} 0' + chr(10) for rank in self.ranks[1:])}\
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0"}} {len(self.waiting)}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0"}} {busy}
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{{engine="0",le="+Inf"}} {self.steps}
vllm:iteration_tokens_total_count{{engine="0"}} {self.steps}
vllm:iteration_tokens_total_sum{{engine="0"}} {self.steps}
"""
        return web.Response(text=text + self.kvbm_series)

    def _development_routes(self) -> list[web.RouteDef]:
        if not self.development:
            return []
        return [
            web.post("/reset_prefix_cache", self._reset),
            web.get("/server_info", self._configuration),
        ]

    async def _configuration(self, _: web.Request) -> web.Response:
        self.told += 1
        transfer = {"kv_connector": self.connector, "kv_connector_extra_config": {}}
        config = {"kv_transfer_config": transfer if self.connector else None}
        return web.json_response({"vllm_config": config})

    async def _reset(self, http: web.Request) -> web.Response:
        """As vLLM: all or nothing, and connectors only on request, whatever they can do."""
        if self.running:
            self.refused += 1
            return web.json_response({"success": False})
        await self.reset()
        if http.query.get("reset_external") == "true" and self.connector == "OffloadingConnector":
            self.below.clear()
        return web.json_response({"success": True})

    def _hicache_routes(self) -> list[web.RouteDef]:
        return [
            web.get("/get_server_info", self._server_info),
            web.post("/flush_cache", self._flush),
            web.post("/hicache/storage-backend/clear", self._clear_storage),
        ]

    async def _flush(self, http: web.Request) -> web.Response:
        """As SGLang: waits until nothing runs."""
        deadline = asyncio.get_running_loop().time() + float(http.query.get("timeout", 0))
        while self.running:
            if asyncio.get_running_loop().time() >= deadline:
                self.refused += 1
                return web.Response(status=400, text="Timed out waiting for idle state.")
            await asyncio.sleep(self.step_s)
        await self.reset()
        return web.Response(text="Cache flushed.")

    async def _clear_storage(self, _: web.Request) -> web.Response:
        """As SGLang: a backend that cannot be cleared keeps its blocks and replies alike."""
        if not self.storage:
            return web.Response(status=400)
        if self.storage == "file":
            self.below.clear()
        return web.Response(text="Hierarchical cache storage backend cleared.")

    async def reset(self) -> None:
        """Drop every unused block."""
        unused = [name for name, users in self.held.items() if not users]
        for name in unused:
            del self.held[name]
        removed = {"type": "BlockRemoved", "block_hashes": unused, "medium": "GPU"}
        await self.events.send(removed)


def unpack(tokens: bytes) -> list[int]:
    return array("I", tokens).tolist()
