"""A stand-in for the `sglang` package: its recorded interface, no model.

The record (`support.engine_api`) has the accepted arguments, the fields of events and a recorded
batch of them. Chunks: the native-API page of docs.sglang.io. As in SGLang a prefill engine serves a
bootstrap port: it computes a prompt once a decode engine has asked there for the prompt's room.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from support.api_server import ApiServer, Request
from support.engine_api import recorded, recorded_class

RECORD = recorded("sglang")
MEDIA: dict[str, str] = RECORD.payloads["media"]
__version__ = RECORD.version
ROOM_S = 10.0
CloseSessionReqInput = recorded_class(RECORD, "CloseSessionReqInput")


def modules(own: ModuleType) -> dict[str, ModuleType]:
    """The stand-in's modules by the names of SGLang's."""
    io_struct = ModuleType("sglang.srt.managers.io_struct")
    io_struct.CloseSessionReqInput = CloseSessionReqInput  # type: ignore[attr-defined]
    packages = ("sglang.srt", "sglang.srt.managers")
    return {
        "sglang": own,
        **{name: ModuleType(name) for name in packages},
        "sglang.srt.managers.io_struct": io_struct,
    }


def signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def event(kind: str, **values: Any) -> dict[str, Any]:
    """An event with SGLang's fields; optional ones that are None are omitted."""
    optional = RECORD.optional(kind)
    given = {key: value for key, value in values.items() if key in optional}
    return {"type": kind} | {
        field: given.get(field)
        for field, may_lack in optional.items()
        if not may_lack or given.get(field) is not None
    }


class Publisher:
    """Converts the server's events to SGLang's; with HiCache the host gets every stored block."""

    def __init__(self, server: ApiServer, hicache: bool) -> None:
        self._inner = server.publisher
        self._hicache = hicache

    async def send(self, *events: dict[str, Any]) -> None:
        sent = []
        for raw in events:
            hashes = [signed(value) for value in raw["block_hashes"]]
            parent = raw.get("parent_block_hash")
            parent = None if parent is None else signed(parent)
            fields = raw | {"block_hashes": hashes, "parent_block_hash": parent}
            sent.append(event(raw["type"], **fields | {"medium": MEDIA["GPU"]}))
            if self._hicache and raw["type"] == "BlockStored":
                sent.append(event(raw["type"], **fields | {"medium": MEDIA["CPU"]}))
        await self._inner.send(*sent)


class Engine:
    """Accepts the recorded arguments; `host_hits` are tokens that HiCache loads for each prompt."""

    made: ClassVar[list["Engine"]] = []

    def __init__(self, **kwargs: Any) -> None:
        RECORD.check("ServerArgs", kwargs)
        if not (Path(kwargs["model_path"]) / "config.json").is_file():
            raise OSError(f"{kwargs['model_path']} does not have a config.json")
        self.kwargs = kwargs
        events = json.loads(kwargs["kv_events_config"])
        RECORD.check("KVEventsConfig", events)
        assert events["publisher"] == "zmq"
        folder = Path(events["endpoint"].removeprefix("ipc://")).parent
        self.server = ApiServer(
            folder,
            "sglang",
            block_size=kwargs["page_size"],
            private=True,
            evict_by_priority=kwargs.get("radix_eviction_policy") == "priority",
            track_sessions=kwargs.get("enable_session_radix_cache", False),
        )
        assert events["endpoint"] == self.server.publisher.endpoint
        self._serving = asyncio.create_task(self.server.publisher.start())
        hicache = kwargs.get("enable_hierarchical_cache", False)
        self.server.events = Publisher(self.server, hicache)
        self.server.begin()
        self.mode = kwargs.get("disaggregation_mode", "null")
        self.arrived: dict[int, asyncio.Event] = {}
        self.computed: dict[int, asyncio.Event] = {}
        self._bootstrap: asyncio.Server | None = None
        self._binding = asyncio.create_task(self._serve_rooms())
        self.host_hits = 0
        self.calls: list[dict[str, Any]] = []
        self.live: dict[str, Request] = {}
        self.tokenizer_manager = SimpleNamespace(
            abort_request=self._abort,
            flush_cache=self._flush,
            clear_hicache_storage=self._clear_storage,
            close_session=self._close_session,
        )
        tokens = self.server.blocks * self.server.block_size
        info = {"max_total_num_tokens": tokens, "max_running_requests": 4}
        self._scheduler_init_result = SimpleNamespace(scheduler_infos=[info])
        Engine.made.append(self)

    async def async_generate(self, **call: Any) -> AsyncIterator[dict[str, Any]]:
        RECORD.check("Engine.async_generate", call)
        self.calls.append(call)
        assert call["stream"]
        params = call["sampling_params"]
        RECORD.check("SamplingParams", params)
        if params["temperature"] < 0:
            raise ValueError("temperature must be non-negative")
        room = call.get("bootstrap_room")
        if self.mode != "null" and room is None:
            return self._refuse()
        body: dict[str, Any] = {"priority": call["priority"], "session": call["session_id"]}
        body["return_logprob"] = call.get("return_logprob", False)
        body["top_logprobs_num"] = call.get("top_logprobs_num")
        return self._chunks(call, params, body)

    async def _refuse(self) -> AsyncIterator[dict[str, Any]]:
        reason = {"type": "abort", "message": "without bootstrap room id", "status_code": 400}
        yield {"output_ids": [], "meta_info": {"finish_reason": reason, "completion_tokens": 0}}

    async def _chunks(
        self, call: dict[str, Any], params: dict[str, Any], body: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        room = call.get("bootstrap_room", 0)
        if self.mode == "prefill":
            await asyncio.wait_for(_event(self.arrived, room).wait(), ROOM_S)
        elif self.mode == "decode":
            await asyncio.wait_for(_fetch(call), ROOM_S)
        limit = 1 if self.mode == "prefill" else params["max_new_tokens"]
        request = self.server.enter(body, call["input_ids"], limit, params["stop_token_ids"])
        request.extra = call.get("cache_salt")
        self.live[call["rid"]] = request
        generated: list[int] = []
        finish: str | None = None
        while finish is None:
            token, finish = await request.news.get()
            generated.append(token)
            chunk = self.server.generate_chunk(request, token, finish, generated)
            if finish is None:
                chunk["output_ids"] = generated
            if request.cached:
                device = request.cached - self.host_hits
                details = {"device": device, "host": self.host_hits}
                chunk["meta_info"]["cached_tokens_details"] = details
            yield chunk
            if finish is not None:
                _event(self.computed, room).set()
        self.live.pop(call["rid"], None)

    async def _serve_rooms(self) -> None:
        if self.mode == "prefill":
            port = self.kwargs["disaggregation_bootstrap_port"]
            self._bootstrap = await asyncio.start_server(self._lend, self.kwargs["host"], port)

    async def _lend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if room := await reader.readline():
            _event(self.arrived, int(room)).set()
            await _event(self.computed, int(room)).wait()
            writer.write(b"computed\n")
        writer.close()

    def _abort(self, **call: Any) -> None:
        RECORD.check("TokenizerManager.abort_request", call)
        request = self.live.pop(call["rid"], None)
        if request is not None:
            self.server.release(request)

    async def _flush(self, **call: Any) -> Any:
        RECORD.check("TokenizerControlMixin.flush_cache", call)
        output = recorded_class(RECORD, "FlushCacheReqOutput", message="")
        if self.server.running:
            return output(success=False, message="Timed out waiting for idle state.")
        await self.server.reset()
        return output(success=True)

    async def _clear_storage(self) -> Any:
        self.storage_cleared = True
        return recorded_class(RECORD, "ClearHiCacheReqOutput")(success=True)

    async def _close_session(self, obj: Any) -> None:
        assert isinstance(obj, CloseSessionReqInput)
        self.server.close_session(obj.session_id)

    def shutdown(self) -> None:
        if self._bootstrap is not None:
            self._bootstrap.close()
        self._closing = asyncio.create_task(self.server.close())


def _event(rooms: dict[int, asyncio.Event], room: int) -> asyncio.Event:
    return rooms.setdefault(room, asyncio.Event())


async def _fetch(call: dict[str, Any]) -> None:
    """Fetch the KV of a room; raises RuntimeError as SGLang does if the prefill engine is gone."""
    try:
        host, port = call["bootstrap_host"], call["bootstrap_port"]
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"%d\n" % call["bootstrap_room"])
        if not await reader.readline():
            raise ConnectionResetError(f"{host}:{port} closed the connection")
        writer.close()
    except OSError as error:
        raise RuntimeError(f"no KV of the prompt: {error}") from error
