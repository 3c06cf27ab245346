"""Shadow traffic: copies of requests for other models, whose answers nobody gets.

A copy is sent once its request has been answered, so that it delays nobody's first token. It has
neither key nor tenant: only its outcome says what it took.
"""

import logging
from collections.abc import Sequence

from msgspec.structs import replace

from kvmesh.bus.messages import Hints, Placement
from kvmesh.frontend import metrics
from kvmesh.frontend.aliases.choice import shadows_of
from kvmesh.frontend.apis.base import UnseenAnswer
from kvmesh.frontend.conversation import GenerateRequest
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.failure_log import log_failure
from kvmesh.frontend.generation.active_request import RequestRunner
from kvmesh.frontend.models import ModelRegistry
from kvmesh.frontend.preprocess.conversation_key import conversation_key, sticky_key
from kvmesh.frontend.preprocess.preprocessor import Preprocessor
from kvmesh.frontend.turn_memo import NO_MEMO
from kvmesh.runtime.background import BackgroundTasks
from kvmesh.tracing.span import NO_SPAN

log = logging.getLogger(__name__)
MOST = 64  # at once, of one frontend; beyond, requests are not copied
FAIR_CLASS = "shadow traffic"  # in the routers' queues, where all copies share one turn


class ShadowTraffic:
    """Makes copies of requests whose alias has shadows, and runs them."""

    def __init__(
        self, registry: ModelRegistry, preprocessor: Preprocessor, runner: RequestRunner
    ) -> None:
        self._registry = registry
        self._preprocessor = preprocessor
        self._runner = runner
        self._tasks = BackgroundTasks()

    def copies(self, request: GenerateRequest) -> list[GenerateRequest]:
        """The copies of a request that has its target and is not prepared yet."""
        alias = self._registry.aliases.get(request.model)
        if alias is None or not alias.shadows or not request.target:
            return []
        return [_copy(request, model) for model in shadows_of(alias, sticky_key(request))]

    def start(self, copies: Sequence[GenerateRequest], now: float) -> None:
        """Run copies, as far as there is room, at the loop's time."""
        for copy in copies:
            if len(self._tasks) < MOST:
                self._tasks.start(self._run(copy, now), "shadow request")
            else:
                metrics.shadow_requests.labels(copy.target, "skipped").inc()

    async def close(self) -> None:
        """Abort all copies, as a frontend that stops does."""
        await self._tasks.close()

    async def _run(self, request: GenerateRequest, started: float) -> None:
        outcome = "failed"
        try:
            model, adapter = self._registry.resolve_for(request, sticky_key)
            prepared = await self._preprocessor.prepare(request, model, adapter)
            async with self._runner.run(prepared, UnseenAnswer(), started) as active:
                await active.finished()
            outcome = "answered"
        except ApiError as error:
            log_failure(error.kind, request.id, f"a shadow for {request.target}: {error}")
        finally:
            metrics.shadow_requests.labels(request.target, outcome).inc()


def _copy(request: GenerateRequest, model: str) -> GenerateRequest:
    """A request of nobody: without placement, retention, key and place in the client's session."""
    session = request.hints.session or f"{conversation_key(request):016x}"
    return replace(
        request,
        id=f"{request.id}-shadow-{model}",
        target=model,
        shadow=True,
        stream=False,
        hints=Hints(
            osl=request.hints.osl,
            session=f"shadow of {session}",
            fair_class=FAIR_CLASS,
            load_test=True,  # nothing is learned from it about agents
        ),
        placement=Placement(),
        policy=None,
        overrides={},
        retention=[],
        decode=None,
        prompt_ttl_s=None,
        speculative=False,
        extra_fields=frozenset(),
        previous_message=None,
        owner=FAIR_CLASS,
        tenant_name="",
        key_name="",
        client_id="",
        span=NO_SPAN,
        memo=NO_MEMO,
    )
