"""One request for vectors or scores, from its dispatch to its last vector."""

import asyncio

from kvmesh.frontend import metrics
from kvmesh.frontend.apis.base import Usage
from kvmesh.frontend.auth.accounts import Account
from kvmesh.frontend.dispatch.task import DispatchState, SequenceTask
from kvmesh.frontend.dispatch.token_stream import TokenStream
from kvmesh.frontend.errors import ApiError
from kvmesh.frontend.generation.active_request import RequestRunner, run_together
from kvmesh.frontend.generation.awaited import AnswerCalls
from kvmesh.frontend.generation.outcome import OutcomeReporter
from kvmesh.frontend.preprocess.preprocessor import PreparedRequest

IN_FLIGHT = 8  # groups of one request that workers compute at once


class PoolingRun:
    """The groups of inputs of a prepared request, each placed on a worker by its load.

    `started` is the request's arrival on the loop's clock.
    """

    def __init__(
        self,
        runner: RequestRunner,
        prepared: PreparedRequest,
        started: float,
        account: Account | None,
    ) -> None:
        self._runner = runner
        self._account = account
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self._reporter = OutcomeReporter(runner.events, runner.expectations)
        self.prepared = prepared
        self.started = started
        names = (f"{prepared.request.id}-{i}" for i in range(len(prepared.prompts)))
        self.tasks = [
            SequenceTask(
                prepared,
                prompt,
                index,
                TokenStream(name, started, limit=prepared.max_tokens, prompt_tokens=prompt.count),
                lambda: None,
                DispatchState(started),
            )
            for index, (name, prompt) in enumerate(zip(names, prepared.prompts, strict=True))
        ]

    async def vectors(self) -> list[bytes]:
        """The vectors of all inputs, in order; raises the first error."""
        gauge = self.prepared.model.metrics.waiting
        metrics.active.inc()
        gauge.inc()
        if self._account is not None:
            self._account.charge_tokens(self.prepared.prompt_tokens)
        try:
            await run_together([self._run(task) for task in self.tasks])
        except (asyncio.CancelledError, ConnectionError):
            metrics.cancellations.labels(self.prepared.model.card.name).inc()
            raise
        finally:
            gauge.dec()
            metrics.active.dec()
        return [vector for task in self.tasks for vector in task.stream.vectors]

    def usage(self) -> Usage:
        cached = sum(sum(task.stream.cached or []) for task in self.tasks)
        return Usage(prompt=self.prepared.prompt_tokens, cached=cached, stored=0, output=0)

    async def _run(self, task: SequenceTask) -> None:
        dispatcher, tenant = self._runner.dispatcher, None
        if self._account is not None:
            tenant = self._account.key.tenant
        async with self._slots:
            now = asyncio.get_running_loop().time()
            task.dispatch.deadline = now + dispatcher.route_timeout_s
            try:
                await dispatcher.dispatch(task)
                await dispatcher.follow(task)
                _check(task)
            finally:
                dispatcher.release(task)
                if task.stream.instance:
                    self._reporter.report(task, self.started, AnswerCalls(), tenant)


def _check(task: SequenceTask) -> None:
    """Raise ApiError unless the worker has sent a vector for each input."""
    vectors, pooling = task.stream.vectors, task.prompt.pooling
    wanted = len(pooling.lengths) if pooling is not None else 0
    sizes = set(map(len, vectors))
    if len(vectors) != wanted or len(sizes) != 1 or sizes == {0} or max(sizes) % 4:
        raise ApiError("internal", "The worker has sent no vector for some of the inputs.")
