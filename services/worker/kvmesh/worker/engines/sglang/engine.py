"""Embedded SGLang: `sglang.Engine` as an engine of the mesh.

Written against the published API (`sglang/srt/entrypoints/engine.py`, `io_struct.py`,
`disaggregation/kv_events.py`); arguments unknown to the installed version are omitted. Higher
priorities go first in SGLang's scheduler, and in radix eviction if that is by priority.
"""

import inspect
import json
import logging
from array import array
from collections.abc import AsyncIterator
from typing import Any

from sglang import Engine
from sglang import __version__ as sglang_version

from kvmesh.bus.messages import Capacity, Load, Work
from kvmesh.worker.adapters.base import StreamingAdapter
from kvmesh.worker.adapters.cache_ledger import CacheLedger, PromptSalts
from kvmesh.worker.adapters.engine_args import engine_arguments
from kvmesh.worker.adapters.event_feed import EventFeed
from kvmesh.worker.adapters.request_streams import EngineUnavailable, RequestStreams, StreamOutput
from kvmesh.worker.adapters.sglang_fields import AnswerReader, request_fields
from kvmesh.worker.adapters.zmq_events import rank_endpoint
from kvmesh.worker.engine import (
    EngineConfigError,
    EngineContext,
    EngineError,
    EngineInfo,
    Rejected,
    Sink,
)
from kvmesh.worker.model_folder import model_context
from kvmesh.worker.scratch import ScratchFolder

log = logging.getLogger(__name__)


def create(context: EngineContext) -> "SglangEngine":
    """Create SGLang with the arguments of `[sglang]` for the model in the folder."""
    worker, sglang = context.settings.worker, context.settings.sglang
    arguments: dict[str, Any] = {
        "model_path": str(context.folder),
        "page_size": worker.block_size,
        "enable_priority_scheduling": True,
        "skip_tokenizer_init": False,
        **engine_arguments(sglang.args, sglang.args_file),
    }
    if worker.context:
        arguments.setdefault("context_length", worker.context)
    served = worker.served_name or context.folder.name
    max_context = arguments.get("context_length") or model_context(context.folder)
    return SglangEngine(arguments, served, max_context, worker.adapters)


class SglangEngine(StreamingAdapter):
    """One `sglang.Engine` with one or more data-parallel ranks."""

    def __init__(
        self, arguments: dict[str, Any], served: str, context: int, adapters: list[str]
    ) -> None:
        super().__init__()
        self._arguments = arguments
        self._context = context
        self._adapters = adapters
        self._block_size = int(arguments["page_size"])
        self._ranks = int(arguments.get("dp_size", 1))
        self._salts = PromptSalts(served, self._block_size)
        self._folder = ScratchFolder()
        self._engine: Any = None
        self._known_parameters: frozenset[str] = frozenset()
        self._ledgers: list[CacheLedger] = []
        self._blocks = 0

    async def start(self, sink: Sink) -> EngineInfo:
        events = self._events_config()
        try:
            # in this thread: it installs signal handlers and uses the running loop
            self._engine = Engine(**self._arguments, kv_events_config=json.dumps(events))
        except Exception as error:  # SGLang and its plugins raise any type
            self._folder.close()
            raise EngineError(f"SGLang failed to start: {error}") from error
        self._known_parameters = frozenset(
            inspect.signature(self._engine.async_generate).parameters
        )
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
        fields = self._request(work)
        self._salts.remember(work)
        self._streams.start(work, self._generate(work, fields))

    def load(self, instance: str) -> list[Load]:
        if self._streams is None:
            return []
        return [
            self._streams.load(instance, rank, self._blocks, len(ledger))
            for rank, ledger in enumerate(self._ledgers)
        ]

    def clear(self) -> None:
        self._tasks.start(self._clear(), "sglang clear")

    async def close(self) -> None:
        await self._stop_streams()
        if self._engine is not None:
            self._engine.shutdown()
        self._folder.close()

    def _events_config(self) -> dict[str, str]:
        """Event sockets in a private folder; several ranks need TCP in the arguments."""
        given = self._arguments.pop("kv_events_config", None)
        if given is not None:
            return dict(json.loads(given) if isinstance(given, str) else given)
        if self._ranks > 1:
            raise EngineConfigError(
                "several ranks need a TCP endpoint for KV events: "
                "--sglang-args kv_events_config.publisher=zmq,kv_events_config.endpoint=tcp://*:5557"
            )
        folder = self._folder.path
        return {
            "publisher": "zmq",
            "endpoint": f"ipc://{folder}/events",
            "replay_endpoint": f"ipc://{folder}/replay",
        }

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
        info = _scheduler_info(self._engine)
        self._blocks = info.get("max_total_num_tokens", 0) // self._block_size
        return EngineInfo(
            name="sglang",
            version=sglang_version,
            context=self._context,
            block_size=self._block_size,
            adapters=self._adapters,
            structural_tags=True,
            capacity=Capacity(
                blocks=self._blocks,
                max_sequences=info.get("max_running_requests") or 256,
                max_batched_tokens=self._arguments.get("chunked_prefill_size") or 8192,
                dp_ranks=self._ranks,
            ),
        )

    def _request(self, work: Work) -> dict[str, Any]:
        tokens = array("I", work.tokens).tolist()
        fields = request_fields(work, tokens, None)
        cache_salt = self._salts.cache_salt(work)
        if cache_salt is not None:
            if "cache_salt" not in self._known_parameters:
                raise Rejected("this version of SGLang cannot isolate tenants (no cache_salt)")
            fields["cache_salt"] = cache_salt
        extra = {"rid": work.request, "priority": work.priority, "session_id": work.session}
        if self._ranks > 1:
            rank = (
                "routed_dp_rank"
                if "routed_dp_rank" in self._known_parameters
                else "data_parallel_rank"
            )
            extra[rank] = work.rank
        fields |= {key: value for key, value in extra.items() if key in self._known_parameters}
        return fields | (work.handoff or {})

    async def _generate(self, work: Work, fields: dict[str, Any]) -> AsyncIterator[StreamOutput]:
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

    async def _clear(self) -> None:
        """Flush the cache once no request runs: SGLang requires that."""
        await self.drain()
        await self._engine.tokenizer_manager.flush_cache()


def _scheduler_info(engine: Any) -> dict[str, Any]:
    """Start-up information of the first scheduler; its attribute differs between versions."""
    init_result = getattr(engine, "_scheduler_init_result", None)
    info = init_result.scheduler_infos[0] if init_result is not None else engine.scheduler_info
    return dict(info)


def _connect_endpoint(endpoint: str, rank: int) -> str:
    return rank_endpoint(endpoint.replace("*", "127.0.0.1"), rank)
