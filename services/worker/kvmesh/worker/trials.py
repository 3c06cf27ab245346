"""Constraints tried in another process, which loses what takes too much."""

import asyncio
import itertools
import logging
from contextlib import suppress
from subprocess import PIPE, Popen

import msgspec

from kvmesh.bus.messages import Guided
from kvmesh.worker.engine import EngineError, Rejected
from kvmesh.worker.trial import Trial, Verdict, framed, unframed

log = logging.getLogger(__name__)
_verdict = msgspec.msgpack.Decoder(Verdict)


class Trials:
    """The process that `command` starts, which runs a `Server`. It starts when it is needed."""

    def __init__(self, *command: str) -> None:
        self._command = command
        self._numbers = itertools.count(1)
        self._starting: asyncio.Task[_Process] | None = None

    async def open(self) -> "_Process":
        """The process, ready; raises EngineError if it ends before it is.

        Cancelled, it goes on starting: it may take longer than anybody waits.
        """
        if self._starting is None or _is_over(self._starting):
            self._starting = asyncio.create_task(_Process.started(self._command), name="trials")
        return await asyncio.shield(self._starting)

    async def judge(self, guided: Guided) -> int:
        """The bytes that a constraint takes; raises Rejected, or EngineError without a verdict.

        Cancelled, it stops the trial.
        """
        process = await self.open()
        verdict = await process.ask(next(self._numbers), guided)
        if verdict.ended:
            log.warning("a %s ended the process that tried it: %s", guided.kind, verdict.ended)
            raise Rejected(f"the {guided.kind} takes too much time, memory or stack to compile")
        if verdict.reason:
            raise Rejected(verdict.reason)
        return verdict.size

    def close(self) -> None:
        if self._starting is not None and not self._starting.cancel() and _is_up(self._starting):
            self._starting.result().close()


def _is_up(starting: "asyncio.Task[_Process]") -> bool:
    return not starting.cancelled() and starting.exception() is None


def _is_over(starting: "asyncio.Task[_Process]") -> bool:
    return starting.done() and (not _is_up(starting) or starting.result().ended)


def _start(command: tuple[str, ...]) -> "Popen[bytes]":
    return Popen(command, stdin=PIPE, stdout=PIPE, process_group=0)


class _Process(asyncio.Protocol):
    """One such process: what is written to it, and what its pipe brings."""

    def __init__(self, started: "Popen[bytes]") -> None:
        self._started = started
        self._data = bytearray()
        self._input: asyncio.WriteTransport | None = None
        self._output: asyncio.BaseTransport | None = None
        self._waiting: dict[int, asyncio.Future[Verdict]] = {}
        self.ended = False

    @classmethod
    async def started(cls, command: tuple[str, ...]) -> "_Process":
        """Returns once trials can begin."""
        loop = asyncio.get_running_loop()
        # Some loops start one by a copy of this process, which for a large one takes a while. It
        # has a group of its own, where no Ctrl-C reaches it: it ends with this process.
        process = cls(await asyncio.to_thread(_start, command))
        ready = process._waiting[0] = loop.create_future()
        process._input, _ = await loop.connect_write_pipe(
            asyncio.BaseProtocol, process._started.stdin
        )
        process._output, _ = await loop.connect_read_pipe(lambda: process, process._started.stdout)
        try:
            await ready
        except BaseException:
            process.close()
            raise
        return process

    async def ask(self, number: int, guided: Guided) -> Verdict:
        if self.ended:
            raise EngineError("the process that tries constraints has ended")
        waiting: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        self._send(Trial(number, guided))
        try:
            return await waiting
        finally:
            if self._waiting.pop(number, None) is not None:
                self._send(Trial(number))

    def close(self) -> None:
        """It ends once its input does."""
        for pipe in (self._input, self._output):
            if pipe is not None and not pipe.is_closing():
                pipe.close()

    def _send(self, trial: Trial) -> None:
        if self._input is not None and not self.ended:
            self._input.write(framed(trial))

    def data_received(self, data: bytes) -> None:
        self._data += data
        for message in unframed(self._data):
            verdict = _verdict.decode(message)
            waiting = self._waiting.pop(verdict.number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(verdict)

    def connection_lost(self, _: Exception | None) -> None:
        self.ended = True
        self.close()
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            if not each.done():
                each.set_exception(EngineError("the process that tries constraints has ended"))
        with suppress(RuntimeError):  # the loop may be closing
            asyncio.get_running_loop().run_in_executor(None, self._started.wait)
