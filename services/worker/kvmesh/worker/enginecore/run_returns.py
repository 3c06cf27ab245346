"""Expected returns of the runs of a rank: forecasts of prompts, applied to the runs of each."""

from collections import Counter
from collections.abc import Iterable, Sequence

from kvmesh.bus.messages import ReturnForecast
from kvmesh.retention.awaited_prompts import (
    AwaitedPrompt,
    AwaitedPrompts,
    still_expected,
    with_expectation,
)
from kvmesh.retention.eviction_pool import EvictionPool
from kvmesh.retention.return_value import TypicalReturn
from kvmesh.retention.valued_keys import Expected, ReturnOrder
from kvmesh.worker.enginecore.radix_tree import BlockRun


class RunReturns:
    """Orders the unclaimed runs in `pool` by forecasts, once there are any."""

    def __init__(self, pool: EvictionPool[BlockRun]) -> None:
        self._pool = pool
        self._typical = TypicalReturn()
        self._awaited: AwaitedPrompts[BlockRun] = AwaitedPrompts(self._typical)
        self._ordered = False

    @property
    def forecasts(self) -> Counter[str]:
        """Forecasts by what came of them."""
        return self._awaited.results

    @property
    def returns(self) -> Counter[str]:
        """Prompts with a forecast that returned, by what had become of their blocks."""
        return self._awaited.returns

    def end_prompt(self, prompt: AwaitedPrompt[BlockRun], now: float, ahead: bool) -> None:
        """Note a prompt with its answer; its place is the run that ends with its last block."""
        end = self._awaited.end_ahead if ahead else self._awaited.end
        if end(prompt):
            self._apply(prompt, now)

    def expect(self, forecasts: Iterable[ReturnForecast], now: float) -> None:
        """Apply forecasts, with `since` on the engine's clock."""
        if not self._ordered:
            self._ordered = True
            order = ReturnOrder(self._typical, _expected, _last_use)
            self._pool.order_by_returns(order)
        for forecast in forecasts:
            prompt = self._awaited.expect(forecast)
            if prompt is not None:
                self._apply(prompt, now)

    def on_prompt(self, session: str | None, prompts: Iterable[Sequence[int]]) -> None:
        """Note the new prompt of a session, and those that it gives up, each by its hashes."""
        self._awaited.on_prompt(session, prompts)

    def release(self, sessions: Iterable[str]) -> None:
        """Expect nothing of sessions any more."""
        self._awaited.release(sessions)

    def _apply(self, prompt: AwaitedPrompt[BlockRun], now: float) -> None:
        """Expect the return of all runs of a prompt that are held."""
        expectation = prompt.expectation
        if expectation is None:
            return
        run: BlockRun | None = prompt.place
        while run is not None and not run.hashes:
            run = run.parent
        if run is not None:
            prompt.place = run
        while run is not None:
            run.expected = with_expectation(run.expected, expectation, now)
            if not run.refs:
                self._pool.reconsider(run)
            run = run.parent


def end_use(run: BlockRun, now: float) -> None:
    """Note the last use of a run, which is now; what has happened is not expected any more."""
    run.used = now
    if run.expected:
        run.expected = still_expected(run.expected)


def on_evicted(run: BlockRun, blocks: int) -> None:
    """Note the eviction of blocks at the end of a run."""
    for expectation in run.expected:
        expectation.evicted += blocks


def _expected(run: BlockRun) -> Expected:
    return run.expected


def _last_use(run: BlockRun) -> float:
    return run.used
