"""The process beside the oracle that simulates: one question at a time, as frames on its pipes."""

import asyncio
import contextlib
import os
import sys
import time
from typing import BinaryIO

import msgspec

from kvmesh.bus.messages import FleetAnswer, FleetQuestion
from kvmesh.oracle.evaluation import FIRST_RATE, QuestionError, answer
from kvmesh.settings.schema import RouterSettings
from kvmesh.workload.capture import CapturedRound

GRACE_S = 3.0  # beyond the budget, for the transfer and the end of a step
STOP_S = 1.0
NICE = 10  # the mesh comes first
HEADER_BYTES = 8


class SimulationTask(msgspec.Struct, frozen=True, kw_only=True):
    """A question with the requests to simulate; `rate` is as in `evaluation.answer`."""

    question: FleetQuestion
    captured: list[CapturedRound]
    router: RouterSettings
    rate: float


_answers = msgspec.msgpack.Decoder(FleetAnswer)
_tasks = msgspec.msgpack.Decoder(SimulationTask)


class SimulationProcess:
    """Starts the process, and again at the next question after it was killed or has died."""

    def __init__(self, router: RouterSettings) -> None:
        self._router = router
        self._process: asyncio.subprocess.Process | None = None
        self._rate = FIRST_RATE

    async def start(self) -> None:
        """Start the process ahead of the first question; a failure shows with that."""
        with contextlib.suppress(OSError):
            await self._running()

    async def answer(self, question: FleetQuestion, captured: list[CapturedRound]) -> FleetAnswer:
        """The answer; one with `error` if the process fails or takes longer than the budget."""
        task = SimulationTask(
            question=question, captured=captured, router=self._router, rate=self._rate
        )
        try:
            async with asyncio.timeout(question.budget_s + GRACE_S):
                found = await self._exchange(task)
        except TimeoutError:
            await self.close()
            return FleetAnswer(error=f"killed after {question.budget_s + GRACE_S:g} s")
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            await self.close()
            return FleetAnswer(error=f"the simulating process failed: {type(error).__name__}")
        except asyncio.CancelledError:
            await self.close()
            raise
        if found.candidates and found.seconds > 0:
            self._rate = len(found.candidates) * found.requests / found.seconds
        return found

    async def close(self) -> None:
        """Kill the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()

    async def _exchange(self, task: SimulationTask) -> FleetAnswer:
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        data = msgspec.msgpack.encode(task)
        process.stdin.write(len(data).to_bytes(HEADER_BYTES) + data)
        await process.stdin.drain()
        size = int.from_bytes(await process.stdout.readexactly(HEADER_BYTES))
        return _answers.decode(await process.stdout.readexactly(size))

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvmesh.oracle.process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C is for the oracle, which ends it
            )
        return self._process


def simulate_tasks(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer the tasks of `source` until it ends."""
    while header := source.read(HEADER_BYTES):
        task = _tasks.decode(source.read(int.from_bytes(header)))
        try:
            found = answer(task.question, task.captured, task.router, task.rate, time.monotonic)
        except QuestionError as error:
            found = FleetAnswer(error=str(error))
        except Exception as error:
            found = FleetAnswer(error=f"{type(error).__name__}: {error}")
        data = msgspec.msgpack.encode(found)
        sink.write(len(data).to_bytes(HEADER_BYTES) + data)
        sink.flush()


def main() -> None:
    """Simulate on standard input and output until the oracle closes them."""
    os.nice(NICE)
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print must not end up among the frames
    with contextlib.suppress(BrokenPipeError):
        simulate_tasks(sys.stdin.buffer, sink)


if __name__ == "__main__":
    main()
