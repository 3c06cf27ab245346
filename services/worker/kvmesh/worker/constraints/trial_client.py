"""Tries constraints in a child process, so that a bad one cannot harm the worker."""

import asyncio
import itertools
import logging
import os
import signal
from contextlib import suppress
from subprocess import PIPE, Popen
from typing import TypeVar

from kvmesh.bus.messages import Guided, MessageDecoder
from kvmesh.worker.constraints.trial_server import Trial, Verdict, framed, unframed
from kvmesh.worker.engine import EngineError, Rejected

log = logging.getLogger(__name__)
T = TypeVar("T")
PROCESS = "the constraint trial process"
START_TIMEOUT_S = 120.0  # importing vLLM is slow on busy cores
BEGIN_TIMEOUT_S = 3.0  # to begin a trial, else the process is frozen
_verdict = MessageDecoder(Verdict)


class _Lost(Exception):
    """The process has ended, or it did not respond and was killed."""


class TrialClient:
    """A child process that runs a `TrialServer` by `command`, started on first use.

    `timeout_s` bounds the time of a trial from its start.
    """

    def __init__(self, timeout_s: float, *command: str) -> None:
        self._timeout_s = timeout_s
        self._command = command
        self._numbers = itertools.count(1)
        self._starting: asyncio.Task[_Process] | None = None
        self._closed = False

    async def open(self) -> "_Process":
        """Return the process once it is ready.

        Raises EngineError if the process ends before, and after `close`. A cancelled call does not
        stop the start, which may take longer than any caller waits.
        """
        if self._closed:
            raise EngineError("the worker is stopping: no constraint is compiled")
        if self._starting is None or _is_over(self._starting):
            self._starting = asyncio.create_task(_Process.started(self._command), name="trials")
        return await asyncio.shield(self._starting)

    async def try_constraint(self, guided: Guided) -> int:
        """The bytes that a constraint takes; cancelling the call cancels the trial.

        Raises Rejected, or EngineError if the constraint could not be tried. A process lost
        meanwhile is replaced once.
        """
        try:
            verdict = await self._try(guided)
        except _Lost as lost:
            log.warning("%s; starting another and trying again", lost)
            try:
                verdict = await self._try(guided)
            except _Lost as again:
                raise EngineError(str(again)) from again
        if verdict.ended:
            log.warning("a %s ended the process that tried it: %s", guided.kind, verdict.ended)
            raise Rejected(f"the {guided.kind} takes too much time, memory or stack to compile")
        if verdict.reason:
            raise Rejected(verdict.reason)
        return verdict.size

    async def _try(self, guided: Guided) -> Verdict:
        process = await self.open()
        return await process.try_constraint(next(self._numbers), guided, self._timeout_s)

    def close(self) -> None:
        self._closed = True
        if self._starting is not None and not self._starting.cancel() and _is_up(self._starting):
            self._starting.result().kill()


def _is_up(starting: "asyncio.Task[_Process]") -> bool:
    return not starting.cancelled() and starting.exception() is None


def _is_over(starting: "asyncio.Task[_Process]") -> bool:
    return starting.done() and (not _is_up(starting) or starting.result().ended)


def _start(command: tuple[str, ...]) -> "Popen[bytes]":
    return Popen(command, stdin=PIPE, stdout=PIPE, process_group=0)


class _Process(asyncio.Protocol):
    """One child process: writes trials to its stdin and reads verdicts from its stdout."""

    def __init__(self, popen: "Popen[bytes]") -> None:
        self._popen = popen
        self._data = bytearray()
        self._input: asyncio.WriteTransport | None = None
        self._output: asyncio.BaseTransport | None = None
        self._verdicts: dict[int, asyncio.Future[Verdict]] = {}
        self._started: dict[int, asyncio.Future[None]] = {}
        self.ended = False

    @classmethod
    async def started(cls, command: tuple[str, ...]) -> "_Process":
        """Start a process and wait until it is ready for trials."""
        loop = asyncio.get_running_loop()
        # Popen in a thread: some event loops fork this process, which is slow if it is large. The
        # child has its own process group, so that Ctrl-C does not reach it.
        process = cls(await asyncio.to_thread(_start, command))
        ready = process._verdicts[0] = loop.create_future()
        process._input, _ = await loop.connect_write_pipe(
            asyncio.BaseProtocol, process._popen.stdin
        )
        process._output, _ = await loop.connect_read_pipe(lambda: process, process._popen.stdout)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await ready
        except _Lost as lost:
            raise EngineError(str(lost)) from lost
        except TimeoutError:
            process.kill()
            raise EngineError(f"{PROCESS} did not start within {START_TIMEOUT_S:g} s") from None
        except BaseException:
            process.kill()
            raise
        log.info("%s is ready", PROCESS)
        return process

    async def try_constraint(self, number: int, guided: Guided, timeout_s: float) -> Verdict:
        """Try a constraint; raises `_Lost`, and kills a process that does not begin the trial.

        A trial that takes more than `timeout_s` seconds is cancelled.
        """
        if self.ended:
            raise _Lost(f"{PROCESS} has ended")
        loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = loop.create_future()
        verdict: asyncio.Future[Verdict] = loop.create_future()
        self._started[number], self._verdicts[number] = started, verdict
        self._send(Trial(number, guided))
        try:
            await asyncio.wait([started], timeout=BEGIN_TIMEOUT_S)
            if not started.done():
                started.cancel()
                self.kill()
                raise _Lost(f"{PROCESS} was silent for {BEGIN_TIMEOUT_S:g} s")
            started.result()
            await asyncio.wait([verdict], timeout=timeout_s)
            if not verdict.done():
                return Verdict(
                    number, f"the {guided.kind} takes more than {timeout_s:g} s to compile"
                )
            return verdict.result()
        finally:
            self._started.pop(number, None)
            if self._verdicts.pop(number, None) is not None:
                self._send(Trial(number))

    def kill(self) -> None:
        """Kill the process and its forks; a frozen one would not notice the end of its input."""
        if not self.ended:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self.connection_lost(None)

    def _send(self, trial: Trial) -> None:
        if self._input is not None and not self.ended:
            self._input.write(framed(trial))

    def data_received(self, data: bytes) -> None:
        self._data += data
        for message in unframed(self._data):
            verdict = _verdict.decode(message)
            if verdict.started:
                _set(self._started.pop(verdict.number, None), None)
            else:
                _set(self._verdicts.pop(verdict.number, None), verdict)

    def connection_lost(self, _: Exception | None) -> None:
        if self.ended:
            return
        self.ended = True
        for pipe in (self._input, self._output):
            if pipe is not None and not pipe.is_closing():
                pipe.close()
        for number, waiting in self._verdicts.items():
            if number in self._started:
                waiting.cancel()
                _fail(self._started[number])
            else:
                _fail(waiting)
        self._verdicts.clear()
        with suppress(RuntimeError):  # the loop may be closing
            asyncio.get_running_loop().run_in_executor(None, self._popen.wait)


def _set(future: asyncio.Future[T] | None, value: T) -> None:
    if future is not None and not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[T]) -> None:
    if not future.done():
        future.set_exception(_Lost(f"{PROCESS} has ended"))
