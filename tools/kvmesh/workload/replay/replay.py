"""`kvmesh replay`: sends a workload over HTTP at its own pace and reports the latencies."""

import argparse
import asyncio
import heapq
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import aiohttp
import msgspec
import uvloop
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvmesh.terminal.console import stdout_console
from kvmesh.workload.errors import WorkloadError
from kvmesh.workload.formats.registry import load
from kvmesh.workload.model import Workload
from kvmesh.workload.reading.options import ReadOptions
from kvmesh.workload.replay.chat_client import ChatEndpoint, EndpointError, Sample
from kvmesh.workload.replay.summary import ReplaySummary, show, summarize
from kvmesh.workload.replay.text import Speller
from kvmesh.workload.tree import Tree

PROBE_WORDS = (64, 1088)
PROBE_SEED = -1


def run(args: argparse.Namespace, options: ReadOptions) -> int:
    """Replay; return 0 if every request succeeded, 1 if some failed, 2 if it could not start."""
    errors = Console(stderr=True, highlight=False)
    try:
        workload, repairs = load(args.trace, args.repair, args.seed, options)
        for line in repairs.lines():
            errors.print(line, markup=False)
        summary = uvloop.run(_replay(workload.first(args.limit), args, errors))
        show(summary, stdout_console())
        if args.json is not None:
            args.json.write_bytes(msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
    except (WorkloadError, OSError) as error:
        text = f"kvmesh replay: {error}"
        errors.print(text, style="red", markup=False, soft_wrap=True)
        return 2
    return 1 if summary.failed or summary.unfinished else 0


async def _replay(workload: Workload, args: argparse.Namespace, errors: Console) -> ReplaySummary:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=args.timeout)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        endpoint = await ChatEndpoint.open(http, args.url, args.model, args.api_key)
        speller = await fitted_speller(workload.tree, endpoint, args.seed)
        with _progress(errors, len(workload)) as progress:
            replay = Replay(workload, speller, endpoint, args.speed, args.concurrency, progress)
            wall_s = await _interruptible(replay)
    return summarize(
        replay.samples,
        {index: round_.input_tokens for index, round_ in enumerate(workload.rounds)},
        wall_s,
        trace=Path(args.trace[0]).name,
        url=args.url,
        model=endpoint.model,
        speed=args.speed,
        concurrency=args.concurrency,
    )


def _progress(errors: Console, total: int) -> AbstractContextManager[Progress | None]:
    if not errors.is_terminal:
        return nullcontext()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(None),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=errors,
    )
    progress.add_task("replaying", total=total)
    return progress


async def _interruptible(replay: "Replay") -> float:
    """Run to the end or to Ctrl-C, both of which are reported. Returns wall seconds."""
    started = time.perf_counter()
    with suppress(asyncio.CancelledError):
        await replay.run()
    return time.perf_counter() - started


async def fitted_speller(tree: Tree, endpoint: ChatEndpoint, seed: int) -> Speller:
    """A speller calibrated to the served tokenizer and template by two trial requests."""
    scratch = Tree()
    branch = scratch.fork()
    trial = Speller(scratch, seed=PROBE_SEED)
    few, many = PROBE_WORDS
    short = await endpoint.prompt_tokens(trial.prompt(branch, few))
    long = await endpoint.prompt_tokens(trial.prompt(branch, many))
    if long <= short:
        raise EndpointError("the server does not count prompt tokens in `usage`")
    per_word = (long - short) / (many - few)
    return Speller(tree, per_word, round(short - few * per_word), seed)


def chains(workload: Workload) -> set[int]:
    """Sessions with several requests, a parent, children or a final request."""
    several = {i for i, members in enumerate(workload.by_session()) if len(members) > 1}
    children = {i for i, session in enumerate(workload.sessions) if session.parent is not None}
    parents = {s.parent for s in workload.sessions if s.parent is not None}
    closed = {i for i, session in enumerate(workload.sessions) if session.ends}
    return several | children | parents | closed


class Replay:
    """Sends each round when it is due: at its arrival time, or after the rounds it waits for.

    At most `concurrency` requests are in flight; a round due while the limit is reached is sent
    late, and its sample records the delay.
    """

    def __init__(
        self,
        workload: Workload,
        speller: Speller,
        endpoint: ChatEndpoint,
        speed: float,
        concurrency: int,
        progress: Progress | None = None,
    ) -> None:
        self._workload = workload
        self._speller = speller
        self._endpoint = endpoint
        self._speed = speed
        self._chains = chains(workload)
        self._final = workload.final_rounds()
        self._slots = asyncio.Semaphore(concurrency)
        self._progress = progress
        self._due: list[tuple[float, int]] = []
        self._changed = asyncio.Event()
        self._open: dict[int, int] = {}
        self._followers: dict[int, list[int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures = 0
        self.samples: list[Sample] = []

    async def run(self) -> None:
        """Send all rounds; return when the last response has ended."""
        self._plan()
        try:
            for _ in range(len(self._workload)):
                due, index = await self._next()
                await self._slots.acquire()
                self._launch(due, index)
            await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()

    def _plan(self) -> None:
        now = time.perf_counter()
        for index, round_ in enumerate(self._workload.rounds):
            if round_.after:
                self._open[index] = len(round_.after)
                for before in round_.after:
                    self._followers.setdefault(before, []).append(index)
            else:
                heapq.heappush(self._due, (now + round_.at_s / self._speed, index))

    async def _next(self) -> tuple[float, int]:
        """Wait for the next due round; return its due time and index."""
        while True:
            self._changed.clear()
            wait = self._due[0][0] - time.perf_counter() if self._due else None
            if wait is not None and wait <= 0:
                return heapq.heappop(self._due)
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _launch(self, due: float, index: int) -> None:
        task = asyncio.create_task(self._send(due, index))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, due: float, index: int) -> None:
        round_ = self._workload.rounds[index]
        text = self._speller.prompt(round_.branch, round_.input_tokens)
        sample = Sample(index=index, late_s=max(0.0, time.perf_counter() - due))
        try:
            await self._endpoint.stream(
                sample, text, round_.output_tokens, self._headers(index), round_.abort_after
            )
        finally:
            self._slots.release()
        self.samples.append(sample)
        self._release_followers(index)
        self._advance()

    def _release_followers(self, index: int) -> None:
        for follower in self._followers.get(index, ()):
            self._open[follower] -= 1
            if not self._open[follower]:
                delay = self._workload.rounds[follower].at_s / self._speed
                heapq.heappush(self._due, (time.perf_counter() + delay, follower))
                self._changed.set()

    def _advance(self) -> None:
        if self._progress is None:
            return
        self._failures += self.samples[-1].error is not None
        text = f"replaying ({self._failures} failed)" if self._failures else "replaying"
        self._progress.update(self._progress.tasks[0].id, advance=1, description=text)

    def _headers(self, index: int) -> dict[str, str]:
        headers: dict[str, str] = {}
        round_ = self._workload.rounds[index]
        session = self._workload.sessions[round_.session]
        if round_.session in self._chains:
            headers["x-kvmesh-session-id"] = session.name
            if index in self._final:
                headers["x-kvmesh-session-final"] = "true"
        if session.parent is not None:
            parent = self._workload.sessions[session.parent].name
            headers["x-kvmesh-parent-session-id"] = parent
        if round_.priority:
            headers["x-kvmesh-priority"] = str(round_.priority)
        if round_.fair_class:
            headers["x-kvmesh-fair-class"] = round_.fair_class
        return headers
