"""Requests of one worker, from the receipt of work to the last chunk of output."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from kvmesh.bus.messages import Load, Tokens, Work, WorkReply
from kvmesh.prompt_delta.tokens import PromptCache
from kvmesh.settings.schema import WorkerSettings
from kvmesh.worker.capabilities import ReadingImages, default_outcomes
from kvmesh.worker.constraints.compiler import ConstraintCompiler
from kvmesh.worker.engine import Engine, EngineInfo, OutputDelta, Rejected
from kvmesh.worker.requests import admission
from kvmesh.worker.requests.engine_trace import EngineTrace, engine_trace
from kvmesh.worker.requests.output_buffer import OutputBuffer
from kvmesh.worker.requests.output_sender import OutputSender
from kvmesh.worker.requests.serving_sample import ServingSample

log = logging.getLogger(__name__)
REF = "#"  # begins the part of a request's name that only its frontend and its worker know


class RequestHandler:
    """Admits work, submits it to the engine, and numbers and sends its output.

    `load` returns the load of each rank; `send` delivers chunks to a frontend. `on_output` receives
    output that the constraint compiler produces instead of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        worker: WorkerSettings,
        load: Callable[[], list[Load]],
        send: Callable[[str, Sequence[Tokens]], None],
        on_output: Callable[[list[OutputDelta]], None],
    ) -> None:
        self._engine = engine
        self._worker = worker
        self._load = load
        self._send = send
        self._outputs = OutputBuffer()
        self._sender = OutputSender(send)
        self._prompts = PromptCache()
        self._traces: dict[str, EngineTrace] = {}
        self._compiler = ConstraintCompiler(engine, self._submit, on_output)
        self.sample: ServingSample | None = None

    @property
    def live(self) -> list[str]:
        """The ids of requests that have not ended."""
        return self._outputs.live

    @property
    def frontends(self) -> set[str]:
        """The frontends of live and recently ended requests."""
        return self._outputs.frontends

    def live_with(self, adapter: str) -> int:
        """The number of requests of an adapter, by its identity, that have not ended."""
        return self._outputs.live_with(adapter)

    def open(self, devices: int) -> None:
        """Begin; a rank of the engine has so many devices."""
        self._outputs.device_time.devices = devices

    def accept(self, received: Work, info: EngineInfo, now: float) -> WorkReply:
        """Submit work to the engine, now or once its constraint is compiled; or refuse it."""
        if self._engine_name(received.request) in self._outputs:
            return admission.ACCEPTED
        named = self._prompts.complete(received)
        if named is None:
            return admission.INCOMPLETE
        work = engine_named(named)
        if reason := admission.rejection_reason(work, info):
            return admission.invalid(reason)
        if work.images and (missing := self._missing(work)):
            return WorkReply(status="images", missing=missing)
        compiles = self._compiler.must_compile(work)
        if self._is_full(work.rank) or (compiles and not self._compiler.has_capacity(work)):
            return admission.BUSY
        self._outputs.start(work, *default_outcomes(work, info), now, named.request)
        if work.traceparent and (trace := engine_trace(work)) is not None:
            self._traces[work.request] = trace
        if compiles:
            self._compiler.start(work)
            return admission.CHECKING
        if reason := self._submit(work):
            self._outputs.drop(work.request)
            self._drop_trace(work.request)
            return admission.invalid(reason)
        if work.pooling is not None:
            return admission.ACCEPTED  # no later prompt begins with its inputs
        return admission.STORED if self._prompts.store(named, received.base) else admission.ACCEPTED

    def output(self, deltas: list[OutputDelta], now: float) -> bool:
        """Number the tokens of `deltas` and send them to their frontends.

        True if a request has ended.
        """
        before = self._outputs.live_count
        if self._traces:
            self._trace(deltas)
        if self.sample is not None:
            self.sample.output(deltas, now)
        self._sender.add(self._outputs.add(deltas, now), now)
        return self._outputs.live_count < before

    def resend(self, request: str, offset: int) -> bool:
        """Send a request's output again from the `offset`-th token; False if it is unknown."""
        found = self._outputs.output_from(self._engine_name(request), offset)
        if found is not None:
            self._send(found[0], [found[1]])
        return found is not None

    def repeat(self, now: float) -> None:
        """Send the last output again: this process has connected anew, which may have lost it."""
        for frontend, chunks in self._outputs.tails(now).items():
            self._send(frontend, chunks)

    def abort(self, request: str) -> bool:
        """Abort a request; False if it is unknown."""
        request = self._engine_name(request)
        return self._compiler.abort(request) or self._engine.abort(request)

    def abort_all(self) -> None:
        """Abort every live request."""
        self._abort_each(self._outputs.live)

    def abandon(self, frontend: str) -> None:
        """Abort and forget the requests of a frontend that is gone."""
        live = self._outputs.live_of(frontend)
        self._abort_each(live)
        for request in live:
            self._drop_trace(request)
        self._outputs.drop_frontend(frontend)

    async def drain(self, timeout_s: float) -> bool:
        """True once every request has ended, False after `timeout_s`; the caller accepts none."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._compiler.drain()
                await self._engine.drain()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Stop compiling constraints."""
        self._compiler.close()

    def _engine_name(self, request: str) -> str:
        """The engine's name of a request that a frontend names."""
        return request if request in self._outputs else request.rpartition(REF)[0] or request

    def _submit(self, work: Work) -> str:
        """Submit work to the engine; return the reason if the engine refuses it."""
        try:
            self._engine.submit(work)
        except Rejected as rejected:
            return rejected.reason
        except Exception:
            # a defect of the engine, which the same request would meet on every worker
            log.exception("the engine failed to accept request %s", work.request)
            return "the engine failed on this request; see the worker's log"
        if self.sample is not None:
            self.sample.submitted(work)
        return ""

    def _trace(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            trace = self._traces.get(delta.request)
            if trace is not None:
                trace.add(delta)
                if delta.finish is not None:
                    del self._traces[delta.request]

    def _drop_trace(self, request: str) -> None:
        if (trace := self._traces.pop(request, None)) is not None:
            trace.abandon()

    def _abort_each(self, requests: list[str]) -> None:
        for request in requests:
            self.abort(request)

    def _missing(self, work: Work) -> list[bytes]:
        """The digests of the images of a work whose files this worker lacks."""
        engine = self._engine
        return engine.images.missing(work.images) if isinstance(engine, ReadingImages) else []

    def _is_full(self, rank: int) -> bool:
        limit = self._worker.max_waiting
        if self._outputs.live_count < limit:
            return False
        return any(load.rank == rank and load.waiting >= limit for load in self._load())


def engine_named(work: Work) -> Work:
    """The work under the name that routers and block managers have for it, too."""
    name = work.request.removesuffix(work.ref) if work.ref else work.request
    return work if name == work.request else replace(work, request=name)
