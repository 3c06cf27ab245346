"""Constraints tried in another process, which loses what takes too much."""

import asyncio
import itertools
import logging
import os
import signal
from contextlib import suppress
from subprocess import PIPE, Popen
from typing import TypeVar

import msgspec

from kvmesh.bus.messages import Guided
from kvmesh.worker.constraints.trial_server import Trial, Verdict, framed, unframed
from kvmesh.worker.engine import EngineError, Rejected

log = logging.getLogger(__name__)
T = TypeVar("T")
SUBJECT = "the process that tries constraints"
START_S = 120.0  # to load what compiling needs; importing vLLM takes long where the cores are busy
HEARD_S = 3.0  # a process that has not begun a trial by then is frozen
_verdict = msgspec.msgpack.Decoder(Verdict)


class _Lost(Exception):
    """The process has ended, or does not answer and was killed."""


class TrialClient:
    """The process that `command` starts, which runs a `Server`. It starts when it is needed.

    `most_s` bounds the time that a trial takes once it has begun.
    """

    def __init__(self, most_s: float, *command: str) -> None:
        self._timeout_s = most_s
        self._command = command
        self._numbers = itertools.count(1)
        self._starting: asyncio.Task[_Process] | None = None
        self._closed = False

    async def open(self) -> "_Process":
        """The process, ready; raises EngineError if it ends before it is, and once this is closed.

        Cancelled, it goes on starting: it may take longer than anybody waits.
        """
        if self._closed:
            raise EngineError("constraints are tried no more: the worker stops")
        if self._starting is None or _is_over(self._starting):
            self._starting = asyncio.create_task(_Process.started(self._command), name="trials")
        return await asyncio.shield(self._starting)

    async def try_constraint(self, guided: Guided) -> int:
        """The bytes that a constraint takes; raises Rejected, or EngineError if it was not tried.

        A process that is lost meanwhile is replaced, once. Cancelled, it stops the trial.
        """
        try:
            verdict = await self._try(guided)
        except _Lost as lost:
            log.warning("%s; the worker starts another and tries again", lost)
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
    """One such process: what is written to it, and what its pipe brings."""

    def __init__(self, started: "Popen[bytes]") -> None:
        self._popen = started
        self._data = bytearray()
        self._input: asyncio.WriteTransport | None = None
        self._output: asyncio.BaseTransport | None = None
        self._verdicts: dict[int, asyncio.Future[Verdict]] = {}
        self._started: dict[int, asyncio.Future[None]] = {}
        self.ended = False

    @classmethod
    async def started(cls, command: tuple[str, ...]) -> "_Process":
        """Returns once trials can begin."""
        loop = asyncio.get_running_loop()
        # Some loops start one by a copy of this process, which for a large one takes a while. It
        # has a group of its own, where no Ctrl-C reaches it: it ends with this process.
        process = cls(await asyncio.to_thread(_start, command))
        ready = process._verdicts[0] = loop.create_future()
        process._input, _ = await loop.connect_write_pipe(
            asyncio.BaseProtocol, process._popen.stdin
        )
        process._output, _ = await loop.connect_read_pipe(lambda: process, process._popen.stdout)
        try:
            async with asyncio.timeout(START_S):
                await ready
        except _Lost as lost:
            raise EngineError(str(lost)) from lost
        except TimeoutError:
            process.kill()
            raise EngineError(f"{SUBJECT} did not start within {START_S:g} s") from None
        except BaseException:
            process.kill()
            raise
        return process

    async def try_constraint(self, number: int, guided: Guided, most_s: float) -> Verdict:
        """Raises `_Lost`; a process that does not begin the trial is killed.

        A trial that takes more than `most_s` seconds is stopped.
        """
        if self.ended:
            raise _Lost(f"{SUBJECT} has ended")
        loop = asyncio.get_running_loop()
        begun: asyncio.Future[None] = loop.create_future()
        waiting: asyncio.Future[Verdict] = loop.create_future()
        self._started[number], self._verdicts[number] = begun, waiting
        self._send(Trial(number, guided))
        try:
            await asyncio.wait([begun], timeout=HEARD_S)
            if not begun.done():
                begun.cancel()
                self.kill()
                raise _Lost(f"{SUBJECT} was silent for {HEARD_S:g} s")
            begun.result()
            await asyncio.wait([waiting], timeout=most_s)
            if not waiting.done():
                return Verdict(number, f"the {guided.kind} takes more than {most_s:g} s to compile")
            return waiting.result()
        finally:
            self._started.pop(number, None)
            if self._verdicts.pop(number, None) is not None:
                self._send(Trial(number))

    def kill(self) -> None:
        """End it and its forks at once; a frozen one would not notice the end of its input."""
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
        future.set_exception(_Lost(f"{SUBJECT} has ended"))
