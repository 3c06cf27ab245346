"""Embedded SGLang: `sglang.Engine` as an engine of the mesh.

Written against SGLang 0.5.23 (`entrypoints/engine.py`, `managers/io_struct.py`,
`disaggregation/kv_events.py`). Higher priorities go first in its scheduler and are evicted last
from its radix cache.
"""

import asyncio
import json
import logging
import secrets
from array import array
from collections.abc import AsyncIterator
from typing import Any

from sglang import Engine
from sglang import __version__ as sglang_version
from sglang.srt.managers.io_struct import CloseSessionReqInput

from kvmesh.bus.messages import Capacity, Clear, Load, Work
from kvmesh.worker.adapters.base import StreamingAdapter
from kvmesh.worker.adapters.engine_stores import clear_sglang
from kvmesh.worker.adapters.kv_events.feed import EventFeed
from kvmesh.worker.adapters.kv_events.ledger import CacheLedger
from kvmesh.worker.adapters.kv_events.salts import PromptSalts
from kvmesh.worker.adapters.kv_events.subscriber import event_endpoints, rank_endpoint
from kvmesh.worker.adapters.request_streams import EngineUnavailable, RequestStreams, StreamOutput
from kvmesh.worker.adapters.sglang_fields import AnswerReader, request_fields
from kvmesh.worker.adapters.weights.linked_folder import LinkedArgument
from kvmesh.worker.clearing import ClearOutcome
from kvmesh.worker.engine import (
    CLEAR_S,
    EngineContext,
    EngineError,
    EngineInfo,
    Rejected,
    Sink,
    Unsupported,
)
from kvmesh.worker.engines.sglang.arguments import server_arguments
from kvmesh.worker.model_folder import check_weights, model_context
from kvmesh.worker.scratch import ScratchFolder

log = logging.getLogger(__name__)
ROOMS = 1 << 63  # SGLang's ids of transfers are signed 64-bit integers


class SglangEngine(StreamingAdapter):
    """SGLang with the arguments of `[sglang]` for the model in the folder: one or more ranks.

    A prefill engine answers with the handoff at once and computes the prompt when the decode engine
    has connected to `address`: SGLang transfers KV only between requests that run on both sides.
    """

    def __init__(self, context: EngineContext) -> None:
        super().__init__()
        settings, folder = context.settings, context.folder
        worker, transfer = settings.worker, settings.transfer
        arguments = server_arguments(settings, folder)
        if context.weights is None:
            check_weights(arguments["model_path"], arguments.get("load_format", "auto"))
        self._model = LinkedArgument(context.weights, folder, "model_path")
        self._arguments = arguments
        self._context = arguments.get("context_length") or model_context(folder)
        self._adapters = worker.adapters
        self._address = transfer.advertise or transfer.host
        self._mode = arguments.get("disaggregation_mode", "null")
        self._block_size = int(arguments["page_size"])
        self._ranks = int(arguments.get("dp_size", 1))
        self._salts = PromptSalts(worker.served_name or folder.name, self._block_size)
        self._folder = ScratchFolder()
        self._engine: Any = None
        self._ledgers: list[CacheLedger] = []
        self._blocks = 0

    async def start(self, sink: Sink) -> EngineInfo:
        events = self._events_config()
        await asyncio.to_thread(self._model.resolve, self._arguments)
        try:
            # in this thread: it installs signal handlers and uses the running loop
            self._engine = Engine(**self._arguments, kv_events_config=json.dumps(events))
        except Exception as error:  # SGLang and its plugins raise any type
            self._model.close()
            self._folder.close()
            raise EngineError(f"SGLang failed to start: {error}") from error
        self._streams = RequestStreams(sink, self._ranks, self._block_size, count_steps=True)
        for rank in range(self._ranks):
            self._ledgers.append(
                CacheLedger(self._block_size, self._salts.root_salt, counted=False)
            )
            self._feeds.append(self._feed(rank, events, sink))
        for feed in self._feeds:
            feed.start()
        return self._describe()

    def submit(self, work: Work) -> None:
        if self._streams is None:
            raise Rejected("the engine has not started")
        if not 0 <= work.rank < self._ranks:
            raise Rejected(f"there is no rank {work.rank}")
        if work.prefill and self._mode != "prefill":
            raise Rejected("this engine does not prefill for others")
        fields = self._request(work)
        self._salts.remember(work)
        stream = self._prefill if work.prefill else self._generate
        self._streams.start(work, stream(work, fields))

    def load(self, instance: str) -> list[Load]:
        if self._streams is None:
            return []
        return [
            self._streams.load(instance, rank, self._blocks, len(ledger))
            for rank, ledger in enumerate(self._ledgers)
        ]

    async def clear(self, command: Clear) -> ClearOutcome:
        return await clear_sglang(self._arguments, command, self._flush, self._clear_storage)

    async def release(self, sessions: list[str]) -> int:
        """Close sessions: SGLang evicts their blocks before those of open sessions.

        It does not report the number of blocks.
        """
        if not self._arguments.get("enable_session_radix_cache"):
            raise Unsupported("SGLang runs without enable_session_radix_cache")
        for session in sessions:
            closing = CloseSessionReqInput(session_id=session)
            await self._engine.tokenizer_manager.close_session(closing)
        return 0

    async def close(self) -> None:
        await self._stop_streams()
        if self._engine is not None:
            self._engine.shutdown()
        self._model.close()
        self._folder.close()

    def _events_config(self) -> dict[str, str]:
        """The arguments' event sockets, else sockets in a private folder."""
        given = self._arguments.pop("kv_events_config", None)
        if given is not None:
            return dict(json.loads(given) if isinstance(given, str) else given)
        return {"publisher": "zmq", **event_endpoints(self._folder.path)}

    def _feed(self, rank: int, events: dict[str, str], sink: Sink) -> EventFeed:
        replay = events.get("replay_endpoint")
        return EventFeed(
            rank,
            self._ledgers[rank],
            sink,
            _connect_endpoint(events["endpoint"], rank),
            _connect_endpoint(replay, rank) if replay else None,
            events.get("topic", ""),
        )

    def _describe(self) -> EngineInfo:
        # Start-up information of the first scheduler
        info = dict(self._engine._scheduler_init_result.scheduler_infos[0])
        self._blocks = info.get("max_total_num_tokens", 0) // self._block_size
        return EngineInfo(
            name="sglang",
            version=sglang_version,
            context=self._context,
            block_size=self._block_size,
            adapters=self._adapters,
            structural_tags=True,
            supports_handoff=self._mode != "null",
            needs_handoff=self._mode == "decode",
            capacity=Capacity(
                blocks=self._blocks,
                max_sequences=info.get("max_running_requests") or 256,
                max_batched_tokens=self._arguments.get("chunked_prefill_size") or 8192,
                dp_ranks=self._ranks,
            ),
        )

    def _request(self, work: Work) -> dict[str, Any]:
        fields = request_fields(work, array("I", work.tokens).tolist(), None)
        cache_salt = self._salts.cache_salt(work)
        if cache_salt is not None:
            fields["cache_salt"] = cache_salt
        if self._ranks > 1:
            fields["routed_dp_rank"] = work.rank
        fields |= {"rid": work.request, "priority": work.priority, "session_id": work.session}
        return fields | (work.handoff or {})

    async def _prefill(self, work: Work, fields: dict[str, Any]) -> AsyncIterator[StreamOutput]:
        """Hand the request off, then compute its prompt for the decode engine."""
        handoff: dict[str, Any] = {
            "bootstrap_host": self._address,
            "bootstrap_port": self._arguments.get("disaggregation_bootstrap_port"),
            "bootstrap_room": secrets.randbelow(ROOMS),
        }
        if self._ranks > 1:
            handoff["disagg_prefill_dp_rank"] = work.rank
        yield StreamOutput([], "length", handoff=handoff, continues=True)
        async for output in self._generate(work, fields | handoff):
            yield output

    async def _generate(self, work: Work, fields: dict[str, Any]) -> AsyncIterator[StreamOutput]:
        if self._mode == "decode" and "bootstrap_room" not in fields:
            raise EngineUnavailable("a decode engine of SGLang cannot compute a prompt")
        reader = AnswerReader()
        finish: str | None = None
        try:
            async for chunk in await self._engine.async_generate(**fields):
                output = reader.read(chunk)
                finish = output.finish
                yield output
        except ValueError as error:
            raise Rejected(str(error)) from error
        except RuntimeError as error:
            raise EngineUnavailable(f"SGLang aborted the request: {error}") from error
        finally:
            if finish is None:
                self._engine.tokenizer_manager.abort_request(rid=work.request)

    async def _flush(self) -> str:
        """Flush the cache once no request runs, as SGLang requires; the reason if it does not."""
        done = await self._engine.tokenizer_manager.flush_cache(timeout_s=CLEAR_S)
        if done.success:
            for feed in self._feeds:
                feed.clear()
        return _refusal(done)

    async def _clear_storage(self) -> str:
        return _refusal(await self._engine.tokenizer_manager.clear_hicache_storage())


def _refusal(done: Any) -> str:
    """SGLang's reason for not having cleared anything; empty if it has."""
    if done.success:
        return ""
    return getattr(done, "message", "") or "SGLang refuses while requests run"


def _connect_endpoint(endpoint: str, rank: int) -> str:
    return rank_endpoint(endpoint.replace("*", "127.0.0.1"), rank)
