"""The parent's side of a weights process."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kvmesh.weights.answer import WeightsAccess, WeightsAnswer, read_answer, write_answer
from kvmesh.weights.errors import WeightsLost
from kvmesh.weights.frames import (
    HEADER_BYTES,
    MAX_FRAME,
    CopyOffered,
    CopyReady,
    CopyWanted,
    CopyWithdrawn,
    EngineRuns,
    ServingReport,
    WeightsEvent,
    WeightsJob,
    decode_event,
    frame,
)

COMMAND = (sys.executable, "-m", "kvmesh.weights.process.main")
STOP_S = 5.0
OFFER_S = 30.0
MOST_UNREAD = 64 << 10  # bytes in the pipe's buffer
ANSWER_MARGIN_S = 30.0  # for its imports, and its connection to NATS


class LoadersProcess:
    """A weights process of a loader that has no worker; it ends with `close`, or with its parent.

    For plain code: a worker uses WorkersProcess.
    """

    def __init__(self, job: WeightsJob) -> None:
        """Raises OSError."""
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._send(job)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def engine_runs(self) -> None:
        """The weights are loaded."""
        self._send(EngineRuns())

    def close(self) -> None:
        """End the process; its copy goes unless it is kept or used."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: Struct) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has died: the loader sees it by `alive`
            self._process.stdin.write(frame(message))
            self._process.stdin.flush()


class WorkersProcess:
    """A weights process of a worker; `on_event` gets what it reports.

    `on_death` runs with a reason each time it ends by itself. Then `start` starts another one,
    which answers the loader if the first has not; `read_folder` lets the loader wait for none.
    """

    def __init__(
        self,
        job: WeightsJob,
        on_event: Callable[[WeightsEvent], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._job = job
        self._on_event = on_event
        self._on_death = on_death
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._runs = False
        self._offered: set[str] = set()
        self._waiting: dict[str, list[asyncio.Future[str]]] = {}

    async def start(self) -> None:
        """Start it, to go on with the answer of one that has died; raises OSError."""
        answer = self._answer()
        if answer is not None:
            self._job = replace(self._job, digest=answer.digest, loaded=self._runs)
        self._process = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._reading = asyncio.create_task(self._read(self._process), name="weights process")
        self._send(self._job)
        if self._runs:
            self._send(EngineRuns())
        for digest in self._offered:
            self._send(CopyOffered(digest))

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def read_folder(self, reason: str) -> None:
        """Let the loader read its folder unless it has an answer."""
        if self._answer() is None:
            with contextlib.suppress(OSError):
                write_answer(Path(self._job.answer_file), WeightsAnswer(disk=reason))

    def engine_runs(self) -> None:
        """The engine has loaded its weights and started."""
        self._runs = True
        self._send(EngineRuns())

    def serving(self, report: ServingReport) -> None:
        """Tell what the parent has served, so that sending weights does not slow it down.

        A process that does not read is told nothing more.
        """
        if self._process is None or self._process.stdin is None:
            return
        if self._process.stdin.transport.get_write_buffer_size() <= MOST_UNREAD:
            self._send(report)

    async def want_copy(self, digest: str, timeout_s: float) -> None:
        """Have the copy with this digest in the store, and offered to others.

        Raises WeightsLost, after `timeout_s` seconds at the latest.
        """
        await self._ask(CopyWanted(digest, timeout_s), timeout_s)
        self._offered.add(digest)

    async def offer_copy(self, digest: str) -> None:
        """Offer a copy in the store to others from now on; raises WeightsLost."""
        await self._ask(CopyOffered(digest), OFFER_S)
        self._offered.add(digest)

    def withdraw_copy(self, digest: str) -> None:
        """Offer a copy to others no more."""
        self._offered.discard(digest)
        self._send(CopyWithdrawn(digest))

    async def _ask(self, message: CopyWanted | CopyOffered, timeout_s: float) -> None:
        if self._process is None:
            raise WeightsLost("there is no weights process")
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(message.digest, [])
        waiting.append(answer)
        try:
            async with asyncio.timeout(timeout_s):
                self._send(message)
                if reason := await answer:
                    raise WeightsLost(reason)
        except TimeoutError as error:
            reason = f"the weights process has not answered in {timeout_s:g} s"
            raise WeightsLost(reason) from error
        finally:
            waiting.remove(answer)
            if not waiting:
                self._waiting.pop(message.digest, None)

    def _receive(self, event: WeightsEvent) -> None:
        if not isinstance(event, CopyReady):
            self._on_event(event)
        else:
            _answer_all(self._waiting.get(event.digest, []), event.reason)

    async def close(self) -> None:
        """End the process; its copy goes unless it is kept or used."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    def _send(self, message: Struct) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # its death is noticed by `_read`
                self._process.stdin.write(frame(message))

    def _answer(self) -> WeightsAnswer | None:
        with contextlib.suppress(WeightsLost):
            return read_answer(Path(self._job.answer_file))
        return None

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while True:
                size = int.from_bytes(await process.stdout.readexactly(HEADER_BYTES), "big")
                if size > MAX_FRAME:
                    raise ValueError(f"a frame of {size} bytes")
                self._receive(decode_event(await process.stdout.readexactly(size)))
        except (asyncio.IncompleteReadError, msgspec.MsgspecError, ValueError) as error:
            if isinstance(error, asyncio.IncompleteReadError):
                status = await process.wait()
                reason = f"the weights process has ended with status {status}"
            else:
                process.kill()
                await process.wait()
                reason = f"the weights process sends nonsense: {error}"
        for answers in self._waiting.values():
            _answer_all(answers, reason)
        if self._process is not process:
            return
        self._process = None
        self._on_death(reason)


def _answer_all(answers: "list[asyncio.Future[str]]", reason: str) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_result(reason)


def access(
    answer_file: Path, directory: Path, max_bytes: int, keep: bool, longest_wait_s: float
) -> WeightsAccess:
    """The access of a loader to the answer of a process.

    The process waits up to `longest_wait_s` seconds for a digest, and then for sources.
    """
    return WeightsAccess(
        answer_file, directory, max_bytes, keep, 2 * longest_wait_s + ANSWER_MARGIN_S
    )
